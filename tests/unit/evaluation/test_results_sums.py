"""What was answered is what is judged: sums, counts, finite numbers, in results and in remembered answers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evaluation.ask.remember import Remembered, written
from evaluation.judge import compare, results
from evaluation.show import facts
from tests.unit.evaluation.test_compare import chosen, subjects, task, write

MODEL = "a" * 64


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return subjects(tmp_path / "a", {"x": [0] * 5 + [1] * 5}, {"x": [0] * 10})


def read(folder: Path) -> list[results.Item]:
    return list(results.items(folder))


def signed_again(folder: Path) -> None:
    """Fits run.json's sums to what lies there now, as nobody does by accident."""
    file = folder / "run.json"
    value = json.loads(file.read_text())
    value["items_sha256"] = results.sha256(folder / "items.jsonl")
    file.write_text(json.dumps(value | {"sum": results.digest(value)}))


def test_each_digit_of_both_files_counts(folder: Path, tmp_path: Path) -> None:
    kept = {name: (folder / name).read_bytes() for name in ("items.jsonl", "run.json")}
    for name, content in kept.items():
        digits = [at for at, byte in enumerate(content) if chr(byte).isdigit()]
        assert len(digits) > 60
        for at in digits[:: len(digits) // 30]:
            other = bytearray(content)
            other[at] = ord("8") if other[at] == ord("3") else ord("3")
            (folder / name).write_bytes(other)
            with pytest.raises(ValueError, match=r"not what was written|is not of format|run the evaluation again"):
                read(folder)
            with pytest.raises(ValueError, match=r"run the evaluation again"):
                compare.compare([folder, folder])
            with pytest.raises(ValueError, match=r"run the evaluation again"):
                facts.gather([str(folder)], "")
        (folder / name).write_bytes(content)
    assert len(read(folder)) == 10


DAMAGE = {
    "doubled": (lambda lines: [*lines, lines[3]], "is x 3 once more"),
    "missing": (lambda lines: lines[:-1], "has 9 items of x and run.json 10"),
    "none": (lambda lines: [], "has 0 items of x and run.json 10"),
    "nan": (lambda lines: [lines[0].replace("-1.0", "NaN", 1), *lines[1:]], "item 0 of x has a number that is not finite"),
    "infinite": (lambda lines: [lines[0].replace("-2.0", "-1e999", 1), *lines[1:]], "-1e999 is beyond float64"),
    "a score": (lambda lines: [lines[0].replace('"acc":1.0', '"acc":NaN'), *lines[1:]], "that is not finite"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_items_are_all_there_once_and_finite(folder: Path, name: str) -> None:
    change, says = DAMAGE[name]
    file = folder / "items.jsonl"
    lines = file.read_text().splitlines()
    changed = change(lines)
    assert changed != lines
    file.write_text("".join(line + "\n" for line in changed))
    with pytest.raises(ValueError, match=r"its sha256 is not run\.json's"):
        read(folder)
    signed_again(folder)
    with pytest.raises(ValueError, match=says):
        read(folder)


def test_a_model_that_gives_no_numbers_is_not_judged(tmp_path: Path) -> None:
    broken = replace(chosen("x", 0, 0, 0), logprobs=(math.nan, -1.0, -2.0, -3.0))
    with pytest.raises(ValueError, match="item 0 of x has a number that is not finite; the model gives numbers"):
        write(tmp_path / "a", [task("x", 1)], [broken])
    assert not (tmp_path / "a" / "run.json").exists()


def test_remembered_answers_are_the_models_own_and_numbers(tmp_path: Path) -> None:
    first = Remembered(tmp_path, MODEL)
    answers = {"x": [-1.25, True], "y": [-0.5, False], "z": [3, 4], "none": []}
    first.put(answers)
    first.close()
    assert Remembered(tmp_path, MODEL, 1).answers == answers
    path = next(tmp_path.glob("*/0.jsonl"))
    content = path.read_bytes()
    digits = [at for at, byte in enumerate(content) if chr(byte).isdigit()]
    for at in digits:  # one digit changed is one answer less, never another one
        other = bytearray(content)
        other[at] = ord("8") if other[at] == ord("3") else ord("3")
        path.write_bytes(other)
        found = Remembered(tmp_path, MODEL, 1).answers
        assert found.items() < answers.items() and len(found) == len(answers) - 1

    def line(name: str, answer: Any, model: str = MODEL) -> bytes:
        return written(name, answer, model) + b"\n"

    wrong: list[Any] = [
        [math.nan, True],
        [-math.inf, True],
        [-1.0, 1],
        [-1.0, None],
        [1.5, 2.5],
        [-1, 2],
        ["a"],
        "a",
        {},
        3,
    ]
    path.write_bytes(content + b"".join(line(f"w{n}", answer) for n, answer in enumerate(wrong)))
    assert Remembered(tmp_path, MODEL, 1).answers == answers
    path.write_bytes(content + line("x", [-9.0, True], "b" * 64))  # of another model, whose file lay elsewhere
    assert Remembered(tmp_path, MODEL, 1).answers == answers
