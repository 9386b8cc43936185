"""Export a checkpoint of a training run as a Hugging Face folder, or such a folder for LMDeploy.

usage: upcycle export RUN OUTPUT [nproc=N] [engine=lmdeploy]

  upcycle export runs/moe moe-exported          # the newest complete checkpoint
  upcycle export runs/moe/checkpoints/step-00000012 moe-12
  upcycle export slices slices-lmdeploy engine=lmdeploy

RUN is the folder of a run or of one of its checkpoints. OUTPUT may be an address, such as s3://bucket/moe. The dense
model, the data and a GPU are not needed. One tensor at a time is in memory. With nproc each process writes some of the
files.

With engine=lmdeploy, RUN is the folder of a model with target=upcycled, and only LMDeploy runs the result.

keys, with defaults and meaning: docs/config.md
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from upcycle.cli import frame


@dataclass(frozen=True)
class ExportKeys:
    run: str = ""  # the folder of a run or of one of its checkpoints; the first word
    output: str = ""  # the folder or address to make; the second word
    engine: Literal["", "lmdeploy"] = ""  # lmdeploy: write the `upcycled` model in the folder `run` for LMDeploy


@frame.command()
def main(words: Sequence[str]) -> int:
    from training.api import export
    from training.checkpoint import lmdeploy
    from training.parallel.processes import rank
    from upcycle.io.remote import is_url

    asked = frame.named(ExportKeys, words, "run", "output")
    if asked.engine:
        if is_url(asked.output):
            raise ValueError(f"output={asked.output} is an address, but engine=lmdeploy writes to a folder here")
        lmdeploy.export(asked.run, asked.output)
        if rank() == 0:
            print(f"{asked.output}: {asked.run} for LMDeploy")
        return 0
    step = export(asked.run, asked.output)
    if rank() == 0:
        print(f"{asked.output}: {asked.run} after step {step}")
    return 0
