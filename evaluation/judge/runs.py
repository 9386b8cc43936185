"""Read training runs: their cost, losses and logs, the curve of one run, and a band over the seeds of an arm.

Runs count in steps; a run's cost up to a step is its tokens, FLOPs and seconds of training.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evaluation.judge.seeds import paired
from training.checkpoint import standalone
from training.observe import plots
from upcycle.io import strict

LAYER = re.compile(r"balance/(\d+)/(\w+)")
OVERALL = re.compile(r"balance/([a-z]\w*)")
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Spent:
    """Hold a run's cost up to a step."""

    step: int
    tokens: float
    flops: float
    seconds: float


Curve = Sequence[tuple[Spent, float]]


@dataclass(frozen=True)
class Run:
    arm: str
    seed: int
    folder: str
    steps: int  # the steps that the config asks for
    spent: Spent
    finished: bool
    whole_tokens: int  # only if the run is finished
    flops_per_token: float
    tokens_per_s: float
    memory_gb: float
    losses: Mapping[str, Curve]  # by validation set, at its steps
    layers: Mapping[str, Mapping[int, float]]  # the latest figure of each layer, by the name of the measure
    overall: Mapping[str, Curve]  # over all layers, by the name of the measure
    name: str = ""
    rows: Sequence[Row] = ()  # the lines of metrics.jsonl

    def last(self, sets: Sequence[str]) -> float | None:
        """Return the mean loss over sets at the run's end; None if the run is not finished or a loss is nan."""
        curve = self.mean(sets)
        return curve[-1][1] if self.finished and curve and curve[-1][0].step == self.steps else None

    def mean(self, sets: Sequence[str]) -> Curve:
        """Return the mean loss over sets, at the steps that evaluated all of them."""
        steps, shared = by([self.losses.get(name, ()) for name in sets], lambda spent: spent.step)
        return [(steps[0][s][0], mean(each[s][1] for each in steps)) for s in shared]

    def points(self, key: str) -> tuple[list[float], list[float]]:
        """Return the tokens and values of all lines that have the key."""
        found = points(self.rows, key, spending(self.rows))
        return [spent.tokens for spent, _ in found], [value for _, value in found]

    def at(self, tokens: float) -> Spent:
        """Return the cost up to this many tokens."""
        counted = [row for row in self.rows if row.get("tokens")]
        step = np.interp(tokens, [0.0, *(row["tokens"] for row in counted)], [0.0, *(row["step"] for row in counted)])
        return spending(self.rows)(float(step))


Arms = Mapping[str, Sequence[Run]]


def read_runs(groups: Sequence[Sequence[Path | str]]) -> dict[str, list[Run]]:
    """Read the runs of each group, one for each seed; the key holds the names of all its runs."""
    folders = [Path(folder) for group in groups for folder in group]
    read = iter(zip(folders, plots.read_runs(folders), strict=True)) if folders else iter(())
    out: dict[str, list[Run]] = {}
    for group in groups:
        found = [next(read) for _ in group]
        arm = ", ".join(run.name for _, run in found)
        out[arm] = [
            run_of(arm, n, str(folder), run.rows, [*run.keys(plots.VALID)], name=run.name, steps=steps_of(folder))
            for n, (folder, run) in enumerate(found)
        ]
    return out


def steps_of(folder: Path) -> int:
    """Return the steps that a run's config asks for; 0 if there is no config."""
    config = standalone.settings_file(folder)
    if not config.is_file():
        return 0
    steps: int = strict.held(standalone.settings_of(folder).get("steps"), strict.Count, f"{config}.steps")
    return steps


def run_of(
    arm: str, seed: int, folder: str, rows: Sequence[Row], sets: Sequence[str], *, steps: int, name: str = "",
    tokens_a_step: int = 0, finished: bool | None = None,
) -> Run:  # fmt: skip
    """Make a run from the lines of its metrics.jsonl; `sets` names the validation sets that count."""
    spent = spending(rows)
    total = spent(rows[-1]["step"])
    layers: dict[str, dict[int, float]] = {}
    for row in rows:
        for key, value in row.items():
            if (match := LAYER.fullmatch(key)) and value is not None:
                layers.setdefault(match[2], {})[int(match[1])] = value
    overall = sorted({match[1] for row in rows for key in row if (match := OVERALL.fullmatch(key))})
    return Run(
        arm,
        seed,
        folder,
        steps or total.step,
        total,
        0 < steps <= rows[-1]["step"] if finished is None else finished,
        steps * tokens_a_step or round(total.tokens),
        total.flops / total.tokens if total.tokens else 0.0,
        total.tokens / total.seconds if total.seconds else 0.0,
        max((row.get("memory_gb") or 0.0 for row in rows), default=0.0),
        {name: points(rows, f"valid/{name}/loss", spent) for name in sets},
        layers,
        {what: points(rows, f"balance/{what}", spent) for what in overall},
        name,
        rows,
    )


