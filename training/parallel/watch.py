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

A rank that waits in a collective is never named as late. If the signs do not show who keeps the others waiting, the
sentence says so, and says where each rank stands.

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
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from training.parallel.collectives import broadcast
from training.parallel.processes import PATIENCE
from training.parallel.standing import entered, means_peer, recorded, standing
from upcycle.io import disk

INTERVAL = 2.0  # seconds between signs of life
SILENCE = 60.0  # seconds without a sign until a rank counts as dead: long, because something may hold Python's lock
WRITTEN = 10.0  # seconds that a process waits for them at its end: a hanging device may block them


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


@dataclass
class Sign:
    """A rank's last sign of life, and when it was read."""

    said: dict[str, Any]
    heard: float


# the sign of a rank that has not written one
NOTHING: dict[str, Any] = {
    "number": 0, "what": "the start", "host": "", "at": "", "since": 0.0, "waits": False, "last": None, "open": {},
}  # fmt: skip


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
    _task: str = "the start"
    _main: int = 0  # the main thread
    _beats: int = 0
    _doubt: bool = False  # whether a rank got an error that means that another rank is missing
    _last: dict[str, int] | None = None  # collectives entered, as counted last
    _moved: float = 0.0  # when a count had grown
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
        if means_peer(error):
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
        # some rank's patience has already ended, so half of the time is enough for silent ranks
        seconds = max(float(sign.said["since"]) for sign in self._signs.values())
        over = self.rank == 0 and seconds >= self.patience * (0.5 if self._doubt else 1.0)
        return self.silent(now, 3 * self.interval if self._doubt or over else SILENCE) or (
            self.late(seconds) if over else ""
        )

    def silent(self, now: float, allowed: float) -> str:
        dead = [rank for rank, sign in self._signs.items() if now - sign.heard > max(allowed, 2 * self.interval)]
        return f"{self.named(dead)} died or froze, in {self._signs[dead[0]].said['what']}" if dead else ""

    def late(self, seconds: float) -> str:
        """Return a sentence that names the ranks that keep the others waiting, or says that no rank can be named."""
        late = self.culprits()
        if not late:
            return (
                f"no rank came on for {seconds:.0f} s, and no rank can be blamed, because their last signs do not show "
                f"who keeps the others waiting: {self.places()}"
            )
        waiting = [rank for rank in self._signs if rank not in late]
        if not waiting:
            return f"no rank came out of {self._signs[late[0]].said['what']} in {seconds:.0f} s: {self.places()}"
        ahead = max(waiting, key=lambda rank: (self._signs[rank].said["waits"], self._signs[rank].said["number"]))
        one, verb = self._signs[late[0]].said, "is" if len(late) == 1 else "are"
        return (
            f"{self.named(late)} {verb} late, {one['since']:.0f} s in {one['what']}{self.place(late[0])} while others "
            f"wait in {self._signs[ahead].said['what']}{self.place(ahead)}"
        )

    def culprits(self) -> list[int]:
        """Return the ranks that keep the others waiting; none if the signs do not show which.

        A rank is innocent if it waits: if its host stands in a collective, or if a member of its group has not entered
        a collective that it has entered. The other ranks are late if a collective waits for one of them, or else if
        they have come least far."""
        signs = {rank: sign.said for rank, sign in self._signs.items()}
        missing: dict[int, set[int]] = {}  # rank -> the ranks that a collective of its own waits for
        for rank, said in signs.items():
            for group, first in said["open"].items():
                members = [each for each in said["ranks"][group] if signs.get(each, NOTHING)["last"] is not None]
                away = {each for each in members if signs[each]["last"].get(group, 0) < first}
                missing.setdefault(rank, set()).update(away)
        awaited = set[int]().union(*missing.values())
        busy = [rank for rank in signs if not signs[rank]["waits"]]
        free = [rank for rank in busy if not missing.get(rank)]
        for found in ([r for r in free if r in awaited], [r for r in busy if r in awaited], free):
            if found:
                least = min(signs[rank]["number"] for rank in found)
                return sorted(rank for rank in found if signs[rank]["number"] == least)
        return []

    def place(self, rank: int) -> str:
        at = self._signs[rank].said["at"]
        return f" ({at})" if at else ""

    def places(self) -> str:
        """Describe where all ranks stand, those at one place together."""
        at: dict[str, list[int]] = {}
        for rank in sorted(self._signs):
            at.setdefault(f"{self._signs[rank].said['what']}{self.place(rank)}", []).append(rank)
        words = [f"{self.named(ranks)} in {where}" for where, ranks in list(at.items())[:4]]
        return "; ".join([*words, f"and {len(at) - 4} other places"] if len(at) > 4 else words)

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

    def sign(self, now: float) -> dict[str, Any]:
        """Return this rank's sign of life. Collectives are counted only when something lasts long, because it takes
        some milliseconds; a rank that enters new ones gets on."""
        number, what, since = self._what
        place, began = standing(self._main), max(since, self._moved)
        said = NOTHING | {"number": number, "what": what, "at": str(place), "waits": bool(place.call)}
        if self._doubt or now - began > self.patience / 4:
            counted = entered()
            if self._last not in (None, counted.last):
                self._moved = began = now
            self._last = counted.last
            said |= vars(counted)
        return said | {"beat": self._beats, "host": socket.gethostname(), "since": now - began}

    def _run(self) -> None:
        assert self.store is not None
        verdict = ""
        while not verdict and not self._stop.wait(self.interval if self._beats else 0):
            self._beats += 1
            try:
                self._doubt = self._doubt or bool(self.store.check(["doubt"]))
                self.store.set(str(self.rank), json.dumps(self.sign(time.monotonic())))
                verdict = self.verdict(time.monotonic())
                if verdict and self.rank == 0:
                    self.store.compare_set("verdict", "", verdict)
            except RuntimeError:
                what = self._what[1]
                verdict = f"the store of the processes is gone, and with it rank 0 or torchrun on its node ({what})"
        # give ranks time to fail by themselves, and the others time to read rank 0's verdict
        if verdict and not self._stop.wait(2 * self.interval):
            self.end(verdict)
