"""Update matrices with Muon: orthogonalised momentum.

torch.optim.Muon takes plain matrices only. Ours are stacks of experts or parts of DTensors, and a step is skipped
without waiting for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate

from training.optim.config import OptimConfig
from training.optim.slots import Slot, copy_masters
from training.parallel.collectives import local

PIECE = 2**26  # elements that are processed at once
# Keller Jordan's quintic: its slope at 0 is as steep as possible, and singular values end within 0.7 ... 1.2
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def muon_(slot: Slot, config: OptimConfig, rate: Tensor, skip: Tensor, excess: Tensor | None) -> None:
    """Update a parameter so that every direction of a matrix learns at the same speed (arXiv 2502.16982)."""
    tensors = local(slot.master), local(slot.state["momentum"]), local(slot.gradient)
    # a few experts at a time: the steps below need six times the memory of their input
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
    copy_masters([slot])


def muon_update(x: Tensor) -> Tensor:
    """Return the update of each matrix separately: each expert, and its gate apart from its up. The factor gives the
    update the size of AdamW's, so that both share rate and decay."""
    return (orthogonalize(x) * (0.2 * math.sqrt(max(x.shape[-2:])))).to(x.dtype)


def orthogonalize(x: Tensor) -> Tensor:
    """Return about U V^T of x = U S V^T, for every matrix of a batch, by five Newton-Schulz steps.

    Steps in bf16 are accurate enough; a CPU uses float32, because bf16 is not faster there. Rows of zeros, which pad
    uneven experts, stay zeros.
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
    """Return whether every matrix of the tensor (its last two dimensions) lies on one rank."""
    return not isinstance(like, DTensor) or not any(divides_matrices(p, like) for p in like.placements)


def divides_matrices(placement: Placement, like: Tensor) -> bool:
    return not placement.is_replicate() and placement.dim >= like.ndim - 2  # type: ignore[attr-defined]  # a shard


def on_whole_matrices(function: Callable[[Tensor], Tensor], shard: Tensor, like: Tensor) -> Tensor:
    """Apply `function` to the whole matrices of a shard and return this rank's part of the result. `shard` is divided
    like `like`. Experts of other ranks are not gathered."""
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