def spending(rows: Sequence[Row]) -> Callable[[float], Spent]:
    """Return the cost as a function of the step, linear between two lines; a line's seconds cover the steps since the
    line before."""
    at, tokens, flops, seconds = [0.0], [0.0], [0.0], [0.0]
    for row in rows:
        if row.get("tokens"):
            seconds.append(seconds[-1] + (row.get("seconds_per_step") or 0.0) * (row["step"] - at[-1]))
            at.append(float(row["step"]))
            tokens.append(float(row["tokens"]))
            flops.append(float(row.get("flops") or 0.0))

    def spent(step: float) -> Spent:
        return Spent(round(step), *(float(np.interp(step, at, what)) for what in (tokens, flops, seconds)))

    return spent


def points(rows: Sequence[Row], key: str, spent: Callable[[float], Spent]) -> Curve:
    return tuple((spent(row["step"]), row[key]) for row in rows if row.get(key) is not None)


# ---- over seeds


@dataclass(frozen=True)
class Band:
    """Hold the mean over seeds with their range, or a mean difference with its interval."""

    arm: str
    spent: tuple[Spent, ...]  # mean over seeds
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    seeds: int


def bands(arms: Arms, curve: Callable[[Run], Curve]) -> tuple[Band, ...]:
    """Return each arm's band, from the lowest seed to the highest, at the steps that every seed has reached."""
    out = []
    for arm, runs in arms.items():
        steps, shared = by([found for run in runs if (found := curve(run))], lambda spent: spent.step)
        values = [[each[s][1] for each in steps] for s in shared]
        spent = tuple(average([each[s][0] for each in steps]) for s in shared)
        if values:
            ends = [(min(each), max(each)) for each in values]
            lows, highs = tuple(low for low, _ in ends), tuple(high for _, high in ends)
            out.append(Band(arm, spent, tuple(map(mean, values)), lows, highs, len(steps)))
    return tuple(out)


def loss_bands(arms: Arms, sets: Sequence[str]) -> tuple[Band, ...]:
    return bands(arms, lambda run: run.mean(sets))


def difference_bands(arms: Arms, control: str, sets: Sequence[str]) -> tuple[Band, ...]:
    """Return each arm's difference to the control at the tokens that all have, over the seeds that both have begun. Low
    and high are the interval over seeds, if there are enough."""
    theirs = {run.seed: run.mean(sets) for run in arms.get(control, ())}
    out = []
    for arm in (arm for arm in arms if arm != control):
        pairs = [(mine, theirs[run.seed]) for run in arms[arm] if (mine := run.mean(sets)) and theirs.get(run.seed)]
        placed, shared = by([curve for pair in pairs for curve in pair], lambda spent: round(spent.tokens))
        each = list(zip(placed[::2], placed[1::2], strict=True))
        made = [paired([ours[at][1] - other[at][1] for ours, other in each]) for at in shared]
        if made:
            spent = tuple(average([ours[at][0] for ours, _ in each]) for at in shared)
            lows = tuple(p.mean if p.low is None else p.low for p in made)
            highs = tuple(p.mean if p.high is None else p.high for p in made)
            out.append(Band(arm, spent, tuple(p.mean for p in made), lows, highs, len(each)))
    return tuple(out)


def by_layer(arms: Arms) -> dict[str, dict[str, dict[int, float]]]:
    """Return measure -> arm -> layer -> mean over seeds of the latest figure."""
    out: dict[str, dict[str, dict[int, float]]] = {}
    for arm, runs in arms.items():
        for what in sorted({what for run in runs for what in run.layers}):
            mine = [run.layers[what] for run in runs if what in run.layers]
            numbers = sorted({n for layers in mine for n in layers})
            out.setdefault(what, {})[arm] = {n: mean(layers[n] for layers in mine if n in layers) for n in numbers}
    return out


def overall(arms: Arms) -> dict[str, tuple[Band, ...]]:
    """Return measure -> a band for each arm, for measures over all layers."""
    measured = sorted({what for runs in arms.values() for run in runs for what in run.overall})
    return {what: bands(arms, lambda run, what=what: run.overall.get(what, ())) for what in measured}  # type: ignore[misc]


Placed = Mapping[int, tuple[Spent, float]]


def by(curves: Sequence[Curve], place: Callable[[Spent], int]) -> tuple[Sequence[Placed], Sequence[int]]:
    """Return (each curve by place, the places that all curves have)."""
    placed = [{place(spent): (spent, value) for spent, value in curve} for curve in curves]
    return placed, [at for at in placed[0] if all(at in each for each in placed)] if placed else []


def average(spent: Sequence[Spent]) -> Spent:
    parts = (mean(getattr(one, name) for one in spent) for name in ("tokens", "flops", "seconds"))
    return Spent(spent[0].step, *parts)


def mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return math.fsum(numbers) / len(numbers)
