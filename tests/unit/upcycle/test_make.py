"""Maker: squared ReLU in gated targets, and experts that need a measurement."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.upcycle.plans import load, readable
from upcycle.converting.make import Maker


@pytest.mark.parametrize("method", ["noise", "drop"])
def test_squared_relu_stays_one_under_noise_and_drop(arcee: Path, method: str) -> None:
    """A gated target holds relu(u)^2 as relu(gate) * up: a change of `up` is the same change of `gate`."""
    words = (f"source={arcee}", f"method.name={method}", "granularity=2", "top_k=2", "experts=4")
    plan, checkpoints = load(*words, "target=mixtral")
    ours, _ = load(*words, "target=upcycled")
    assert plan.promise.estimate == ours.promise.estimate
    gated, plain = Maker(plan, checkpoints), Maker(ours, checkpoints)
    factor = plan.factors(0)["up"]
    for expert in range(8):
        name = f"model.layers.1.block_sparse_moe.experts.{expert}"
        assert torch.equal(gated.tensor(f"{name}.w1.weight") * factor, gated.tensor(f"{name}.w3.weight"))
        up = plain.tensor(f"model.layers.1.mlp.experts.{expert}.up_proj.weight")
        torch.testing.assert_close(gated.tensor(f"{name}.w1.weight") * ours.factors(0)["up"], up, rtol=1e-6, atol=0)


def test_experts_by_activation_are_not_made_before_the_measurement(llama: Path, tmp_path: Path) -> None:
    source, text = readable(llama, tmp_path)
    plan, checkpoints = load(
        f"source={source}", "method.name=split", "method.by=activation", f"calibration.texts={text}", "target=mixtral"
    )
    with pytest.raises(AssertionError, match="measure"):
        Maker(plan, checkpoints).tensor("model.layers.0.block_sparse_moe.experts.0.w1.weight")
