"""Make a tiny base, two parts of it that nobody trained, and the folder that joins them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.parity import tiny
from tests.unit.training.test_data import make_tokenizer
from training import api
from training.checkpoint import layout
from training.parts.join import names_of, spec_of
from upcycle.config.schema import UpcycleConfig
from upcycle.converting import part
from upcycle.io.checkpoint import Checkpoint
from upcycle.planning.plan import UpcyclePlan

ROWS = 0.3  # deviation of the parts' router rows, with which base and parts get tokens


def empty(plan: UpcyclePlan, _: object) -> dict[str, torch.Tensor]:
    return {f"layers.{layer}.rows": torch.zeros(2, plan.dense.hidden) for layer in plan.moe.layers}


def joined(folder: Path, **shape: Any) -> Path:
    """Make FOLDER/base, law, code and joined; return the last."""
    base = tiny.make("llama", folder / "base", **shape)
    make_tokenizer(base, bos=False)
    with Checkpoint.open(base) as checkpoint:
        about: part.Base = {"name": "base", "files": part.sums_of(checkpoint)}
    for seed, name in enumerate(("law", "code")):
        draw = torch.Generator().manual_seed(seed)
        method = {"name": "part", "part": name}
        settings = UpcycleConfig(source=str(base), target="upcycled", method=method, granularity=4, top_k=4)
        with layout.online(settings, empty, reads=False) as origin:

            def noisy(role: str, origin: layout.Origin = origin, draw: torch.Generator = draw) -> torch.Tensor:
                tensor = origin.read(names_of(origin)[role])
                size = ROWS if role.endswith("router.weight") else 0.3 * float(tensor.std())
                return tensor + size * torch.randn(tensor.shape, generator=draw)

            part.write(folder / name, spec_of(origin), name, noisy, about, [{"steps": 1}], [], {})
    return api.join(base, folder / "law", folder / "code", output=folder / "joined")
