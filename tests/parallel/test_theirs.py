"""transformers divides a model of `target=upcycled` among processes by our plans, and computes what one process does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import upcycle
from tests.parallel.ranks import run
from tests.parity import tiny

# experts that are stacked and experts that are not, dense layers, a norm of all heads, biases in FFNs
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "stacked": ("qwen2", {"shared": 1}),
    "loose": ("nemotron", {"shared": 1}),
    "dense layers": ("llama", {"layers": "first-dense:1"}),
    "full norms": ("olmo2", {}),
    "biases": ("starcoder2", {}),
}
KEYS = {"experts": 4, "granularity": 2, "top_k": 2, "method": "virtual_group", "target": "upcycled"}


def logits(folder: Path, **more: Any) -> tuple[Any, Tensor]:
    options = {"trust_remote_code": True, "dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, **options, **more).eval()
    with torch.no_grad():
        found: Tensor = model(tiny.tokens()).logits
    return model, found


def divided(rank: int, world: int, folder: Path, parts: dict[str, Any]) -> tuple[Tensor, float]:
    """Return the logits, and which part of the layers' numbers this rank holds."""
    from transformers.distributed import DistributedConfig

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    model, found = logits(folder, distributed_config=DistributedConfig(**parts))
    parameters: list[Any] = list(model.model.layers.parameters())
    own = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in parameters)
    return found, own / sum(p.numel() for p in parameters)


@pytest.mark.parametrize(
    ("case", "parts"),
    [(case, {"tp_size": 2, "tp_plan": "auto"}) for case in CASES]
    + [("stacked", {"tp_size": 2, "tp_plan": "auto", "ep_size": 2})],
    ids=lambda value: value if isinstance(value, str) else "+".join(key[:2] for key in value if key.endswith("size")),
)
def test_two_processes_are_one(case: str, parts: dict[str, Any], tmp_path: Path) -> None:
    family, more = CASES[case]
    router = {"choice": "each-slice", "init": {"std": 0.3}}
    folder = upcycle.convert(
        KEYS | more, source=tiny.make(family, tmp_path / "dense"), router=router, output=tmp_path / "moe", quiet=True
    )
    _, want = logits(folder)
    for found, part in run(2, divided, folder, parts):
        assert float((found - want).abs().max()) < 1e-5 * float(want.abs().max())
        assert part < (0.75 if case == "full norms" else 0.6), "most matrices are whole"
