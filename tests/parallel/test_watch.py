"""Three real processes, one of which goes wrong: the others end in time and name it."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import forked

from training.dispatch.alltoall import exchange
from training.observe.profiling import Phases
from training.parallel import standing as places
from training.parallel import watch as watch_module
from training.parallel.processes import PATIENCE, processes
from training.parallel.standing import Entered, standing
from training.parallel.watch import NOTHING, SILENCE, Watch, guarded


def loop(rank: int, port: int, victim: int, how: str, folder: str) -> None:
    """Ranks that add up, and one that is told to go wrong."""
    with open(f"{folder}/{rank}", "w") as output:
        os.dup2(output.fileno(), 2)
    torch.set_num_threads(1)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3", "RANK": str(rank)}
    os.environ.update(place | {"GLOO_SOCKET_IFNAME": "lo"})
    patience = timedelta(seconds=60 if how in ("killed", "error", "none") else 4)
    phases = Phases(torch.device("cpu"))
    recorded = Path(folder, "run") if how == "stuck" else None
    waits = timedelta(seconds=1) if how == "closing" else PATIENCE
    with (
        processes("cpu", waits),
        guarded(patience, interval=0.2, folder=recorded) as watch,
        closing(3 if rank == 0 and how == "closing" else 0),
        ThreadPoolExecutor(1) as saver,
    ):
        pair = dist.new_group([0, 1])
        phases.tell = watch.enter
        for step in range(1, 1000):
            watch.doing(f"step {step}")
            with phases("data"):
                if step == 5 and rank == victim:
                    if how == "error":
                        raise ValueError("the disk is full")
                    if how in ("killed", "late"):
                        time.sleep(1)  # a sign of life goes out
                        Path(folder, "there").touch()
                        time.sleep(1000)
            if step == 20 and how == "none":
                break
            with phases("forward"):
                if step == 5 and rank == victim and how in ("stuck", "group", "closing"):
                    time.sleep(1000)
                if how == "thread":
                    saver.submit(save, step == 5 and rank == victim).result()
                elif how != "group":
                    dist.all_reduce(torch.ones(10))
                elif rank < 2:
                    dist.all_reduce(torch.ones(10), group=pair)
            with phases("backward"):
                if how == "group":
                    dist.all_reduce(torch.ones(10))


def save(hangs: bool) -> None:
    """Do what the thread of an asynchronous checkpoint does."""
    if hangs:
        time.sleep(1000)
    dist.all_reduce(torch.ones(10))


@contextmanager
def closing(seconds: float) -> Iterator[None]:
    """Close something that takes time, after an error too."""
    try:
        yield
    finally:
        time.sleep(seconds)


def start(victim: int, how: str, folder: Path) -> list[BaseProcess]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = forked()
    ranks = [context.Process(target=loop, args=(rank, port, victim, how, str(folder))) for rank in range(3)]
    for rank in ranks:
        rank.start()
    return list(ranks)


@pytest.mark.parametrize(
    ("victim", "how", "want"),
    [
        (2, "killed", r"rank 2 \(.*\) died or froze, in the data of step 5; this run ends"),
        (0, "killed", r"the store of the processes is gone, and with it rank 0 or torchrun .*; this run ends"),
        (
            1,
            "late",
            r"rank 1 \(.*\) is late, \d+ s in the data of step 5 \(at loop, tests/parallel/test_watch.py:\d+\) while "
            r"others wait in the forward of step 5 \(at loop, tests/.*:\d+, for all_reduce\); this run ends",
        ),
        (
            1,
            "stuck",  # in the same part as the others, but not in its collective
            r"rank 1 \([^)]*\) is late, \d+ s in the forward of step 5 \(at loop, tests/.*:\d+\) while others wait in "
            r"the forward of step 5 \(at loop, tests/.*:\d+, for all_reduce\); this run ends; the last collectives of "
            r"each rank are in .*/run/collectives-rank-\*\.json",
        ),
        (
            1,
            "group",  # rank 0 waits for it in a smaller group, and rank 2 for both
            r"training: rank 1 \([^)]*\) is late, \d+ s in the forward of step 5 \(at loop, tests/[^)]*\) while others wait "
            r"in the backward of step 5 \(at loop, tests/.*:\d+, for all_reduce\)",
        ),
        (
            1,
            "thread",  # its main thread waits as the others' do, but theirs wait for a thread that is in a collective
            r"training: rank 1 \([^)]*\) is late, \d+ s in the forward of step 5 \(at loop, tests/[^)]*\) while others wait "
            r"in the forward of step 5 \(at save, tests/.*:\d+, for all_reduce\)",
        ),
        (
            2,
            "closing",  # the others' collective has timed out, and one of them closes its files
            r"training: rank 2 \([^)]*\) is late, \d+ s in the forward of step 5 \(at loop, tests/[^)]*\) while others wait "
            r"in the forward of step 5 \(at loop, tests/.*:\d+, for all_reduce\)",
        ),
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
            if index != victim or how in ("stuck", "group", "thread", "closing"):
                rank.join(max(deadline - time.monotonic(), 0))
                assert rank.exitcode not in (0, None), f"rank {index} goes on"
                said = (tmp_path / str(index)).read_text()
                assert re.search(want, said), said
                if how == "stuck":  # all but it came to the one that they wait in
                    found = json.loads((tmp_path / "run" / f"collectives-rank-{index}.json").read_text())["gloo"]
                    last = [entry for entry in found["entries"] if entry["profiling_name"] == "gloo:all_reduce"]
                    assert len(last) == 5 - (index == victim) and last[-1]["input_sizes"] == [[10]]
        assert how == "stuck" or "collectives" not in said
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


SIGN = NOTHING | {"beat": 1, "number": 7, "what": "step 3", "host": "here", "since": 9.0, "last": {}}


def said_of(*signs: dict[str, Any]) -> str:
    """Return rank 0's verdict on these signs, after a patience of eight seconds."""
    store = dist.HashStore()
    for rank, sign in enumerate(signs):
        store.set(str(rank), json.dumps(SIGN | sign))
    return Watch(0, len(signs), store, patience=8.0).verdict(0.0)


