"""What runs reached and what they had spent by then: a curve of one run, a band over the seeds of a group.

Steps are what a run counts in; tokens, FLOPs and seconds of training are what it has spent up to a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evaluation.judge.seeds import paired

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Spent:
    """What a run has spent up to a step."""

    step: int
    tokens: float
    flops: float
    seconds: float


Curve = Sequence[tuple[Spent, float]]


@dataclass(frozen=True)
class Band:
    """Mean over seeds of one arm and how far they lie apart, or of a difference and its interval."""

    arm: str
    spent: tuple[Spent, ...]  # mean over seeds
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    seeds: int


# ---- of one run


def spending(rows: Sequence[Row]) -> Callable[[float], Spent]:
    """What was spent, by step: linear between two lines. A line's seconds are of the steps since the line before."""
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


def points(rows: Sequence[Row], key: str, spent: Callable[[float], Spent]) -> tuple[tuple[Spent, float], ...]:
    return tuple((spent(row["step"]), row[key]) for row in rows if row.get(key) is not None)


def mean_curve(curves: Sequence[Curve]) -> list[tuple[Spent, float]]:
    """The mean of curves of one run, at the steps that all of them have."""
    by_step = [{spent.step: (spent, value) for spent, value in curve} for curve in curves]
    shared = [step for step in by_step[0] if all(step in values for values in by_step)]
    return [(by_step[0][s][0], math.fsum(values[s][1] for values in by_step) / len(curves)) for s in shared]


# ---- over seeds


def band(arm: str, by_seed: Sequence[Curve]) -> Band:
    """An arm's band at the steps that every seed has reached; low and high are the lowest and the highest seed."""
    begun = [{spent.step: (spent, value) for spent, value in curve} for curve in by_seed if curve]
    shared = [step for step in begun[0] if all(step in curve for curve in begun)] if begun else []
    values = [[curve[step][1] for curve in begun] for step in shared]
    return Band(
        arm,
        tuple(average([curve[step][0] for curve in begun]) for step in shared),
        tuple(mean(figures) for figures in values),
        tuple(min(figures) for figures in values),
        tuple(max(figures) for figures in values),
        len(begun),
    )


def difference_band(arm: str, pairs: Sequence[tuple[Curve, Curve]]) -> Band | None:
    """Differences, the first of each pair less the second, at the tokens that all have: a pair is a seed, of `arm` and
    of what it is compared with. Low and high are the interval over seeds, where they are enough for one. None without a
    place that all have."""
    every = [tuple({round(spent.tokens): (spent, v) for spent, v in curve} for curve in pair) for pair in pairs]
    shared = [at for at in every[0][0] if all(at in curve for pair in every for curve in pair)] if every else []
    made = [paired([ours[at][1] - theirs[at][1] for ours, theirs in every]) for at in shared]
    if not made:
        return None
    spent = tuple(average([ours[at][0] for ours, _ in every]) for at in shared)
    lows = tuple(p.mean if p.low is None else p.low for p in made)
    highs = tuple(p.mean if p.high is None else p.high for p in made)
    return Band(arm, spent, tuple(p.mean for p in made), lows, highs, len(every))


def average(spent: Sequence[Spent]) -> Spent:
    parts = (mean(getattr(one, name) for one in spent) for name in ("tokens", "flops", "seconds"))
    return Spent(spent[0].step, *parts)


def mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return math.fsum(numbers) / len(numbers)
