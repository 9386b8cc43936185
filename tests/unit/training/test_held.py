"""Weights that never learn are held as the checkpoint has them: the same numbers in half of the bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.training.test_frozen import FROZEN, first_batches, still
from tests.unit.training.test_train import config, losses
from tests.unit.training.test_train import place as place
from training import export
from training.checkpoint.state import found
from training.estimating.estimate import of_frozen
from training.estimating.memory import Model, memory
from training.model.lora import is_adapter
from training.run.build import begin, start
from training.run.loop import train
from training.run.parts import held_in
from training.run.step import gradients

BF16, NARROW = "model.upcycle.dtype=bfloat16", "model.frozen=bfloat16"
LORA = ["lora.rank=2", "schedule.peak=1e-2", "data.valid=[]"]


@pytest.mark.parametrize("words", [LORA, [FROZEN]], ids=["lora", "groups"])
def test_half_the_bytes_give_the_same_run(place: Path, tmp_path: Path, words: list[str]) -> None:
    """Losses, exports (of adapters merged) and what upcycle export makes of a checkpoint, bit for bit."""
    for name, more in {"wide": [], "half": [NARROW]}.items():
        train(config(place, tmp_path / name, BF16, *more, *words, f"export={tmp_path / name}-out", steps=3))
    assert losses(tmp_path / "wide") == losses(tmp_path / "half")
    export(tmp_path / "half", tmp_path / "again")
    want = load_file(tmp_path / "wide-out" / "model.safetensors")
    for folder in ("half-out", "again"):
        have = load_file(tmp_path / folder / "model.safetensors")
        assert have.keys() == want.keys() and all(torch.equal(have[name], want[name]) for name in want)
    sizes = [
        sum(file.stat().st_size for file in found(tmp_path / name / "checkpoints")[0].glob("*.safetensors"))
        for name in ("wide", "half")
    ]
    assert sizes[1] < sizes[0]


@pytest.mark.parametrize("words", [LORA, [FROZEN]], ids=["lora", "groups"])
def test_what_is_held_is_what_is_planned(place: Path, tmp_path: Path, words: list[str]) -> None:
    settings = config(place, tmp_path / "run", BF16, NARROW, *words)
    with start(settings, torch.device("cpu")) as run:
        begin(run)
        held = sum(p.numel() * p.element_size() for p in run.model.parameters())
        for name, p in run.model.named_parameters():
            exact = "norm" in name or "router" in name
            frozen = not is_adapter(name) if "lora.rank=2" in words else still(name)
            assert (p.dtype == torch.bfloat16) == (frozen and not exact), name
        planned = memory(run.origin.spec, settings, 1, Model(run.origin.spec, settings))
        assert planned.weights == held
        gradients(run, first_batches(run))
        assert planned.gradients == bytes_of(p.grad for p in run.model.parameters())
        assert run.optimizer is not None
        kept = [tensor for state in run.optimizer.state.values() for key, tensor in state.items() if key != "step"]
        assert planned.moments == bytes_of(kept)


def bytes_of(tensors: Iterable[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def test_what_learns_in_any_stage_is_held_wide(place: Path, tmp_path: Path) -> None:
    first = "{steps: 4, optim: {groups: [{match: '*', lr: 0}, {match: layers.0.attention}]}}"
    second = "{steps: 4, optim: {groups: [{match: experts, lr: 0}, {match: layers.0.attention, lr: 0}]}, schedule: {warmup: 0}}"
    words = [BF16, NARROW, f"stages=[{first}, {second}]"]
    with start(config(place, tmp_path / "run", *words), torch.device("cpu")) as run:
        held = {name for name, p in run.model.named_parameters() if p.dtype == torch.bfloat16}
        assert held == {name for name, _ in run.model.named_parameters() if "experts" in name}


def test_a_float32_source_stays_float32_unless_it_may_round(place: Path, tmp_path: Path) -> None:
    bf16 = "model.dtype=bfloat16"
    with start(config(place, tmp_path / "x", bf16, *LORA), torch.device("cpu")) as run:
        assert {p.dtype for p in run.model.parameters()} == {torch.float32} and run.origin.spec.dtype == "float32"
        assert of_frozen(run.origin.spec, run.whole) == (
            "frozen weights stay float32, because the checkpoint is float32; model.frozen=bfloat16 rounds them"
        )
    with start(config(place, tmp_path / "x", bf16, BF16, *LORA), torch.device("cpu")) as run:
        assert held_in(run.whole.model, run.origin.spec) == torch.bfloat16 and not of_frozen(run.origin.spec, run.whole)
    with start(config(place, tmp_path / "x", NARROW, *LORA), torch.device("cpu")) as run:
        assert "are rounded to bfloat16" in of_frozen(run.origin.spec, run.whole)
        with pytest.warns(UserWarning, match="never learn are rounded to bfloat16; the checkpoint is float32"):
            begin(run)
    with start(config(place, tmp_path / "x"), torch.device("cpu")) as run:
        assert not of_frozen(run.origin.spec, run.whole), "nothing is frozen"


def test_a_config_json_that_says_another_dtype_than_the_files_is_no_reason_to_round(
    place: Path, tmp_path: Path
) -> None:
    says = tmp_path / "says"
    says.mkdir()
    for file in (place / "dense").iterdir():
        (says / file.name).write_bytes(file.read_bytes())
    tensors = load_file(says / "model.safetensors")
    save_file({name: tensor.float() for name, tensor in tensors.items()}, says / "model.safetensors")
    keys = json.loads((says / "config.json").read_text())
    (says / "config.json").write_text(json.dumps({**keys, "dtype": "bfloat16", "torch_dtype": "bfloat16"}))
    words = ["model.upcycle=", f"model.source={says}", "model.dtype=bfloat16", "balance.bias_rate=0", *LORA]
    with (
        start(config(place, tmp_path / "x", *words), torch.device("cpu")) as run,
        pytest.raises(
            ValueError, match=r"is float32 and config\.json says bfloat16, so the frozen weight would be rounded"
        ),
    ):
        begin(run)
    with start(config(place, tmp_path / "x", *words, "model.frozen=float32"), torch.device("cpu")) as run:
        begin(run)


def test_what_was_held_narrow_is_thawed_exactly_and_not_the_other_way(place: Path, tmp_path: Path) -> None:
    words = [BF16, NARROW, "data.valid=[]", "schedule.warmup=1"]
    train(config(place, tmp_path / "run", FROZEN, *words, f"export={tmp_path / 'half'}", steps=2))
    more = ["schedule.peak=1e-30", "schedule.final=0"]  # learns nothing any more
    with pytest.warns(UserWarning, match="other settings"):
        train(config(place, tmp_path / "run", *words, *more, f"export={tmp_path / 'wide'}", steps=3))
    have, want = (load_file(tmp_path / name / "model.safetensors") for name in ("wide", "half"))
    assert all(torch.equal(have[name], want[name]) for name in want if "correction_bias" not in name)
    with pytest.raises(
        ValueError, match=r"bfloat16 in this run and .*float32 in the checkpoint.*model\.frozen=float32"
    ):
        train(config(place, tmp_path / "run", FROZEN, *words, *more, steps=4))
