"""Keep the server's state on disk: a snapshot, and a log of every event since. An event is logged before its answer.

    FOLDER/snapshot-3.safetensors    the whole state after the events of logs 0 ... 2
    FOLDER/log-3                     a record for the sha256 of snapshot-3, and then one for each event

    record: length u64 | sum of the event (16) | sum of these (8) | kind u8, seq u32, name length u16, name, data ...

A server that was killed restores its state and its answers from these files, bit for bit. The torn end of a log is an
event that nobody was told of: the log is copied aside, and the end is cut off. Any other wrong sum is an error. A
snapshot is written once a log is longer than the model. The snapshot before it stays with its log, and replaces a
damaged one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from training.islands import center as messages
from training.islands.center import Center
from training.islands.link import frames, wire
from upcycle.io import disk, strict

NAMES = re.compile(r"(?:snapshot-(\d{1,9})\.safetensors|log-(\d{1,9}))", re.ASCII)
RECORD = struct.Struct("<Q16s8s")
EVENT = struct.Struct("<BIH")
SNAPSHOT, QUARANTINE = 0, 100  # kinds of records that no frame has
LEAST = 1 << 20  # bytes of a log; a shorter one is not worth a snapshot
SECTOR = 512  # bytes that a disk writes completely or not at all


class Event(NamedTuple):
    kind: int
    name: str
    seq: int = 0
    data: bytes | bytearray = b""


class Journal:
    """Write and replay the log of a folder. Only one process may; the caller holds the folder's lock."""

    def __init__(self, folder: Path, center: Center) -> None:
        """Bring `center`, which is new, to the state that the folder holds."""
        self.folder, self.center = folder, center
        disk.make_folder(folder)
        disk.sweep(folder)
        found = [NAMES.fullmatch(name) for name in os.listdir(folder)]
        snapshots = sorted((int(m[1]) for m in found if m and m[1]), reverse=True)
        logs = [int(m[2]) for m in found if m and m[2]]
        self.number = max([*logs, *snapshots], default=0)
        self.base = self.start([*snapshots, 0])
        older = max((number for number in snapshots if number < self.base), default=0)
        self.first = older if all(self.log(each).exists() for each in range(older, self.base)) else self.base
        for event in self.events(self.base, self.number):
            self.apply(event)
        # unbuffered, because a buffer keeps the rest of a record that the disk refused; close() closes it
        self.file: IO[bytes] = open(self.log(self.number), "a+b", buffering=0)  # noqa: SIM115
        whole = 0
        with open(self.log(self.number), "rb") as file:
            for event, end in self.records(file, last=True):
                self.apply(event)
                whole = end
        if lost := os.fstat(self.file.fileno()).st_size - whole:
            self.cut(whole, lost)
        self.file.seek(whole)
        with disk.naming(self.log(self.number)):
            sync(self.file)
        disk.sync_folder(folder)

    def log(self, number: int) -> Path:
        return self.folder / f"log-{number}"

    def snapshot(self, number: int) -> Path:
        return self.folder / f"snapshot-{number}.safetensors"

    # ---- the start

    def start(self, numbers: list[int]) -> int:
        """Restore the newest of these snapshots that is whole, and return its number. 0: the state without events."""
        problem = ""
        for number in numbers:
            logs = [self.log(each) for each in range(number, self.number + 1)]
            missing = [log for log in logs if not log.exists()]
            if missing and self.number:
                raise ValueError(
                    f"{problem or f'{missing[0]} is missing'}; restore {self.folder} from a copy, or start the server "
                    "and its islands in new outputs"
                )
            if not number:
                break
            problem = self.wrong(number)
            if not problem:
                self.read_snapshot(self.snapshot(number))
                break
            print(f"{problem}; trying the snapshot before it and its log", file=sys.stderr, flush=True)
        return number

    def wrong(self, number: int) -> str:
        """Say what is wrong with a snapshot, whose sum is the first record of its log."""
        with open(self.log(number), "rb") as file:
            record = next((event for event, _ in self.records(file, last=number == self.number)), None)
        if record is None or record.kind != SNAPSHOT:
            return f"{self.log(number)} does not begin with the sum of {self.snapshot(number)}"
        if bytes.fromhex(disk.sha256(self.snapshot(number))) != record.data:
            return f"{self.snapshot(number)} does not have the sum that {self.log(number)} holds"
        return ""

    def read_snapshot(self, path: Path) -> None:
        with safe_open(path, "pt") as file:
            facts = strict.parse((file.metadata() or {})["facts"], path)
            self.center.restore({name: file.get_tensor(name) for name in file.keys()}, facts)  # noqa: SIM118

    def records(self, file: IO[bytes], *, last: bool = False) -> Iterator[tuple[Event, int]]:
        """Yield (event, where it ends). Raise a ValueError for a wrong sum, except that of a torn end if `last`."""
        size, at = os.fstat(file.fileno()).st_size, 0
        file.seek(0)
        while at < size:
            head = file.read(RECORD.size)
            if len(head) == RECORD.size and short(head[:-8]) == head[-8:]:
                length, digest, _ = RECORD.unpack(head)
                data = file.read(length) if length <= size - file.tell() else b""
                if len(data) == length and hashlib.sha256(data).digest()[:16] == digest:
                    at = file.tell()
                    yield event_of(data), at
                    continue
                torn = not data or (file.tell() == size and blank(data, at + RECORD.size))
            else:
                rest = head + file.read()
                torn = len(head) < RECORD.size or not any(rest[-at % SECTOR if -at % SECTOR < RECORD.size else 0 :])
            if torn and last:
                return
            raise ValueError(
                f"{file.name} has a wrong sum at byte {at} of {size}, and what follows cannot be trusted; restore "
                f"{self.folder} from a copy, or start the server and its islands in new outputs"
            )

    def events(self, first: int, last: int) -> Iterator[Event]:
        """Yield the events of the logs `first` ... `last` - 1."""
        for number in range(first, last):
            with open(self.log(number), "rb") as file:
                for event, _ in self.records(file):
                    yield event

    def cut(self, whole: int, lost: int) -> None:
        """Cut off the torn end of the log, after copying the log aside."""
        log = self.log(self.number)
        aside = log.with_name(f"{log.name}.torn-{whole}")
        disk.copy(log, aside)
        self.file.truncate(whole)
        print(
            f"{log} ended in a record of {lost} bytes that was not written to its end; it is cut off, and {aside} is "
            "the log as it was",
            file=sys.stderr,
            flush=True,
        )

    # ---- events

    def add(self, kind: int, name: str, seq: int = 0, data: bytes | bytearray = b"") -> None:
        """Check an event, write it to the disk, and then apply it to the center."""
        self.center.check(kind, name, data)
        with disk.naming(self.log(self.number)):
            at = self.file.tell()
            try:
                write(self.file, Event(kind, name, seq, data))
            except OSError:  # the disk is full: half a record must not stand before the next one
                self.file.seek(at)
                self.file.truncate(at)
                raise
        self.apply(Event(kind, name, seq, data))
        if self.file.tell() > max(4 * self.center.layout.size, LEAST):
            self.save()

    def apply(self, event: Event) -> None:
        if event.kind == frames.JOIN:
            self.center.join(event.name)
        elif event.kind == frames.LEAVE:
            self.center.leave(event.name)
        elif event.kind == frames.PUSH:
            self.center.push(event.name, event.seq, event.data)
        elif event.kind == QUARANTINE:
            self.center.quarantine(event.name, event.data)

    def quarantine(self, name: str, why: str) -> None:
        """Put an island into quarantine, and take back its pushes of the logs that are still here."""
        change = torch.stack(self.pushed_by(name))
        self.add(QUARANTINE, name, data=messages.join({"why": why}, change.numpy().tobytes()))

    def pushed_by(self, name: str) -> list[Tensor]:
        """Return the change that an island's pushes made to each tensor of the rule that sums pushes.

        These sums are linear, so they are replayed from zero with the pushes of this island alone."""
        rule, layout = type(self.center.rule), self.center.layout
        first = self.base if self.first and self.wrong(self.first) else self.first
        state = {key: torch.zeros(layout.size) for key in rule.LINEAR}
        numbers: dict[str, int] = {}
        here: list[int] = []
        if first:
            with safe_open(self.snapshot(first), "pt") as file:
                members = strict.parse((file.metadata() or {})["facts"], self.snapshot(first))["members"]
                if "rule.pushed" in file.keys():  # noqa: SIM118
                    state["pushed"] = file.get_tensor("rule.pushed")
            numbers = {other: member["number"] for other, member in members.items()}
            here = [member["number"] for member in members.values() if member["here"]]
        state.setdefault("pushed", torch.zeros(1, dtype=torch.int64))
        ghost = rule(torch.zeros(layout.size))
        ghost.restore(state)
        ghost.has = dict.fromkeys(here, ghost.model)
        for event in self.events(first, self.number + 1):
            own = numbers.setdefault(event.name, max(numbers.values(), default=-1) + 1)
            if event.kind == frames.PUSH:
                parts = wire.pieces(messages.split(event.data)[1], layout.size) if event.name == name else ()
                for sent in parts:
                    ghost.take(own, sent)
                ghost.done(own)
            elif event.kind != SNAPSHOT:
                ghost.leave(own)
            if event.kind == frames.JOIN:
                ghost.has[own] = ghost.model
        return [getattr(ghost, key) for key in rule.LINEAR]

    # ---- snapshots

    def save(self) -> None:
        """Write a snapshot and begin a new log; remove everything before the last snapshot."""
        tensors, facts = self.center.state()
        number = self.number + 1
        scratch = self.folder / f"{self.snapshot(number).name}.{os.getpid()}-00000000.upcycle.tmp"
        with disk.renamed(scratch, self.snapshot(number)), disk.naming(scratch):
            try:
                save_file(tensors, scratch, {"facts": json.dumps(facts)})
            except SafetensorError as error:  # the disk refused it
                raise OSError(errno.EIO, f"cannot be written ({error})") from error
            with open(scratch, "rb") as file:
                os.fsync(file.fileno())
            log = open(self.log(number), "w+b", buffering=0)  # noqa: SIM115
            with disk.naming(self.log(number)):
                write(log, Event(SNAPSHOT, "", 0, bytes.fromhex(disk.sha256(scratch))))
            disk.sync_folder(self.folder)
        disk.sync_folder(self.folder)
        self.file.close()
        self.file, self.number, self.first, self.base = log, number, self.base, number
        for name in os.listdir(self.folder):
            old = re.match(r"(?:snapshot|log)-(\d{1,9})\b", name, re.ASCII)
            if old and int(old[1]) < self.first:
                (self.folder / name).unlink()

    def close(self) -> None:
        self.file.close()


def write(file: IO[bytes], event: Event) -> None:
    """Append an event to a log; on return it is on the disk."""
    label = event.name.encode()
    head = EVENT.pack(event.kind, event.seq, len(label)) + label
    made = hashlib.sha256(head)
    made.update(event.data)
    record = RECORD.pack(len(head) + len(event.data), made.digest()[:16], b"")[:-8]
    for part in (record + short(record) + head, event.data):
        disk.write_all(file.fileno(), memoryview(part))
    sync(file)


def sync(file: IO[bytes]) -> None:
    os.fsync(file.fileno())


def event_of(data: bytes) -> Event:
    kind, seq, letters = EVENT.unpack_from(data)
    end = EVENT.size + letters
    return Event(kind, data[EVENT.size : end].decode(), seq, data[end:])


def short(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:8]


def blank(data: bytes, at: int) -> bool:
    """Say whether a sector of `data`, which begins at byte `at` of a file, holds only zeros: it was never written."""
    return any(not any(data[first : first + SECTOR]) for first in range(-at % SECTOR, len(data), SECTOR))
