"""LoRA: a frozen matrix W learns as W + scale * B A; A has `rank` rows, and B starts at zero and has `rank` columns.

The modules compute with their adapters (layers.py, moe.py, experts/); this file creates, finds and merges the adapters.
For stacked experts A is (N, in, rank) and B (N, out, rank): the large dimension is second, so that FSDP can divide it.

N experts, H of 1 or 2 halves (gate, up), F neurons, D hidden, r rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from training.model.layers import Linear
from training.model.moe import Experts, Router
from training.model.names import holds, plain_name
from training.model.nf4 import NF4
from upcycle.config.values import Rule, check_values, finite
from upcycle.plugin import nearest

A, B = "lora_a", "lora_b"
RANK = 2**16  # the largest rank; no matrix that people adapt has more rows


@dataclass(frozen=True)
class LoraConfig:
    ELSEWHERE: ClassVar = {"r": "lora.rank", "lora_alpha": "lora.alpha"} | dict.fromkeys(
        ("target_modules", "modules"), "lora.match, as in lora.match=[attention,ffn]"
    )

    rank: int = 0  # rank of the adapters; only adapters are trained; 0: no adapters, and all parameters are trained
    alpha: float = 0.0  # the product of each pair of adapters is multiplied by alpha / rank; 0: twice the rank
    # modules that get adapters, by words of names as in optim.groups: attention, attention.[qv], experts, router,
    # shared; ffn: a dense FFN, or experts, router and shared expert
    match: tuple[str, ...] = ("attention", "ffn")
    export: str = ""  # a folder for the adapters alone at the end of the run, in PEFT's layout (`export` merges them)

    def __post_init__(self) -> None:
        rank = Rule(lambda value: value >= 0, "it must be at least 1, or 0 for no adapters", RANK)
        alpha = finite(", and 0 is twice the rank")
        check_values(self, "lora.", {"rank": rank, "alpha": alpha})
        if self.export and not self.rank:
            raise ValueError(f"lora.export is {self.export} and lora.rank is 0; write a rank, for instance 16")

    @property
    def scale(self) -> float:
        return (self.alpha or 2 * self.rank) / self.rank


def is_adapter(name: str) -> bool:
    return A in name or B in name


def attach(model: nn.Module, config: LoraConfig) -> None:
    """Add uninitialized adapters to the modules that the config matches, on the device of their weights."""
    if not config.rank:
        return
    if any(isinstance(module, Experts) and module.anchor for module in model.modules()):
        raise ValueError(f"lora.rank is {config.rank}; the copies of a part learn whole, so leave lora out")
    for name, module in adaptable(model):
        if any(holds(pattern, name) for pattern in config.match):
            module.low = config.scale
            for key, shape in shapes(module, config.rank).items():
                module.register_parameter(key, nn.Parameter(torch.empty(shape, device=first(module).device)))


def encode(model: nn.Module, frozen: str) -> None:
    """Make the routed experts codes of 4 bits if the config's model.frozen says so, before their weights are read."""
    for module in model.modules():
        if isinstance(module, Experts) and frozen == NF4:
            module.encode()


def check_match(model: nn.Module, config: LoraConfig) -> None:
    """Raise a ValueError for a pattern of lora.match that matches no module of the whole model."""
    names = [name for name, _ in adaptable(model)]
    for pattern in config.match if config.rank else ():
        if not any(holds(pattern, name) for name in names):
            known = dict.fromkeys(word for name in names for word in name.split(".") if not word.isdecimal())
            raise ValueError(
                f"lora.match has {pattern!r}, which matches no module that can have adapters"
                f"{nearest(pattern, list(known))}; names are made of {', '.join(known)}, and layer numbers"
            )


def adaptable(model: nn.Module) -> Iterator[tuple[str, Linear | Router | Experts]]:
    """Yield each module that can have adapters with its plain name: those of layers with more than one output."""
    for name, module in model.named_modules():
        plain = plain_name(f"{name}.")[:-1]
        if isinstance(module, Linear | Router | Experts) and plain.startswith("layers.") and len(first(module)) > 1:
            yield plain, module


def first(module: Linear | Router | Experts) -> Tensor:
    return module.up if isinstance(module, Experts) else module.weight


def shapes(module: Linear | Router | Experts, rank: int) -> dict[str, tuple[int, ...]]:
    if isinstance(module, Experts):
        n, halves, f, d = module.up.shape
        sizes = {f"up_{A}": d, f"up_{B}": halves * f, f"down_{A}": f, f"down_{B}": d}
        return {key: (n, size, rank) for key, size in sizes.items()}
    out, into = module.weight.shape
    return {A: (rank, into), B: (out, rank)}


def pairs(model: nn.Module) -> Iterator[tuple[Tensor, Tensor, Tensor, float]]:
    """Yield (matrix, A, B, scale) for each matrix that has adapters."""
    for _, module in adaptable(model):
        if not module.low:
            continue
        if isinstance(module, Experts):
            yield module.up, module.up_lora_a, module.up_lora_b, module.low
            yield module.down, module.down_lora_a, module.down_lora_b, module.low
        else:
            yield module.weight, module.lora_a, module.lora_b, module.low


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Add the adapters of an undivided model to its matrices, which are decoded, and remove the adapters."""
    for module in model.modules():
        if isinstance(module, Experts):
            module.decode()
    for matrix, a, b, scale in pairs(model):
        matrix += delta(a, b, scale, matrix.shape, [(0, size) for size in matrix.shape])
    for _, module in adaptable(model):
        for key in shapes(module, 1) if module.low else ():
            delattr(module, key)
        module.low = 0.0


def delta(a: Tensor, b: Tensor, scale: float, shape: Sequence[int], box: Sequence[tuple[int, int]]) -> Tensor:
    """Return the part of scale * B A within the bounds `box`; `shape` is the shape of the whole matrix."""
    within = [slice(*bounds) for bounds in box]
    if len(box) == 2:
        return scale * (b[within[0]] @ a[:, within[1]])
    if len(box) == 3:
        return scale * torch.einsum("nor,nir->noi", b[within[0], within[1]], a[within[0], within[2]])
    halves = b.view(len(b), *shape[1:3], -1)
    n, h, f, d = within
    return scale * torch.einsum("nhfr,ndr->nhfd", halves[n, h, f], a[n, d])
