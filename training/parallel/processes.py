"""Connect the processes of a run, which torchrun starts."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from training.parallel.collectives import broadcast, gather
from upcycle.io import disk, publish, strict

# a rank that waits longer waits for a dead one; loading and checkpoints take minutes
PATIENCE = timedelta(minutes=30)
# gloo opens a socket to a peer at its first message: rings and trees need a few per rank, and rank 0's gathers of
# checkpoints need one to every rank
OTHER_FILES = 512
COMPILERS = 0.1  # seconds that an ending process waits for torch's idle compile workers, which take almost one to end
DEATH = 1  # Linux's PR_SET_PDEATHSIG
REMEMBERED = 2000  # collectives that torch's flight recorder keeps; watch.py writes them if a run hangs


def device_here(device: str = "") -> torch.device:
    """Return this process's device, or raise a ValueError if the machine has no such device."""
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda":
        kind = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        own = torch.device(kind)
    except RuntimeError:
        raise ValueError(f"device is {strict.short(device)}; write device=cpu, or device=cuda") from None
    if own.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(
                f"device is {device} and this machine has no such device; write device=cpu, or leave it out"
            )
        if (own.index or 0) >= (count := torch.cuda.device_count()):
            raise ValueError(
                f"this process needs {own}, and this machine has {count} GPUs; write nproc={count} or less"
            )
    return own


@contextmanager
def processes(
    device: str = "", patience: timedelta = PATIENCE, settings: Mapping[str, Any] | None = None
) -> Iterator[torch.device]:
    """Set up torch.distributed if there are several processes, and yield this process's device. Raise a ValueError if
    `settings` differ between ranks."""
    own = device_here(device)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    end_with_torchrun()
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        check_alike(settings or {})
        try:
            yield own
        finally:
            hurry_compilers()
        return
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # else it connects to every peer at once, in each group
    make_room(int(os.environ["WORLD_SIZE"]))
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # its older name
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(REMEMBERED))
    # gloo next to NCCL, for tensors in host memory
    backend = "cpu:gloo,cuda:nccl" if own.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, timeout=patience, device_id=own if own.type == "cuda" else None, **meeting_place(patience)
    )
    check_alike(settings or {})
    try:
        yield own
    finally:
        hurry_compilers()
    dist.destroy_process_group()  # not after an error: others wait for this rank until torchrun ends them


def end_with_torchrun() -> None:
    """Ask Linux to kill this process when its torchrun dies. torchrun normally ends its ranks, but if torchrun itself
    is killed nobody does: each rank has its own session, and a rank that waits for a lost one hears no signal and keeps
    its GPU's memory."""
    if "TORCHELASTIC_RUN_ID" in os.environ and (end := end_with_parent()):
        end()


def end_with_parent() -> Callable[[], object] | None:
    """Return a function with which a process asks Linux to kill it when its parent dies; None on other systems."""
    return partial(ctypes.CDLL(None).prctl, DEATH, int(signal.SIGKILL)) if sys.platform == "linux" else None


def hurry_compilers() -> None:
    """Limit how long this process waits at its end for torch's compile workers. torch waits 300 seconds, during which a
    finished rank would hold its GPU's memory. Without compiled code this does nothing."""
    for pool in getattr(sys.modules.get("torch._inductor.async_compile"), "_pool_set", ()):
        if isinstance(worker := getattr(pool, "process", None), subprocess.Popen):
            worker.wait = partial(ended, worker, worker.wait)  # type: ignore[method-assign]


def ended(worker: subprocess.Popen[bytes], wait: Callable[[float | None], int], timeout: float | None = None) -> int:
    """Return the exit code of a process that should end; kill it if it does not."""
    try:
        return wait(COMPILERS if timeout is None else min(timeout, COMPILERS))
    except subprocess.TimeoutExpired:
        worker.kill()
        return wait(None)


