"""The learning experiment: what a process has learned before, changes no bit of what it learns next."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import islands_learn
from benchmarks.islands_learn import (
    ARMS,
    KEPT,
    MAIN,
    SMALL,
    Arm,
    Runner,
    Size,
    behind,
    check,
    ended,
    few,
    lines,
    named,
    run,
    table,
    together,
)
from evaluation.judge.seeds import paired
from tests.unit.training.test_train import place
from training.data.open import check_tokens
from training.data.shards import TokenShards
from training.islands.rules import diloco

__all__ = ["place"]  # a fixture


def runner(place: Path, tmp_path: Path) -> Runner:
    size = replace(
        SMALL,
        source=str(place / "dense"),
        train="data",
        valid="valid",
        sequence=32,
        batch=2,
        held=600,
        points=2,
        steps=16,
    )
    return Runner(size, place, tmp_path, "cpu")


def told(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "wall"}


def test_what_a_process_has_learned_before_changes_no_bit_of_a_row(place: Path, tmp_path: Path) -> None:
    arms = [replace(MAIN, every=2, share=0.05, seed=seed) for seed in (1, 0)] + [replace(ARMS[0], seed=1), ARMS[3]]
    arms[-1] = replace(arms[-1], every=4)
    one = runner(place, tmp_path)
    rows = [told(run(one, arm)) for arm in arms]
    assert len(one.ones) == 2, "islands share a model, and so do big runs"
    assert any(each.learner.balance.load.total_NE.any() for each in one.ones.values())
    again = [told(run(one, arm)) for arm in arms]
    assert again == rows
    assert (diloco.RATE, diloco.MOMENTUM) == (0.7, 0.9), "as other tests expect them"
    alone = [told(run(runner(place, tmp_path), arm)) for arm in arms[1:]]
    assert alone == rows[1:]
    assert len({row["loss"] for row in rows}) == len(rows)
    used = one.one(arms[0], 2, 4)
    assert used in one.ones.values() and not used.learner.balance.load.total_NE.any()
    other = one.one(replace(arms[0], model="groups"), 2, 4)
    assert list(one.ones.values()) == [other], "of one kind at a time"


def test_steps_are_whole_exchanges_of_all_islands() -> None:
    size = replace(Size(), steps=160)
    for arm in (ARMS[0], MAIN, ARMS[3], Arm("", every=30, seconds=100.0)):
        check(size, arm)
    with pytest.raises(ValueError, match="multiple of 120, 120 for instance"):
        check(size, replace(MAIN, every=30))
    with pytest.raises(ValueError, match="multiple of 40, 160 for instance"):
        check(replace(size, steps=170), MAIN)


def test_seeds_and_groups_follow_at_the_best_rate_and_later_arms_after_the_first() -> None:
    asked, follows = together({1: [1e-3, 2e-3], 3: [1e-3, 5e-4]}, again=(1, 3), groups=(1,), seeds=(0, 1, 2), first=1)
    assert [(arm.name, arm.peak, arm.seed) for _, arm in asked] == [(MAIN.name, 1e-3, 0), (MAIN.name, 2e-3, 0)]
    row = {"name": MAIN.name, "seed": 0, "model": "copies"}
    rows: list[dict[str, Any]] = [row | {"peak": 1e-3, "flushed": 2.0}]
    assert not follows(rows)
    rows.append(row | {"peak": 2e-3, "flushed": 1.9})
    found = [arm for _, arm in sorted(follows(rows), key=lambda pair: pair[0])]
    assert [(arm.name, arm.peak, arm.model, arm.seed) for arm in found] == [
        (MAIN.name, 2e-3, "copies", 1), (MAIN.name, 2e-3, "copies", 2), (MAIN.name, 2e-3, "groups", 0),
        (ARMS[3].name, 1e-3, "copies", 0), (ARMS[3].name, 5e-4, "copies", 0),
        (MAIN.name, 2e-3, "groups", 1), (MAIN.name, 2e-3, "groups", 2),
    ]  # fmt: skip
    assert not follows(rows), "asked for once"
    other = row | {"name": ARMS[3].name, "peak": 1e-3, "flushed": 1.7}
    assert not follows([*rows, other, other | {"seed": 1}]), "one rate of two"
    found = [arm for _, arm in follows([*rows, other, other | {"peak": 5e-4, "flushed": 1.8}])]
    assert [(arm.name, arm.peak, arm.seed) for arm in found] == [(ARMS[3].name, 1e-3, 1), (ARMS[3].name, 1e-3, 2)]


def test_arms_that_are_named_are_these_and_as_soon_as_they_are_named() -> None:
    assert named("3:copies:2:1e-3,1:groups:1:5e-4;1:copies:0:5e-4:20:794:1e9") == [
        (0, replace(ARMS[3], seed=2, peak=1e-3)),
        (0, replace(MAIN, model="groups", seed=1, peak=5e-4)),
        (1, replace(MAIN, peak=5e-4, every=20, seconds=794.0, link=1e9)),
    ]
    for word in ("1:copies:2", "1:copy:2:1e-3", "99:copies:2:1e-3", "x:copies:2:1e-3", "1:copies:2:1e-3:1:1:1:1", ""):
        with pytest.raises(ValueError, match="it must be like 1:copies:2:5e-4"):
            named(f"0:copies:0:1e-3,{word}")


def test_no_arm_begins_late_and_those_that_began_are_waited_for(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`last=`, with a clock by which one of two workers is done every ten seconds."""
    now, begun = [0.0], list[tuple[float, int, Arm]]()
    waiting: list[tuple[int, Arm]] = []

    def put(worker: int, arm: Arm) -> None:
        begun.append((now[0], worker, arm))
        waiting.append((worker, arm))

    def get(timeout: float) -> tuple[int, dict[str, Any]]:
        now[0] += 10
        worker, arm = waiting.pop(0)
        return worker, asdict(arm) | {"error": "nothing was learned"}

    @contextmanager
    def workers(count: int, *_: Any) -> Iterator[Any]:
        yield [SimpleNamespace(put=partial(put, number)) for number in range(count)], SimpleNamespace(get=get)

    monkeypatch.setattr(islands_learn, "workers", workers)
    monkeypatch.setattr(islands_learn, "time", SimpleNamespace(monotonic=lambda: now[0]))
    named = "named=" + ",".join(f"1:copies:{seed}:1e-3" for seed in range(6))
    words = [
        "size=small",
        f"source={place / 'dense'}",
        "train=data",
        "valid=valid",
        "sequence=32",
        "held=600",
        "workers=2",
        named,
    ]
    for last, starts in (("last=25", [0, 0, 10, 20]), ("limit=1e9", [0, 0, 10, 20, 30, 40])):
        now[0] = 0.0
        begun.clear()
        monkeypatch.setattr(
            "sys.argv", ["islands_learn", "arms", str(tmp_path / last), f"tokens={place}", *words, last]
        )
        islands_learn.main()
        assert [when for when, *_ in begun] == starts and not waiting
        assert [arm.seed for *_, arm in begun] == list(range(len(starts)))
        rows = (tmp_path / last / "rows.jsonl").read_text().splitlines()
        assert [json.loads(row)["seed"] for row in rows] == list(range(len(starts)))
        assert f"{len(starts)} of 6 arms in" in capsys.readouterr().out


