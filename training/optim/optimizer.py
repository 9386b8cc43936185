"""Optimiser: AdamW, or Muon for the matrices; clipping; steps that are skipped without asking the device.

    optimiser = Optimizer(config, model.named_parameters())
    guard = SpikeGuard(config, device)
    for step in range(steps):
        ...backward of every micro-batch...
        norm = optimiser.clip()                            # a device tensor: nothing waits
        skip = ~norm.isfinite() | guard.spike(loss, norm)
        optimiser.step(rate(step), skip)

**Master weights.** A parameter in float32 (or 64) is its own master; one in a lower dtype gets a float32 master in the
optimiser's state, which is stepped and then rounded into the parameter. To train, keep the parameters float32 and cast
for compute (FSDP2's MixedPrecisionPolicy(param_dtype=bf16), or a cast in forward): 4 bytes a weight instead of 2 + 4,
gradients accumulate in float32, the checkpoint holds one copy, and FSDP2 casts its shard before gathering, so the wire
carries bf16 either way. bf16 parameters are for one device, where the cast would be paid in each micro-batch.

**Sharding.** Nothing here knows a mesh. State is made like the parameter, so a DTensor's state is a DTensor of the same
placement; AdamW is element-wise and works on the local shards. Muon gathers a matrix that is sharded inside; experts
that are sharded by expert need no gathering. `state_dict` is flat, tensors under parameter names: what
torch.distributed.checkpoint saves, loads in place and reshards.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.optim.adamw import adamw

from training.kernels import updates
from training.model.lora import is_adapter
from training.model.names import holds, plain_name
from training.optim.copies import pull_
from training.parallel.collectives import local
from upcycle.arch.spec import MoESpec
from upcycle.config.reading import build
from upcycle.plugin import nearest

Reduce = Callable[[Tensor], Tensor]  # sums a tensor over ranks that hold different parameters (pipeline stages)
RULES = ("adamw", "muon")
MOMENTS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BUCKET = 2**27  # elements that one fused call updates, which bounds the temporary float32 copies of bf16 tensors
# words in the names of what is in no layer: of ours, and of transformers' own models
OUTSIDE = {"embed", "head", "embed_tokens", "embeddings", "wte", "lm_head"}
PIECE = 2**26  # elements that Muon works on at once
NOTHING = (
    "this rank's part of the model has no parameter to train; give some a learning rate above 0 in optim.groups, or "
    "take a smaller mesh.pp"
)
# Keller Jordan's quintic: its slope at 0 is as steep as possible, and singular values end within 0.7 ... 1.2
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True)
class ParameterGroup:
    match: str = ""  # words of a name, between dots, each of which may hold * ? [0-9]: router, experts, layers.0, *norm
    lr: float = 1.0  # multiplies the learning rate; 0: frozen, with neither gradients nor moments
    decay: float | None = None  # their weight decay; none given: as without the group

    def holds(self, name: str) -> bool:
        """Whether the pattern's words are neighbours somewhere in a parameter's name."""
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
    # the mean
    # of its copies' (1: all learn alike, which is dense training); none given: 0.5 where the router chooses in each
    # slice, else 0
    share: float | None = None
    # of copies too: how much of what tells each from the mean of its copies a run's end takes away; none given: 0.3
    # where the router chooses in each slice, else 0
    shrink: float | None = None
    spike_sigma: float = 0.0  # skip a step whose loss or gradient norm is so many deviations above the mean; 0: none
    spike_window: int = 128  # steps that this mean is over
    skips: int = 10  # steps skipped in a row (not finite, or a spike) that end a run; 0: no limit

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(group_of(value, i) for i, value in enumerate(self.groups)))
        if self.name not in RULES:
            raise ValueError(f"optim.name is {self.name!r}; it must be one of {', '.join(RULES)}")
        if self.moments not in MOMENTS:
            raise ValueError(f"optim.moments is {self.moments!r}; it must be one of {', '.join(MOMENTS)}")
        for name in ("weight_decay", "eps", "clip", "router_lr", "expert_lr", "embed_lr", "spike_sigma"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"optim.{name} is {value}; it must be a number of at least 0")
        for name in ("beta1", "beta2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optim.{name} is {getattr(self, name)}; it must be at least 0 and below 1")
        if self.moments == "bfloat16" and 1 - self.beta2 <= 2**-8:
            # a decay below half a unit in the last place rounds away: the second moment could only ever grow
            raise ValueError(
                f"optim.beta2={self.beta2} cannot decay moments in bfloat16; use at most 0.995, or moments=float32"
            )
        if not 0 <= self.average <= 1:
            raise ValueError(f"optim.average is {self.average}; it must be a share of the steps, from 0 to 1")
        for name in ("share", "shrink"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"optim.{name} is {value}; it must be a number from 0 to 1")
        if self.skips < 0:
            raise ValueError(f"optim.skips is {self.skips}; it must be a number of steps, 0 for no limit")
        if self.spike_window < 2:
            raise ValueError(f"optim.spike_window is {self.spike_window}; it must be at least 2, for instance 128")


def group_of(value: Any, number: int) -> ParameterGroup:
    where = f"optim.groups.{number}."
    group = value if isinstance(value, ParameterGroup) else build(ParameterGroup, value, where)
    if not all(group.match.split(".")):
        raise ValueError(f"{where}match is {group.match!r}; write words of parameters' names, for instance experts.*")
    for name, number_ in (("lr", group.lr), ("decay", group.decay or 0.0)):
        if not (math.isfinite(number_) and number_ >= 0):
            raise ValueError(f"{where}{name} is {number_}; it must be a number of at least 0")
    return group


@dataclass(frozen=True)
class Slot:
    """A parameter and how to update it."""

    name: str
    parameter: nn.Parameter
    rule: str
    decay: float
    multiplier: float
    state: dict[str, Tensor]  # the optimiser's own of it

    @property
    def master(self) -> Tensor:
        return self.state.get("master", self.parameter)

    @property
    def gradient(self) -> Tensor:
        if self.parameter.grad is None:
            raise ValueError(f"{self.name} has no gradient; use it in the loss, or set requires_grad=False on it")
        return self.parameter.grad


class Optimizer(torch.optim.Optimizer):
    """A torch optimiser to whoever saves it (`state`, `param_groups`); `step` and `state_dict` have our signatures."""

    def __init__(
        self, config: OptimConfig, parameters: Iterable[tuple[str, nn.Parameter]], moe: MoESpec | None = None
    ) -> None:
        """`parameters`: by role (upcycle/arch/spec.py), loaded and sharded. `moe`: of the model, which says what is a
        copy
        of what."""
        named = [(plain_name(name), p) for name, p in parameters if p.requires_grad]
        if not named:
            raise ValueError(NOTHING)
        # one group: what differs between parameters follows from their names, so a checkpoint need not hold it
        super().__init__([{"params": [p for _, p in named], "name": "all"}], {"fused": True})
        self.named, self.moe, self.decays = named, moe, True
        for name, p in named:
            self.state[p] = fresh_state(config, make_slot(config, name, p, {}))
        self.follow(config)
        self.slices = 1 if moe is None else moe.granularity
        device = local(named[0][1]).device
        self.never = torch.zeros((), dtype=torch.bool, device=device)
        self.excess: Tensor | None = None  # what the next step divides gradients by
        self.param_groups[0]["skipped"] = torch.zeros((), dtype=torch.int64, device=device)
        self.param_groups[0]["in_a_row"] = torch.zeros((), dtype=torch.int64, device=device)
        self.param_groups[0]["averaged"] = 0  # steps in the mean
        self.longest = torch.zeros((), dtype=torch.int64, device=device)  # row of skipped steps, in this process

    def follow(self, config: OptimConfig) -> None:
        """From here on updates are by `config`, of what has gradients now; what has none keeps weights and moments."""
        self.config = config = settled(config, self.moe)
        self.slots = [make_slot(config, name, p, self.state[p]) for name, p in self.named if p.requires_grad]
        if not self.slots:
            raise ValueError(NOTHING)
        if not self.decays:
            self.slots = [replace(slot, decay=0.0) for slot in self.slots]
        self.buckets = make_buckets([slot for slot in self.slots if slot.rule == "adamw"])
        device = local(self.slots[0].parameter).device
        wide = torch.float64 if device.type == "cpu" else torch.float32  # what torch's fused AdamW reads of a GPU
        self.rates = {slot.multiplier: torch.zeros((), dtype=wide, device=device) for slot in self.slots}
        self.share, self.shrink = config.share or 0.0, config.shrink or 0.0
        # adapters are no copies: the mean of their products is not the product of their means
        experts = [s for s in self.slots if "experts" in s.name.split(".") and not is_adapter(s.name)]
        self.copies = experts if self.share or self.shrink else []

    @property
    def skipped(self) -> Tensor:
        """How many steps were skipped, since the run began."""
        count: Tensor = self.param_groups[0]["skipped"]
        return count

    @property
    def in_a_row(self) -> Tensor:
        """How many of the last steps were skipped, one after the other."""
        count: Tensor = self.param_groups[0]["in_a_row"]
        return count

    @torch.no_grad()
    def clip(self, reduce: Reduce | None = None, elsewhere: Container[str] = ()) -> Tensor:
        """Returns the global norm of all gradients. The next step scales them to a norm of at most `config.clip` as it
        reads them, so that clipping costs no pass of its own; it may overwrite them. `elsewhere`: parameters that
        another pipeline stage has too, and counts."""
        gradients = {slot.name: slot.gradient for slot in self.slots}
        norm = global_norm([grad for name, grad in gradients.items() if name not in elsewhere], reduce)
        self.excess = ((norm + 1e-6) / self.config.clip).clamp(min=1.0) if self.config.clip else None
        return norm

    def pace(self, lr: float) -> None:
        """Sets the learning rate, on the device: a step that is recorded (record.py) reads it there."""
        for multiplier, rate in self.rates.items():
            rate.fill_(lr * multiplier)

    @torch.no_grad()
    def step(self, lr: float | None = None, skip: Tensor | None = None) -> None:  # type: ignore[override]  # no closure
        """One update, at the rate that is set if none is given. Where `skip` (a bool on the device, the same on every
        rank) is true, nothing changes but the count of skipped steps: not a weight, not a moment, not the step number
        of the bias correction."""
        if lr is not None:
            self.pace(lr)
        skip, excess = self.never if skip is None else skip, self.excess
        self.excess = None
        later = dict[str, int]()  # copies of those whose update pulls their gradients as it reads them
        for slot in self.copies if self.share else []:
            whole = slot.rule == "adamw" and len(local(slot.gradient)) == len(slot.gradient)
            if whole and updates.mixed(tensors_of(slot)[0]):
                later[slot.name] = len(slot.gradient) // self.slices
            else:
                pull_(slot.gradient, self.slices, self.share)
        for bucket in self.buckets:
            adamw_(bucket, self.config, self.rates[bucket[0].multiplier], skip, excess, self.share, later)
        for slot in self.slots:
            if slot.rule == "muon":
                muon_(slot, self.config, self.rates[slot.multiplier], skip, excess)
        self.skipped.add_(skip)
        self.in_a_row.add_(1).mul_(skip)
        torch.maximum(self.longest, self.in_a_row, out=self.longest)

    def without_decay(self) -> dict[str, float]:
        """Decays no weight from now on; returns, by name, the share that a step has taken at a learning rate of 1."""
        taken = {slot.name: slot.decay * slot.multiplier for slot in self.slots}
        self.decays = False
        self.follow(self.config)
        return taken

    @torch.no_grad()
    def finish(self, step: int, steps: int) -> None:
        """After a step: what a run's end needs of it, and after the last one what ends the run."""
        if self.config.average:
            self.average(step, steps)
        else:
            self.param_groups[0]["averaged"] = 0  # the next checkpoint has no mean
        if step == steps and self.shrink:
            for slot in self.copies:
                pull_(slot.master, self.slices, self.shrink)
                copy_where_apart([local(slot.parameter)], [local(slot.master)])

    def average(self, step: int, steps: int) -> None:
        """Adds a step's weights to the mean of the last ones; after the run's last step the mean takes their place."""
        first, group = steps - round(self.config.average * steps) + 1, self.param_groups[0]
        if step < first:
            return
        group["averaged"] = 1 if step == first else group["averaged"] + 1  # of a resume that asks for it late: the rest
        pairs = [(local(slot.state["mean"]), local(slot.master)) for slot in self.slots]
        means, masters = [mean for mean, _ in pairs], [master for _, master in pairs]
        torch._foreach_lerp_(means, masters, 1 / group["averaged"])
        if step == steps:
            torch._foreach_copy_(masters, means)
            copy_where_apart([local(slot.parameter) for slot in self.slots], masters)

    def state_dict(self) -> dict[str, Any]:
        """The live tensors by parameter name: a checkpoint loader may fill them in place."""
        tensors = {f"{kind}.{name}": tensor for name, p in self.named for kind, tensor in self.state[p].items()}
        return {"skipped": self.skipped, **tensors}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        fill(self.state_dict(), state, "optimiser")


