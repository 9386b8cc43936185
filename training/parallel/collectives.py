"""Collectives: tensors summed, gathered and scattered over ranks; values exchanged as JSON, tensors as safetensors.

Never a pickle: what comes from another rank is data and cannot run. A group of one rank is None.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor
from torch.distributed.tensor import DTensor

Group = dist.ProcessGroup
# torch 2.13 has new names for these two; 2.11 knows only the old ones
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's part, as a plain tensor that shares memory with `tensor`, and its gradient where one is recorded.

    Not detached here: detaching a DTensor goes through torch's dispatch, 25 us of host time, and an optimiser calls
    this some thousand times a step while the device waits."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# ---- tensors


def all_reduce(x: Tensor, group: Group | None) -> Tensor:
    """The sum over a group, as a new tensor; in a group of one, `x` itself."""
    if group is None:
        return x
    y = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(y, group=group)
    return y


def all_gather(x: Tensor, group: Group) -> Tensor:
    """All ranks' rows, in order of ranks."""
    out = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    all_gather_single(out, x.contiguous(), group=group)
    return out


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """This rank's rows of the sum over ranks."""
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    reduce_scatter_single(out, x.contiguous(), group=group)
    return out


# ---- values


def broadcast(value: Any, source: int = 0) -> Any:
    """Rank `source`'s value, anything that JSON can hold, on every rank. All ranks call this together."""
    if not dist.is_initialized():
        return value
    return json.loads(broadcast_bytes(json.dumps(value).encode() if dist.get_rank() == source else b"", source))


def broadcast_tensors(tensors: Mapping[str, Tensor], source: int = 0) -> dict[str, Tensor]:
    """Rank `source`'s tensors, in host memory on every rank. All ranks call this together."""
    if not dist.is_initialized():
        return dict(tensors)
    return load(broadcast_bytes(save(dict(tensors)) if dist.get_rank() == source else b"", source))


def broadcast_bytes(data: bytes, source: int) -> bytes:
    length = torch.tensor([len(data)])
    dist.broadcast(length, source)  # in host memory, so over gloo even where there is NCCL
    buffer = torch.zeros(int(length), dtype=torch.uint8)
    if data:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(buffer, source)
    return buffer.numpy().tobytes()


def gather(value: Any, group: Group | None = None, device: torch.device | str = "cpu") -> list[Any]:
    """Every rank's value, in order of ranks; otherwise as `broadcast`. `device`: where the group communicates, which
    for a mesh's groups may be the mesh's device only."""
    if not dist.is_initialized():
        return [value]
    own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([len(own)], device=device), group=group)
    sizes = torch.cat(lengths).tolist()
    buffers = [own.new_zeros(max(sizes)) for _ in sizes]
    dist.all_gather(buffers, torch.cat([own, own.new_zeros(len(buffers[0]) - len(own))]), group=group)
    return [json.loads(bytes(text[:size].tolist())) for text, size in zip(buffers, sizes, strict=True)]
