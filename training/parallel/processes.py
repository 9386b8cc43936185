"""The processes of a run: torchrun starts them, and here they find each other."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

# a rank that waits longer for another one waits for a dead one; loading and checkpoints take minutes
PATIENCE = timedelta(minutes=30)
# torch 2.13's names for what 2.11 calls otherwise
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@contextmanager
def processes(device: str = "", patience: timedelta = PATIENCE) -> Iterator[torch.device]:
    """Within, torch.distributed works if there are several processes; the device is this one's."""
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda":
        kind = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    own = torch.device(kind)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield own
        return
    # gloo beside NCCL: what lies in host memory is talked about there
    backend = "cpu:gloo,cuda:nccl" if own.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=patience, device_id=own if own.type == "cuda" else None, **meeting_place())
    yield own
    dist.destroy_process_group()  # not after an error: the others still wait for this rank, until torchrun ends them


def meeting_place() -> dict[str, Any]:
    """Of one node's torchrun: a part of its store for each start of the run. The store outlives a restart, and in it
    the addresses of those who died. Several nodes may count restarts differently; there torchrun itself is told to make
    a new store (configs/launch/slurm.sbatch)."""
    start, world = os.environ.get("TORCHELASTIC_RESTART_COUNT"), os.environ["WORLD_SIZE"]
    if start is None or os.environ.get("LOCAL_WORLD_SIZE") != world:
        return {}
    store, rank, _ = next(rendezvous("env://"))
    return {"store": PrefixStore(f"start/{start}", store), "rank": rank, "world_size": int(world)}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def broadcast(value: Any, source: int = 0) -> Any:
    """What rank `source` says: anything that JSON can hold, and nothing that could run. For all ranks at once."""
    if not dist.is_initialized():
        return value
    said = json.dumps(value).encode() if dist.get_rank() == source else b""
    length = torch.tensor([len(said)])
    dist.broadcast(length, source)  # host memory: over gloo, also where there is NCCL
    letters = torch.zeros(int(length), dtype=torch.uint8)
    if said:
        letters.copy_(torch.frombuffer(bytearray(said), dtype=torch.uint8))
    dist.broadcast(letters, source)
    return json.loads(bytes(letters.tolist()))


def gather(value: Any, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu") -> list[Any]:
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