@torch.no_grad()
def fill(own: Mapping[str, Tensor], state: Mapping[str, Tensor], what: str) -> None:
    if odd := sorted(own.keys() ^ state.keys()):
        where = "the checkpoint lacks it" if odd[0] in own else "only the checkpoint has it"
        raise ValueError(
            f"the {what}'s state does not fit at {odd[0]!r} ({where}); resume with the config that made the checkpoint"
        )
    for name, tensor in own.items():
        tensor.copy_(state[name])


def settled(config: OptimConfig, moe: MoESpec | None) -> OptimConfig:
    """The config with what follows from the model. Raises a ValueError for what copies do if nothing is a copy."""
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


def make_slot(config: OptimConfig, name: str, parameter: nn.Parameter, state: dict[str, Tensor]) -> Slot:
    """The Slot of a parameter: its name and shape decide how it is updated."""
    words = name.split(".")
    router, outside = "router" in words, bool(OUTSIDE & set(words))
    vector = parameter.ndim < 2 or words[-1].endswith("bias") or any(word.endswith("norm") for word in words)
    vector = vector or words[-1] == "A_log"  # the decay of a state, which has a row for each channel
    decay = config.weight_decay if not vector and (config.router_decay or not router) else 0.0
    for group in config.groups:
        if group.decay is not None and group.holds(name):
            decay = group.decay
    # a shared expert's gate is a matrix of one row: no directions to tell apart
    matrix = not (vector or router or outside) and min(parameter.shape[-2:]) > 1
    rule = "muon" if config.name == "muon" and matrix else "adamw"
    return Slot(name, parameter, rule, decay, multiplier(config, name), state)


