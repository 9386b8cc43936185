"""The published law of upcycling, and that it never leaves its range without a word."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import law_points
from training.estimating import law
from training.estimating.law import Case, advice, dense, outside, overtaken, scratch, second, upcycled

WITHIN = Case(parameters=1e9, first=74e9, more=10e9, copies=8, top_k=2, cost=1.8)


def test_where_from_scratch_overtakes() -> None:
    """Computed from the table's numbers elsewhere: 38 B, 190 B and 0.4 T; at 2 T of a 1 B model never."""
    found = {(n, d): overtaken(n, d) for n, d in ((1e9, 74e9), (1e9, 300e9), (7e9, 2e12))}
    assert found[1e9, 74e9] == pytest.approx(38e9, rel=0.03)
    assert found[1e9, 300e9] == pytest.approx(190e9, rel=0.03)
    assert found[7e9, 2e12] == pytest.approx(0.4e12, rel=0.1)
    assert overtaken(1e9, 2e12) is None
    crossing = found[1e9, 74e9]
    assert crossing is not None
    assert upcycled(1e9, 74e9, crossing) == pytest.approx(scratch(1e9, crossing))
    assert upcycled(1e9, 74e9, crossing / 2) < scratch(1e9, crossing / 2)
    assert upcycled(1e9, 74e9, crossing * 2) > scratch(1e9, crossing * 2)


def test_losses_by_hand() -> None:
    assert dense(1e9, 1e12) == pytest.approx(8.83 * 10**-1.056 + 12.3 * 10**-1.044 + 0.165)
    assert scratch(1e9, 1e12) == pytest.approx(32 * 10**-1.932 + 7.05 * 10**-0.72 + 0.165)
    assert second(1e12) == pytest.approx(0.085 - 7.98e-4 * 27.631, rel=1e-4)
    assert upcycled(1e9, 1e12, 1e11) == pytest.approx(
        16.3 * 10**-0.516 * 10 ** (-11 * second(1e12)) + 8.53 * 10**-1.008 + 0.165
    )


def test_the_table_has_these_losses() -> None:
    """At 1.8 times the FLOPs of a dense token, the dense model gets 1.8 times the tokens for as many."""
    said = {line[2:24].strip(): float(line[24:31]) for line in advice(WITHIN).splitlines()[1:5]}
    assert said == {
        "dense, same tokens": pytest.approx(dense(1e9, 84e9), abs=6e-4),
        "dense, same FLOPs": pytest.approx(dense(1e9, 92e9), abs=6e-4),
        "8 copies, top-2": pytest.approx(upcycled(1e9, 74e9, 10e9), abs=6e-4),
        "MoE from scratch": pytest.approx(scratch(1e9, 10e9), abs=6e-4),
    }
    assert said["dense, same FLOPs"] < said["dense, same tokens"] - 2e-3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"parameters": 8e9}, "8 B parameters"),
        ({"first": 15e12}, "15 T tokens before"),
        ({"more": 26e6}, "26 M tokens more"),
        ({"copies": 16}, "16 copies"),
        ({"top_k": 1}, "top-1"),
        ({"parameters": 2e7}, "20 M parameters"),
        ({"first": 20e6}, "20 M tokens before, too few"),
        ({"more": 5.85e12}, "5.85 T tokens more"),
        ({"granularity": 4, "method": "virtual_group"}, "granularity 4"),
        ({"method": "drop"}, "method drop"),
        ({"method": "split", "copies": 16, "top_k": 4}, "method split"),
    ],
)
def test_the_law_is_not_shown_where_it_was_not_fitted(change: dict[str, float], says: str) -> None:
    assert outside(WITHIN) == [] and "not shown" not in advice(WITHIN)
    case = replace(WITHIN, **change)  # type: ignore[arg-type]
    text = advice(case)
    assert len(outside(case)) == 1 and says in outside(case)[0] and f"  {outside(case)[0]}" in text
    assert "not shown" in text and "Expected loss" not in text and "dense, same" not in text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"more": 100e9}, "train one"),
        ({"more": 30e9}, "more than half of that"),
        ({"first": 2e12}, "500 to 600 B"),
        ({"first": 2e12}, "2,000 tokens a parameter"),
        ({"method": "drop"}, "500 B tokens (arXiv 2502.19261)"),
        ({"granularity": 4}, "router.choice=each-slice"),
    ],
)
def test_each_warning_has_its_case_and_its_source(change: dict[str, object], says: str) -> None:
    assert says not in advice(WITHIN)
    line = next(line for line in advice(replace(WITHIN, **change)).splitlines() if says in line)  # type: ignore[arg-type]
    assert line.startswith("! ") and ("arXiv" in line or "docs/" in line)


def test_warnings_that_do_not_apply() -> None:
    assert "! " not in advice(WITHIN)
    assert "each-slice" not in advice(replace(WITHIN, granularity=4, choice="each-slice"))
    assert "method drop gained" not in advice(replace(WITHIN, method="drop", more=600e9, parameters=7e9))


