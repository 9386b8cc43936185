"""Say how far a figure of a test may lie from the truth because its items are a sample: 95 % intervals over clusters.

They are of these very models and other items, and say nothing about another training (seeds.py). Items that come from
one file, passage or document go right or wrong together, so a cluster of them counts once, and with fewer than LEAST
clusters there is no interval. Shares of right answers have score intervals, which hold where hardly an item differs;
else the jackknife leaves out a cluster at a time. scipy has no score interval of paired shares, and its bootstrap knows
no multinomial draws, which make a figure of right and wrong answers a hundred times quicker.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from evaluation.judge.seeds import student

LEAST = 10  # clusters: the spread of fewer is hardly known, and an interval of it would hold too seldom
MANY = 200  # degrees of freedom at which Student's t is taken for the normal's: it is wider by 0.6 %
NORMAL = 1.959963984540054
DRAWS = 10_000
CHUNK = 1 << 22  # numbers drawn at a time
Array = NDArray[np.float64]


def difference(
    a_N: Array, b_N: Array, unit_N: Array, cluster_N: Sequence[str], value: Callable[[Array], Array]
) -> tuple[float, float] | None:
    """Return the interval of value(sum b / sum units) - value(sum a / sum units); None of fewer than LEAST clusters."""
    sums_C4 = sums(np.stack([a_N, b_N, unit_N, np.ones(len(a_N))], 1), cluster_N)
    if len(sums_C4) < LEAST:
        return None
    if (unit_N == 1).all() and is_right(a_N) and is_right(b_N):
        items, z = weighed(sums_C4[:, 1] - sums_C4[:, 0], sums_C4[:, 3], float(((b_N - a_N) ** 2).sum()))
        share = items / len(a_N)
        return shares(float((b_N > a_N).sum()) * share, float((a_N > b_N).sum()) * share, items, z)

    def figure(sums_3: Array) -> Array:
        return np.asarray(value(sums_3[..., 1] / sums_3[..., 2]) - value(sums_3[..., 0] / sums_3[..., 2]))

    total = sums_C4.sum(0)
    middle, without_C = float(figure(total)), figure(total - sums_C4)
    count = len(sums_C4)
    error = math.sqrt((count - 1) / count * float(((without_C - without_C.mean()) ** 2).sum()))
    reach = student(min(count - 1, MANY)) * error
    return middle - reach, middle + reach


def is_right(score_N: Array) -> bool:
    """Say whether every item is right or wrong."""
    return bool(((score_N == 0) | (score_N == 1)).all())


def sums(table_NK: Array, cluster_N: Sequence[str]) -> Array:
    """Return the sums over the items of each cluster."""
    names, at_N = np.unique(np.asarray(cluster_N), return_inverse=True)
    out = np.zeros((len(names), table_NK.shape[1]))
    np.add.at(out, at_N, table_NK)
    return out


def weighed(sum_C: Array, size_C: Array, squares: float) -> tuple[float, float]:
    """Return (how many items alone would tell as much as these clusters do, the quantile to take). Where no item
    differs, nobody sees how alike those of a cluster are, and a cluster counts as one item."""
    items, count = float(size_C.sum()), len(sum_C)
    if count == items:
        return items, NORMAL
    mean = float(sum_C.sum()) / items
    alone = squares / items - mean**2
    clustered = count / (count - 1) * float(((sum_C - mean * size_C) ** 2).sum()) / items
    effect = max(1.0, clustered / alone) if alone > 0 else items / count
    return items / effect, student(min(count - 1, MANY))


def shares(only_b: float, only_a: float, items: float, z: float = NORMAL) -> tuple[float, float]:
    """Return the score interval of the difference of two shares of the same items (Tango 1998): what a test of each
    difference does not reject. With no item that differs it is 0 +- z² / (items + z²)."""

    def distance(delta: float) -> float:
        """Count the standard errors from a true difference `delta`, of the likeliest such truth, to the seen one."""
        linear = -only_b - only_a + (2 * items - only_b + only_a) * delta
        square = max(linear**2 + 8 * items * only_a * delta * (1 - delta), 0.0)
        likeliest = (math.sqrt(square) - linear) / (4 * items)
        variance = items * (2 * likeliest + delta * (1 - delta))
        off = only_b - only_a - items * delta
        return off / math.sqrt(variance) if variance > 1e-12 else math.copysign(math.inf, off) if off else 0.0

    def end(inner: float, outer: float) -> float:
        for _ in range(60):
            middle = (inner + outer) / 2
            inner, outer = (middle, outer) if abs(distance(middle)) < z else (inner, middle)
        return inner

    seen = (only_b - only_a) / items
    return end(seen, -1.0), end(seen, 1.0)


def wilson(right: float, items: float, z: float = NORMAL) -> tuple[float, float]:
    """Return Wilson's interval of a share of right answers, which has a width even where all are right."""
    middle = (right + z * z / 2) / (items + z * z)
    reach = z / (items + z * z) * math.sqrt(right * (items - right) / items + z * z / 4)
    return 0.0 if right == 0 else middle - reach, 1.0 if right == items else middle + reach


# ---- one figure, by draws of its items


def bootstrap(sum_N: Array, unit_N: Array, value: Callable[[Array], Array], key: str) -> tuple[float, float]:
    """Return the 95 % interval of value(sum / sum of units), of items drawn anew with replacement."""
    none = float(value(np.zeros(1))[0])
    drawn = [value(draws[:, 0] / draws[:, 1]) - none for draws in resampled(np.stack([sum_N, unit_N], 1), key)]
    low, high = np.percentile(np.concatenate(drawn), (2.5, 97.5))
    return none + float(low), none + float(high)


def resampled(table_NC: Array, key: str) -> Iterator[Array]:
    """Yield sums over as many items as there are, drawn with replacement: [draws, C], some draws at a time."""
    rng = generator("bootstrap", key)
    rows, count = np.unique(table_NC, axis=0, return_counts=True)
    items = len(table_NC)
    if len(rows) < items / 8:  # few kinds, as right and wrong: their counts are multinomial, much quicker to draw
        yield rng.multinomial(items, count / items, DRAWS) @ rows
        return
    size = max(1, CHUNK // max(items, 1))
    for start in range(0, DRAWS, size):
        yield table_NC[rng.integers(0, items, (min(size, DRAWS - start), items))].sum(1)


def generator(*key: str) -> np.random.Generator:
    """Return a generator that is a function of the key alone."""
    return np.random.default_rng(int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "big"))
