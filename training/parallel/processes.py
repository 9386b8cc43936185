"""The processes of a run: torchrun starts them, and here they find each other."""

from __future__ import annotations

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


@contextmanager
def processes(device: str = "", patience: timedelta = PATIENCE) -> Iterator[torch.device]:
    """Context in which torch.distributed works, if there are several processes; yields this process's device."""
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda":
        kind = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    own = torch.device(kind)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield own
        return
    # gloo beside NCCL: it carries tensors in host memory
    backend = "cpu:gloo,cuda:nccl" if own.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=patience, device_id=own if own.type == "cuda" else None, **meeting_place())
    yield own
    dist.destroy_process_group()  # not after an error: the others still wait for this rank, until torchrun ends them


def meeting_place() -> dict[str, Any]:
    """Arguments of init_process_group that give each start of a one-node run its own part of torchrun's store: the
    store outlives a restart and still holds the addresses of processes that died. Several nodes may count restarts
    differently; there torchrun itself is told to make a new store (configs/launch/slurm.sbatch)."""
    start, world = os.environ.get("TORCHELASTIC_RESTART_COUNT"), os.environ["WORLD_SIZE"]
    if start is None or os.environ.get("LOCAL_WORLD_SIZE") != world:
        return {}
    store, rank, _ = next(rendezvous("env://"))
    return {"store": PrefixStore(f"start/{start}", store), "rank": rank, "world_size": int(world)}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
