"""Measure tokens/s, TFLOP/s and memory of training steps with random weights and random tokens.

usage: upcycle bench [CONFIG] [key=value ...] [nproc=N]

  upcycle bench bench-qwen3-30b-4l                      # a stack of blocks, forward and backward
  upcycle bench bench-qwen3-30b-4l routing=balanced     # the same number of rows for every expert
  upcycle bench architecture=./moe/config.json stack=false optimizer=true    # head, loss, optimiser too
  upcycle bench bench-qwen3-30b mesh.ep=8 nproc=8       # tokens/s of all, TFLOP/s of each

A step is training's own (training/run/step.py) with balance losses and statistics; without optimizer=true it ends at
the gradients. FLOPs follow the half-square convention (upcycle.planning.size): 6 per weight and token, half the square
of attention (of each document), no router, no recomputation, and no head when only blocks run. The last line is a JSON
row with versions.

keys of bench and of training, with defaults and meaning: docs/config.md
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from upcycle.cli import frame


@frame.command()
def main(words: Sequence[str]) -> int:
    from training.estimating.bench import BenchConfig, bench, sentence
    from training.parallel.processes import rank
    from upcycle.config.reading import read
    from upcycle.config.ready import TRAIN

    row = bench(read(BenchConfig, *frame.file_and_words(words), TRAIN))
    if rank() == 0:
        print(f"{sentence(row)}\n{json.dumps(row)}")
    return 0
