"""Turn a checkpoint of a training run into a folder in its model's Hugging Face layout.

usage: upcycle export RUN OUTPUT [nproc=N]

  upcycle export runs/moe moe-exported          # the newest checkpoint that is whole
  upcycle export runs/moe/checkpoints/step-00000012 moe-12

RUN is a run's folder, or that of one of its checkpoints. Neither the dense model, the data nor a GPU is needed, and one
tensor at a time is in memory; with nproc each process writes some of the files.
"""

from __future__ import annotations

from collections.abc import Sequence

from upcycle.cli import frame


@frame.command()
def main(words: Sequence[str]) -> int:
    if len(words) != 2:
        raise ValueError("write upcycle export RUN OUTPUT")
    from training.api import export
    from training.parallel.processes import rank

    step = export(*words)
    if rank() == 0:
        print(f"{words[1]}: {words[0]} after step {step}")
    return 0
