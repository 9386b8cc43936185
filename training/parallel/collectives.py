"""Sum, gather and scatter tensors over ranks; exchange values as JSON and tensors as safetensors.

Nothing is pickled, so data from another rank cannot run code. A group of one rank is None.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Group = dist.ProcessGroup
# torch 2.13 renamed these two
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part as a plain tensor that shares memory with `tensor` and keeps its gradient.

    It is not detached: detaching a DTensor takes 25 us on the host, and an optimiser calls this about a thousand times
    a step while the device waits."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def box(tensor: Tensor) -> list[tuple[int, int]]:
    """Return [first, last) of each dimension for this rank's part of the whole tensor."""
    if not isinstance(tensor, DTensor):
        return [(0, size) for size in tensor.shape]
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return [(first, first + size) for first, size in zip(offset, shape, strict=True)]


# ---- tensors


def all_reduce(x: Tensor, group: Group | None) -> Tensor:
    """Return the sum over a group as a new tensor; a group of one returns `x` itself."""
    if group is None:
        return x
    y = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(y, group=group)
    return y


def all_gather(x: Tensor, group: Group) -> Tensor:
    """Return all ranks' rows, in order of ranks."""
    out = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    all_gather_single(out, x.contiguous(), group=group)
    return out


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Return this rank's rows of the sum over ranks."""
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    reduce_scatter_single(out, x.contiguous(), group=group)
    return out


# ---- values


def broadcast(value: Any, source: int = 0) -> Any:
    """Return rank `source`'s value, which JSON must hold, on every rank. All ranks must call this together."""
    if not dist.is_initialized():
        return value
    return json.loads(broadcast_bytes(json.dumps(value).encode() if dist.get_rank() == source else b"", source))


def broadcast_tensors(tensors: Mapping[str, Tensor], source: int = 0) -> dict[str, Tensor]:
    """Return rank `source`'s tensors, in host memory, on every rank. All ranks must call this together."""
    if not dist.is_initialized():
        return dict(tensors)
    return load(broadcast_bytes(save(dict(tensors)) if dist.get_rank() == source else b"", source))


def broadcast_bytes(data: bytes, source: int) -> bytes:
    length = torch.tensor([len(data)])
    dist.broadcast(length, source)  # in host memory, so gloo carries it even next to NCCL
    buffer = torch.zeros(int(length), dtype=torch.uint8)
    if data:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(buffer, source)
    return buffer.numpy().tobytes()


def gather(value: Any, group: Group | None = None, device: torch.device | str = "cpu") -> list[Any]:
    """Return every rank's value, in order of ranks, as `broadcast` does. `device`: the device on which the group
    communicates, which for a mesh's groups is the mesh's device."""
    return [json.loads(text) for text in gather_bytes(json.dumps(value).encode(), group, device)]


def gather_bytes(data: bytes, group: Group | None = None, device: torch.device | str = "cpu") -> list[bytes]:
    """Return every rank's bytes, in order of ranks, as `gather` does."""
    if not dist.is_initialized():
        return [data]
    own = torch.frombuffer(bytearray(data or b" "), dtype=torch.uint8).to(device)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([len(data)], device=device), group=group)
    sizes = torch.cat(lengths).tolist()
    buffers = [own.new_zeros(max(1, *sizes)) for _ in sizes]
    dist.all_gather(buffers, torch.cat([own, own.new_zeros(len(buffers[0]) - len(own))]), group=group)
    return [text[:size].cpu().numpy().tobytes() for text, size in zip(buffers, sizes, strict=True)]


@contextmanager
def together(what: str, group: Group | None = None) -> Iterator[None]:
    """Raise an error of any rank on all ranks, naming the first rank that could not do `what`."""
    reason: BaseException | None = None
    try:
        yield
    except BaseException as error:
        reason = error
    problems = gather("" if reason is None else str(reason) or type(reason).__name__, group)
    if reason is not None and not isinstance(reason, OSError | ValueError):
        raise reason
    if isinstance(reason, ValueError) and len(problems) == 1:
        raise reason
    first = next((rank for rank, problem in enumerate(problems) if problem), None)
    if first is not None:
        raise ValueError(f"rank {first} could not {what}: {problems[first]}") from reason
