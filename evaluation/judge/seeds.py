"""Is a method better? Seeds are the unit: the mean of differences paired by seed, and its 95 % interval over seeds.

Two runs of one seed read the same samples in the same order, so what the order does cancels in their difference; what
is left differs from seed to seed, and Student's t says how far the mean of so few differences may lie from the truth.
The items of a test say nothing about that: a thousand of them answered by one model are one draw of a training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

LEVEL = 0.95
LEAST = 3  # seeds that an interval needs: with two it would reach 12.7 standard errors to each side and say nothing


@dataclass(frozen=True)
class Paired:
    seeds: int
    mean: float
    low: float | None = None  # None: fewer than LEAST seeds have no interval
    high: float | None = None
    p: float | None = None  # two-sided, of no difference
    p_holm: float | None = None  # corrected for others that are judged with it (`together`); None: it is judged alone

    def verdict(self, higher_is_better: bool = False) -> str:
        if self.low is None or self.high is None:
            return "no interval"
        if self.low <= 0 <= self.high or (self.p_holm is not None and self.p_holm > 1 - LEVEL):
            return "no difference shown"
        return "better" if (self.mean > 0) == higher_is_better else "worse"


def paired(differences: Sequence[float], grain: float = 0.0) -> Paired:
    """The mean of the differences, one of each seed, and its interval. ValueError if there are none.

    `grain`: the least that two differences can be apart, an item of a test. Three seeds that all gained one item seem
    to have no spread at all, so no spread is believed that is below half a grain.
    """
    seeds = len(differences)
    if not seeds:
        raise ValueError("there is no seed that both have finished, so there is no difference; train one seed of both")
    mean = math.fsum(differences) / seeds
    if seeds < LEAST:
        return Paired(seeds, mean)
    deviation = math.sqrt(math.fsum((d - mean) ** 2 for d in differences) / (seeds - 1))
    error = max(deviation, grain / 2) / math.sqrt(seeds)
    reach = student(seeds - 1) * error
    p = 1 - inside(abs(mean) / error, seeds - 1) if error else float(mean == 0)
    return Paired(seeds, mean, mean - reach, mean + reach, p)


def holm(p: Sequence[float]) -> list[float]:
    """Holm's step-down correction, in the given order."""
    corrected, largest = [0.0] * len(p), 0.0
    for rank, at in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        largest = max(largest, min(1.0, (len(p) - rank) * p[at]))
        corrected[at] = largest
    return corrected


def together(found: Sequence[Paired]) -> list[Paired]:
    """The same, each corrected for how many of them are judged."""
    corrected = iter(holm([each.p for each in found if each.p is not None]))
    return [each if each.p is None else replace(each, p_holm=next(corrected)) for each in found]


@cache
def student(freedom: int, level: float = LEVEL) -> float:
    """The t for which -t ... t holds the share `level` of Student's distribution of so many degrees of freedom."""
    low, high = 0.0, 1.0
    while inside(high, freedom) < level:
        high *= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle, freedom) < level else (low, middle)
    return high


def inside(t: float, freedom: int) -> float:
    """The share in -t ... t, a finite sum for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(freedom))
    square, odd = math.cos(angle) ** 2, freedom % 2
    term = total = 1.0
    for k in range(3 if odd else 2, freedom, 2):
        term *= square * (k - 1) / k
        total += term
    if not odd:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + (math.sin(angle) * math.cos(angle) * total if freedom > 1 else 0.0))
