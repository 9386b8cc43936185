"""End all ranks when one dies, and name it; a collective alone only says that some rank is missing.

    with processes() as device, guarded() as watch:
        for step in ...:
            watch.doing(f"step {step}")        # the same words in the same order on every rank
            watch.enter("data")                # a part of the step; "" between parts
            ...

A thread of each rank writes a sign of life to torchrun's store every two seconds: what the rank is doing, the line of
code and the collective. Rank 0 reads all signs, the others read rank 0's. Three things end a run with one sentence:

    a rank failed        its exception, in its own words
    a rank fell silent   killed, frozen, or its node is gone
    a rank is late       alive, but busy with one thing for longer than the run's patience while others wait

At the end, each rank writes its last collectives from torch's flight recorder to the run's folder: the first one that a
rank missed shows where it left the others.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d

from training.parallel.collectives import broadcast
from training.parallel.processes import PATIENCE
from upcycle.io import disk

ROOT = Path(__file__).parents[2]
COLLECTIVES = distributed_c10d.__file__
PLAIN = str(Path(__file__).with_name("collectives.py"))  # its callers say more than this file
INTERVAL = 2.0  # seconds between signs of life
SILENCE = 60.0  # seconds without a sign until a rank counts as dead: long, because something may hold Python's lock
# torch's flight recorders; they give JSON, while NCCL's own watchdog writes a pickle
RECORDERS = {"nccl": "_dump_nccl_trace_json", "gloo": "_dump_fr_trace_json"}
WRITTEN = 10.0  # seconds that a process waits for them at its end: a hanging device may block them
# phrases of errors that only mean that another rank is missing
PEERS = ("gloo", "NCCL", "Connection closed", "Connection reset", "Timed out", "Broken pipe")


@contextmanager
def guarded(patience: timedelta = PATIENCE, interval: float = INTERVAL, folder: Path | None = None) -> Iterator[Watch]:
    """End all ranks when one fails, and yield the Watch. A single process has nothing to watch. `folder`: where ranks
    write their last collectives."""
    if not dist.is_initialized() or "MASTER_ADDR" not in os.environ:
        yield Watch(0, 1)
        return
    if folder and "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" not in os.environ:  # where NCCL's watchdog writes, if it acts first
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder / "nccl-rank-"))
    # a separate connection, since the main thread may be waiting on the other
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=30))
    except RuntimeError as error:
        raise RuntimeError(f"the processes' store at {address}:{port} does not answer; was this torchrun?") from error
    # torchrun's store keeps old entries after a restart, and each node counts restarts itself: so the time
    own = PrefixStore(f"watch/{broadcast(time.time_ns())}", store)
    end = partial(leave, folder=folder, rank=dist.get_rank())
    watch = Watch(dist.get_rank(), dist.get_world_size(), own, patience.total_seconds(), interval, end)
    watch.start()
    try:
        yield watch
        dist.barrier()  # end together, or the first to end would look dead to the others
    except BaseException as error:
        watch.failed(error)
        raise
    finally:
        watch.stop()


def leave(sentence: str, folder: Path | None = None, rank: int = 0) -> None:
    """Print the sentence, write this rank's last collectives to the folder, and end the process at once, since the main
    thread may be in a collective that never returns."""
    told = f"; the last collectives of each rank are in {folder}/collectives-rank-*.json" if folder else ""
    print(f"training: {sentence}; this run ends{told}", file=sys.stderr, flush=True)
    if folder:
        with suppress(Exception):  # the sentence is printed, and the process must end
            faulthandler.dump_traceback_later(WRITTEN, exit=True)
            disk.make_folder(folder)
            disk.write_atomic(folder / f"collectives-rank-{rank}.json", recorded())
    os._exit(1)


def recorded() -> bytes:
    """Return the records of torch's flight recorders as JSON."""
    asked = {name: getattr(c10d, call, None) for name, call in RECORDERS.items()}
    told = {name: call() for name, call in asked.items() if call is not None}
    return b"{" + b",".join(b'"%s":%s' % (name.encode(), text) for name, text in told.items()) + b"}"


def standing(main: int) -> str:
    """Describe where this process is: our function, and the collective that it waits for."""
    stacks = sys._current_frames()
    if main not in stacks:
        return ""
    place, call, backward = read_stack(stacks[main])
    if backward and not call:  # on a GPU another thread computes gradients
        own = threading.get_ident()
        found = [read_stack(stack) for thread, stack in stacks.items() if thread not in (main, own)]
        place, call, _ = next((each for each in found if each[0] and each[1]), (place, call, backward))
    return f"{place}, for {call}" if call and place else place


def read_stack(frame: FrameType | None) -> tuple[str, str, bool]:
    """Return a thread's innermost function of ours, torch's collective, and whether autograd is running."""
    place, call, backward = "", "", False
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file == COLLECTIVES and not place and not name.startswith("_"):
            call = name
        elif not place and file != PLAIN and file.startswith(f"{ROOT}{os.sep}") and "site-packages" not in file:
            place = f"at {name}, {Path(file).relative_to(ROOT)}:{frame.f_lineno}"
        backward |= name == "_engine_run_backward"
        frame = frame.f_back
    return place, call, backward


@dataclass
class Sign:
    """A rank's last sign of life, and when it was read."""

    said: dict[str, Any]
    heard: float


# the sign of a rank that has not written one
NOTHING: dict[str, Any] = {"number": 0, "what": "the start", "host": "", "at": "", "since": 0.0}


