"""Recorded steps against the same steps as they are; on a CPU a stand-in runs again what CUDA would replay."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.training.test_train import Stopped, config, losses, place, stops_before
from training.data.batch import Batch
from training.observe.metrics import read as read_metrics
from training.run import record
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
    words = ["stages=[{steps: 5, optim: {router_lr: 0.5}}, {steps: 5, schedule: {peak: 1.0e-4}, batch: 8}]"]
    plain = train(config(place, tmp_path / "plain-stages", "model.graph=false", *words, steps=10))
    run = train(config(place, tmp_path / "stages", *ASKED, *words, steps=10))
    assert len(recordings) == 4 and losses(run) == losses(plain)


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
    with pytest.warns(UserWarning, match="the step is not recorded, and each goes on by its host"):
        run = train(config(place, tmp_path / "run"))
    assert losses(run) == losses(plain)
    with pytest.raises(RuntimeError):
        train(config(place, tmp_path / "asked", "model.graph=true"))


class Device:
    """In place of a GPU that records: what is asked of it while it does is made, and taken back at the end, so that
    what is left of it is the host's."""

    current, recorded, broken, steps = "own", False, False, 0
    waiting = False  # its generator, until a recording ends well
    before: list[tuple[torch.Tensor, torch.Tensor]]

    def capture_begin(self, *_: Any, **__: Any) -> None:
        alive = (each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter))
        self.before = [(tensor, tensor.detach().clone()) for tensor in alive if tensor.device.type == "cpu"]
        self.recorded = self.waiting = True

    def capture_end(self) -> None:
        for tensor, value in self.before:
            tensor.data.copy_(value)
        self.before, self.recorded = [], False
        if self.broken:
            self.broken = False
            raise RuntimeError("operation failed due to a previous error during capture")
        self.waiting = False

    def fails(self) -> None:
        if self.recorded:
            self.broken = True
            raise RuntimeError("operation not permitted when stream is capturing")


@dataclasses.dataclass
class Stream:
    """Context in which a device's stream is another one, as torch.cuda.stream's is."""

    of: Device
    name: str

    def __enter__(self) -> None:
        self.last, self.of.current = self.of.current, self.name

    def __exit__(self, *_: object) -> None:
        self.of.current = self.last


def figures(folder: Path) -> list[dict[str, Any]]:
    """All that is logged and no time."""
    own = ("loss", "grad_norm", "lr", "valid/", "balance/")
    return [{key: row[key] for key in row if key.startswith(own)} for row in read_metrics(folder)]


@pytest.mark.parametrize("at", ["forward", "optimizer", "end"])
def test_a_recording_that_fails_leaves_nothing_on_the_host(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """By torch's own context around a recording, as far as that runs without a device."""
    words = ["optim.spike_sigma=6", "optim.average=0.5", "balance.aux_scope=global", "balance.z_weight=1e-3"]
    # Device looks at all objects of the process: a tuple that a thread is making then cannot be finished
    words.append("checkpoint.asynchronous=false")
    plain = train(config(place, tmp_path / "plain", "model.graph=false", *words))
    device, real, names = Device(), step_module.train_step, {"loss": "forward", "clip": "optimizer"}

    def then(made: Any, here: bool, *inputs: Any) -> Any:
        found = made(*inputs)
        if here:
            device.fails()
        return found

    def step(run: Any, *inputs: Any) -> Any:
        device.steps += 1
        assert device.current == ("side" if device.recorded else "own")
        with pytest.MonkeyPatch.context() as patch:
            for part, name in ((run.model, "loss"), (run.optimizer, "clip")):
                patch.setattr(part, name, partial(then, getattr(part, name), at == names[name]))
            learned = real(run, *inputs)
        then(lambda: None, at == "end")
        return learned

    for name, value in {
        "CUDAGraph": lambda: device, "Stream": lambda: "side", "stream": lambda name: Stream(device, name),
        "current_stream": lambda: device.current, "synchronize": lambda: None, "empty_cache": lambda: None,
        "max_memory_reserved": lambda: 0, "mem_get_info": lambda: (1, 1),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", None)
    monkeypatch.setattr(record, "obstacle", lambda run: "")
    monkeypatch.setattr(step_module, "train_step", step)
    with pytest.warns(UserWarning, match="the step is not recorded"):
        run = train(config(place, tmp_path / "run", *words))
    assert device.steps == 9 and device.current == "own" and not device.waiting
    assert figures(run) == figures(plain)
