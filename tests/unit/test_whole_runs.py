"""benchmarks/whole_runs.py measures real runs, continues where it stopped, and its table divides by the first arm."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import whole_runs
from tests.unit.training.test_train import WORDS, place

__all__ = ["place"]  # a fixture


def test_a_whole_run_is_measured_once_and_a_failing_one_names_its_output(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = [f"model.source={place / 'dense'}", f"data.train=[{place / 'data'}]", "balance.bias_rate=0", "log_every=1"]
    words = " ".join([*WORDS[1:], *own, "steps=22", "schedule.warmup=0"])
    asked = [str(tmp_path / "work"), WORDS[0], f"dense={words}", "turns=1"]
    assert whole_runs.main(asked) == 0
    said = (tmp_path / "work" / "rows.jsonl").read_text()
    (row,) = map(json.loads, said.splitlines())
    assert 0 < row["first logged step"] < row["last step"] <= row["saved"] <= row["ended"]
    log = (tmp_path / "work" / "dense-1.log").read_text()
    assert "step 22/22" in log and row["tokens/s"] > 0
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == ["dense-1.log", "rows.jsonl"]
    assert whole_runs.main(asked) == 0
    assert (tmp_path / "work" / "rows.jsonl").read_text() == said
    assert f"| tokens/s | dense | {row['tokens/s']:,.1f} | 1.00 |" in capsys.readouterr().out
    assert whole_runs.main([*asked[:2], "wrong=steps=-1 model.source=x", "turns=1"]) == 2
    assert re.search(r"wrong-1 ended with exit code 2; .*wrong-1\.log has what it printed", capsys.readouterr().err)


def test_a_table_divides_medians_by_the_first_arms() -> None:
    rows = [
        {"turn": turn, "arm": arm, "command": [], "ended": ended}
        for arm, seconds in {"dense": (4.0, 2.0, 9.0), "slices": (6.0, 1000.0, 5.0)}.items()
        for turn, ended in enumerate(seconds, 1)
    ]
    assert whole_runs.table(rows).splitlines() == [
        "| mark | arm | turn 1 | turn 2 | turn 3 | over dense |",
        "|---|---|---|---|---|---|",
        "| ended | dense | 4.0 | 2.0 | 9.0 | 1.00 |",
        "| ended | slices | 6.0 | 1,000.0 | 5.0 | 1.50 |",
    ]


def test_an_arm_is_not_divided_by_a_mark_that_the_first_lacks() -> None:
    rows = [{"turn": 1, "arm": "dense", "ended": 2.0}, {"turn": 1, "arm": "slices", "ended": 3.0, "validated": 1.0}]
    assert "| validated | slices | 1.0 |  |" in whole_runs.table(rows).splitlines()


@pytest.mark.parametrize(
    ("words", "said"), [(["slices", "dense"], "dense is no arm; write NAME="), ([], "write FOLDER CONFIG and at least")]
)
def test_words_that_are_no_arm_are_named(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert whole_runs.main([str(tmp_path), *words]) == 2
    assert said in capsys.readouterr().err
