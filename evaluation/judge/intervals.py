"""Compute 95 % intervals over clusters of items: how far a test's figure may be from the truth.

The intervals are about the same models and other items, not about another training (seeds.py). Items from one file,
passage or document are often right or wrong together, so a cluster of them counts once; fewer than LEAST clusters give
no interval. Shares of right answers have score intervals, which hold even if few items differ; other metrics use the
jackknife over clusters. We do not use scipy: it has no score interval for paired shares, and its bootstrap lacks
multinomial draws, which are a hundred times faster for right and wrong answers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evaluation.judge.seeds import student

LEAST = 10  # clusters: the spread of fewer is not known well, and such an interval would be wrong too often
MANY = 200  # degrees of freedom from which the normal replaces Student's t, which is 0.6 % wider there
NORMAL = 1.959963984540054
DRAWS = 10_000
CHUNK = 1 << 22  # numbers drawn at a time
Array = NDArray[np.float64]


def difference(
    a_N: Array, b_N: Array, unit_N: Array, cluster_N: Sequence[str], value: Callable[[Array], Array]
) -> tuple[float, float] | None:
    """Return the interval of value(sum b / sum units) - value(sum a / sum units); None if clusters are fewer than
    LEAST."""
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
    """Return whether every item is either right or wrong."""
    return bool(((score_N == 0) | (score_N == 1)).all())


def sums(table_NK: Array, cluster_N: Sequence[str]) -> Array:
    """Return the sums over the items of each cluster."""
    names, at_N = np.unique(np.asarray(cluster_N), return_inverse=True)
    out = np.zeros((len(names), table_NK.shape[1]))
    np.add.at(out, at_N, table_NK)
    return out


def weighed(sum_C: Array, size_C: Array, squares: float) -> tuple[float, float]:
    """Return (the number of independent items that tell as much as these clusters, the quantile). If no item differs, a
    cluster counts as one item, because the correlation inside it cannot be seen."""
    items, count = float(size_C.sum()), len(sum_C)
    if count == items:
        return items, NORMAL
    mean = float(sum_C.sum()) / items
    alone = squares / items - mean**2
    clustered = count / (count - 1) * float(((sum_C - mean * size_C) ** 2).sum()) / items
    effect = max(1.0, clustered / alone) if alone > 0 else items / count
    return items / effect, student(min(count - 1, MANY))


def shares(only_b: float, only_a: float, items: float, z: float = NORMAL) -> tuple[float, float]:
    """Return the score interval for the difference of two shares of the same items (Tango 1998): all differences that a
    test does not reject. If no item differs, it is 0 +- z² / (items + z²)."""

    def distance(delta: float) -> float:
        """Return the standard errors between a true difference `delta`, at its likeliest, and the seen difference."""
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
    """Return Wilson's interval for a share of right answers, which has a width even if all are right."""
    middle = (right + z * z / 2) / (items + z * z)
    reach = z / (items + z * z) * math.sqrt(right * (items - right) / items + z * z / 4)
    return 0.0 if right == 0 else middle - reach, 1.0 if right == items else middle + reach


@dataclass(frozen=True)
class Figure:
    """Hold sum / sum of units, with its standard error and 95 % interval over clusters."""

    value: float
    items: int
    clusters: int
    error: float | None = None  # None with fewer than LEAST clusters, like the interval
    low: float | None = None
    high: float | None = None


def figure(sum_N: Array, unit_N: Array, cluster_N: Sequence[str]) -> Figure:
    """Return sum / sum of units of items in clusters. A share of right answers has Wilson's interval, for as many
    independent items as the clusters are worth; any other figure has the interval of the jackknife."""
    sums_C3 = sums(np.stack([sum_N, unit_N, np.ones(len(sum_N))], 1), cluster_N)
    total, count = sums_C3.sum(0), len(sums_C3)
    value = float(total[0] / total[1])
    if count < LEAST:
        return Figure(value, len(sum_N), count)
    rest_C3 = total - sums_C3
    without_C = rest_C3[:, 0] / rest_C3[:, 1]
    error = math.sqrt((count - 1) / count * float(((without_C - without_C.mean()) ** 2).sum()))
    if (unit_N == 1).all() and is_right(sum_N):
        items, z = weighed(sums_C3[:, 0], sums_C3[:, 2], float((sum_N**2).sum()))
        return Figure(value, len(sum_N), count, error, *wilson(value * items, items, z))
    reach = student(min(count - 1, MANY)) * error
    return Figure(value, len(sum_N), count, error, value - reach, value + reach)


# ---- bootstrap of one figure


def bootstrap(sum_N: Array, unit_N: Array, value: Callable[[Array], Array], key: str) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of value(sum / sum of units)."""
    none = float(value(np.zeros(1))[0])
    drawn = [value(draws[:, 0] / draws[:, 1]) - none for draws in resampled(np.stack([sum_N, unit_N], 1), key)]
    low, high = np.percentile(np.concatenate(drawn), (2.5, 97.5))
    return none + float(low), none + float(high)


def resampled(table_NC: Array, key: str) -> Iterator[Array]:
    """Yield sums over resampled items: [draws, C], a batch of draws at a time."""
    rng = generator("bootstrap", key)
    rows, count = np.unique(table_NC, axis=0, return_counts=True)
    items = len(table_NC)
    if (
        len(rows) < items / 8
    ):  # few kinds, such as right and wrong: their counts are multinomial, which is much faster to draw
        yield rng.multinomial(items, count / items, DRAWS) @ rows
        return
    size = max(1, CHUNK // max(items, 1))
    for start in range(0, DRAWS, size):
        yield table_NC[rng.integers(0, items, (min(size, DRAWS - start), items))].sum(1)


def generator(*key: str) -> np.random.Generator:
    """Return a generator that depends only on the key."""
    return np.random.default_rng(int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "big"))
