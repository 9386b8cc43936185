"""How often intervals over items hold the truth, simulated; and by hand where nothing differs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from evaluation.judge import intervals
from evaluation.judge.intervals import NORMAL, difference, shares, wilson


def mean(values: intervals.Array) -> intervals.Array:
    return values


def names(clusters: int, each: int = 1) -> list[str]:
    return [str(n) for n in range(clusters) for _ in range(each)]


def test_where_nothing_differs_the_interval_has_a_width() -> None:
    for items in (10, 100, 1000):
        edge = NORMAL**2 / (items + NORMAL**2)
        assert shares(0, 0, items) == pytest.approx((-edge, edge), abs=1e-9)
        assert wilson(items, items) == pytest.approx((1 - edge, 1.0), abs=1e-9)
        assert wilson(0, items) == pytest.approx((0.0, edge), abs=1e-9)
    assert shares(20, 0, 20)[1] == pytest.approx(1.0) and 0.65 < shares(20, 0, 20)[0] < 1
    low, high = shares(30, 10, 400)
    assert shares(10, 30, 400) == pytest.approx((-high, -low), abs=1e-9)
    error = math.sqrt(40 / 400 - 0.05**2) / 20  # far from the boundary it is the plain one
    assert (low, high) == pytest.approx((0.05 - 1.96 * error, 0.05 + 1.96 * error), abs=0.004)


def test_fewer_than_ten_clusters_have_no_interval() -> None:
    ones = np.ones(90)
    assert difference(ones, ones, ones, names(9, 10), mean) is None
    assert difference(ones, ones, ones, names(10, 9), mean) is not None


def test_wilson_is_scipys() -> None:
    stats = pytest.importorskip("scipy.stats")
    for right, items in ((0, 10), (3, 10), (10, 10), (700, 1000)):
        theirs = stats.binomtest(right, items).proportion_ci(method="wilson")
        assert wilson(right, items) == pytest.approx((theirs.low, theirs.high))


@pytest.mark.parametrize("clusters", [10, 20, 50])
@pytest.mark.parametrize("change", [0.05, 0.3])
def test_coverage_of_right_and_wrong(clusters: int, change: float) -> None:
    """Pairs of answers, of which a few change, more to right than to wrong."""
    rng, held, draws = np.random.default_rng(clusters), 0, 300
    truth = change * 0.4
    for _ in range(draws):
        kind = rng.choice(4, clusters, p=[change * 0.7, change * 0.3, (1 - change) / 2, (1 - change) / 2])
        a, b = np.isin(kind, (1, 2)) * 1.0, np.isin(kind, (0, 2)) * 1.0
        low, high = difference(a, b, np.ones(clusters), names(clusters), mean) or (0.0, 0.0)
        held += low <= truth <= high
    assert held / draws >= 0.93  # sampling error of the share: 0.0126


@pytest.mark.parametrize("each", [1, 8])
def test_coverage_of_texts_and_of_clusters(each: int) -> None:
    """Bits a byte of texts of other sizes; with 8 texts a file, which share most of what is off."""
    rng, held, draws, clusters = np.random.default_rng(each), 0, 400, 12
    for _ in range(draws):
        size = rng.integers(100, 400, clusters * each).astype(np.float64)
        shared = np.repeat(rng.normal(0.1, 0.3, clusters), each)
        a, b = -size * 2.0, -size * (2.0 + shared + rng.normal(0, 0.1, clusters * each))
        low, high = difference(a, b, size, names(clusters, each), lambda x: -x / math.log(2)) or (0.0, 0.0)
        held += low <= 0.1 / math.log(2) <= high
    assert 0.92 <= held / draws <= 0.985


def test_coverage_of_right_and_wrong_in_clusters() -> None:
    rng, held, draws, clusters, each = np.random.default_rng(5), 0, 300, 15, 10
    for _ in range(draws):
        gain = np.repeat(rng.random(clusters) < 0.25, each)  # whole passages that B reads better
        a = (rng.random(clusters * each) < 0.5) * 1.0
        b = np.where(gain & (rng.random(clusters * each) < 0.8), 1.0, a)
        low, high = difference(a, b, np.ones(len(a)), names(clusters, each), mean) or (0.0, 0.0)
        held += low <= 0.25 * 0.8 * 0.5 <= high
    assert held / draws >= 0.92
