"""On a GPU: a recorded run is the run as it is, bit for bit, and a step that waits for the device is not recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.training.test_train import losses, place
from training.config.reading import read_config
from training.experts import quack
from training.run import step as step_module
from training.run.loop import train

__all__ = ["place"]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def words(place: Path, output: Path, upcycled: bool, *more: str, score: str = "softmax") -> list[str]:
    source = [f"model.source={place / 'dense'}"]
    if upcycled:
        source = [
            f"model.upcycle={{source: {place / 'dense'}, target: upcycled, experts: 4, granularity: 2, top_k: 2, "
            f"method: virtual_group, router: {{score: {score}}}}}"
        ]
    data = [f"data.train=[{place / 'data'}]", f"data.valid=[{place / 'valid'}]", "data.sequence=128", "batch=4"]
    return [*source, *data, f"output={output}", "log_every=1", "micro_batch=2", "steps=10", "schedule.warmup=2", *more]


QUACK = pytest.param("quack", marks=pytest.mark.skipif(bool(quack.available()), reason=quack.available()))


@pytest.mark.parametrize("kind", ["dense", "softmax", "sigmoid", QUACK])
def test_recorded_steps_are_the_steps(place: Path, tmp_path: Path, kind: str) -> None:
    more = {"sigmoid": ["balance.bias_rate=0.01"], "quack": ["model.expert_backend=quack"]}.get(kind, [])
    score = {"dense": "", "sigmoid": "sigmoid"}.get(kind, "softmax")
    upcycled = bool(score)
    plain = train(read_config("", words(place, tmp_path / "plain", upcycled, "model.graph=false", *more, score=score)))
    recorded = train(
        read_config("", words(place, tmp_path / "recorded", upcycled, "model.graph=true", *more, score=score))
    )
    assert losses(recorded) == losses(plain)


@pytest.mark.parametrize("upcycled", [False, True], ids=["dense", "upcycled"])
def test_no_step_waits_for_the_device(
    place: Path, tmp_path: Path, upcycled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, count = step_module.train_step, [0]

    def step(*inputs: Any) -> dict[str, torch.Tensor]:
        count[0] += 1
        torch.cuda.set_sync_debug_mode("error" if count[0] > 2 else "default")  # kernels are compiled in the first
        try:
            return real(*inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(step_module, "train_step", step)
    train(read_config("", words(place, tmp_path / "run", upcycled, "model.graph=false", "steps=4")))


@pytest.mark.parametrize("at", ["forward", "optimizer", "end"])
def test_a_recording_that_fails_leaves_nothing_behind(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Whatever part of the step waits for the device, the run goes on as one that was never recorded."""
    more = ["optim.spike_sigma=6", "optim.average=0.5", "balance.aux_scope=global", "balance.z_weight=1e-3"]
    plain = train(read_config("", words(place, tmp_path / "plain", True, "model.graph=false", *more)))
    real = step_module.train_step

    def waits(run: Any, *inputs: Any) -> dict[str, torch.Tensor]:
        with pytest.MonkeyPatch.context() as patch:
            for part, name in (("forward", (run.model, "loss")), ("optimizer", (run.optimizer, "clip"))):
                if part == at:
                    function = getattr(*name)
                    patch.setattr(*name, lambda *given: (found := function(*given), float(found))[0])  # noqa: B023
            learned = real(run, *inputs)
        if at == "end":
            float(learned["loss"])
        return learned

    monkeypatch.setattr(step_module, "train_step", waits)
    with pytest.warns(UserWarning, match="the step is not recorded"):
        run = train(read_config("", words(place, tmp_path / "waits", True, *more)))
    assert losses(run) == losses(plain)
    torch.randn(2, device="cuda")  # a recording that failed has left torch's generator as it was
    with pytest.raises(RuntimeError):
        train(read_config("", words(place, tmp_path / "asked", True, "model.graph=true", *more)))
    torch.randn(2, device="cuda")
