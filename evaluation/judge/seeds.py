"""Judge differences over seeds: their mean, Student's 95 % interval, and Holm's correction for several comparisons.

Two runs of one seed read the same samples in the same order, so the order cancels in their difference. The rest differs
between seeds, and Student's t says how far the mean of so few differences may be from the truth. The items of a test
cannot say that: a thousand answers of one model are still one training.

Student's distribution is our own, because scipy comes only with the extra `eval`, and comparing trainings must work
without it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache

LEVEL = 0.95
LEAST = 3  # seeds that an interval needs: with two it would be 12.7 standard errors wide on each side


@dataclass(frozen=True)
class Paired:
    seeds: int
    mean: float
    low: float | None = None  # None with fewer than LEAST seeds
    high: float | None = None
    p: float | None = None  # two-sided, for no difference
    p_holm: float | None = None  # corrected for the family; None for the comparison that was named beforehand
    family: int = 1  # the number of comparisons that Holm's correction counts

    def verdict(self, higher_is_better: bool = False) -> str:
        """Say whether the mean is better, worse, or not shown to differ from 0."""
        if self.low is None or self.high is None:
            return f"{'one run' if self.seeds == 1 else f'{self.seeds} runs'} each: no verdict"
        if self.low <= 0 <= self.high or (self.p_holm is not None and self.p_holm > 1 - LEVEL):
            return "no difference shown"
        return "better" if (self.mean > 0) == higher_is_better else "worse"


def paired(differences: Sequence[float], grain: float = 0.0) -> Paired:
    """Return the mean of the differences, one for each seed, and its interval; raise a ValueError if there is none.

    `grain` is the smallest step between two differences, for instance one item of a test. Three seeds that all gained
    one item seem to have no spread, so the spread is at least half a grain.
    """
    seeds = len(differences)
    if not seeds:
        raise ValueError("both have finished no seed in common, so there is no difference; train one seed of both")
    mean = math.fsum(differences) / seeds
    if seeds < LEAST:
        return Paired(seeds, mean)
    deviation = math.sqrt(math.fsum((d - mean) ** 2 for d in differences) / (seeds - 1))
    error = max(deviation, grain / 2) / math.sqrt(seeds)
    reach = student(seeds - 1) * error
    p = 1 - inside(abs(mean) / error, seeds - 1) if error else float(mean == 0)
    return Paired(seeds, mean, mean - reach, mean + reach, p)


def outside(found: Paired, margin: float) -> float | None:
    """Return the p of two one-sided t-tests against a difference of at least `margin`; None without an interval."""
    if found.high is None:
        return None
    freedom, room = found.seeds - 1, margin - abs(found.mean)
    error = (found.high - found.mean) / student(freedom)
    if not error:
        return float(room <= 0)
    tail = (1 - inside(abs(room) / error, freedom)) / 2
    return tail if room > 0 else 1 - tail


def check_margin(key: str, margin: object) -> None:
    """Raise a ValueError unless the margin of an equivalence is a number above 0."""
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not 0 < margin < math.inf:
        raise ValueError(f"{key} is {margin!r}; write a margin above 0, for instance 0.005")


def together(found: Sequence[Paired], marks: Sequence[Hashable] = (), primary: Hashable | None = None) -> list[Paired]:
    """Correct each difference by Holm's method for the others in its family.

    Differences with the same mark are one comparison that is shown twice. `primary` is the mark of the comparison that
    was named beforehand; it is not corrected and does not count for the others.
    """
    marks = marks or range(len(found))
    p_of = {mark: each.p for mark, each in zip(marks, found, strict=True) if each.p is not None and mark != primary}
    corrected = dict(zip(p_of, holm(list(p_of.values())), strict=True))
    return [
        replace(each, p_holm=corrected[mark], family=len(corrected)) if mark in corrected else each
        for mark, each in zip(marks, found, strict=True)
    ]


def holm(p: Sequence[float]) -> list[float]:
    """Return Holm's step-down correction of each p, in the given order."""
    corrected, largest = [0.0] * len(p), 0.0
    for rank, at in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        largest = max(largest, min(1.0, (len(p) - rank) * p[at]))
        corrected[at] = largest
    return corrected


@cache
def student(freedom: int, level: float = LEVEL) -> float:
    """Return the t whose range -t ... t holds the share `level` of Student's distribution."""
    low, high = 0.0, 1.0
    while inside(high, freedom) < level:
        high *= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle, freedom) < level else (low, middle)
    return high


def inside(t: float, freedom: int) -> float:
    """Return the share of the distribution in -t ... t, a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(freedom))
    square, odd = math.cos(angle) ** 2, freedom % 2
    term = total = 1.0
    for k in range(3 if odd else 2, freedom, 2):
        term *= square * (k - 1) / k
        total += term
    if not odd:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + (math.sin(angle) * math.cos(angle) * total if freedom > 1 else 0.0))
