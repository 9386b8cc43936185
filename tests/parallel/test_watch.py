"""Three real processes, one of which goes wrong: the others end in time and name it."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import time
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import PRELOAD

from training.parallel.processes import processes
from training.parallel.watch import Watch, guarded


def loop(rank: int, port: int, victim: int, how: str, folder: str) -> None:
    """Ranks that add up, and one that is told to go wrong."""
    with open(f"{folder}/{rank}", "w") as output:
        os.dup2(output.fileno(), 2)
    torch.set_num_threads(1)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3", "RANK": str(rank)}
    os.environ.update(place | {"GLOO_SOCKET_IFNAME": "lo"})
    patience = timedelta(seconds=4 if how == "late" else 60)
    with processes("cpu"), guarded(patience, interval=0.2) as watch:
        for step in range(1, 1000):
            watch.doing(f"the data of step {step}")
            if step == 5 and rank == victim:
                if how == "error":
                    raise ValueError("the disk is full")
                if how in ("killed", "late"):
                    time.sleep(1)  # a sign of life goes out
                    Path(folder, "there").touch()
                    time.sleep(1000)
            if step == 20 and how == "none":
                break
            watch.doing(f"step {step}")
            dist.all_reduce(torch.ones(10))


def start(victim: int, how: str, folder: Path) -> list[BaseProcess]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ranks = [context.Process(target=loop, args=(rank, port, victim, how, str(folder))) for rank in range(3)]
    for rank in ranks:
        rank.start()
    return list(ranks)


@pytest.mark.parametrize(
    ("victim", "how", "want"),
    [
        (2, "killed", r"rank 2 \(.*\) died or froze, in the data of step 5; this run ends"),
        (0, "killed", r"the store of the processes is gone, and with it rank 0 or torchrun .*; this run ends"),
        (1, "late", r"rank 1 \(.*\) is late, \d+ s in the data of step 5 while others wait in step 5; this run ends"),
        (1, "error", r"rank 1 failed in the data of step 5 \(ValueError: the disk is full\); this run ends"),
    ],
)
def test_the_others_end_in_time_and_name_the_rank(victim: int, how: str, want: str, tmp_path: Path) -> None:
    ranks = start(victim, how, tmp_path)
    try:
        deadline = time.monotonic() + 60
        if how == "killed":
            while not (tmp_path / "there").exists():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            os.kill(ranks[victim].pid or 0, signal.SIGKILL)
        for index, rank in enumerate(ranks):
            if index != victim:
                rank.join(max(deadline - time.monotonic(), 0))
                assert rank.exitcode not in (0, None), f"rank {index} goes on"
                said = (tmp_path / str(index)).read_text()
                assert re.search(want, said), said
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def test_nobody_is_blamed_for_ending_well(tmp_path: Path) -> None:
    ranks = start(0, "none", tmp_path)
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0, 0, 0], [(tmp_path / str(i)).read_text() for i in range(3)]
    assert not any((tmp_path / str(i)).read_text() for i in range(3))


def test_one_process_watches_nobody() -> None:
    with guarded() as watch:
        watch.doing("step 1")
        assert isinstance(watch, Watch) and watch.store is None
