"""The dtype of activations follows the device where no config names one, and a run says what it computes in."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from tqdm import tqdm

from tests.parity import tiny
from tests.unit.training.test_folders import trains as words
from tests.unit.training.test_train import place
from training.checkpoint import layout
from training.config.schema import ModelConfig
from training.model.stock.model import model_of
from training.run import step as step_module
from upcycle.__main__ import main

__all__ = ["place"]  # a fixture
LARGE = ["batch=256", "micro_batch=256", "data.sequence=128"]  # enough for plans to differ in GB


def trains(place: Path, *more: str) -> list[str]:
    return [*(word for word in words(place) if not word.startswith("model.dtype=")), "checkpoint.every=1", *more]


def recorded(run: Path) -> str:
    return str(json.loads((run / "run.json").read_text())["model"]["dtype"])


def test_a_run_on_a_cpu_computes_in_float32_unless_told_and_goes_on_as_it_was(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, dtype in (("plain", ""), ("told", "bfloat16")):
        output, named = f"output={tmp_path / name}", [f"model.dtype={dtype}"] if dtype else []
        for steps, given, kept in ((1, named, ""), (2, [], f"{', as this run did before' if dtype else ''}")):
            assert main(trains(place, output, *given, f"steps={steps}")) == 0
            said = capsys.readouterr().err
            assert f"computes in {dtype or 'float32'} on this CPU{kept}" in said and "was" not in said.split("steps")[0]
            assert recorded(tmp_path / name) == (dtype or "float32")
    older = tmp_path / "told" / "run.json"
    older.rename(tmp_path / "told" / "config.json")
    assert main(trains(place, f"output={tmp_path / 'told'}", "steps=3")) == 0
    assert "computes in bfloat16 on this CPU, as this run did before" in capsys.readouterr().err


def test_a_plan_counts_bytes_as_the_device_computes(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plans = []
    for more in (["device="], ["model.dtype=bfloat16"], ["model.dtype=float32"], ["device=cpu"]):
        assert main(["estimate", *trains(place, *more)[1:], *LARGE, "gpus=1"]) == 0
        plans.append(capsys.readouterr().out)
    assert plans[0] == plans[1] != plans[2] == plans[3]
    assert [ModelConfig().computes(kind) for kind in ("cuda", "cpu")] == ["bfloat16", "float32"]


def test_a_validation_that_takes_long_has_a_bar(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step_module, "tqdm", lambda *given, **more: partial(tqdm, *given)(**{**more, "delay": 0}))
    assert main(trains(place, f"output={tmp_path / 'run'}", f"data.valid=[{place / 'valid'}]")) == 0
    said = capsys.readouterr().err
    assert 0 < said.index("validation valid") < said.index("step 1/2")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_half_as_many_bytes_load_as_the_same_numbers(dtype: torch.dtype, tmp_path: Path) -> None:
    half = tiny.make("mixtral", tmp_path / "half", dtype=dtype)
    theirs = tiny.loaded(half, torch.float32)
    theirs.save_pretrained(tmp_path / "wide")
    found = []
    for folder in (half, tmp_path / "wide"):
        with layout.opened(folder) as origin:
            model = layout.load(model_of(origin.spec, experts="reference", compute=torch.float32).float(), origin)
        found.append(model.state_dict())
    assert torch.equal(found[0]["embed.weight"], theirs.get_input_embeddings().weight)
    for name, tensor in found[0].items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, found[1][name]), name
