"""A slice of the fuzz over every reader (tests/fuzz.py), and that the harness sees what it looks for.

The long run is `python -m tests.fuzz --count 2000`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import bits, fuzz
from tests.fuzz import READERS, Reader

# of each reader; those whose one call is slow have less
SLICE = {
    "texts": 8,
    "dense": 12,
    "moe": 12,
    "siblings": 12,
    "mixtures": 8,
    "manifest": 6,
    "weights": 8,
    "conversion": 8,
    "run": 10,
    "suite": 12,
    "template": 12,
}


@pytest.mark.parametrize("name", READERS)
def test_whatever_a_file_holds_it_is_read_or_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    report = fuzz.fuzz(name, SLICE.get(name, 40), tmp_path)
    assert not report.faults, "\n".join(f"{what}: number {numbers}" for what, numbers in report.faults.items())
    assert report.read + report.refused == report.mutants


def test_one_flipped_bit_of_a_run_a_shard_folder_or_an_export_is_named_or_changes_nothing(tmp_path: Path) -> None:
    flips = bits.flip(tmp_path, 40, 0, fuzz.restore)
    assert not flips.silent, "\n".join(flips.silent)
    assert sum(flips.harmless.values()) <= 6 and {folder for folder, _ in flips.counts} == {*bits.USES}


def test_a_flipped_bit_that_changes_an_answer_without_a_word_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(place: Path) -> None:
        for name in ("run", "export"):
            (place / name).mkdir()
            (place / name / "a.txt").write_text("word")

    def refuse(file: Path) -> str:
        if file.read_text() != "word":
            raise ValueError(f"{file} has changed")
        return "word"

    uses = {
        "run": lambda place: iter([lambda: (place / "run" / "a.txt").read_bytes()]),
        "export": lambda place: iter([lambda: refuse(place / "export" / "a.txt")]),
    }
    monkeypatch.setattr(bits, "make", make)
    monkeypatch.setattr(bits, "USES", uses)
    flips = bits.flip(tmp_path, 8, 0, fuzz.restore)
    assert flips.counts == {("run", "silent"): 4, ("export", "named"): 4} and len(flips.silent) == 4


def hang(text: str) -> None:
    while "1" not in text:
        time.sleep(0.01)


def spin(text: str) -> None:
    while "1" not in text:
        pass


def hog(text: str) -> int:
    return 0 if "1" in text else len(b"x" * 200_000_000)


def show(text: str) -> str:
    return "" if "1" in text else os.environ[fuzz.SECRET]


@pytest.mark.parametrize(
    ("read", "kind"),
    [
        (lambda text: json.loads(text)["a"].get("b"), "traceback: "),
        (lambda text: json.loads(text)["a"]["b"] + 1, "traceback: TypeError"),
        (hang, "hang"),
        (spin, "hang"),
        (hog, "memory"),
        (show, "leak"),
        (lambda text: "1" in text or [][0], "traceback: IndexError"),
    ],
)
def test_the_harness_sees_what_it_looks_for(
    read: Callable[[str], object], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(folder: Path) -> None:
        (folder / "a.json").write_text('{"a": {"b": 1}}')

    planted = Reader(make, lambda folder, path: read(path.read_text() if path.is_file() else "1"), ("a.json",))
    monkeypatch.setitem(READERS, "planted", planted)
    monkeypatch.setattr(fuzz, "SECONDS", 0.2 if read is spin else 30.0)
    monkeypatch.setattr(fuzz, "WAITING", 0.2 if read is hang else 30.0)
    monkeypatch.setattr(fuzz, "MEMORY", 100_000_000)
    report = fuzz.fuzz("planted", 8 if kind in ("hang", "memory") else 60, tmp_path)
    assert any(what.startswith(kind) for what in report.faults), report.faults


def test_an_abort_is_a_fault_and_the_rest_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = iter([-6, 0])
    starts: list[int] = []

    def run(words: list[str], **_: object) -> object:
        first = int(words[words.index("--first") + 1])
        starts.append(first)
        Path(words[words.index("--child") + 1], "at").write_text(str(first + 3))
        rest = vars(fuzz.Report("answers", 6, 6))
        return fuzz.subprocess.CompletedProcess(words, next(codes), json.dumps(rest).encode())

    monkeypatch.setattr(fuzz.subprocess, "run", run)
    report = fuzz.in_child("answers", 0, 10)
    assert starts == [0, 4] and report.mutants == 10 and list(report.faults.values()) == [[3]]
