"""Try each row of docs/supported.md's table of what starts from a model that is already an MoE."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.parity import tiny
from tests.unit.training.test_train import place
from training.__main__ import main as train
from training.cli.estimate import main as plan
from upcycle.__main__ import main as upcycle

__all__ = ["place"]  # a fixture
PAGE = (Path(__file__).parents[2] / "docs" / "supported.md").read_text()


def test_the_table_says_what_is_so(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    section = PAGE[PAGE.index("## Models that are already") : PAGE.index("## Engines")]
    rows = dict(re.findall(r"^\| (`[^|]*) \| (yes|no|with its dense model) \|", section, re.MULTILINE))
    assert list(rows.values()) == ["yes", "yes", "yes", "yes", "with its dense model", "yes"]

    moe = tmp_path / "moe"
    assert upcycle(["convert", f"source={place / 'dense'}", "target=mixtral", "experts=4", f"output={moe}"]) == 0
    data = ["data.sequence=24", "batch=2", "micro_batch=2", "steps=2", "schedule.warmup=0", "model.dtype=float32"]
    given = [f"model.source={moe}", f"data.train=[{place / 'data'}]", *data]
    assert plan([*given, "gpus=2", "mesh.ep=2"]) == 0
    assert train([*given, f"output={tmp_path / 'run'}", f"export={tmp_path / 'out'}"]) == 0
    assert tiny.logits(tmp_path / "out", tiny.tokens()).isfinite().all()
    assert upcycle(["inspect", str(moe)]) == 0
    assert upcycle(["verify", str(place / "dense"), str(moe)]) == 0
    capsys.readouterr()
    assert upcycle(["plan", f"source={moe}"]) == 2
    assert "is a mixture of experts already" in capsys.readouterr().err
    assert train([*given[1:], f"output={tmp_path / 'again'}", f"model.upcycle.source={moe}"]) == 2
    assert "is a mixture of experts already" in capsys.readouterr().err
