"""Define how weights are updated: the keys of optim, and those of its groups of parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from training.model.names import holds
from upcycle.arch.spec import MoESpec
from upcycle.config.reading import build
from upcycle.config.values import Rule, at_least, check_values, finite, one_of, share_of_one

RULES = ("adamw", "muon")
MOMENTS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ParameterGroup:
    match: str = ""  # words of a name, between dots, each of which may hold * ? [0-9]: router, experts, layers.0, *norm
    lr: float = 1.0  # multiplies the learning rate; 0: frozen, with neither gradients nor moments
    decay: float | None = None  # their weight decay; none given: as without the group

    def holds(self, name: str) -> bool:
        """Return whether the pattern's words are neighbours somewhere in a parameter's name."""
        return holds(self.match, name)


@dataclass(frozen=True)
class OptimConfig:
    ELSEWHERE: ClassVar = dict.fromkeys(("lr", "learning_rate", "peak", "peak_lr", "max_lr"), "schedule.peak")

    name: str = "adamw"  # adamw | muon: for matrices inside the layers, AdamW for the rest, at the same learning rate
    weight_decay: float = 0.1  # of matrices; norms and biases have none
    router_decay: bool = False  # decay routers too
    beta1: float = 0.9  # AdamW's: share of the old mean of gradients that a step keeps
    beta2: float = 0.95  # AdamW's: of the old mean of their squares
    eps: float = 1e-8  # AdamW's: added to the root that it divides by
    momentum: float = 0.95  # Muon's, after Nesterov
    moments: str = "float32"  # dtype that the moments are kept in: float32 | bfloat16
    clip: float = 1.0  # limit of the gradient's norm over all weights; 0: none
    # multiplies the learning rate of routers; none given: 0.3 where the router chooses in each slice, else 1
    router_lr: float | None = None
    expert_lr: float = 1.0  # multiplies the learning rate of routed experts
    embed_lr: float = 1.0  # multiplies the learning rate of embeddings and LM head
    # parameters by name, each group with its own rate and decay (match, lr, decay): of several that hold one the last
    # decides, and the three keys above decide of what is in none. A rate of 0 freezes
    groups: tuple[Any, ...] = ()
    # share of the steps, the last ones: a run ends with the mean of their weights, which is what is validated, saved
    # and exported then, and what more steps go on from; 0: with the last step's. It averages out the noise of steps, as
    # a falling rate does
    average: float = 0.0
    # where experts are copies of a dense FFN's slices (training/optim/copies.py): how much of each one's gradient is
    # the mean of its copies' (1: all learn alike, which is dense training); none given: 0.5 where the router chooses in
    # each slice, else 0
    share: float | None = None
    # of copies too: how much of what tells each from the mean of its copies a run's end takes away; none given: 0.3
    # where the router chooses in each slice, else 0
    shrink: float | None = None
    spike_sigma: float = 0.0  # skip a step whose loss or gradient norm is so many deviations above the mean; 0: none
    spike_window: int = 128  # steps that this mean is over
    skips: int = 10  # steps skipped in a row (not finite, or a spike) that end a run; 0: no limit

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(group_of(value, i) for i, value in enumerate(self.groups)))
        rules = {
            "name": one_of(RULES),
            "moments": one_of(MOMENTS),
            "weight_decay eps clip router_lr expert_lr embed_lr spike_sigma": finite(),
            "beta1 beta2 momentum": Rule(lambda value: 0 <= value < 1, "it must be at least 0 and below 1"),
            "average": share_of_one("it must be a share of the steps, from 0 to 1"),
            "share shrink": share_of_one(),
            "skips": Rule(lambda value: value >= 0, "it must be a number of steps, 0 for no limit"),
            "spike_window": at_least(2, ", for instance 128"),
        }
        check_values(self, "optim.", rules)
        if self.moments == "bfloat16" and 1 - self.beta2 <= 2**-8:
            # a decay below half a unit in the last place rounds away: the second moment could only ever grow
            raise ValueError(
                f"optim.beta2={self.beta2} cannot decay moments in bfloat16; use at most 0.995, or moments=float32"
            )


def group_of(value: Any, number: int) -> ParameterGroup:
    """Return a group of parameters, read from plain values."""
    where = f"optim.groups.{number}."
    group = value if isinstance(value, ParameterGroup) else build(ParameterGroup, value, where)
    words = Rule(lambda match: all(match.split(".")), "write words of parameters' names, for instance experts.*")
    check_values(group, where, {"match": words, "lr decay": finite()})
    return group


def settled(config: OptimConfig, moe: MoESpec | None) -> OptimConfig:
    """Return the config with what follows from the model; refuse what copies do if no expert is a copy."""
    apart = moe is None or moe.disjoint or moe.copies == 1
    for name in ("share", "shrink"):
        if apart and getattr(config, name):
            raise ValueError(
                f"optim.{name} is {getattr(config, name)}, but no expert of this model is known to be a copy of "
                "another one; leave it out"
            )
    share, shrink, router_lr = (0.5, 0.3, 0.3) if moe is not None and moe.choice == "each-slice" else (0.0, 0.0, 1.0)
    return replace(
        config,
        share=share if config.share is None else config.share,
        shrink=shrink if config.shrink is None else config.shrink,
        router_lr=router_lr if config.router_lr is None else config.router_lr,
    )