def test_few_words_are_the_most_frequent_ones_and_all_others_are_one(place: Path, tmp_path: Path) -> None:
    size = replace(SMALL, vocab=20, train="data", valid="valid")
    few(size, place, tmp_path)
    check_tokens(Runner(size, tmp_path, tmp_path, "cpu").config({"source": "x"}, size.batch, 0).data)
    before, after = (TokenShards.open(str(folder / "data"), 400) for folder in (place, tmp_path))
    assert after.vocab == 20 and after.eos == before.eos and after.start == before.start
    old, new = (np.concatenate([shard.tokens for shard in shards.shards]) for shards in (before, after))
    others, left = np.unique(old[new == 19], return_counts=True)
    assert not set(others) & set(range(KEPT))
    named = {int(a): int(b) for a, b in zip(old, new, strict=True) if b != 19}
    assert {b for a, b in named.items() if a >= KEPT} == set(range(KEPT, 19)), "each has a place, and none of the kept"
    assert all(a == b for a, b in named.items() if a < KEPT)
    assert len(named) == len(set(named.values()))
    counts = [int((old == token).sum()) for token in named if token >= KEPT]
    assert min(counts) >= left.max(), "none left out is more frequent"


def test_runs_are_behind_the_big_run_of_their_seed_and_model() -> None:
    big = {"name": ARMS[0].name, "rule": "", "model": "copies", "seed": 0, "seconds": 0.0}
    rows = [big | {"peak": 1e-3, "flushed": 2.0}, big | {"peak": 2e-3, "flushed": 2.5}]
    rows += [big | {"peak": 1e-3, "flushed": 4.0, "seed": 1}, big | {"peak": 2e-3, "flushed": 1.0, "seed": 1}]
    own = big | {"name": MAIN.name, "rule": "dgs", "peak": 5e-4, "flushed": 2.1}
    rows += [
        own,
        own | {"seed": 1},
        own | {"seed": 2},
        own | {"model": "groups"},
        own | {"seconds": 9.0},
        own | {"error": "x"},
    ]
    assert behind(rows) == [None] * 4 + [pytest.approx(0.05), pytest.approx(2.1 / 4 - 1)] + [None] * 4
    assert behind(rows[4:]) == [None] * 6