def multiplier(config: OptimConfig, name: str) -> float:
    """What a parameter's learning rate is multiplied with; 0: it is frozen."""
    rates = [group.lr for group in config.groups if group.holds(name)]
    if rates:
        return float(rates[-1])
    words = name.split(".")
    if "router" in words:
        return 1.0 if config.router_lr is None else config.router_lr
    return config.expert_lr if "experts" in words else config.embed_lr if OUTSIDE & set(words) else 1.0


def freeze(model: nn.Module, *configs: OptimConfig) -> bool:
    """Marks the parameters that stay as they are by all of these configs, so that no gradient is made of them. Returns
    whether that is new of any."""
    names = [plain_name(name) for name, _ in model.named_parameters()]
    learned = set[str]().union(*(learning(config, names) for config in configs))
    changed = [p for name, p in model.named_parameters() if p.requires_grad != (plain_name(name) in learned)]
    for parameter in changed:
        parameter.requires_grad_(not parameter.requires_grad)
    return bool(changed)


def learning(config: OptimConfig, names: Sequence[str]) -> set[str]:
    """Those of a model's parameters that learn: where there are adapters, of these alone."""
    adapters = [name for name in names if is_adapter(name)]
    return {name for name in adapters or names if multiplier(config, name)}


def check_groups(config: OptimConfig, names: Sequence[str]) -> None:
    """Raises a ValueError for a group that holds no parameter of the whole model, and where all of it is frozen."""
    for number, group in enumerate(config.groups):
        if not any(group.holds(name) for name in names):
            known = dict.fromkeys(word for name in names for word in name.split(".") if not word.isdecimal())
            raise ValueError(
                f"optim.groups.{number}.match is {group.match!r}, which no parameter's name has"
                f"{nearest(group.match, list(known))}; names are made of {', '.join(known)}, and layers of numbers"
            )
    if not learning(config, names):
        raise ValueError("optim freezes every parameter of the model; give some a learning rate above 0")


