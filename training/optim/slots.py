"""Decide from a parameter's name and shape how it is updated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from training.model.lora import is_adapter
from training.model.names import plain_name
from training.optim.config import OptimConfig
from training.parallel.collectives import local
from upcycle.plugin import nearest

MOMENTS = {"adamw": 2, "muon": 1}  # numbers that each rule keeps for a weight
# words in the names of parameters outside of layers, in our models and in transformers'
OUTSIDE = {"embed", "head", "embed_tokens", "embeddings", "wte", "lm_head"}


@dataclass(frozen=True)
class Slot:
    """A parameter and how to update it."""

    name: str
    parameter: nn.Parameter
    rule: str
    decay: float
    multiplier: float
    state: dict[str, Tensor]  # the optimiser's state

    @property
    def master(self) -> Tensor:
        return self.state.get("master", self.parameter)

    @property
    def gradient(self) -> Tensor:
        if self.parameter.grad is None:
            raise ValueError(f"{self.name} has no gradient; use it in the loss, or set requires_grad=False on it")
        return self.parameter.grad


def is_vector(name: str, shape: Sequence[int]) -> bool:
    """Return whether a parameter is not a matrix, by its meaning: a norm, a bias or the like."""
    words = name.split(".")
    vector = len(shape) < 2 or words[-1].endswith("bias") or any(word.endswith("norm") for word in words)
    return vector or words[-1] == "A_log"  # the decay of a state-space model, with a row for each channel


def rule_of(config: OptimConfig, name: str, shape: Sequence[int]) -> str:
    """Return the rule that updates a parameter: muon for matrices inside layers if the config says so, else adamw."""
    inside = not ({"router"} | OUTSIDE) & set(name.split("."))
    # a shared expert's gate is a matrix of one row, which Muon cannot orthogonalise
    matrix = inside and not is_vector(name, shape) and min(shape[-2:]) > 1
    return "muon" if config.name == "muon" and matrix else "adamw"


def make_slot(config: OptimConfig, name: str, parameter: nn.Parameter, state: dict[str, Tensor]) -> Slot:
    """Return how a parameter is updated."""
    router = "router" in name.split(".")
    decay = config.weight_decay if not is_vector(name, parameter.shape) and (config.router_decay or not router) else 0.0
    for group in config.groups:
        if group.decay is not None and group.holds(name):
            decay = group.decay
    return Slot(name, parameter, rule_of(config, name, parameter.shape), decay, multiplier(config, name), state)


def multiplier(config: OptimConfig, name: str) -> float:
    """Return the factor of a parameter's learning rate; 0 means frozen."""
    rates = [group.lr for group in config.groups if group.holds(name)]
    if rates:
        return float(rates[-1])
    words = name.split(".")
    if "router" in words:
        return 1.0 if config.router_lr is None else config.router_lr
    return config.expert_lr if "experts" in words else config.embed_lr if OUTSIDE & set(words) else 1.0


def freeze(model: nn.Module, *configs: OptimConfig) -> bool:
    """Switch off gradients of the parameters that all of these configs freeze; return whether anything changed."""
    names = [plain_name(name) for name, _ in model.named_parameters()]
    learned = set[str]().union(*(learning(config, names) for config in configs))
    changed = [p for name, p in model.named_parameters() if p.requires_grad != (plain_name(name) in learned)]
    for parameter in changed:
        parameter.requires_grad_(not parameter.requires_grad)
    return bool(changed)


def learning(config: OptimConfig, names: Sequence[str]) -> set[str]:
    """Return the names of the parameters that learn: only the adapters, if the model has any, and never an anchor."""
    adapters = [name for name in names if is_adapter(name)]
    return {name for name in adapters or names if multiplier(config, name) and "anchor" not in name.split(".")}


def check_groups(config: OptimConfig, names: Sequence[str]) -> None:
    """Raise a ValueError if a group matches no parameter, or if every parameter is frozen."""
    for number, group in enumerate(config.groups):
        if not any(group.holds(name) for name in names):
            known = dict.fromkeys(word for name in names for word in name.split(".") if not word.isdecimal())
            raise ValueError(
                f"optim.groups.{number}.match is {group.match!r}, which matches no parameter"
                f"{nearest(group.match, list(known))}; names consist of {', '.join(known)} and numbers of layers"
            )
    if not learning(config, names):
        raise ValueError("optim freezes every parameter of the model; give some a learning rate above 0")


def copy_where_apart(stored: Sequence[Tensor], used: Sequence[Tensor]) -> None:
    """Copy the values that were used into the stored tensors of another dtype, rounding them."""
    pairs = [(k, u) for k, u in zip(stored, used, strict=True) if k.dtype != u.dtype]
    if pairs:
        torch._foreach_copy_([k for k, _ in pairs], [u for _, u in pairs])


@torch.no_grad()
def copy_masters(slots: Sequence[Slot]) -> None:
    """Round master weights into their parameters, where these have a lower dtype."""
    copy_where_apart([local(slot.parameter) for slot in slots], [local(slot.master) for slot in slots])