def test_a_curve_ends_when_all_is_told() -> None:
    """1e9 numbers in bfloat16 bytes and bitmaps, over 0.1 Gb/s: 170 s more for what keeps something back."""
    shared = {
        "model": "copies",
        "seed": 0,
        "seconds": 0.0,
        "link": 1e8,
        "peak": 1e-3,
        "dense": 2e8,
        "steps": 80,
        "flushed": 2.0,
    }
    big = shared | {
        "name": ARMS[0].name,
        "rule": "",
        "every": 1,
        "exchanges": 20,
        "clock": 6440.0,
        "curve": [[0, 0.0, 4.0], [80, 6440.0, 2.0]],
    }
    own = shared | {
        "name": MAIN.name,
        "rule": "dgs",
        "every": 10,
        "clock": 150.0,
        "curve": [[0, 10.0, 4.0], [80, 150.0, 3.0]],
    }
    late = own | {"every": 20, "seconds": 700.0, "flushed": 1.5}
    assert (
        ended(big) == 6440 and ended(own) == pytest.approx(150 + 80 * (2 + 514 / 4096), abs=0.01) and ended(late) == 700
    )
    rows = [
        big,
        own,
        late,
        own | {"peak": 2e-3, "flushed": 2.5},
        own | {"model": "groups"},
        late | {"link": 1e9},
        own | {"error": "x"},
    ]
    drawn = [(label, style, x, y) for label, style, _, x, y in lines(rows, 0, 1e8)]
    assert drawn == [
        (ARMS[0].name, "-", [0, 80], [4.0, 2.0]),
        (f"{MAIN.name}, H 10", "-", [0, 80, 80], [4.0, 3.0, 2.0]),
    ]
    drawn = [(label, style, x, y) for label, style, _, x, y in lines(rows, 1, 1e8)]
    assert drawn == [
        (ARMS[0].name, "-", [322.0, 6440.0], [4.0, 2.0]),
        (f"{MAIN.name}, H 10", "-", [10.0, 150.0, ended(own)], [4.0, 3.0, 2.0]),
        (f"{MAIN.name}, H 20, until 700 s", "--", [10.0, 150.0, 700.0], [4.0, 3.0, 1.5]),
    ]


def test_three_seeds_have_an_interval() -> None:
    shared = {"model": "copies", "seconds": 0.0, "link": 1e8, "dense": 2e8, "steps": 80, "loss": 1.0, "clock": 1.0, "exchanges": 8,
              "up": 1e6, "down": 1e6, "gain": 0.0, "share": 0.014, "answer": 0.0, "peak": 1e-3, "every": 1}  # fmt: skip
    big = shared | {"name": ARMS[0].name, "rule": "", "flushed": 2.0}
    own = shared | {"name": MAIN.name, "rule": "dgs"}
    rows = [big | {"seed": k} for k in range(3)] + [
        own | {"seed": k, "flushed": f} for k, f in enumerate((2.04, 2.06, 2.08))
    ]
    assert "| 2.00, 3.00, 4.00: 3.00, 95 % 0.52 to 5.48 |" in table(rows)
    assert "| 2.00, 3.00 |" in table(rows[:-1]), "two have none"


def test_what_the_docs_say_of_smollm2_is_in_its_rows() -> None:
    """In the log, two GPUs with rates and seeds: each line of its table is one of the rows' table, and all are there."""
    rows = [json.loads(line) for line in Path("benchmarks/data/islands_smollm2.jsonl").read_text().splitlines()]
    made = set()
    for line in table(rows).splitlines()[2:]:
        _, place, arm, before, after, gaps, _, _, sent, _, seconds, _ = (cell.strip() for cell in line.split("|"))
        seeds = arm.split(", ")[-1].split()[0]
        flushed = after if seeds == "3" else after.split()[0]
        kept = before.split()[0] if "error feedback" in arm else ""
        gaps = gaps.replace(": ", ": **").replace(", 95 % ", "** (") + ")" if ":" in gaps else gaps
        timed = "equal tokens" not in place
        made.add((seeds, kept, flushed, gaps, "" if timed else sent.removesuffix(".00"), seconds))
    page = Path("benchmarks/results/2026-11-islands.md").read_text().split("**GPU, rates and seeds**")[1].split("![")[0]
    said = set()
    for line in [line for line in page.splitlines() if line.startswith("| ")][1:]:
        _, _, seeds, kept, flushed, gaps, sent, seconds = (cell.strip() for cell in line.split("|")[1:-1])
        said.add((seeds, kept, flushed.strip("*"), gaps, sent, seconds.replace(",", "")))
    assert said == made and len(said) == 9
    begins = [row["curve"][0][2] for row in rows]
    assert (round(min(begins), 4), round(max(begins), 4)) == (2.5989, 2.5991)
    gained: dict[str, list[float]] = {}
    for row, gap in zip(rows, behind(rows), strict=True):
        if gap is not None and row["peak"] == (5e-4 if row["rule"] == "dgs" else 1e-3):
            big = row["flushed"] / (1 + gap)
            gained.setdefault(row["name"], []).append(
                (row["curve"][0][2] - row["flushed"]) / (row["curve"][0][2] - big)
            )
    spans = {name: (round(100 * min(values)), round(100 * max(values))) for name, values in gained.items()}
    assert spans == {MAIN.name: (84, 87), ARMS[3].name: (89, 92)}


