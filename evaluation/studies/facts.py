"""Make the facts that the arms of a study learn: a suite, its tokens, and the steps that follow from them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path

from evaluation.facts import suite
from evaluation.facts.suite import WriteConfig
from training.data.prepare import PrepareConfig, prepare
from training.data.shards import read_meta
from upcycle.config.values import above_zero, check_values


@dataclass(frozen=True)
class FactsConfig(WriteConfig):
    # how often training reads the documents; the steps of an arm follow from it, unless `base` or the arm has steps
    readings: float = 2.0

    def __post_init__(self) -> None:
        check_values(self, "", {"readings": above_zero(most=1000)})
        super().__post_init__()


def make(config: FactsConfig, tokenizer: str) -> int:
    """Write the suite into the folder `output` and its token shards next to it; return the tokens of a training."""
    folder = Path(config.output)
    written = WriteConfig(**{field.name: getattr(config, field.name) for field in fields(WriteConfig)})
    suite.write(written)
    tokens = 0
    for name in (suite.TRAIN, suite.TOLD, suite.UNTOLD):
        out = folder.parent / f"{folder.name}-tokens" / Path(name).stem
        prepare(PrepareConfig(str(out), tokenizer, (str(folder / name),)), quiet=True)
        tokens = tokens or read_meta(out)["tokens"]
    return math.ceil(tokens * config.readings)
