"""Intervals over seeds, against scipy's, and how often they call a method better that is none, alone and together."""

from __future__ import annotations

import math
import re
from pathlib import Path
from statistics import stdev

import numpy as np
import pytest
from scipy import stats

from evaluation.judge import noise
from evaluation.judge.seeds import LEAST, check_margin, holm, outside, paired, student, together


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 9, 30, 199])
@pytest.mark.parametrize("level", [0.5, 0.95, 0.99])
def test_student_is_scipys(freedom: int, level: float) -> None:
    assert student(freedom, level) == pytest.approx(stats.t.ppf((1 + level) / 2, freedom), rel=1e-9)


@pytest.mark.parametrize("seeds", [3, 4, 7])
def test_an_interval_is_scipys_paired_one(seeds: int) -> None:
    a, b = np.random.default_rng(seeds).normal(size=(2, seeds))
    found, whole = paired([*(a - b)]), stats.ttest_rel(a, b).confidence_interval(0.95)
    assert (found.seeds, found.mean) == (seeds, pytest.approx((a - b).mean()))
    assert (found.low, found.high) == (pytest.approx(whole.low), pytest.approx(whole.high))


def test_what_the_interval_leaves_out_decides() -> None:
    assert paired([-0.02, -0.021, -0.019]).verdict() == "better"
    assert paired([-0.02, -0.021, -0.019]).verdict(higher_is_better=True) == "worse"
    assert paired([0.02, 0.021, 0.019]).verdict() == "worse"
    assert paired([-0.05, -0.001, -0.001]).verdict() == "no difference shown"  # all are below 0, and that is not enough
    assert paired([0.0, 0.0, 0.0]).verdict() == "no difference shown"


def test_two_seeds_have_no_interval_and_none_no_difference() -> None:
    for differences in ([-0.5], [-0.5, -0.5]):
        assert len(differences) < LEAST
        found = paired(differences)
        runs = {1: "one run", 2: "2 runs"}[len(differences)]
        assert (found.mean, found.low, found.high, found.verdict()) == (-0.5, None, None, f"{runs} each: no verdict")
    with pytest.raises(ValueError, match="no seed"):
        paired([])


@pytest.mark.parametrize("seeds", [3, 5])
def test_an_arm_beside_itself_is_called_better_at_most_one_time_in_twenty(seeds: int) -> None:
    """Null studies: differences of runs that differ in nothing but noise."""
    noise = np.random.default_rng(0).normal(scale=0.01, size=(4000, seeds))
    verdicts = [paired([*row]).verdict() for row in noise]
    share = {word: verdicts.count(word) / len(verdicts) for word in ("better", "worse")}
    assert max(share.values()) <= 0.05
    assert sum(share.values()) == pytest.approx(0.05, abs=0.01)  # and it is no interval of everything


def test_holm_by_hand() -> None:
    assert holm([0.04, 0.01, 0.03, 0.5]) == pytest.approx([0.09, 0.04, 0.09, 0.5])
    assert holm([0.01, 0.02, 0.025]) == pytest.approx([0.03, 0.04, 0.04]), "never below that of a smaller p"
    assert holm([0.6, 0.7]) == [1.0, 1.0]


def test_what_is_judged_together_is_called_better_at_most_one_time_in_twenty_all_in_all() -> None:
    """Null studies of six means: two arms beside themselves and one that is better, each at equal tokens and FLOPs."""
    noise = np.random.default_rng(0).normal(scale=0.01, size=(2000, 6, 3))
    noise[:, 4:] -= 1
    alone = [[paired([*row]) for row in study] for study in noise]
    every = [together(study) for study in alone]
    assert all(found.verdict() == "better" for study in every for found in study[4:]), "it does not hide what is there"
    share, called = (
        sum(any(found.verdict() != "no difference shown" for found in study[:4]) for study in studies) / len(studies)
        for studies in (every, alone)
    )
    assert 0.02 < share <= 0.055 and called > 0.15  # sampling error: 0.005


def test_a_comparison_shown_twice_counts_once_and_the_primary_one_not_at_all() -> None:
    sure, unsure = paired([-0.02, -0.021, -0.019]), paired([-0.02, -0.01, -0.04])
    few = together([paired([0.1]), sure, sure])
    assert [found.p_holm for found in few] == [None, *(pytest.approx(2 * (sure.p or 0)) for _ in range(2))]
    assert [found.family for found in together([sure, unsure, sure], ["a", "b", "a"])] == [2, 2, 2]
    first, second, third = together([sure, unsure, unsure], ["a", "b", "c"], primary="b")
    assert second == unsure and second.p_holm is None, "named beforehand: its p stands alone"
    assert first.p_holm == pytest.approx(2 * (sure.p or 0)) and third.p_holm == unsure.p