def fresh_state(config: OptimConfig, slot: Slot) -> dict[str, Tensor]:
    master = slot.parameter.detach()
    state = {}
    if master.dtype not in (torch.float32, torch.float64):
        master = state["master"] = master.to(torch.float32)
    if config.average:
        state["mean"] = torch.zeros_like(master)
    dtype = torch.bfloat16 if config.moments == "bfloat16" else master.dtype
    if slot.rule == "muon":
        return state | {"momentum": torch.zeros_like(master, dtype=dtype)}
    for kind in ("exp_avg", "exp_avg_sq"):
        state[kind] = torch.zeros_like(master, dtype=dtype)
    return state | {"step": torch.zeros((), dtype=torch.float32, device=local(master).device)}


def make_buckets(slots: Sequence[Slot]) -> list[list[Slot]]:
    """The slots in groups, each of which one fused call can update."""
    buckets: dict[tuple[float, float, torch.dtype], list[list[Slot]]] = {}
    for slot in slots:
        same = buckets.setdefault((slot.decay, slot.multiplier, slot.master.dtype), [[]])
        if same[-1] and sum(local(s.parameter).numel() for s in [*same[-1], slot]) > BUCKET:
            same.append([])
        same[-1].append(slot)
    return [bucket for same in buckets.values() for bucket in same]


