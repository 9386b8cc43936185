"""What ranks tell each other: tensors summed, gathered and scattered; values as JSON and tensors as safetensors.

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
# torch 2.13's names for what 2.11 calls otherwise
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's part, as a plain tensor that shares its memory; in the graph, where gradients are recorded.

    Not detached here: that would go through torch's dispatch for DTensors, 25 us of a host's time, and an optimiser
    asks some thousand times a step while the device waits for it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# ---- tensors


def all_reduce(x: Tensor, group: Group | None) -> Tensor:
    """The sum over a group, as a new tensor; of a group of one, the tensor."""
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
    """What rank `source` says: anything that JSON can hold. For all ranks at once."""
    if not dist.is_initialized():
        return value
    return json.loads(broadcast_bytes(json.dumps(value).encode() if dist.get_rank() == source else b"", source))


def broadcast_tensors(tensors: Mapping[str, Tensor], source: int = 0) -> dict[str, Tensor]:
    """What rank `source` has, in host memory. For all ranks at once."""
    if not dist.is_initialized():
        return dict(tensors)
    return load(broadcast_bytes(save(dict(tensors)) if dist.get_rank() == source else b"", source))


def broadcast_bytes(said: bytes, source: int) -> bytes:
    length = torch.tensor([len(said)])
    dist.broadcast(length, source)  # host memory: over gloo, also where there is NCCL
    letters = torch.zeros(int(length), dtype=torch.uint8)
    if said:
        letters.copy_(torch.frombuffer(bytearray(said), dtype=torch.uint8))
    dist.broadcast(letters, source)
    return letters.numpy().tobytes()


def gather(value: Any, group: Group | None = None, device: torch.device | str = "cpu") -> list[Any]:
    """What each rank says, in order of ranks; as `broadcast`. A mesh's groups may talk on the mesh's device only."""
    if not dist.is_initialized():
        return [value]
    said = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([len(said)], device=device), group=group)
    sizes = torch.cat(lengths).tolist()
    letters = [said.new_zeros(max(sizes)) for _ in sizes]
    dist.all_gather(letters, torch.cat([said, said.new_zeros(len(letters[0]) - len(said))]), group=group)
    return [json.loads(bytes(text[:size].tolist())) for text, size in zip(letters, sizes, strict=True)]
