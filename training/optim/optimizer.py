"""Update weights with AdamW, or Muon for matrices; clip gradients; skip steps without waiting for the device.

    optimiser = Optimizer(config, model.named_parameters())
    guard = SpikeGuard(config, device)
    for step in range(steps):
        ...backward of every micro-batch...
        norm = optimiser.clip()                            # a device tensor: nothing waits
        skip = ~norm.isfinite() | guard.spike(loss, norm)
        optimiser.step(rate(step), skip)

A parameter in float32 (or 64) is its own master. A parameter in a lower dtype gets a float32 master in the optimiser's
state, which is updated and then rounded into the parameter. Runs keep parameters in float32 and cast them for compute:
4 bytes a weight instead of 2 + 4, gradients that add up in float32, and one copy in the checkpoint.

Nothing here knows a mesh: the state of a DTensor is a DTensor of the same placement, AdamW works on local shards, and
Muon gathers divided matrices. torch's AdamW and Muon have no masters, no mean of weights and no skip.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from training.kernels import updates
from training.model.names import plain_name
from training.optim.adamw import adamw_, make_buckets, tensors_of
from training.optim.config import OptimConfig, settled
from training.optim.copies import is_stack, pull_
from training.optim.guard import Reduce, global_norm
from training.optim.muon import muon_
from training.optim.slots import Slot, copy_masters, make_slot
from training.parallel.collectives import local
from upcycle.arch.spec import MoESpec

NOTHING = (
    "this rank's part of the model has no parameter to train; give some a learning rate above 0 in optim.groups, or "
    "take a smaller mesh.pp"
)


class Optimizer(torch.optim.Optimizer):
    """A torch optimiser (`state`, `param_groups`) whose `step` takes a rate and a skip."""

    def __init__(
        self, config: OptimConfig, parameters: Iterable[tuple[str, nn.Parameter]], moe: MoESpec | None = None
    ) -> None:
        """Take loaded and sharded parameters by role (upcycle/arch/spec.py). `moe` says which experts are copies."""
        named = [(plain_name(name), p) for name, p in parameters if p.requires_grad]
        if not named:
            raise ValueError(NOTHING)
        # one group: differences between parameters follow from their names, so checkpoints need not store them
        super().__init__([{"params": [p for _, p in named], "name": "all"}], {"fused": True})
        self.named, self.moe, self.decays = named, moe, True
        for name, p in named:
            self.state[p] = fresh_state(config, make_slot(config, name, p, {}))
        self.follow(config)
        self.slices = 1 if moe is None else moe.granularity
        device = local(named[0][1]).device
        self.never = torch.zeros((), dtype=torch.bool, device=device)
        self.excess: Tensor | None = None  # the next step divides gradients by this
        # skipped steps: since the run began, in a row until now, and the longest row in this process
        self.skipped, self.in_a_row, self.longest = (
            torch.zeros((), dtype=torch.int64, device=device) for _ in range(3)
        )
        # saved in checkpoints, with the number of steps in the mean; a resume fills the tensors in place. Checkpoints
        # of older versions have no shrink, because their runs pulled the masters at the end: it is 0 until a step ends
        self.param_groups[0] |= {"skipped": self.skipped, "in_a_row": self.in_a_row, "averaged": 0, "shrink": 0.0}

    def follow(self, config: OptimConfig) -> None:
        """Use `config` from now on for parameters with gradients; the others keep their weights and moments."""
        self.config = config = settled(config, self.moe)
        self.slots = [make_slot(config, name, p, self.state[p]) for name, p in self.named if p.requires_grad]
        if not self.slots:
            raise ValueError(NOTHING)
        if not self.decays:
            self.slots = [replace(slot, decay=0.0) for slot in self.slots]
        self.buckets = make_buckets([slot for slot in self.slots if slot.rule == "adamw"])
        device = local(self.slots[0].parameter).device
        # the dtype that torch's fused AdamW reads on a GPU
        wide = torch.float64 if device.type == "cpu" else torch.float32
        self.rates = {slot.multiplier: torch.zeros((), dtype=wide, device=device) for slot in self.slots}
        self.share, self.shrink = config.share or 0.0, config.shrink or 0.0
        self.copies = [slot for slot in self.slots if is_stack(slot.name)] if self.share else []

    @torch.no_grad()
    def clip(self, reduce: Reduce | None = None, elsewhere: Container[str] = ()) -> Tensor:
        """Return the global norm of all gradients. The next step scales them to at most `config.clip` while it reads
        them, so that clipping needs no extra pass. `elsewhere`: parameters that another pipeline stage counts."""
        gradients = {slot.name: slot.gradient for slot in self.slots}
        norm = global_norm([grad for name, grad in gradients.items() if name not in elsewhere], reduce)
        self.excess = ((norm + 1e-6) / self.config.clip).clamp(min=1.0) if self.config.clip else None
        return norm

    def pace(self, lr: float) -> None:
        """Set the learning rate on the device, where a recorded step (record.py) reads it."""
        for multiplier, rate in self.rates.items():
            rate.fill_(lr * multiplier)

    @torch.no_grad()
    def step(self, lr: float | None = None, skip: Tensor | None = None) -> None:  # type: ignore[override]  # no closure
        """Update once, at rate `lr` or at the rate that was set. If `skip` (a bool on the device, equal on every rank)
        is true, only the count of skipped steps changes: no weight, no moment, no step of the bias correction."""
        if lr is not None:
            self.pace(lr)
        skip, excess = self.never if skip is None else skip, self.excess
        self.excess = None
        later = dict[str, int]()  # copies of experts whose update pulls their gradients while reading them
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
        """Stop weight decay from now on; return by name the decay of one step at a learning rate of 1."""
        taken = {slot.name: slot.decay * slot.multiplier for slot in self.slots}
        self.decays = False
        self.follow(self.config)
        return taken

    @torch.no_grad()
    def finish(self, step: int, steps: int, last: bool = True) -> None:
        """End a step of a stage. In the `last` stage update the mean of weights, which replaces them after the last
        step."""
        self.param_groups[0]["shrink"] = self.shrink
        if last and self.config.average:
            self.average(step, steps)
        elif last:
            self.param_groups[0]["averaged"] = 0  # the next checkpoint stores no mean

    @property
    def pulled(self) -> list[Slot]:
        """Return the experts that differ in use from what is trained, also those that do not learn now."""
        experts = [(name, p) for name, p in self.named if self.param_groups[0]["shrink"] and is_stack(name)]
        return [make_slot(self.config, name, p, self.state[p]) for name, p in experts]

    @contextmanager
    def viewed(self) -> Iterator[None]:
        """Show weights as a validation and an export use them: copies are pulled together, and afterwards every bit is
        restored. All ranks call this together."""
        slots = self.pulled
        masters = [local(slot.master.detach()) for slot in slots]
        before = [master.clone() for master in masters]
        try:
            for slot in slots:
                pull_(slot.master, self.slices, self.param_groups[0]["shrink"])
            copy_masters(slots)
            yield
        finally:
            for master, old in zip(masters, before, strict=True):
                master.copy_(old)
            copy_masters(slots)

    def average(self, step: int, steps: int) -> None:
        """Add a step's weights to the mean of the last steps; after the last step the mean replaces them."""
        first, group = steps - round(self.config.average * steps) + 1, self.param_groups[0]
        if step < first:
            return
        # a resume that asks for it late averages the rest
        group["averaged"] = 1 if step == first else group["averaged"] + 1
        pairs = [(local(slot.state["mean"]), local(slot.master)) for slot in self.slots]
        means, masters = [mean for mean, _ in pairs], [master for _, master in pairs]
        torch._foreach_lerp_(means, masters, 1 / group["averaged"])
        if step == steps:
            torch._foreach_copy_(masters, means)
            copy_masters(self.slots)


def fresh_state(config: OptimConfig, slot: Slot) -> dict[str, Tensor]:
    """Return the optimiser's state of a parameter before its first step."""
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
