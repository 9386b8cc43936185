"""A slice of the fuzz over the keys of every command: `python -m benchmarks.fuzz cases=1000` is the long run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from benchmarks import fuzz
from benchmarks.fuzz import Case, FuzzConfig


def test_no_key_leads_to_a_traceback_a_hang_or_a_run_that_only_looks_trained() -> None:
    found = fuzz.fuzz(FuzzConfig(cases=40))
    assert not [str(case) for kind in fuzz.FAULTS for case in found[kind]]
    assert sum(map(len, found.values())) == 40 and found["done"] and found["refused"]


def fail() -> int:
    raise KeyError("a")


def hang() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(100)
    return 0


def hog() -> int:
    return len(bytearray(1 << 40))


def obey() -> int:
    try:
        time.sleep(100)
    except KeyboardInterrupt:
        return 130
    return 0


@pytest.mark.parametrize(
    ("work", "kind"), [(fail, "traceback"), (hang, "hang"), (hog, "traceback"), (obey, "stopped"), (lambda: 2, "refused"),
                       (lambda: os._exit(3), "traceback"), (lambda: 0, "done")],
)  # fmt: skip
def test_the_harness_sees_what_it_looks_for(
    work: fuzz.Callable[[], int], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = {
        "hang": (0.2, 0.3, 0.4),
        "stopped": (2, 600, 600),
    }  # all others end by themselves, however busy the machine
    monkeypatch.setattr(fuzz, "WAITS", waits.get(kind, (600, 600, 600)))
    monkeypatch.setattr(fuzz.door, "main", lambda words: work())
    assert fuzz.outcome(Case(0, "plan", ()), {})[0] == kind


@pytest.mark.parametrize(
    ("rows", "says"),
    [('{"grad_norm": 1, "skipped": 1}\n', "every step was skipped"), ('{"grad_norm": 1}\n', "")],
)
def test_a_run_that_skipped_every_step_is_not_trained(rows: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_text(rows)
    assert fuzz.untrained(tmp_path) == says


def test_cases_follow_from_the_seed_alone_and_cover_every_command() -> None:
    cases = [fuzz.case(number, 2611) for number in range(1000)]
    assert cases == [fuzz.case(number, 2611) for number in range(1000)]
    assert {case.verb for case in cases} == set(fuzz.door.COMMANDS)
