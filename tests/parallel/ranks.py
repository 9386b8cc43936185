"""`run(world, function, *args)`: function(rank, world, *args) in `world` gloo processes on this machine."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

PRELOAD = ["torch", "torch.distributed.tensor", "torch.distributed.fsdp", "training.train"]


def run(world: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """The ranks' results in order. `function` must be importable (top level of a module), and its results picklable.

    The first rank that fails ends all, and its traceback is in the error. Ranks that hang are ended after `timeout`
    seconds, after each has written where it stands to stderr.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)  # torch is imported once, not once a rank
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world):
            receive, send = context.Pipe(duplex=False)
            target = (rank, world, os.path.join(folder, "store"), timeout, send, function, args)
            process = context.Process(target=_rank, args=target, daemon=True)
            process.start()
            send.close()
            pipes.append(receive)
            processes.append(process)
        try:
            return _collect(pipes, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout=max(deadline - time.monotonic(), 0))
        late = [rank for rank in range(len(pipes)) if rank not in results]
        if not ready:
            raise TimeoutError(f"ranks {late} did not finish; where they stood is on stderr")
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise RuntimeError(f"rank {rank} died without a word") from None
            if not ok:
                raise RuntimeError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _rank(
    rank: int, world: int, store: str, timeout: float, send: Connection, function: Callable[..., Any], args: Any
) -> None:
    faulthandler.dump_traceback_later(max(timeout - 3, 1), exit=False)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout),
        )
        # bytes of our own: multiprocessing would hand tensors over as shared memory, which dies with this process
        message = pickle.dumps((True, function(rank, world, *args)))
    except BaseException:
        message = pickle.dumps((False, traceback.format_exc()))
    send.send_bytes(message)
    send.close()
    os._exit(0)  # peers may still talk to each other; nobody needs an orderly end
