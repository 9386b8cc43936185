"""Define the keys of `optim` and of its parameter groups."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from training.model.names import holds
from upcycle.arch.spec import MoESpec
from upcycle.config.reading import build
from upcycle.config.values import COUNT, Rule, at_least, check_values, finite, one_of, share_of_one

RULES = ("adamw", "muon")
WINDOW = 10**6  # steps that a spike guard keeps, at most
MOMENTS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ParameterGroup:
    match: str = ""  # words of a parameter's name, separated by dots; * ? [0-9] match: router, experts, layers.0, *norm
    lr: float = 1.0  # multiplies the learning rate; 0: frozen, without gradients and moments
    decay: float | None = None  # weight decay of the group; null: as without the group

    def holds(self, name: str) -> bool:
        """Return whether the pattern's words follow each other somewhere in a parameter's name."""
        return holds(self.match, name)


@dataclass(frozen=True)
class OptimConfig:
    ELSEWHERE: ClassVar = dict.fromkeys(("lr", "learning_rate", "peak", "peak_lr", "max_lr"), "schedule.peak")

    # adamw | muon: Muon for matrices inside layers and AdamW for the rest, at the same learning rate
    name: str = "adamw"
    weight_decay: float = 0.1  # weight decay of matrices; norms and biases have none
    router_decay: bool = False  # also decay routers
    beta1: float = 0.9  # AdamW: share of the old mean of gradients that a step keeps
    beta2: float = 0.95  # AdamW: share of the old mean of squared gradients that a step keeps
    eps: float = 1e-8  # AdamW: added to the square root that divides the update
    momentum: float = 0.95  # Muon: momentum, with Nesterov
    moments: str = "float32"  # dtype of the moments: float32 | bfloat16
    clip: float = 1.0  # largest norm of the whole gradient; 0: no clipping
    # multiplies the learning rate of routers; null: 0.3 where the router chooses in each slice, else 1
    router_lr: float | None = None
    expert_lr: float = 1.0  # multiplies the learning rate of routed experts
    embed_lr: float = 1.0  # multiplies the learning rate of embeddings and LM head
    # groups of parameters by name (match, lr, decay); the last match decides, and the three keys above decide for
    # parameters in no group. lr 0 freezes
    groups: tuple[Any, ...] = ()
    # share of the last steps whose weights are averaged; the run validates, saves and exports the mean, and later steps
    # start from it
    average: float = 0.0
    # for experts that are copies of a dense FFN's slices: share of each gradient that is the mean over its copies (1 is
    # dense training). null: 0.5 if the router chooses in each slice and
    # the copies began equal, else 0
    share: float | None = None
    # also for copies: share of each expert's distance to the mean of its copies that validations and exports leave out;
    # training continues without it. null: 0.3 if the router chooses in each slice and the copies began equal, else 0
    shrink: float | None = None
    # skip a step whose loss or gradient norm is this many standard deviations above the mean; 0: never
    spike_sigma: float = 0.0
    spike_window: int = 128  # steps that the mean covers
    skips: int = 10  # steps skipped in a row (not finite, or a spike) that end the run; 0: no limit

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(group_of(value, i) for i, value in enumerate(self.groups)))
        rules = {
            "name": one_of(RULES),
            "moments": one_of(MOMENTS),
            "weight_decay clip router_lr expert_lr embed_lr spike_sigma": finite(),
            "eps": finite(most=1.0),
            "beta1 beta2 momentum": Rule(lambda value: 0 <= value < 1, "it must be at least 0 and below 1"),
            "average": share_of_one("it must be a share of the steps, from 0 to 1"),
            "share shrink": share_of_one(),
            "skips": Rule(lambda value: value >= 0, "it must be a number of steps, 0 for no limit", COUNT),
            "spike_window": at_least(2, ", for instance 128", most=WINDOW),
        }
        check_values(self, "optim.", rules)
        if self.moments == "bfloat16" and 1 - self.beta2 <= 2**-8:
            # a decay below half a unit in the last place rounds away, so the second moment could only grow
            raise ValueError(
                f"optim.beta2={self.beta2} cannot decay moments in bfloat16; use at most 0.995, or moments=float32"
            )


def group_of(value: Any, number: int) -> ParameterGroup:
    """Read a parameter group from plain values."""
    where = f"optim.groups.{number}."
    group = value if isinstance(value, ParameterGroup) else build(ParameterGroup, value, where)
    words = Rule(lambda match: all(match.split(".")), "write words of parameters' names, for instance experts.*")
    check_values(group, where, {"match": words, "lr decay": finite()})
    return group


def settled(config: OptimConfig, moe: MoESpec | None) -> OptimConfig:
    """Return the config with this model's defaults; raise a ValueError for keys of copies if no expert is a copy."""
    apart = moe is None or moe.disjoint or moe.copies == 1 or bool(moe.parts)
    for name in ("share", "shrink"):
        if apart and getattr(config, name):
            raise ValueError(
                f"optim.{name} is {getattr(config, name)}, but no expert of this model learns with copies of itself; "
                "leave it out"
            )
    chooses = moe is not None and moe.choice == "each-slice"
    # copies that a method made different on purpose are not pulled together
    share, shrink = (0.5, 0.3) if chooses and not apart and moe is not None and moe.equal else (0.0, 0.0)
    router_lr = 0.3 if chooses else 1.0
    return replace(
        config,
        share=share if config.share is None else config.share,
        shrink=shrink if config.shrink is None else config.shrink,
        router_lr=router_lr if config.router_lr is None else config.router_lr,
    )
