"""Ask a model the items of a suite, and keep every answer.

usage: upcycle eval SUITE CHECKPOINT [key=value ...] [nproc=N]

  upcycle eval mmlu ./moe fewshot=0                            # from the hub; data=FOLDER: from files
  upcycle eval perplexity runs/moe texts=[book.txt]            # a training run: its newest checkpoint
  upcycle eval tiny ./moe limit=10 dtype=bfloat16
  upcycle eval tiny ./moe mesh.ep=8 nproc=8
  upcycle eval ./moe tasks=[mmlu_astronomy,arc_easy] limit=0.1    # any tasks of lm-eval's

SUITE is a file of evaluation/suites, a file of your own, or a ready config (configs/eval). The same command continues a
killed evaluation. `python -m evaluation lm-eval run ...` is lm-eval's own command line, with our engine as its model
`upcycle`.

keys, with defaults and meaning: docs/config.md
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from upcycle.cli import frame


@frame.command(resumes=True)
def main(words: Sequence[str]) -> int:
    from evaluation.ask.run import evaluate, read_config, table

    done = evaluate(read_config(words), shlex.join(["upcycle", "eval", *words]))
    if done:  # only in the first process
        print(frame.printable(table(done), keep="\n"))
    return 0