def test_a_grain_is_the_least_spread_that_is_believed() -> None:
    """Three seeds that each gained one item of ten seem to agree to the last digit."""
    assert paired([0.1, 0.1, 0.1]).verdict(higher_is_better=True) == "better"
    found = paired([0.1, 0.1, 0.1], grain=0.1)
    assert found.verdict(higher_is_better=True) == "no difference shown" and found.p is not None and found.p > 0.05
    assert paired([0.5, 0.5, 0.5], grain=0.1).verdict(higher_is_better=True) == "better"
    assert paired([0.0, 0.0, 0.0], grain=0.1).p == 1
    rng = np.random.default_rng(0)
    for seeds in (3, 4, 5):  # differences of an item up, an item down or none: called at most one time in twenty
        some = rng.integers(-1, 2, (3000, seeds)) / 10
        called = sum(paired([*row], grain=0.1).verdict() in ("better", "worse") for row in some)
        assert called / len(some) <= 0.06  # sampling error of the share: 0.004


def test_p_is_scipys() -> None:
    a, b = np.random.default_rng(1).normal(size=(2, 4))
    assert paired([*(a - b)]).p == pytest.approx(stats.ttest_rel(a, b).pvalue)
    assert paired([0.1]).p is None


def test_the_noise_that_is_named_is_the_studys() -> None:
    """Each figure is the page's: seeds, or an interval over three."""
    page = (Path(__file__).parents[3] / "benchmarks" / "results" / "2026-11-studies.md").read_text()

    def of_seeds(before: str) -> float:
        return stdev(float(found) for found in re.findall(r"[-+]0\.\d+", page.split(before)[1])[:3])

    def of_interval(row: str, place: int = 0) -> float:
        line = next(line for line in page.splitlines() if line.startswith(row))
        low, high = [(float(a), float(b)) for a, b in re.findall(r"\(([-+]0\.\d+) to ([-+]0\.\d+)\)", line)][place]
        return (high - low) / 2 / student(2) * 3**0.5

    trained = [of_seeds("Seed by seed, in: "), of_seeds("Seed by seed, mean of four: "), of_interval("| in | 4.0703")]
    trained += [of_interval("| **answers** | 2.7059", 1), of_interval("| **in** | 2.6289")]
    assert (round(min(trained), 4), round(max(trained), 4)) == noise.LOSS
    assert round(of_interval("| **law**, nobody's"), 4) == noise.OTHER
    tasks = [
        of_interval(f"| {name}", place)
        for name in ("HellaSwag, acc_norm | 2,009", "ARC-Easy, acc_norm | 1,188", "LAMBADA, acc | 1,718")
        for place in range(3)
    ]
    assert (round(min(tasks), 4), round(max(tasks), 4)) == noise.ACCURACY


def test_as_many_seeds_as_are_named_show_a_difference_four_times_in_five() -> None:
    for ratio in (0.5, 0.8, 1.0, 1.66, 2.1, 5.0):
        count, rng = noise.seeds(ratio), np.random.default_rng(0)
        drawn = rng.normal(ratio, 1.0, (4000, count))
        shown = sum(paired(list(each)).verdict(True) == "better" for each in drawn[:1000]) / 1000
        assert shown > 0.77, (ratio, count, shown)
        if count > LEAST:
            fewer = sum(paired(list(each)).verdict(True) == "better" for each in drawn[:1000, :-1]) / 1000
            assert fewer < 0.83, (ratio, count, fewer)
    assert noise.seeds(100.0) == LEAST and noise.seeds(0.01) == noise.seeds(0.0) == 0


def test_equivalence_is_two_one_sided_tests() -> None:
    """Compare p with scipy's t-tests; of studies whose true difference is the margin, 5 % may claim equivalence."""
    differences = [0.0012, -0.0006, 0.0021, 0.0003, 0.0009]
    for margin in (0.0005, 0.002, 0.005):
        low = stats.ttest_1samp(differences, -margin, alternative="greater").pvalue
        high = stats.ttest_1samp(differences, margin, alternative="less").pvalue
        assert outside(paired(differences), margin) == pytest.approx(max(low, high), abs=1e-9)
    assert outside(paired(differences[:2]), 0.005) is None
    assert outside(paired([0.001] * 3), 0.005) == 0 and outside(paired([0.01] * 3), 0.005) == 1
    rng = np.random.default_rng(2611)
    p = [outside(paired([float(x) for x in rng.normal(0.005, 0.002, 5)]), 0.005) for _ in range(2000)]
    assert sum(each is not None and each <= 0.05 for each in p) / len(p) < 0.065


@pytest.mark.parametrize("margin", [0, -0.1, math.nan, math.inf, "x", True, None])
def test_a_margin_is_a_number_above_zero(margin: object) -> None:
    with pytest.raises(ValueError, match=r"equivalent\.law is .*; write a margin above 0"):
        check_margin("equivalent.law", margin)
