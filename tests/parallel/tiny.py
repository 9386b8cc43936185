"""Small models and batches in float64 whose every number differs, the same in every process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tests.parallel.models import whole
from training.checkpoint.layout import initialise
from training.data.batch import Batch
from training.model.decoder import Decoder
from upcycle.arch.spec import DenseSpec, MoESpec

DENSE: dict[str, Any] = {
    "family": "llama", "layers": 2, "hidden": 32, "ffn": 24, "heads": 4, "kv_heads": 2, "head_dim": 8, "vocab": 61,
    "context": 64, "init_std": 0.3,
}  # fmt: skip


def dense(**changed: Any) -> DenseSpec:
    return DenseSpec(**(DENSE | changed))


def moe(routed: tuple[int, ...] | None = None, **changed: Any) -> MoESpec:
    spec = dense(**changed)
    routed = tuple(range(spec.layers)) if routed is None else routed
    return MoESpec(dense=spec, layers=routed, widths=(16,) * 4, top_k=2, copies=4, shared=8)


def model(spec: DenseSpec | MoESpec, part: range | None = None) -> Decoder:
    built = Decoder(spec, part=part, experts="reference", compute=torch.float64).double()
    return initialise(built, seed=5)


def batch(sequences: int, length: int, *, documents: bool, seed: int = 0) -> Batch:
    """Sequences cut into documents at places of their own, one longer than half of it; some labels are not scored."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(61, (sequences, length), generator=draw)
    labels = torch.randint(61, (sequences, length), generator=draw)
    labels[torch.rand(sequences, length, generator=draw) < 0.2] = -100
    positions = torch.arange(length).expand(sequences, -1).clone()
    number = torch.zeros(sequences, length, dtype=torch.int32)
    for row in range(sequences if documents else 0):
        for at in (2 + row, length // 4 + row, length - 3 - row):
            number[row, at:] += 1
            positions[row, at:] = torch.arange(length - at)
    return Batch(tokens, labels, number, positions)


def gradients(*parts: Decoder) -> dict[str, Tensor]:
    """Gradients by name. Tied embeddings are in two parts: one has the gradient, or both have the same."""
    found: dict[str, Tensor] = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            assert parameter.grad is not None or name == "embed.weight", name
            if parameter.grad is not None:
                found[name] = whole(parameter.grad)
    return found


def worst(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Largest difference, as a share of the largest entry of that tensor."""
    assert set(found) <= set(expected)
    return max(float((found[n] - expected[n]).abs().max() / expected[n].abs().max()) for n in found)
