"""A run that no longer learns ends, and says from which checkpoint it can be saved."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.training.test_train import place
from training.__main__ import main
from training.observe.metrics import read as read_metrics
from training.optim.config import OptimConfig
from training.optim.optimizer import Optimizer
from training.run import step as step_module

__all__ = ["place"]  # a fixture


def skipping(first: int, last: int) -> Any:
    """train_step, in which the steps first ... last are skipped."""
    real, count = step_module.train_step, [0]

    def step(run: Any, batches: Any, lr: float) -> Any:
        count[0] += 1
        weight = run.model.final_norm.weight
        hook = weight.register_hook(lambda g: g * (math.nan if first <= count[0] <= last else 1))
        try:
            return real(run, batches, lr)
        finally:
            hook.remove()

    return step


def words(place: Path, folder: Path, *more: str) -> list[str]:
    given = [
        "data.sequence=24",
        "batch=2",
        "micro_batch=2",
        "log_every=1",
        "schedule.warmup=0",
        "model.dtype=float32",
    ]
    data = [f"model.source={place / 'dense'}", f"data.train=[{place / 'data'}]", f"output={folder}"]
    return [*given, *data, "checkpoint.every=2", "checkpoint.asynchronous=false", *more]


def test_a_run_that_only_skips_ends_and_names_the_checkpoint_from_before(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step_module, "train_step", skipping(6, 10**9))
    assert main(words(place, tmp_path / "run", "steps=20", "optim.skips=7")) == 2
    said = capsys.readouterr().err
    good = tmp_path / "run" / "checkpoints" / "step-00000004"
    assert "9 steps in a row were skipped by step 14, because their loss or gradient was not finite" in said
    assert f"the last checkpoint from before them is {good};" in said and "schedule.peak (it is 0.0002)" in said
    assert good.is_dir(), "what was saved while steps were skipped pushed it out"
    assert read_metrics(tmp_path / "run")[-1]["step"] == 14


def test_a_peak_beyond_all_reason_is_refused_before_training(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loud = ["schedule.peak=1e30", "schedule.final=0", "steps=20"]
    assert main(words(place, tmp_path / "run", *loud)) == 2
    said = capsys.readouterr()
    assert "schedule.peak is 1e+30; it must be at most" in said.err and "is trained" not in said.out
    assert not (tmp_path / "run").exists()


def test_few_skipped_steps_are_no_end_and_none_has_no_limit(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_module, "train_step", skipping(3, 5))
    assert main(words(place, tmp_path / "few", "steps=8", "optim.skips=4")) == 0
    assert read_metrics(tmp_path / "few")[-1]["skipped"] == 3
    monkeypatch.setattr(step_module, "train_step", skipping(3, 5))
    assert main(words(place, tmp_path / "ends", "steps=8", "optim.skips=3")) == 2  # it is over when it is asked
    monkeypatch.setattr(step_module, "train_step", skipping(2, 8))
    assert main(words(place, tmp_path / "none", "steps=8", "optim.skips=0")) == 0


def test_rows_of_skipped_steps_are_counted() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = Optimizer(OptimConfig(), [("w", weight)])
    seen = []
    for skip in (1, 1, 0, 1, 1, 1, 0, 0):
        weight.grad = torch.ones(2, 2)
        optimizer.step(0.1, torch.tensor(bool(skip)))
        seen.append((int(optimizer.in_a_row), int(optimizer.longest), int(optimizer.skipped)))
    assert seen == [(1, 1, 1), (2, 2, 2), (0, 2, 2), (1, 2, 3), (2, 2, 4), (3, 3, 5), (0, 3, 5), (0, 3, 5)]
