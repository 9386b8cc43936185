"""Find out where this process stands: its line of code, the collective that it waits for, and the collectives that it
has entered.

watch.py sends the answers to rank 0, which judges from all ranks' answers who keeps the others waiting. Host stacks
suffice for gloo, whose collectives block their caller. NCCL's run on the device, so torch's flight recorder counts
them.
"""

from __future__ import annotations

import json
import linecache
import os
import re
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

ROOT = Path(__file__).parents[
    2
]  # a checkout, which may hold a virtual environment, or the folder of installed packages
OURS = tuple(f"{name}{os.sep}" for name in ("upcycle", "training", "evaluation", "benchmarks", "tests"))
TORCH = str(Path(dist.__file__).parent)
COLLECTIVES = distributed_c10d.__file__
PLAIN = str(Path(__file__).with_name("collectives.py"))  # its callers say more than this file
WAITING = re.compile(r"\.wait\w*\(")  # a line that waits for torch's work has no deeper frame in Python
# torch's flight recorders; they give JSON, while NCCL's own watchdog writes a pickle
RECORDERS = {"nccl": "_dump_nccl_trace_json", "gloo": "_dump_fr_trace_json"}
# phrases of errors that only mean that another rank is missing
PEERS = ("gloo", "NCCL", "Connection closed", "Connection reset", "Timed out", "Broken pipe")
Frames = Iterable[tuple[FrameType, int]]  # from the innermost outwards, each with its line


@dataclass(frozen=True)
class Place:
    """A thread's place: our function and line, and the collective or the message that it waits for."""

    ours: str = ""
    call: str = ""
    backward: bool = False  # whether autograd is running
    paused: bool = False  # whether it waits for another thread of this process

    def __str__(self) -> str:
        return f"{self.ours}, for {self.call}" if self.call and self.ours else self.ours


@dataclass
class Entered:
    """Collectives by group. `last`: the number of the last one that this process entered. `open`: the number of the
    first one that it entered and that has not ended."""

    last: dict[str, int] = field(default_factory=dict)
    open: dict[str, int] = field(default_factory=dict)
    ranks: dict[str, list[int]] = field(default_factory=dict)  # the members of each group in `open`


def standing(main: int) -> Place:
    """Return the place of this process's main thread, or of the thread that the main thread waits for."""
    if (error := handled(main)) is not None and means_peer(error):  # it waited until now, and is ending since
        return read_stack(traced(error.__traceback__), "another rank")
    stacks = sys._current_frames()
    if main not in stacks:
        return Place()
    place = read_stack(outwards(stacks[main]))
    if (place.backward or place.paused) and not place.call:  # on a GPU another thread computes gradients
        own = threading.get_ident()
        others = [read_stack(outwards(stack)) for thread, stack in stacks.items() if thread not in (main, own)]
        place = next((each for each in others if each.ours and each.call), place)
    return place


def means_peer(error: BaseException) -> bool:
    """Return whether an error only says that another rank is missing."""
    return isinstance(error, dist.DistError) or any(word in str(error) for word in PEERS)


def handled(thread: int) -> BaseException | None:
    """Return the exception that a thread is handling, for instance while it closes what it had opened."""
    found: Any = sys._current_exceptions().get(thread)
    error: BaseException | None = found[1] if isinstance(found, tuple) else found  # a tuple before Python 3.12
    return error


def outwards(frame: FrameType | None) -> Iterable[tuple[FrameType, int]]:
    """Yield a stack's frames from the innermost outwards."""
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


def traced(trace: TracebackType | None) -> list[tuple[FrameType, int]]:
    """Return a traceback's frames from the innermost outwards."""
    frames = []
    while trace is not None:
        frames.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return frames[::-1]


def read_stack(frames: Frames, call: str = "") -> Place:
    """Return a thread's innermost function of ours, and torch's collective within it. `call`: the collective if the
    frames name none."""
    ours, found, backward, paused = "", "", False, False
    for number, (frame, line) in enumerate(frames):
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        mine = file.startswith(f"{ROOT}{os.sep}") and file.removeprefix(f"{ROOT}{os.sep}").startswith(OURS)
        paused |= number == 0 and file == threading.__file__
        if number == 0 and (mine or file.startswith(TORCH)) and WAITING.search(linecache.getline(file, line)):
            found = "a message" if mine else name
        if not ours and file == COLLECTIVES and not name.startswith("_"):
            found = name
        elif not ours and file.startswith(TORCH) and "wait" in name:
            found = found or name
        elif not ours and file != PLAIN and mine:
            ours = f"at {name}, {Path(file).relative_to(ROOT)}:{line}"
        backward |= name == "_engine_run_backward"
    return Place(ours, found or call, backward, paused)


# ---- counts of collectives


def recorded() -> bytes:
    """Return the records of torch's flight recorders as JSON."""
    asked = {name: getattr(c10d, call, None) for name, call in RECORDERS.items()}
    told = {name: call() for name, call in asked.items() if call is not None}
    return b"{" + b",".join(b'"%s":%s' % (name.encode(), text) for name, text in told.items()) + b"}"


def entered() -> Entered:
    """Return the collectives that this process has entered, by group. Messages between two ranks have no common count
    and are left out."""
    found, names = Entered(), dict[str, str]()
    for told in json.loads(recorded()).values():
        for entry in told.get("entries", ()):
            if not entry["is_p2p"]:
                count(found, names, entry)
    return found


def count(found: Entered, names: dict[str, str], entry: Mapping[str, Any]) -> None:
    """Count a flight recorder's entry. `names`: keys of groups by torch's name."""
    name, number = str(entry["process_group"][0]), int(entry["collective_seq_id"])
    if name not in names:
        ranks = sorted(dist.get_process_group_ranks(c10d._resolve_process_group(name)))  # type: ignore[arg-type]
        names[name] = f"{name} of {ranks}"  # groups of other ranks may have the same name
        found.ranks[names[name]] = ranks
    group = names[name]
    found.last[group] = max(found.last.get(group, 0), number)
    if not entry["retired"] and entry["state"] != "completed":
        found.open[group] = min(found.open.get(group, number), number)
