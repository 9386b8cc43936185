"""python -m training CONFIG [key=value ...]: train, or go on training where the run in `output` stopped."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from training.config import TrainConfig
    from training.evaluate import Suite

EXAMPLES = """usage: python -m training CONFIG [key=value ...]

  python -m training.prepare runs/data tokenizer=./llama sources=[book.txt]     text to token shards, once
  python -m training stories output=runs/moe                                    a ready config
  python -m training model.source=./llama data.train=[runs/data] output=runs/dense steps=1000 batch=8
  python -m training model.upcycle=llama3-8b-e8t2 data.train=[runs/data] output=runs/moe
  python -m training stories output=runs/moe profile=10-12 log.tensorboard=true     where the time goes; more to look at
  torchrun --nproc-per-node 8 -m training CONFIG mesh.ep=8 output=runs/moe          on 8 GPUs, the same run
  python -m training.plots runs/dense runs/moe --output loss.png

The same command goes on where it stopped. All keys, with comments: training/config.py
"""


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(EXAMPLES, end="")
        return 0 if words else 2
    from training.config import read_config
    from training.observe.metrics import read
    from training.parallel.processes import rank
    from training.train import train

    file, words = (words[0], words[1:]) if "=" not in words[0] else ("", words)
    try:
        config = read_config(file, words)
        folder = train(config, suite_of(config))
        reached = max((row["step"] for row in read(folder)), default=config.steps)
    except (ValueError, OSError) as error:
        who = f"training, rank {rank()}" if rank() else "training"
        print(f"{who}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    if rank():  # the first one speaks for all
        return 0
    if reached < config.steps:
        print(f"{folder} stopped after step {reached} of {config.steps}; the same command goes on from there")
    else:
        print(f"{folder} is trained: metrics.jsonl, checkpoints/")
    return 0


def suite_of(config: TrainConfig) -> Suite | None:
    """evaluation's, where a run wants it: the one place of training that knows evaluation. lm-eval is imported then."""
    if not config.eval.every:
        return None
    try:
        from evaluation.run import live
    except ModuleNotFoundError as error:
        raise ValueError(
            f"eval.every={config.eval.every} needs the package {error.name}, which is not installed; "
            'pip install -e ".[eval]", or write eval.every=0'
        ) from None
    return live


if __name__ == "__main__":
    sys.exit(main())
