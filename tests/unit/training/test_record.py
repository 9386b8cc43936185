"""Recorded steps against the same steps as they are; on a CPU a stand-in runs again what CUDA would replay."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.training.test_train import Stopped, config, losses, place, stops_before
from training.data.batch import Batch
from training.run import measures, record
from training.run import step as step_module
from training.run.build import start
from training.run.loop import train

__all__ = ["place"]
ASKED = ["model.graph=true"]
Recordings = list[record.Recorded]


@dataclasses.dataclass
class Graph:
    """Makes once more the step that was recorded, from where its inputs were to where its results were."""

    of: record.Recorded

    def replay(self) -> None:
        for name, value in self.of.train_step(self.of.run, self.of.batches, None).items():
            self.of.learned[name].copy_(value)

    def reset(self) -> None:
        self.of.learned.clear()


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> Recordings:
    found: Recordings = []

    def of(self: record.Recorded, batches: Sequence[Batch]) -> None:
        self.batches = [batch.each(torch.Tensor.clone) for batch in batches]
        self.learned = {name: torch.zeros(()) for name in ("loss", "grad_norm", "skipped")}
        self.graph = Graph(self)  # type: ignore[assignment]
        found.append(self)

    monkeypatch.setattr(record, "obstacle", lambda run: "")
    monkeypatch.setattr(record.Recorded, "record", of)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 100))
    return found


def test_recorded_steps_are_the_steps_with_stops_and_stages(
    place: Path, tmp_path: Path, recordings: Recordings
) -> None:
    plain = train(config(place, tmp_path / "plain", "model.graph=false"))
    assert not recordings
    run = train(config(place, tmp_path / "recorded", *ASKED))
    assert len(recordings) == 1 and losses(run) == losses(plain)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(step_module, "train_step", stops_before(7))
        train(config(place, tmp_path / "parts", *ASKED))
    parts = train(config(place, tmp_path / "parts", *ASKED))
    assert len(recordings) == 2 and losses(parts) == losses(plain)  # two steps were left, which are as they are
    sliced = ["model.upcycle.target=upcycled", "model.upcycle.router.choice=each-slice"]
    plain = train(config(place, tmp_path / "plain-slices", "model.graph=false", "data.valid=[]", *sliced))
    run = train(config(place, tmp_path / "slices", *ASKED, "valid_every=2", *sliced))  # which shows pulled copies
    assert len(recordings) == 3
    assert [row[:3] for row in losses(run) if row[0]] == [row[:3] for row in losses(plain) if row[0]]
    words = ["stages=[{steps: 5, optim: {router_lr: 0.5}}, {steps: 5, schedule: {peak: 1.0e-4}, batch: 8}]"]
    plain = train(config(place, tmp_path / "plain-stages", "model.graph=false", *words, steps=10))
    run = train(config(place, tmp_path / "stages", *ASKED, *words, steps=10))
    assert len(recordings) == 5 and losses(run) == losses(plain)


@pytest.mark.parametrize(("held", "times"), [(51, 3), (49, 1)])  # of 100 bytes
def test_a_large_step_is_recorded_again_after_each_validation(
    place: Path, tmp_path: Path, recordings: Recordings, monkeypatch: pytest.MonkeyPatch, held: int, times: int
) -> None:
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: held)
    measured, holding = measures.measured, list[bool]()

    def seen(*given: Any) -> bool:
        holding.extend(each.graph is not None for each in recordings[-1:] if given[2])
        return measured(*given)

    words = ["valid_every=5"]
    with monkeypatch.context() as patch:
        patch.setattr(measures, "measured", seen)
        run = train(config(place, tmp_path / "run", *ASKED, *words, steps=13))
    plain = train(config(place, tmp_path / "plain", "model.graph=false", *words, steps=13))
    assert len(recordings) == times and any(holding) == (times == 1)
    assert losses(run) == losses(plain)


def test_what_cannot_be_recorded(place: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model.graph is true, but there is no CUDA graph on a CPU"):
        train(config(place, tmp_path / "cpu", "model.graph=true"))
    with start(config(place, tmp_path / "run", "model.dtype=bfloat16"), torch.device("cpu")) as run:
        run.device = torch.device("cuda")
        assert not record.obstacle(run)

        def refused(**parts: Any) -> str:
            kept = run.config
            run.config = dataclasses.replace(kept, model=dataclasses.replace(kept.model, **parts))
            try:
                return record.obstacle(run)
            finally:
                run.config = kept

        assert "model.expert_backend=reference" in refused(expert_backend="reference")
        assert not refused(expert_backend="quack")
        assert "model.dtype is float32" in refused(dtype="float32")
        assert "transformer_engine" in refused(transformer_engine=("norm",))
        run.mesh.world = 2
        assert "2 ranks" in record.obstacle(run)


def test_a_recording_that_fails_is_done_without(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "obstacle", lambda run: "")  # there is no CUDA here, so the recording fails
    plain = train(config(place, tmp_path / "plain", "model.graph=false"))
    with pytest.warns(UserWarning, match="the step is not recorded, so the host launches each one"):
        run = train(config(place, tmp_path / "run"))
    assert losses(run) == losses(plain)
    with pytest.raises(RuntimeError):
        train(config(place, tmp_path / "asked", "model.graph=true"))