def test_what_the_docs_say_of_equal_seconds_is_in_the_toys_rows() -> None:
    """In the log, over three links: each line is of three seeds of one arm, and the first of a link is the best."""
    rows = [json.loads(line) for line in Path("benchmarks/data/islands_toy.jsonl").read_text().splitlines()]
    assert not any("error" in row for row in rows)
    arms: dict[tuple[str, ...], dict[int, float]] = {}
    for row in [row for row in rows if row["seconds"]]:
        key = (f"{row['link'] / 1e9:g} Gb/s, {row['seconds']:.0f} s", row["name"], str(row["every"]), str(row["peak"]))
        arms.setdefault(key, {})[row["seed"]] = row["flushed"]
    made = {}
    for (link, *_), found in arms.items():
        if len(found) == 3:
            values = list(found.values())
            made[link, f"{statistics.fmean(values):.4f} ({min(values):.4f}-{max(values):.4f})"] = found
    page = (
        Path("benchmarks/results/2026-11-islands.md")
        .read_text()
        .split("**At equal seconds, over three links")[1]
        .split("Over 0.1 and 1 Gb/s")[0]
    )
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")][
        1:
    ]
    seen: list[str] = []
    for where, _, _, loss, ahead in lines:
        seen += [where] if where else []
        found = made[seen[-1], loss.replace("**", "")]
        if where:
            first = found
            of_link = [value for (link, _), values in made.items() if link == where for value in values.values()]
            assert min(of_link) in found.values(), "the first of a link is the best"
        if ahead:
            told = paired([100 * (1 - first[seed] / value) for seed, value in found.items()])
            assert ahead == f"{told.mean:.2f} % ({told.low:.2f} to {told.high:.2f})"
    assert seen == ["0.1 Gb/s, 794 s", "1 Gb/s, 200 s", "10 Gb/s, 200 s"] and len(lines) == 12


def test_what_the_docs_say_of_all_rules_is_in_the_toys_rows() -> None:
    """In the log, at equal tokens: each line is of three seeds, at the better of its rates, and the best is first."""
    rows = [json.loads(line) for line in Path("benchmarks/data/islands_toy.jsonl").read_text().splitlines()]
    rows = [row for row in rows if not row["seconds"]]
    arms: dict[tuple[str, str], dict[float, list[dict[str, Any]]]] = {}
    for row, gap in zip(rows, behind(rows), strict=True):
        arms.setdefault((row["model"], row["name"]), {}).setdefault(row["peak"], []).append(row | {"behind": gap})
    made = []
    for (model, _), rates in arms.items():
        whole = {peak: runs for peak, runs in rates.items() if sorted(run["seed"] for run in runs) == [0, 1, 2]}
        peak, runs = min(whole.items(), key=lambda item: statistics.fmean(run["flushed"] for run in item[1]))
        losses = [run["flushed"] for run in runs]
        cells = [f"{peak:g}", f"{statistics.fmean(losses):.4f} ({min(losses):.4f}-{max(losses):.4f})", ""]
        if runs[0]["name"] != ARMS[0].name:
            told = paired([100 * run["behind"] for run in runs])
            cells[2] = f"{told.mean:.2f} % ({told.low:.2f} to {told.high:.2f})"
        made.append((model, statistics.fmean(losses), [*cells, f"{statistics.fmean(ended(run) for run in runs):,.0f}"]))
    page = (
        Path("benchmarks/results/2026-11-islands.md")
        .read_text()
        .split("**All rules at equal tokens")[1]
        .split("No rule is within")[0]
    )
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")][
        1:
    ]
    assert [[line[1], *line[3:]] for line in lines] == [cells for _, _, cells in sorted(made, key=lambda one: one[:2])]
    assert len(lines) == 9 and all("groups" in line[0] for line in lines[6:])