@dataclass
class Watch:
    """One rank's sign of life, and its view of the others'. `end`: called with the sentence that ends the run."""

    rank: int
    world: int
    store: Store | None = None
    patience: float = PATIENCE.total_seconds()
    interval: float = INTERVAL
    end: Callable[[str], None] = leave
    _what: tuple[int, str, float] = (0, "the start", 0.0)  # number, words, start time
    _task: str = ""
    _main: int = 0  # the main thread
    _beats: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _signs: dict[int, Sign] = field(default_factory=dict)
    _thread: threading.Thread | None = None

    def doing(self, what: str) -> None:
        self._task = what
        self._what = (self._what[0] + 1, what, time.monotonic())

    def enter(self, part: str) -> None:
        """Name the part of the step that starts now, "" for none, so that a rank that waits after a part does not seem
        to be in it."""
        words = f"the {part} of {self._task}" if part else self._task
        self._what = (self._what[0] + 1, words, time.monotonic())

    # ---- what ends a run

    def failed(self, error: BaseException) -> None:
        """Tell the others this rank's error. If it only means that another rank is missing, wait for the thread to find
        out which and to end the run."""
        if self.store is None:
            return
        if any(word in str(error) for word in PEERS) or isinstance(error, dist.DistError):
            with suppress(RuntimeError):  # if the store is gone the thread notices too; wait for it
                self.store.set("doubt", "1")
            self._stop.wait(10 * self.interval)
        else:
            self._stop.set()
            words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            with suppress(RuntimeError):
                self.store.compare_set("verdict", "", f"rank {self.rank} failed in {self._what[1]} ({words})")

    def verdict(self, now: float) -> str:
        """Return the sentence that ends the run, or "": rank 0 judges all ranks, the others judge rank 0."""
        assert self.store is not None
        if self.store.check(["verdict"]):
            return str(self.store.get("verdict"), "utf-8")
        watched = [str(rank) for rank in range(self.world)] if self.rank == 0 else ["0"]
        if not self.store.check(watched):  # a rank without a first sign counts as heard now, and may fall silent later
            for rank in watched:
                self._signs.setdefault(int(rank), Sign(dict(NOTHING), now))
            watched = [rank for rank in watched if self.store.check([rank])]
        for rank, beat in zip(watched, self.store.multi_get(watched) if watched else [], strict=True):
            said = json.loads(beat)
            if int(rank) not in self._signs or self._signs[int(rank)].said != said:
                self._signs[int(rank)] = Sign(said, now)
        doubt = bool(self.store.check(["doubt"]))
        return self.silent(now, 3 * self.interval if doubt else SILENCE) or self.late(doubt)

    def silent(self, now: float, allowed: float) -> str:
        dead = [rank for rank, sign in self._signs.items() if now - sign.heard > max(allowed, 2 * self.interval)]
        return f"{self.named(dead)} died or froze, in {self._signs[dead[0]].said['what']}" if dead else ""

    def late(self, doubt: bool) -> str:
        # some rank's patience has already ended, so half of the time is enough for silent ranks
        seconds = {rank: float(sign.said["since"]) for rank, sign in self._signs.items()}
        if self.rank != 0 or max(seconds.values()) < self.patience * (0.5 if doubt else 1.0):
            return ""
        number = {rank: sign.said["number"] for rank, sign in self._signs.items()}
        behind = [rank for rank in number if number[rank] == min(number.values())]
        first, ahead = self._signs[behind[0]].said["what"], max(number, key=lambda rank: number[rank])
        if len(behind) == self.world:
            odd = self.odd_ones(behind)
            if len(odd) == self.world:
                return f"no rank came out of {first} in {max(seconds.values()):.0f} s{self.place(odd[0])}"
            behind, ahead = odd, next(rank for rank in number if rank not in odd)
        waiting = self._signs[ahead].said["what"]
        return (
            f"{self.named(behind)} is late, {seconds[behind[0]]:.0f} s in {first}{self.place(behind[0])} while others "
            f"wait in {waiting}{self.place(ahead)}"
        )

    def odd_ones(self, ranks: list[int]) -> list[int]:
        """Return the smallest group of ranks that are at one place in the code, preferring ranks outside of
        collectives, because ranks in a collective wait for others."""
        at = {rank: self._signs[rank].said["at"] for rank in ranks}
        outside = [rank for rank in ranks if ", for " not in at[rank]] or ranks
        return min(([r for r in outside if at[r] == place] for place in {at[r] for r in outside}), key=len)

    def place(self, rank: int) -> str:
        at = self._signs[rank].said["at"]
        return f" ({at})" if at else ""

    def named(self, ranks: list[int]) -> str:
        words = [f"rank {rank} ({self._signs[rank].said['host'] or 'host unknown'})" for rank in sorted(ranks)[:4]]
        return " and ".join(words) + (f" and {len(ranks) - 4} others" if len(ranks) > 4 else "")

    # ---- the thread

    def start(self) -> None:
        self._what, self._main = (0, "the start", time.monotonic()), threading.get_ident()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=self.interval)

    def _run(self) -> None:
        assert self.store is not None
        host, verdict = socket.gethostname(), ""
        while not verdict and not self._stop.wait(self.interval if self._beats else 0):
            number, what, since = self._what
            self._beats += 1
            sign = {"beat": self._beats, "number": number, "what": what, "host": host, "at": standing(self._main)}
            try:
                self.store.set(str(self.rank), json.dumps(sign | {"since": time.monotonic() - since}))
                verdict = self.verdict(time.monotonic())
                if verdict and self.rank == 0:
                    self.store.compare_set("verdict", "", verdict)
            except RuntimeError:
                verdict = f"the store of the processes is gone, and with it rank 0 or torchrun on its node ({what})"
        # give ranks time to fail by themselves, and the others time to read rank 0's verdict
        if verdict and not self._stop.wait(2 * self.interval):
            self.end(verdict)