def test_points_of_our_own(tmp_path: Path) -> None:
    """Check results/2026-11-planning.md: the law as published, refitted, and along a dense curve, on points held out."""
    points, loss, third = law_points.read()
    published = law_points.losses(law_points.PUBLISHED, points)
    assert published[0] == pytest.approx(upcycled(*points[0]), rel=1e-9), "the same law"
    off = published / loss - 1
    assert [(third == held).sum() for held in range(3)] == [12, 12, 12]
    assert off.mean() == pytest.approx(-0.083, abs=6e-4) and np.abs(off).max() == pytest.approx(0.175, abs=6e-4)
    said = {
        "refitted": [(0.013, 0.032), (0.015, 0.038), (0.011, 0.019)],
        "along": [(0.008, 0.015), (0.007, 0.013), (0.008, 0.013)],
    }
    for form, pairs in said.items():
        assert law_points.held_out(form) == [pytest.approx(pair, abs=6e-4) for pair in pairs]
    # losses that follow a form exactly are met where they were held out
    for form, exact in (("refitted", upcycled), ("along", law.continued)):
        rows = [{"parameters": n, "first": d1, "more": d2, "loss": exact(n, d1, d2)} for n, d1, d2 in points.tolist()]
        (tmp_path / "exact.json").write_text(json.dumps({"texts": {}, "points": rows}))
        assert max(most for _, most in law_points.held_out(form, tmp_path / "exact.json")) < 1e-9


def test_points_that_were_fixed_before_they_ran() -> None:
    """The must of 2 %: of 12 points that no constant has seen, and that `training.estimating.law` says."""
    points, loss, _ = law_points.read()
    rows, off = law_points.checked()
    at, real = law_points.values(rows)
    assert len(points) == 36 and len(rows) == 12 and not {*map(tuple, points)} & {*map(tuple, at)}
    assert {n for n, *_ in at} == {11835456, 25051840}
    by_law = np.array([law.continued(*each) for each in at])
    assert np.abs(by_law / real - 1).max() <= 0.02, "what training.estimating.law says, as asked"
    said = {"along": (0.005, 0.019), "refitted": (0.010, 0.019), "as published": (0.086, 0.137)}
    for form, pair in said.items():
        assert (np.abs(off[form]).mean(), np.abs(off[form]).max()) == pytest.approx(pair, abs=6e-4)
    # its constants are those of the 36, each of them
    assert pytest.approx(law_points.along(points, loss), rel=1e-5) == law.CONTINUED
    for (low, high), column in zip(law.RUNS, points.T, strict=True):
        assert low <= column.min() <= low * 1.05 and high / 1.05 <= column.max() <= high


def test_runs_of_a_place_are_apart_by_less_than_the_law_is_off() -> None:
    apart = law_points.noise()
    assert len(apart) == 13
    assert max(both for both, _ in apart.values()) == pytest.approx(0.009, abs=6e-4)
    assert max(same for _, same in apart.values()) == pytest.approx(0.006, abs=6e-4)


def test_points_of_other_texts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, texts = law_points.known(law_points.CHECKS)
    other = {**texts, "fiction": texts["fiction"].replace("sha256 ", "sha256 0")}
    (tmp_path / "checks.json").write_text(json.dumps({"texts": other, "points": rows}))
    monkeypatch.setattr(law_points, "CHECKS", tmp_path / "checks.json")
    with pytest.raises(ValueError, match="losses compare only on the same texts"):
        law_points.checked()


def test_points_are_kept(tmp_path: Path) -> None:
    """Of a run's lines each file gets its own, in order, and texts once, if they are the same."""
    (rows, texts), (others, _) = law_points.known(law_points.HERE), law_points.known(law_points.CHECKS)
    points, file = tmp_path / "points.jsonl", tmp_path / "kept.json"
    lines = [{**row, "texts": texts} for row in (*reversed(rows), *others, {**rows[0], "seed": 1})]
    points.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for own, between in ((law_points.HERE, False), (law_points.CHECKS, True)):
        law_points.keep(file, points, between)
        assert file.read_text() == own.read_text()
    kept = file.read_text()
    for at, between in ((0, False), (len(rows), False), (-1, True)):  # one of the 36; of the 12; of another seed
        mixed = [dict(line) for line in lines]
        mixed[at]["texts"] = {}
        points.write_text("".join(json.dumps(line) + "\n" for line in mixed))
        with pytest.raises(ValueError, match="all its points must have the same texts"):
            law_points.keep(file, points, between)
    assert file.read_text() == kept


def test_advice_where_our_runs_were() -> None:
    inside = replace(WITHIN, parameters=1.2e7, first=6e6, more=4e6)
    line = next(line for line in advice(inside).splitlines() if "of our own runs" in line)
    assert f"{law.continued(1.2e7, 6e6, 4e6):.3f}" in line
    for change in ({"parameters": 1e8}, {"first": 1e9}, {"more": 1e6}, {"copies": 4}, {"granularity": 2}):
        assert "of our own runs" not in advice(replace(inside, **change))  # type: ignore[arg-type]