def make_room(world: int) -> None:
    """Allow this process to open as many files as `world` ranks need; the usual limit of 1,024 is too low for 600."""
    need = world - 1 + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < need:
        if hard != resource.RLIM_INFINITY and hard < need:
            raise ValueError(
                f"{world} ranks need {need} open files each, and this machine allows {hard}; write ulimit -n {need} "
                "before torchrun, or raise the hard limit of the service that starts it"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Let only these processes write `folder`: rank 0 holds its lock, and if it cannot, every rank raises. All ranks
    must call this together."""
    with ExitStack() as stack:
        refused = ""
        if rank() == 0:
            try:
                stack.enter_context(publish.alone(folder / publish.LOCK, folder))
                disk.sweep(folder)
            except (OSError, ValueError) as error:
                refused = str(error)
        if refused := broadcast(refused):
            raise ValueError(refused)
        yield


def meeting_place(patience: timedelta) -> dict[str, Any]:
    """Return arguments of init_process_group with which the processes of one start find each other in torchrun's store.

    The store outlives a restart and still holds addresses of dead processes. torch tells starts apart by the number of
    restarts, which agents of several nodes count differently, so that they would wait for each other forever."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}  # the processes created the store themselves, so it is new
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=patience)
    return {"store": part_of_this_start(store, rank, world, patience), "rank": rank, "world_size": world}


def part_of_this_start(store: Store, rank: int, world: int, patience: timedelta) -> PrefixStore:
    """Return a part of `store` for these processes only, whatever earlier processes left in it.

    Every process draws a name. Rank 0 sends its own name to every name that it finds, until the latest process of each
    rank has answered. Names of dead processes get a message too but never answer."""
    name = uuid.uuid4().hex
    if rank:
        store.set(f"meet/{rank}", name)
        first = str(store.get(f"meet/tell/{name}"), "utf-8")  # blocks until it is there
        store.set(f"meet/{first}/{name}", "here")
        return PrefixStore(f"start/{first}", store)
    others, told = [f"meet/{other}" for other in range(1, world)], set[str]()
    deadline = time.monotonic() + patience.total_seconds()
    while time.monotonic() < deadline:
        if store.check(others):
            names = [str(other, "utf-8") for other in store.multi_get(others)]
            for other in set(names) - told:
                store.set(f"meet/tell/{other}", name)
            told.update(names)
            if store.check([f"meet/{name}/{other}" for other in names]):
                return PrefixStore(f"start/{name}", store)
        time.sleep(0.05)
    raise RuntimeError(f"not all of the {world} ranks arrived within {patience}; find the one that did not start")


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


# ---- what ranks must have in common


def check_alike(settings: Mapping[str, Any]) -> None:
    """Raise a ValueError on every rank if settings differ between ranks, which would block or train something
    unintended. All ranks must call this together. `settings`: values by key."""
    text = json.dumps(settings, sort_keys=True, default=str)
    digests = gather(hashlib.sha256(text.encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    every: list[dict[str, Any]] = gather(json.loads(text))
    reasons = []
    for key in sorted({key for found in every for key in found}):
        ranks: dict[str, list[int]] = {}
        for number, found in enumerate(every):
            ranks.setdefault(repr(found[key]) if key in found else "not set", []).append(number)
        if len(ranks) > 1:
            values = [f"{value} on {listed(having)}" for value, having in ranks.items()]
            reasons.append(f"{key} is {', '.join(values[:-1])} and {values[-1]}")
    if len(reasons) > 3:
        reasons[3:] = [f"and {len(reasons) - 3} more keys differ"]
    differ = ", ".join(reasons)
    raise ValueError(f"the ranks' configurations differ: {differ}; start every rank with the same configuration")


def listed(ranks: Sequence[int]) -> str:
    words = [str(rank) for rank in ranks[:4]]
    if len(ranks) > 4:
        words.append(f"{len(ranks) - 4} others")
    return f"rank {words[0]}" if len(words) == 1 else f"ranks {', '.join(words[:-1])} and {words[-1]}"
