"""Train, or go on training where the run in `output` stopped.

usage: python -m training [CONFIG] [key=value ...]

CONFIG is a YAML file or the name of a ready config (configs/train). The same command goes on where it stopped.

  python -m training stories model.upcycle.source=./llama output=runs/moe
  python -m training model.source=./llama data.train=[runs/stories-data] output=runs/dense steps=1000 batch=8
  python -m training my.yaml profile=10-12                                  # where the time goes, as a trace
  torchrun --nproc-per-node 8 -m training my.yaml mesh.ep=8                 # on 8 GPUs, the same run
  python -m training my.yaml output=runs/try islands.local=2                # two islands; see training.islands

Text becomes token shards by upcycle prepare, once; upcycle estimate says whether a run fits; training.cli.plots draws
it.

keys, with defaults and meaning: docs/config.md
"""

from __future__ import annotations

import sys

from upcycle.cli import frame as cli

STOPPED = 75  # exit code of a run that was asked to stop: EX_TEMPFAIL, the same command goes on. `a && b` ends there


@cli.command(resumes=True)
def main(words: list[str]) -> int:
    from training.config.reading import read_config
    from training.parallel.processes import rank
    from training.run.loop import train
    from training.run.stop import Stopped

    config = read_config(*cli.file_and_words(words))
    if config.islands.local:
        from training.islands.run import local

        print(local(config, words))
        return 0
    said, code = f"{config.output} is trained: metrics.jsonl, checkpoints/", 0
    said += f"; {config.export} is its model" if config.export else ""
    try:
        train(config)
    except Stopped as stopped:
        said = f"{config.output} {stopped} of {config.steps}; the same command goes on from there"
        code = STOPPED
    if rank() == 0:  # the first one speaks for all
        print(said)
    return code


if __name__ == "__main__":
    sys.exit(cli.start("training.__main__"))