def tensors_of(slot: Slot) -> tuple[list[Tensor], Tensor]:
    """What an update by AdamW reads and writes, of this rank: weight, master, gradient and moments; and its steps."""
    state, own = slot.state, slot.parameter
    parts = [own, state.get("master", own), slot.gradient, state["exp_avg"], state["exp_avg_sq"]]
    # what belongs to a plain parameter is plain
    return [local(part) for part in parts] if isinstance(own, DTensor) else parts, state["step"]


def adamw_(
    slots: Sequence[Slot], config: OptimConfig, rate: Tensor, skip: Tensor, excess: Tensor | None,
    share: float = 0.0, copies: Mapping[str, int] = MappingProxyType({}),
) -> None:  # fmt: skip
    """torch's fused AdamW, whose `found_inf` is the skip and whose `grad_scale` divides gradients. It wants one dtype,
    hence the copies of bf16 tensors, unless our own kernel reads them as they are. `copies`: of how many copies each is
    whose gradients are still to be pulled together by `share`."""
    decay = slots[0].decay
    mixed: list[tuple[list[Tensor], Tensor, int]] = []
    same: list[tuple[list[Tensor], Tensor]] = []
    every = [tensors_of(slot) for slot in slots]
    several = len({t.dtype for parts, _ in every for t in parts}) > 1
    for slot, (parts, step) in zip(slots, every, strict=True):
        if several and updates.mixed(parts):
            mixed.append((parts, step, copies.get(slot.name, 0)))
        else:
            same.append((parts, step))
    divisor = None if excess is None else excess.float()
    for (parameter, master, gradient, mean, square), step, together in mixed:
        copy = parameter if parameter.dtype != master.dtype else None
        updates.adamw_(
            master, gradient, mean, square, copy, step, skip, divisor,
            lr=rate, decay=decay, beta1=config.beta1, beta2=config.beta2, eps=config.eps,
            share=share if together else 0.0, copies=together or 1,
        )  # fmt: skip
    if mixed:
        # a list of it: given one tensor for all, torch asks the device for its number, and the host waits for the step
        torch._foreach_add_([step for _, step, _ in mixed], [(~skip).float()] * len(mixed))
    if not same:
        return
    parameters, masters, raw, *moments = (list(tensors) for tensors in zip(*[parts for parts, _ in same], strict=True))
    first, second, gradients = (as_wide(each, masters) for each in (*moments, raw))
    if excess is not None and masters[0].dtype == torch.float64:  # which a float32 grad_scale would round
        gradients, divisor = list(torch._foreach_div(gradients, excess)), None
    adamw(
        masters,
        gradients,
        first,
        second,
        [],
        [step for _, step in same],
        fused=True,
        grad_scale=divisor,
        found_inf=skip.float(),
        amsgrad=False,
        beta1=config.beta1,
        beta2=config.beta2,
        lr=rate,
        weight_decay=decay,
        eps=config.eps,
        maximize=False,
    )
    copy_where_apart([*moments[0], *moments[1]], [*first, *second])
    copy_where_apart(parameters, masters)


