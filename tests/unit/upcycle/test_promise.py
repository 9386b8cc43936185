"""The promise of a plan that is exact but for rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
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


@pytest.mark.parametrize(
    ("parts", "says"), [(3, "down x 1.5 to bfloat16, which changes these weights by about 0.18 %"), (4, "")]
)
def test_a_plan_says_by_how_much_its_scale_rounds(tmp_path: Path, parts: int, says: str) -> None:
    source = tiny.make("llama", tmp_path / "dense", dtype=torch.bfloat16)
    made, checkpoints = load(
        f"source={source}", f"output={tmp_path / 'moe'}", "method=virtual_group", f"granularity={parts}",
        f"top_k={parts}", "target=mixtral", "experts=2",
    )  # fmt: skip
    remarks = [remark for remark in made.promise.reasons if "rounding" in remark]
    assert made.promise.exact and [says in remark for remark in remarks] == ([True] if says else [])
    dense, moe = (
        load_file(source / "model.safetensors"),
        load_file(convert(made, checkpoints, quiet=True) / "model.safetensors"),
    )
    want = dense["model.layers.0.mlp.down_proj.weight"].double() * (1.5 if parts == 3 else 2)
    have = torch.cat([moe[f"model.layers.0.block_sparse_moe.experts.{i}.w2.weight"].double() for i in range(parts)], 1)
    change = float((have - want).norm() / want.norm())
    assert 0.0015 < change < 0.0019 if says else change == 0.0
