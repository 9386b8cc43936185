"""What a layer asks of the host in a step, in calls of Python and from Python: a bound, so that it does not grow unseen.
Nothing is timed here."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from tests.parallel.ranks import run
from training.config.schema import ModelConfig
from training.data.mixture import DataConfig
from training.estimating import bench
from training.estimating.measure import TINY
from training.parallel.mesh import MeshConfig
from training.parallel.shard import Summed

DENSE: dict[str, Any] = {**TINY, "model_type": "llama"}
MOE: dict[str, Any] = {
    **TINY, "model_type": "qwen3_moe", "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "norm_topk_prob": True,
}  # fmt: skip
LAYERS = 2, 4


def counted(step: Callable[[], None]) -> int:
    """The calls of a step, without those that torch's FSDP makes for itself, whose number is torch's affair."""
    calls, inside = 0, [False]  # of FSDP, frame by frame

    def seen(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        if event == "call":
            file = frame.f_code.co_filename
            inside.append("fsdp" in file or (inside[-1] and "/training/" not in file))
        elif event == "return" and len(inside) > 1:
            inside.pop()
        calls += event in ("call", "c_call") and not inside[-1]

    before = sys.getprofile()
    gc.collect()
    gc.disable()  # what it collects may call something
    sys.setprofile(seen)
    try:
        step()
    finally:
        sys.setprofile(before)
        gc.enable()
    return calls


def of_a_layer(rank: int, world: int, architecture: dict[str, Any]) -> float:
    """A layer's calls in a step of two micro-batches, with AdamW: the difference of two models."""
    found: list[int] = []

    def once(step: Callable[[], None], device: torch.device, often: int) -> float:
        found.append(counted(step))
        return 1.0

    for layers in LAYERS:
        config = bench.BenchConfig(
            architecture=architecture, layers=layers, data=DataConfig(sequence=16), batch=2 * world, micro_batch=1, optimizer=True,
            weights="float32", model=ModelConfig(dtype="bfloat16"), mesh=MeshConfig(ep=world), warmup=2, steps=1,
        )  # fmt: skip
        with patch.object(bench, "timed", once), patch.object(bench, "BLOCKS", 1):
            bench.measured(config, bench.spec_of(config), torch.device("cpu"))
    return (found[1] - found[0]) / (LAYERS[1] - LAYERS[0])


# counted: 452, 1,609 and 3,413 with torch 2.13
@pytest.mark.parametrize(("architecture", "most"), [(DENSE, 470), (MOE, 1660)], ids=["dense", "moe"])
def test_a_layers_calls(architecture: dict[str, Any], most: int) -> None:
    found = of_a_layer(0, 1, architecture)
    assert most / 2 < found < most


def test_a_layers_calls_where_experts_are_on_other_ranks() -> None:
    found = run(2, of_a_layer, MOE)
    assert all(2000 < each < 3475 for each in found), found


def test_a_further_gradient_is_added_where_it_lies() -> None:
    """To make a DTensor of a sum takes a hundred calls: the first sum is a new tensor, being wider, and no other."""
    parameter = nn.Parameter(torch.zeros(3))
    copy, made = parameter.detach().bfloat16().requires_grad_(), list[torch.Tensor | None]()
    for number in range(4):
        Summed.apply(parameter, copy).backward(torch.full((3,), 1.0 + 2.0**-7 * number, dtype=torch.bfloat16))  # type: ignore[no-untyped-call]
        made.append(parameter.grad)
    first, second, *others = made
    assert first is not None and second is not None and first.dtype == torch.bfloat16 and second.dtype == torch.float32
    assert all(each is second for each in others)
    assert torch.equal(second, torch.full((3,), 4 + 6 * 2.0**-7))
