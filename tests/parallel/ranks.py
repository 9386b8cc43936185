"""`run(world, function, *args)`: function(rank, world, *args) in `world` gloo processes on this machine."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class Failed(RuntimeError):
    """Ranks failed: why, by rank."""

    def __init__(self, why: dict[int, str]) -> None:
        super().__init__("\n".join(f"rank {rank} failed:\n{said}" for rank, said in why.items()))
        self.why = why


def run(world: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """The ranks' results in order. `function` must be importable (top level of a module), and its results picklable.

    The first rank that fails ends all. The error holds its traceback, and those of ranks that fail within two seconds
    of it: who is heard first may be the peer of one that died. Ranks that hang are ended after `timeout` seconds,
    after each has written where it stands to stderr.
    """
    context = forked()
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
            return _collect(pipes, processes, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()


def forked() -> Any:
    """What processes are made with: forks of one that has imported torch and us. There is one such in a process of
    pytest, and whoever asks first says what it imports: so all ask here."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.parallel.warm"])
    return context


def as_torchrun(world: int, module: str, words: list[str], said: list[Path]) -> list[int | None]:
    """Exit codes of `torchrun --nproc-per-node WORLD -m MODULE WORDS`, in this folder and without torchrun: three times
    the imports, which take longer than what a test asks of them. A rank's output is in its file of `said`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = (os.getcwd(), port, module, words)
    processes = [
        forked().Process(target=_command, args=(rank, world, str(said[rank]), *where)) for rank in range(world)
    ]
    deadline = time.monotonic() + 240
    try:
        for process in processes:
            process.start()
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
            wait([process.sentinel for process in processes if process.is_alive()], timeout=1)
            if any(process.exitcode for process in processes):  # as torchrun: who fails ends all
                break
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()


class Program:
    """A subprocess.Popen of `python -P -m upcycle WORDS`, forked with its imports made."""

    def __init__(self, command: list[str], *, stdout: Any, env: dict[str, str], **_: Any) -> None:
        assert command[:4] == [sys.executable, "-P", "-m", "upcycle"], command
        self.process = forked().Process(target=_program, args=(os.getcwd(), stdout.name, env, command[4:]))
        self.process.start()
        self.pid = self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode  # type: ignore[no-any-return]

    def poll(self) -> int | None:
        return self.returncode

    def wait(self) -> int | None:
        self.process.join()
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.process.kill()


def _program(folder: str, said: str, environment: dict[str, str], words: list[str]) -> None:
    for output in (1, 2):
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), output)
    os.chdir(folder)
    os.environ.clear()
    os.environ |= environment
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.exit(import_module("upcycle.__main__").main(words))


def _command(rank: int, world: int, said: str, folder: str, port: int, module: str, words: list[str]) -> None:
    for output in (1, 2):
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), output)
    os.chdir(folder)
    torch.set_num_threads(1)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ |= {name: str(number) for name, number in place.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    sys.exit(import_module(module).main(words))


def _collect(pipes: list[Connection], processes: list[Any], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    failed: dict[int, str] = {}
    while late := [rank for rank in range(len(pipes)) if rank not in results and rank not in failed]:
        ready = wait([pipes[rank] for rank in late], timeout=max(deadline - time.monotonic(), 0))
        if not ready and failed:
            break
        if not ready:
            raise TimeoutError(f"ranks {late} did not finish; where they stood is on stderr")
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join(5)
                ok, value = False, f"it died without a word, exit code {processes[rank].exitcode}"
            (results if ok else failed)[rank] = value
        if failed:
            deadline = min(deadline, time.monotonic() + 2)
    if failed:
        raise Failed(failed)
    return [results[rank] for rank in range(len(pipes))]


def _rank(
    rank: int, world: int, store: str, timeout: float, send: Connection, function: Callable[..., Any], args: Any
) -> None:
    faulthandler.enable()  # native code that crashes says where
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
    faulthandler.cancel_dump_traceback_later()
    # a peer may still be in the middle of connecting to this process, whose end it would take for an error
    parent = multiprocessing.parent_process()
    wait([parent.sentinel] if parent else [])
    os._exit(0)
