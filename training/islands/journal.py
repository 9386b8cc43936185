"""Keep the server's state on disk: a snapshot, and a log of every event since. An event is logged before its answer.

    FOLDER/snapshot-3.safetensors    the whole state after the events of logs 0 ... 2
    FOLDER/log-3                     length u64 | sha256 (16) | kind u8, seq u32, name length u16, name, data ...

A server that was killed restores its state and its answers from these files, bit for bit. The torn end of a log is an
event that nobody was told of; it is cut off. A snapshot is written once a log is longer than the model.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from safetensors import safe_open
from safetensors.torch import save_file

from training.islands.center import Center
from training.islands.link import frames
from upcycle.io import disk, strict

SNAPSHOT = re.compile(r"snapshot-(\d{1,9})\.safetensors", re.ASCII)
RECORD = struct.Struct("<Q16s")
EVENT = struct.Struct("<BIH")
LEAST = 1 << 20  # bytes of a log; a shorter one is not worth a snapshot


class Journal:
    """Write and replay the log of a folder. Only one process may; the caller holds the folder's lock."""

    def __init__(self, folder: Path, center: Center) -> None:
        """Bring `center`, which is new, to the state that the folder holds."""
        self.folder, self.center = folder, center
        disk.make_folder(folder)
        disk.sweep(folder)
        self.number = max((int(m[1]) for m in map(SNAPSHOT.fullmatch, os.listdir(folder)) if m), default=0)
        if self.number:
            self.read_snapshot(self.snapshot(self.number))
        self.file: IO[bytes] = open(self.log(self.number), "a+b")  # noqa: SIM115 - close() closes it
        whole = 0
        for record, end in self.records():
            self.apply(*record)
            whole = end
        self.file.truncate(whole)
        self.file.seek(whole)
        self.sync()
        disk.sync_folder(folder)

    def log(self, number: int) -> Path:
        return self.folder / f"log-{number}"

    def snapshot(self, number: int) -> Path:
        return self.folder / f"snapshot-{number}.safetensors"

    def add(self, kind: int, name: str, seq: int = 0, data: bytes = b"") -> None:
        """Write an event to the disk, and then apply it to the center."""
        label = name.encode()
        event = EVENT.pack(kind, seq, len(label)) + label
        made = hashlib.sha256(event)
        made.update(data)
        digest = made.digest()[:16]
        with disk.naming(self.log(self.number)):
            at = self.file.tell()
            try:
                self.file.write(RECORD.pack(len(event) + len(data), digest) + event)
                self.file.write(data)
                self.sync()
            except OSError:  # the disk is full: half a record must not stand before the next one
                self.file.seek(at)
                self.file.truncate(at)
                raise
        self.apply(kind, name, seq, data)
        if self.file.tell() > max(4 * self.center.layout.size, LEAST):
            self.save()

    def apply(self, kind: int, name: str, seq: int, data: bytes) -> None:
        if kind == frames.JOIN:
            self.center.join(name)
        elif kind == frames.LEAVE:
            self.center.leave(name)
        else:
            self.center.push(name, seq, data)

    def records(self) -> Iterator[tuple[tuple[int, str, int, bytes], int]]:
        """Yield (event, where it ends) up to the first torn record."""
        size = os.fstat(self.file.fileno()).st_size
        self.file.seek(0)
        while True:
            head = self.file.read(RECORD.size)
            if len(head) < RECORD.size:
                return
            length, digest = RECORD.unpack(head)
            if length < EVENT.size or length > size - self.file.tell():
                return
            data = self.file.read(length)
            if hashlib.sha256(data).digest()[:16] != digest:
                return
            kind, seq, letters = EVENT.unpack_from(data)
            name = data[EVENT.size : EVENT.size + letters].decode()
            yield (kind, name, seq, data[EVENT.size + letters :]), self.file.tell()

    def save(self) -> None:
        """Write a snapshot and begin a new log."""
        tensors, facts = self.center.state()
        number = self.number + 1
        scratch = self.folder / f"{self.snapshot(number).name}.{os.getpid()}-00000000.upcycle.tmp"
        with disk.renamed(scratch, self.snapshot(number)), disk.naming(scratch):
            save_file(tensors, scratch, {"facts": json.dumps(facts)})
            with open(scratch, "rb") as file:
                os.fsync(file.fileno())
        disk.sync_folder(self.folder)
        self.file.close()
        self.number = number
        self.file = open(self.log(number), "w+b")  # noqa: SIM115
        disk.sync_folder(self.folder)
        for old in range(number - 1, -1, -1):
            self.snapshot(old).unlink(missing_ok=True)
            if not self.log(old).exists():
                break
            self.log(old).unlink()

    def read_snapshot(self, path: Path) -> None:
        with safe_open(path, "pt") as file:
            facts = strict.parse((file.metadata() or {})["facts"], path)
            self.center.restore({name: file.get_tensor(name) for name in file.keys()}, facts)  # noqa: SIM118

    def sync(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()
