"""Update parameters with AdamW, in buckets that one fused call can update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from training.kernels import updates
from training.optim.config import OptimConfig
from training.optim.slots import Slot, copy_where_apart
from training.parallel.collectives import local

BUCKET = 2**27  # elements that one fused call updates, which bounds the temporary float32 copies of bf16 tensors


def make_buckets(slots: Sequence[Slot]) -> list[list[Slot]]:
    """Return the slots in groups that one fused call can update."""
    buckets: dict[tuple[float, float, torch.dtype], list[list[Slot]]] = {}
    for slot in slots:
        same = buckets.setdefault((slot.decay, slot.multiplier, slot.master.dtype), [[]])
        if same[-1] and sum(local(s.parameter).numel() for s in [*same[-1], slot]) > BUCKET:
            same.append([])
        same[-1].append(slot)
    return [bucket for same in buckets.values() for bucket in same]


def tensors_of(slot: Slot) -> tuple[list[Tensor], Tensor]:
    """Return this rank's weight, master, gradient and moments, which an update reads and writes, and its steps."""
    state, own = slot.state, slot.parameter
    parts = [own, state.get("master", own), slot.gradient, state["exp_avg"], state["exp_avg_sq"]]
    # the state of a plain parameter is plain
    return [local(part) for part in parts] if isinstance(own, DTensor) else parts, state["step"]


def adamw_(
    slots: Sequence[Slot], config: OptimConfig, rate: Tensor, skip: Tensor, excess: Tensor | None,
    share: float = 0.0, copies: Mapping[str, int] = MappingProxyType({}),
) -> None:  # fmt: skip
    """Update parameters with torch's fused AdamW. Its `found_inf` is the skip, and its `grad_scale` divides gradients.

    The fused call needs one dtype, so bf16 tensors are copied, unless our own kernel can read them directly. `copies`:
    the number of copies of each expert whose gradients must still be pulled together by `share`.
    """
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
        # pass a list: for a single tensor torch reads its value from the device, and the host waits
        torch._foreach_add_([step for _, step, _ in mixed], [(~skip).float()] * len(mixed))
    if not same:
        return
    parameters, masters, raw, *moments = (list(tensors) for tensors in zip(*[parts for parts, _ in same], strict=True))
    first, second, gradients = (as_wide(each, masters) for each in (*moments, raw))
    if excess is not None and masters[0].dtype == torch.float64:  # a float32 grad_scale would round these
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