def test_a_collective_that_one_rank_has_not_entered_names_it_though_no_host_waits() -> None:
    """On a GPU the hosts go on to where they need a result, and only the counts show who is missing."""
    there = {"at": "at log, a.py:1", "last": {"dp": 5}, "open": {"dp": 5}, "ranks": {"dp": [0, 1, 2]}}
    said = said_of(there, {"at": "at log, a.py:1", "last": {"dp": 4}}, there)
    assert said.startswith("rank 1 (here) is late, 9 s in step 3 (at log, a.py:1) while others wait in step 3")


def test_a_rank_that_waits_for_another_one_is_not_late() -> None:
    """Rank 1 has not entered what rank 0 waits in, because it waits for rank 2 in another group."""
    first = {"waits": True, "last": {"a": 5}, "open": {"a": 5}, "ranks": {"a": [0, 1]}}
    second = {"waits": True, "last": {"a": 4, "b": 3}, "open": {"b": 3}, "ranks": {"b": [1, 2]}}
    assert said_of(first, second, {"last": {"b": 2}}).startswith("rank 2 (here) is late")


def test_ranks_that_wait_for_each_other_are_not_blamed() -> None:
    first = {"at": "at f, a.py:1, for all_reduce", "waits": True, "last": {"a": 5, "b": 2}, "open": {"a": 5}}
    second = {"at": "at g, a.py:2, for all_gather", "waits": True, "last": {"a": 4, "b": 3}, "open": {"b": 3}}
    ranks = {"ranks": {"a": [0, 1], "b": [0, 1]}}
    said = said_of(first | ranks, second | ranks)
    assert said.startswith("no rank came on for 9 s, and no rank can be blamed") and "late" not in said
    assert "rank 0 (here) in step 3 (at f, a.py:1, for all_reduce); rank 1 (here) in step 3 (at g, a.py:2" in said


def test_ranks_of_which_none_waits_are_all_named() -> None:
    said = said_of({"at": "at f, a.py:1"}, {"at": "at f, a.py:1"}, {"at": "at g, a.py:9"})
    assert said.startswith(
        "no rank came out of step 3 in 9 s: rank 0 (here) and rank 1 (here) in step 3 (at f, a.py:1)"
    )
    assert said.endswith("; rank 2 (here) in step 3 (at g, a.py:9)")


