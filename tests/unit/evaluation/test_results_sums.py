"""What was answered is what is judged: sums, counts, finite numbers, in results and in remembered answers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evaluation.ask.remember import Remembered, written
from evaluation.judge import compare, logged
from evaluation.show import facts
from tests.unit.evaluation.test_compare import chosen, subjects, task, write
from upcycle.io.disk import sha256
from upcycle.io.publish import digest

MODEL = "a" * 64


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return subjects(tmp_path / "a", {"x": [0] * 5 + [1] * 5}, {"x": [0] * 10})


def files(folder: Path) -> tuple[Path, Path]:
    [results], [samples] = folder.glob("results_*.json"), folder.glob("samples_x_*.jsonl")
    return results, samples


def change(folder: Path, edit: Callable[[Any], None]) -> None:
    """Edit the results and fit the sums to what lies there now, as nobody does by accident."""
    results, samples = files(folder)
    value = json.loads(results.read_text())
    edit(value)
    value["upcycle"]["samples"]["x"] = sha256(samples)
    del value["upcycle"]["sum"]
    value["upcycle"]["sum"] = digest(value)
    results.write_text(json.dumps(value))


def damaged(content: bytes, at: int) -> bytes:
    other = bytearray(content)
    other[at] = ord("8") if other[at] == ord("3") else ord("3")
    return bytes(other)


def digits(content: bytes) -> list[int]:
    return [at for at, byte in enumerate(content) if chr(byte).isdigit()]


def test_each_digit_of_all_files_counts(folder: Path) -> None:
    for path in files(folder):
        content = path.read_bytes()
        places = digits(content)
        assert len(places) > 60
        for at in places[:: len(places) // 30]:
            path.write_bytes(damaged(content, at))
            for read in (
                logged.load,
                lambda folder: compare.compare([folder, folder]).comparisons,
                lambda f: facts.gather([str(f)], ""),
            ):
                with pytest.raises(
                    ValueError, match=r"was changed after it was written|run the evaluation again|is it a results file"
                ):
                    read(folder)
        path.write_bytes(content)
    assert len(logged.load(folder).items) == 10


DAMAGE = {
    "doubled": (lambda lines: [*lines, lines[3]], "the item x 3 is there twice"),
    "missing": (lambda lines: lines[:-1], "has 10 items of x and its samples 9"),
    "none": (lambda lines: [], "has 10 items of x and its samples 0"),
    "nan": (lambda lines: [lines[0].replace("-1.0", "NaN", 1), *lines[1:]], "item 0 of x has a number that is not finite"),
    "infinite": (lambda lines: [lines[0].replace("-2.0", "-1e999", 1), *lines[1:]], "that is not finite"),
    "a score": (lambda lines: [lines[0].replace('"acc": 1.0', '"acc": NaN'), *lines[1:]], "that is not finite"),
    "a choice": (lambda lines: [lines[0].replace('"A",', '"A", "E",'), *lines[1:]], "more choices than log-probabilities"),
    "a reply": (lambda lines: [lines[0].replace('"resps": [[', '"resps": [[], ['), *lines[1:]], "lm-eval's format"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_items_are_all_there_once_and_finite(folder: Path, name: str) -> None:
    edit, says = DAMAGE[name]
    _, samples = files(folder)
    lines = samples.read_text().splitlines()
    changed = edit(lines)
    assert changed != lines
    samples.write_text("".join(line + "\n" for line in changed))
    with pytest.raises(ValueError, match=r"its sha256 is not the one in results_"):
        logged.load(folder)
    change(folder, lambda value: None)
    with pytest.raises(ValueError, match=says):
        logged.load(folder)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("group_subtasks", {"all": ["more"], "more": ["all"]}, "the group all contains itself"),
        ("n-shot", {"x": "five"}, "lm-eval's format .*'five'"),
        ("config", {"model_num_parameters": "many"}, "model_num_parameters is .many."),
        ("configs", {}, ""),
        ("results", [], "is it a results file of lm-eval"),
    ],
)
def test_results_of_another_shape_are_a_sentence(folder: Path, key: str, value: Any, says: str) -> None:
    change(folder, lambda whole: whole.update({key: value}))
    if says:
        with pytest.raises(ValueError, match=says):
            logged.load(folder)
    else:
        assert not logged.load(folder).items


def test_a_model_that_gives_no_numbers_is_not_judged(tmp_path: Path) -> None:
    broken = replace(chosen("x", 0, 0, 0), logprobs=(math.nan, -1.0, -2.0, -3.0))
    with pytest.raises(ValueError, match="item 0 of x has a number that is not finite; the model's answer"):
        write(tmp_path / "a", [task("x", 1)], [broken])
    assert not logged.is_run(tmp_path / "a")


def test_remembered_answers_are_the_models_own_and_numbers(tmp_path: Path) -> None:
    first = Remembered(tmp_path, MODEL)
    answers = {"x": (-1.25, True), "y": (-0.5, False), "z": (3, 4), "none": ()}
    first.put(answers)
    first.close()
    assert Remembered(tmp_path, MODEL, 1).answers == answers
    path = next(tmp_path.glob("*/0.jsonl"))
    content = path.read_bytes()
    for at in digits(content):  # one digit changed is one answer less, never another one
        path.write_bytes(damaged(content, at))
        found = Remembered(tmp_path, MODEL, 1).answers
        assert found.items() < answers.items() and len(found) == len(answers) - 1
    wrong: list[Any] = [
        [math.nan, True], [-math.inf, True], [-1.0, 1], [-1.0, None], [1.5, 2.5], [-1, 2], ["a"], "a", {}, 3,
    ]  # fmt: skip
    lines = [written(f"w{n}", answer, MODEL) for n, answer in enumerate(wrong)]
    lines.append(written("x", [-9.0, True], "b" * 64))  # of another model, whose file lay elsewhere
    path.write_bytes(content + b"".join(line + b"\n" for line in lines))
    assert Remembered(tmp_path, MODEL, 1).answers == answers