def as_wide(tensors: Sequence[Tensor], masters: Sequence[Tensor]) -> list[Tensor]:
    return [t if t.dtype == m.dtype else t.to(m.dtype) for t, m in zip(tensors, masters, strict=True)]


def copy_where_apart(stored: Sequence[Tensor], used: Sequence[Tensor]) -> None:
    pairs = [(k, u) for k, u in zip(stored, used, strict=True) if k.dtype != u.dtype]
    if pairs:
        torch._foreach_copy_([k for k, _ in pairs], [u for _, u in pairs])


def muon_(slot: Slot, config: OptimConfig, rate: Tensor, skip: Tensor, excess: Tensor | None) -> None:
    """Momentum, orthogonalised: every direction of a matrix learns at the same speed (arXiv 2502.16982).

    The factor 0.2 * sqrt(larger side) gives the update the size of AdamW's, so that both share rate and decay.
    """
    tensors = local(slot.master), local(slot.state["momentum"]), local(slot.gradient)
    # stacked experts a few at a time: the steps below need six times the memory of what they work on
    count = len(tensors[0])
    if tensors[0].ndim > 2 and has_whole_matrices(slot.parameter):
        count = min(count, max(PIECE // math.prod(tensors[0].shape[1:]), 1))
    for master, stored, raw in zip(*(torch.split(t, count) for t in tensors), strict=True):
        gradient = raw.to(master.dtype) if excess is None else raw.to(master.dtype) / excess
        momentum = config.momentum * stored.to(master.dtype) + gradient
        nesterov = gradient + config.momentum * momentum
        update = on_whole_matrices(muon_update, nesterov, slot.parameter)
        new = master * (1 - rate * slot.decay) - rate * update
        stored.copy_(torch.where(skip, stored, momentum.to(stored.dtype)))
        master.copy_(torch.where(skip, master, new))
    copy_where_apart([local(slot.parameter)], [tensors[0]])


def muon_update(x: Tensor) -> Tensor:
    """Each matrix, in the last two dimensions, by itself: each expert's, and its gate apart from its up."""
    return (orthogonalize(x) * (0.2 * math.sqrt(max(x.shape[-2:])))).to(x.dtype)


def orthogonalize(x: Tensor) -> Tensor:
    """About U V^T of x = U S V^T, for every matrix of a batch, by five Newton-Schulz steps: matrix products only.

    Five steps of bf16 are accurate enough (the singular values stay spread anyway); a CPU is no faster in bf16. Rows of
    zeros, which pad uneven experts, stay zeros.
    """
    a, b, c = NEWTON_SCHULZ
    tall = x.shape[-2] > x.shape[-1]
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    x = x.to(torch.bfloat16) if x.is_cuda else x
    x = x.mT if tall else x
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


def has_whole_matrices(like: Tensor) -> bool:
    """Whether no matrix of the tensor, in its last two dimensions, is divided between ranks."""
    return not isinstance(like, DTensor) or not any(divides_matrices(p, like) for p in like.placements)


def divides_matrices(placement: Placement, like: Tensor) -> bool:
    return not placement.is_replicate() and placement.dim >= like.ndim - 2  # type: ignore[attr-defined]  # a shard


def on_whole_matrices(function: Callable[[Tensor], Tensor], shard: Tensor, like: Tensor) -> Tensor:
    """Applies `function` to the whole matrices that `shard` is a part of, and returns this rank's part of the result.
    `shard`: this rank's part of a tensor sharded as `like` is. Only matrices are gathered, not the stack of them:
    nothing comes here of experts that are on other ranks."""
    if has_whole_matrices(like) or not isinstance(like, DTensor):
        return function(shard)
    mesh, placements = like.device_mesh, like.placements
    apart = [Replicate() if divides_matrices(p, like) else p for p in placements]
    part = DTensor.from_local(shard, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())
    whole = part.redistribute(mesh, apart)
    done = DTensor.from_local(
        function(whole.to_local()), mesh, apart, run_check=False, shape=like.shape, stride=like.stride()
    )
    return done.redistribute(mesh, placements).to_local()


def global_norm(gradients: Sequence[Tensor], reduce: Reduce | None = None) -> Tensor:
    """The 2-norm of all gradients as one vector, the same on every rank, on the device.

    DTensors of one placement share one small all-reduce; parts that are replicated are not counted twice. Experts and
    dense weights may live on different meshes. `reduce` adds up the squares of ranks with other parameters.
    """
    groups = defaultdict[object, list[Tensor]](list)
    for g in gradients:
        key = (g.device_mesh, g.placements) if isinstance(g, DTensor) else None
        assert key is None or not any(isinstance(p, Partial) for p in key[1]), "gradients are not reduced yet"
        groups[key].append(g)
    squares = []
    for group in groups.values():
        parts = [local(g) for g in group] if isinstance(group[0], DTensor) else group
        dtypes = dict.fromkeys([part.dtype for part in parts])
        wide = torch.float64 if torch.float64 in dtypes else torch.float32
        # a dtype at a time: of several torch reads each tensor by itself, at a fifth of the memory's speed
        kinds = [[part for part in parts if part.dtype == dtype] for dtype in dtypes]
        norms = [norm for kind in kinds for norm in torch._foreach_norm(kind, 2.0, dtype=wide)]
        square = torch.stack(norms).square().sum()
        if isinstance(group[0], DTensor):
            sums = [Replicate() if isinstance(p, Replicate) else Partial() for p in group[0].placements]
            square = DTensor.from_local(square, group[0].device_mesh, sums, run_check=False).full_tensor()
        squares.append(square)
    total = torch.stack(squares).sum()
    return (total if reduce is None else reduce(total)).sqrt()


class SpikeGuard:
    """Finds steps whose loss or gradient norm is far above the last steps' mean, in deviations; all on the device.

    Give it values that are equal on every rank, or ranks would skip different steps. A spike enters the window as well:
    a level that has really changed widens the deviation and is soon normal again. NaN and Inf never enter. Quiet until
    half the window is full.
    """

    def __init__(self, config: OptimConfig, device: torch.device | str = "cpu") -> None:
        self.sigma = config.spike_sigma
        self.values = torch.zeros(2, config.spike_window, dtype=torch.float64, device=device)  # losses, norms
        self.seen = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def spike(self, loss: Tensor, norm: Tensor) -> Tensor:
        """A bool on the device, whether to skip this step; its values join the window."""
        new = torch.stack([loss.detach(), norm.detach()]).double()
        window = self.values.shape[1]
        place = torch.arange(window, device=new.device)
        full = place < self.seen
        count = full.sum().clamp(min=1)
        mean = self.values.sum(1) / count
        deviation = (((self.values - mean[:, None]) * full).square().sum(1) / count).sqrt()
        # a run of equal values has no deviation; rounding alone is no spike
        far = new > mean + self.sigma * torch.maximum(deviation, 1e-6 * mean.abs())
        finite = new.isfinite().all()
        flag = far.any() & finite & (self.seen >= window // 2) & (self.sigma > 0)
        here = (place == self.seen % window) & finite
        self.values.copy_(torch.where(here, new[:, None], self.values))
        self.seen += finite
        return flag

    def state_dict(self) -> dict[str, Tensor]:
        return {"values": self.values, "seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if state["values"].shape != self.values.shape:
            return  # another window, which starts anew
        older = {"flagged"}  # a key of older checkpoints
        fill(self.state_dict(), {name: state[name] for name in state.keys() - older}, "spike guard")
