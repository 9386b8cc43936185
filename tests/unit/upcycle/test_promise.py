"""The promise of a plan that is exact but for rounding."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.parity import tiny
from tests.unit.upcycle.plans import load
from upcycle.__main__ import main
from upcycle.converting.convert import convert


def test_float32_norms_in_a_bfloat16_model_are_known_to_be_rounded(tmp_path: Path) -> None:
    folder = tiny.make("llama", tmp_path / "dense", dtype=torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {k: v.float() * 1.001 for k, v in tensors.items() if "norm" in k}
    save_file(tensors, folder / "model.safetensors")
    plan, checkpoints = load(f"source={folder}", f"output={tmp_path / 'moe'}")
    assert plan.promise.reasons == (
        "exact except for the rounding of float32 weights to bfloat16, which changes these weights by about 0.17 %",
    )
    convert(plan, checkpoints, quiet=True)
    assert main(["verify", str(folder), str(tmp_path / "moe"), "tokens=64"]) == 0


def test_parts_of_ffns_are_planned_if_asked_for_and_not_called_exact(llama: Path) -> None:
    made, _ = load(f"source={llama}", "method.name=virtual_group", "granularity=4", "top_k=6", "router.choice=parts")
    assert (made.moe.choice, made.moe.top_k) == ("any", 6) and not made.promise.exact
    assert "top_k=6 is not a multiple of granularity=4" in made.promise.reasons[0]
