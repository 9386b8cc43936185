"""A checkpoint of a training run as a folder in its model's Hugging Face layout.

usage: upcycle export RUN OUTPUT

  upcycle export runs/moe moe-exported          # the newest checkpoint that is whole
  upcycle export runs/moe/checkpoints/step-00000012 moe-12

RUN is a run's folder, or that of one of its checkpoints. Neither the dense model, the data nor a GPU is needed, and one
tensor at a time is in memory; under torchrun each process writes some of the files.
"""

from __future__ import annotations

import sys

from upcycle.cli import frame as cli

if __name__ == "__main__":  # before the imports below, which take seconds
    sys.exit(cli.start("training.cli.export"))

from pathlib import Path

import torch

from training.checkpoint import export as exporting
from training.checkpoint import standalone
from training.checkpoint.state import check_model
from training.experts import SPECIFICATION
from training.model.stock.model import model_of
from training.parallel.processes import processes, rank


def export(source: Path, output: Path) -> int:
    """Writes the folder `output` from a run or one of its checkpoints; returns the checkpoint's step."""
    run, folder = standalone.training_run(source)
    if run is None:
        raise ValueError(f"{source} is no training run or checkpoint of one; give the folder that checkpoints/ is in")
    if exporting.exported(output):
        raise ValueError(f"{output} exists already; remove it or choose another folder to export to")
    origin = standalone.kept(run)
    with processes("cpu"):
        with torch.device("meta"):
            model = model_of(origin.spec, experts=SPECIFICATION, compute=torch.float32)
            standalone.attach_adapters(model, run)
        saved = standalone.shards_of(run, folder)
        check_model(model, saved)
        exporting.export(model, origin, output, saved=saved, facts=exporting.facts_of(run, saved.step))
    return saved.step


@cli.command()
def main(words: list[str]) -> int:
    if len(words) != 2:
        raise ValueError("write upcycle export RUN OUTPUT")
    source, output = map(Path, words)
    step = export(source, output)
    if rank() == 0:
        print(f"{output}: {source} after step {step}")
    return 0