def test_a_rank_that_enters_new_collectives_gets_on() -> None:
    watch = Watch(0, 2, dist.HashStore(), patience=8.0, _what=(7, "the validation of step 3", 0.0))
    with mock.patch.object(watch_module, "entered", side_effect=[Entered({"dp": n}) for n in (4, 4, 5)]):
        assert [watch.sign(now)["since"] for now in (1.0, 50.0, 60.0, 70.0, 71.0)] == [1.0, 50.0, 60.0, 0.0, 1.0]


def test_nobody_is_blamed_for_ending_well(tmp_path: Path) -> None:
    ranks = start(0, "none", tmp_path)
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0, 0, 0], [(tmp_path / str(i)).read_text() for i in range(3)]
    said = [(tmp_path / str(i)).read_text() for i in range(3)]
    assert said == ["", "", ""]


def test_one_process_watches_nobody() -> None:
    with guarded() as watch:
        watch.doing("step 1")
        assert isinstance(watch, Watch) and watch.store is None


def test_a_rank_that_never_left_a_sign_is_named() -> None:
    """It died between the last thing that all did together and its first sign."""
    store = dist.HashStore()
    watch = Watch(0, 3, store)
    sign = {"beat": 1, "number": 0, "what": "the start", "host": "here", "at": "", "since": 0.0}
    for beat, now in enumerate((0.0, SILENCE, SILENCE + 1)):
        for rank in (0, 1):
            store.set(str(rank), json.dumps(sign | {"beat": beat}))
        said = watch.verdict(now)
        assert said == ("rank 2 (host unknown) died or froze, in the start" if now > SILENCE else "")


class Gone(dist.HashStore):
    """A store whose host is dead, which this rank's other thread knows already: what is sent fails at once."""

    def set(self, key: str, value: str) -> None:
        raise RuntimeError("Broken pipe")


def test_a_store_that_is_gone_is_said_by_the_thread_before_the_error_of_a_peer_ends_the_process() -> None:
    ended: list[str] = []

    def end(sentence: str) -> None:
        ended.append(sentence)
        watch._stop.set()  # a process would be gone

    watch = Watch(1, 3, Gone(), interval=0.3, end=end, _beats=1)  # it waits for its next beat
    watch.start()
    watch.failed(RuntimeError("Connection closed by peer"))
    assert ended and ended[0].startswith("the store of the processes is gone, and with it rank 0 or torchrun")


@pytest.mark.filterwarnings("ignore:Running all_to_all_single")
def test_a_stack_names_the_collective_and_who_called_it() -> None:
    """Of a thread whose dispatch stands in its all-to-all, and of one that stands in none."""
    gate: queue.Queue[bool] = queue.Queue()

    def alone() -> None:
        gate.get()

    def where(work: Callable[[], object]) -> str:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        time.sleep(0.3)
        found = str(standing(thread.ident or 0))
        gate.put(True)
        thread.join()
        return found

    with mock.patch.object(dist.distributed_c10d, "_rank_not_in_group", gate.get):  # the first that it asks
        found = where(lambda: exchange(torch.ones(2), [1, 1], [1, 1], mock.MagicMock()))
    assert re.fullmatch(r"at exchange, training/dispatch/alltoall.py:\d+, for all_to_all_single", found), found
    assert re.fullmatch(r"at alone, tests/parallel/test_watch.py:\d+", where(alone))


@pytest.mark.parametrize("root", ["/home/me/upcycle", "/usr/lib/python3.12/site-packages"])
def test_a_place_is_in_our_code_in_a_checkout_and_in_an_installed_package(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "ROOT", Path(root))

    def place(*files: str) -> places.Place:
        """The place of a stack whose functions are in these files, the innermost first."""
        frames = []
        for file in files:
            names: dict[str, Any] = {}
            exec(compile("import sys\ndef here(): return sys._getframe()", f"{root}/{file}", "exec"), names)
            frames.append((names["here"](), 7))
        return places.read_stack(frames)

    others = ["numpy/core.py", ".venv/lib/python3.12/site-packages/training/loop.py", "torch/nn/functional.py"]
    assert place(*others, "training/run/step.py", "upcycle/cli/main.py").ours == "at here, training/run/step.py:7"
    assert place(*others).ours == ""
