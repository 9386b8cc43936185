"""micro_batch=auto: the most that fits by plan, the same after a resume, and a sentence where it cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.training.test_train import config, losses, place
from training.config.reading import read_config
from training.estimating.memory import SPARE, memory, sized
from training.run.loop import train
from training.run.parts import source

__all__ = ["place"]


def test_the_most_that_fits(place: Path, tmp_path: Path) -> None:
    asked = config(place, tmp_path / "run", "micro_batch=auto", "batch=24")
    with source(asked) as origin:
        spec = origin.spec

    def plan(size: int) -> float:
        return memory(spec, config(place, tmp_path / "run", f"micro_batch={size}", "batch=24"), 1).total + SPARE

    sizes = [1, 2, 3, 4, 6, 8, 12, 24]
    for size, more in zip(sizes, [*sizes[1:], None], strict=True):
        assert sized(asked, spec, 1, plan(size)).micro_batch == size
        assert more is None or sized(asked, spec, 1, plan(more) - 1).micro_batch == size
    assert sized(asked, spec, 1, 1).micro_batch == 1, "nothing fits"
    assert sized(asked, spec, 2, plan(24)).micro_batch == 12, "each of two ranks has half of the batch"
    staged = config(
        place, tmp_path / "run", "micro_batch=auto", "stages=[{steps: 4}, {steps: 4, batch: 16}]", "batch=24"
    )
    assert sized(staged, spec, 1, plan(24)).micro_batch == 8, "it must divide the batches of all stages"


def test_a_resumed_run_keeps_its_own(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = train(config(place, tmp_path / "run", "micro_batch=2", steps=4))
    plain = train(config(place, tmp_path / "plain", "micro_batch=2", steps=6))
    capsys.readouterr()
    run = train(config(place, tmp_path / "run", "micro_batch=auto", steps=6))
    assert run == first and "micro_batch=2, as before" in capsys.readouterr().err
    assert json.loads((run / "run.json").read_text())["micro_batch"] == 2
    assert losses(run)[-1] == pytest.approx(losses(plain)[-1], rel=0.05)
    train(config(place, tmp_path / "new", "micro_batch=auto", "schedule.warmup=1", steps=2))
    assert "on a CPU" in capsys.readouterr().err


def test_what_it_does_not_go_with() -> None:
    with pytest.raises(ValueError, match=r"micro_batch=auto does not go with mesh.pp=2.*write micro_batch=1 or more"):
        read_config("", ["micro_batch=auto", "mesh.pp=2"])
    with pytest.raises(ValueError, match="batch is 'auto'; it must be a whole number"):
        read_config("", ["batch=auto"])
