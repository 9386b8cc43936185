"""One run of a study: what it has spent and what it reached, read from its metrics.jsonl and the config beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from evaluation.judge.curves import Curve, Row, Spent, mean_curve, points, spending
from evaluation.studies.plan import tokens_of_step
from training.config.schema import TrainConfig
from training.observe import metrics
from upcycle.config.reading import build
from upcycle.io import strict

LAYER = re.compile(r"balance/(\d+)/(\w+)")
OVERALL = re.compile(r"balance/([a-z]\w*)")


@dataclass(frozen=True)
class Outcome:
    """What a run has spent, reached and logged."""

    arm: str
    seed: int
    folder: str
    steps: int  # that the run is to make
    spent: Spent
    finished: bool
    whole_tokens: int  # when it is finished
    flops_per_token: float
    tokens_per_s: float
    memory_gb: float
    losses: Mapping[str, Curve]  # by validation set, at the steps where it was evaluated
    layers: Mapping[str, Mapping[int, float]]  # latest figure of each layer, by what is measured
    overall: Mapping[str, Curve]  # of all layers, by what is measured

    def last(self, sets: Sequence[str]) -> float | None:
        """Mean loss over sets at the run's end; None if the run is not finished or a loss is no number."""
        curve = self.mean(sets)
        return curve[-1][1] if self.finished and curve and curve[-1][0].step == self.steps else None

    def routing(self, what: str) -> Curve:
        return self.overall.get(what, ())

    def mean(self, sets: Sequence[str]) -> list[tuple[Spent, float]]:
        """Mean loss over sets, at the steps where all of them were evaluated."""
        return mean_curve([self.losses.get(name, ()) for name in sets])


def outcome(arm: str, seed: int, folder: Path) -> Outcome | None:
    """The outcome of the run in `folder`; None before its first line."""
    file = folder.with_suffix(".yaml")
    if not (folder / metrics.FILE).is_file() or not file.is_file():
        return None
    config, rows = build(TrainConfig, strict.read_yaml(file)), metrics.read(folder)
    if not rows:
        return None
    spent = spending(rows)
    total = spent(rows[-1]["step"])
    timed = [row for row in rows if row.get("tokens_per_s")]
    names = dict.fromkeys(source.name for source in config.data.valid)
    layers: dict[str, dict[int, float]] = {}
    for row in rows:
        for key, value in row.items():
            if (match := LAYER.fullmatch(key)) and value is not None:
                layers.setdefault(match[2], {})[int(match[1])] = value
    overall = sorted({match[1] for row in rows for key in row if (match := OVERALL.fullmatch(key))})
    return Outcome(
        arm,
        seed,
        str(folder),
        config.steps,
        total,
        finished(config, rows),
        config.steps * tokens_of_step(config),
        total.flops / total.tokens if total.tokens else 0.0,
        total.tokens / total.seconds if total.seconds else 0.0,
        max((row.get("memory_gb") or 0.0 for row in timed), default=0.0),
        {name: points(rows, f"valid/{name}/loss", spent) for name in names},
        layers,
        {what: points(rows, f"balance/{what}", spent) for what in overall},
    )


def finished(config: TrainConfig, rows: Sequence[Row]) -> bool:
    """Whether all steps are made, and validation after the last one is logged."""
    last = rows[-1] if rows else {"step": -1}
    return last["step"] >= config.steps and all(f"valid/{s.name}/loss" in last for s in config.data.valid)
