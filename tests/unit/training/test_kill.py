"""A run that is killed again and again, at any moment, ends as the run that never was: weights, state and log.

KILLS=50 pytest -s tests/unit/training/test_kill.py        the long form: minutes; 5 kills otherwise
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from tests.parallel.ranks import forked
from tests.unit.training.test_train import WORDS, moe, place
from training.__main__ import main
from training.observe.metrics import FILE

__all__ = ["place"]  # a fixture
KILLS = int(os.environ.get("KILLS", 5))
STEPS = max(30, 3 * KILLS)
CLOCK = {"seconds_per_step", "tokens_per_s", "tflops", "mfu", "eta_s", "memory_gb"}


def command(place: Path, folder: Path) -> list[str]:
    return [
        f"output={folder}", f"export={folder / 'export'}", f"steps={STEPS}",
        f"model.upcycle={json.dumps(moe(place))}", f"data.train=[{place / 'data'}]", f"data.valid=[{place / 'valid'}]",
        *WORDS, "checkpoint.every=2",
    ]  # fmt: skip


def trained(words: list[str], said: str) -> None:
    for output in (1, 2):
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), output)
    torch.set_num_threads(1)
    sys.exit(main(words))


def started(place: Path, folder: Path, *words: str) -> BaseProcess:
    process = forked().Process(
        target=trained, args=([*command(place, folder), *words], str(folder.with_suffix(".said")))
    )
    process.start()
    return process


def code(process: BaseProcess, seconds: float) -> int | None:
    process.join(seconds)
    return process.exitcode


def step(folder: Path) -> int:
    """The last one in the log."""
    lines = (folder / FILE).read_bytes().splitlines() if (folder / FILE).exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith(b"}")), default=0)


def log(folder: Path) -> list[dict[str, Any]]:
    """Every line, which must be whole; without what the clock says."""
    rows = [json.loads(line) for line in (folder / FILE).read_text().splitlines()]
    return [{n: v for n, v in row.items() if n not in {*CLOCK, "crc"} and not n.startswith("time/")} for row in rows]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_run_that_is_killed_again_and_again(place: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    began = time.perf_counter()
    process = started(place, whole)
    while process.is_alive() and step(whole) == 0:
        time.sleep(0.01)
    to_first = time.perf_counter() - began
    assert code(process, 300) == 0, whole.with_suffix(".said").read_text()
    pace = (time.perf_counter() - began - to_first) / STEPS

    killed.mkdir()
    chance, moments, again = random.Random(time.time_ns()), Counter[str](), 0
    for kill in range(KILLS):
        aim = round((kill + 1) * STEPS / KILLS)  # the last ones come while the run ends
        process = started(place, killed)
        if chance.random() < 0.25:
            time.sleep(chance.uniform(0, to_first))  # while it reads and takes up the checkpoint
        else:
            while process.is_alive() and step(killed) < aim:
                time.sleep(0.005)
            time.sleep(chance.uniform(0, 4 * pace))
        process.kill()
        ended = code(process, 60)
        assert ended in (-9, 0), killed.with_suffix(".said").read_text()
        saved = [path.name.removeprefix("step-") for path in (killed / "checkpoints").glob("*")]
        kept = max((int(name) for name in saved if name.isdigit()), default=0)
        again += max(0, step(killed) - kept)
        if ended == 0:
            moments["after the end"] += 1
        else:
            moments["beside half a checkpoint" if any(not name.isdigit() for name in saved) else "elsewhere"] += 1
    process = started(place, killed)
    assert code(process, 300) == 0, killed.with_suffix(".said").read_text()
    print(f"\n{KILLS} kills, {STEPS} steps: {dict(moments)}; {again} steps taken again")

    assert log(killed) == log(whole)
    assert [row["step"] for row in log(killed) if "loss" in row] == list(range(1, STEPS + 1))
    assert files(killed / "export") == files(whole / "export")
    assert {p.name for p in (killed / "checkpoints").iterdir()} == {p.name for p in (whole / "checkpoints").iterdir()}
    last = f"checkpoints/step-{STEPS:08d}"  # weights, moments, bias, data and generators
    have, want = files(killed / last), files(whole / last)
    assert have.keys() == want.keys()
    assert [name for name in want if have[name] != want[name]] == []
