"""Write files safely: `Stream` writes and hashes a large file from start to end, `write_atomic` a small file at once.

When they return, the file is on the disk; when they fail, they leave no partial file.

A shard bypasses the page cache if the system allows it (O_DIRECT): its bytes are not read again, so caching them would
push the source out of memory. The processor only computes the sha256 and copies data into an aligned buffer, while the
disk writes.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import mmap
import os
import re
import shutil
import uuid
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from upcycle.io.dtypes import DTYPES
from upcycle.io.strict import naming as naming

BUFFER = 8 << 20  # bytes of each of two buffers: one is filled while the other is written
PIECE = 1 << 20  # bytes copied at a time, so that they are hashed while still in the processor's cache
ENDS = 1 << 16  # bytes at the start and at the end of a file in which check_own looks for a mark
ALIGN = 4096  # alignment of direct writes: address, length and file position
TEMPORARY = re.compile(r"(.+)\.\d+-[0-9a-f]{8}\.upcycle\.tmp", re.DOTALL)  # names that only write_blocks uses
SAFETENSORS = {torch_name: name for name, (torch_name, _) in DTYPES.items()}


class Stored(Protocol):
    """The fields of a tensor that a safetensors header needs (plan.Output has them)."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def bytes(self) -> int: ...


T = TypeVar("T", bound=Stored)


def shards(tensors: Iterable[T], limit: int) -> list[tuple[str, list[T]]]:
    """Return (file name, tensors) of each shard, in order: as many tensors as fit into `limit` bytes, at least one."""
    groups: list[list[T]] = []
    room = 0
    for tensor in tensors:
        if not groups or tensor.bytes > room:
            groups.append([])
            room = limit
        groups[-1].append(tensor)
        room -= tensor.bytes
    if len(groups) == 1:
        return [("model.safetensors", groups[0])]
    return [(f"model-{i:05d}-of-{len(groups):05d}.safetensors", group) for i, group in enumerate(groups, 1)]


def header(tensors: Iterable[Stored]) -> bytes:
    """Return the header of a safetensors file with these tensors; values are not needed."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        stop = start + tensor.bytes
        table[tensor.name] = {
            "dtype": SAFETENSORS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)  # start the data on a page boundary, so that most tensors do too
    return len(text).to_bytes(8, "little") + text


class Stream:
    """A new file, written from start to end and hashed. After the `with` block it is on the disk, or was removed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            self.fd = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: this filesystem has no direct writes
                raise
            self.fd = os.open(path, flags, 0o666)
        self.digest, self.bytes = hashlib.sha256(), 0
        self.views = [np.frombuffer(mmap.mmap(-1, BUFFER), np.uint8) for _ in range(2)]  # mapped memory is page-aligned
        self.filled = 0  # bytes of views[0]
        self.writer = ThreadPoolExecutor(1, "write")
        self.pending: Future[None] | None = None

    def write(self, data: bytes | Tensor) -> None:
        """Copy and hash `data`; a thread writes each full buffer while the next one is filled."""
        source = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data.flatten().view(torch.uint8).numpy()
        self.bytes += source.size
        start = 0
        while start < source.size:
            size = min(PIECE, BUFFER - self.filled, source.size - start)
            piece = self.views[0][self.filled : self.filled + size]
            np.copyto(piece, source[start : start + size])
            self.digest.update(piece.data)
            start += size
            self.filled += size
            if self.filled == BUFFER:
                self.flush(BUFFER)

    def flush(self, size: int) -> None:
        self.wait()
        self.pending = self.writer.submit(write_all, self.fd, self.views[0].data[:size])
        self.views.reverse()
        self.filled = 0

    def wait(self) -> None:
        pending, self.pending = self.pending, None
        if pending is not None:
            with naming(self.path):
                pending.result()

    def close(self) -> None:
        """Write the remaining bytes and sync the file to the disk."""
        whole, rest = self.filled - self.filled % ALIGN, self.filled % ALIGN
        tail = self.views[0][whole : whole + rest].tobytes()
        self.flush(whole)
        self.wait()
        with naming(self.path):
            undirect(self.fd)  # the end of a file need not be aligned
            write_all(self.fd, memoryview(tail))
            os.fsync(self.fd)

    @property
    def sha256(self) -> str:
        return self.digest.hexdigest()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        done = False
        try:
            if error is None:
                self.close()
                done = True
        finally:
            self.writer.shutdown(wait=True, cancel_futures=True)
            os.close(self.fd)
            if not done:  # free its space, because the disk may be full
                self.path.unlink(missing_ok=True)


def write_all(fd: int, data: memoryview) -> None:
    while data:
        try:
            data = data[os.write(fd, data[: 1 << 30]) :]
        except OSError as error:
            if error.errno != errno.EINVAL or not undirect(fd):  # some filesystems refuse direct writes only here
                raise


def undirect(fd: int) -> bool:
    """Switch `fd` to writes through the page cache; return False if it already did so."""
    direct, flags = getattr(os, "O_DIRECT", 0), fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~direct)
    return bool(flags & direct)


def write_atomic(path: Path, data: bytes) -> None:
    """Write a small file completely or not at all; on return it is on the disk under its name."""
    write_blocks(path, [data])


def copy(source: Path, target: Path) -> None:
    """Copy a file completely or not at all; on return it is on the disk under its name."""
    with open(source, "rb") as file:

        def block() -> bytes:
            with naming(source):
                return file.read(BUFFER)

        write_blocks(target, iter(block, b""))


def write_blocks(path: Path, blocks: Iterable[bytes], mode: int = 0o666) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.upcycle.tmp")
    with renamed(temporary, path):
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            for block in blocks:
                with naming(path):
                    write_all(fd, memoryview(block))
            with naming(path):
                os.fsync(fd)
        finally:
            os.close(fd)
    sync_folder(path.parent)


def check_own(path: Path, mark: bytes, writer: str) -> None:
    """Raise a ValueError if `path` exists and `writer` did not write it.

    Files of `writer` have the pattern `mark` in their first or last ENDS bytes.
    """
    if not path.exists():
        return
    content = b""
    if path.is_file():
        with open(path, "rb") as file:
            content = file.read(ENDS)
            file.seek(max(len(content), path.stat().st_size - ENDS))
            content += file.read()
    if not path.is_file() or (content and not re.search(mark, content)):
        raise ValueError(f"{path} exists and {writer} did not write it; choose another output, or move {path} away")


@contextmanager
def renamed(scratch: Path, path: Path) -> Iterator[None]:
    """Rename `scratch`, which the `with` block writes, to `path`; remove it on failure."""
    try:
        yield
        os.rename(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def sweep(folder: Path, names: Collection[str] | None = None) -> None:
    """Remove temporary files and folders of killed processes, of these names or of all; nobody may be writing them."""
    for path in folder.iterdir():
        left = TEMPORARY.fullmatch(path.name)
        if left and (names is None or left[1] in names):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, and sync each parent to the disk."""
    new = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in reversed(new):
        with suppress(PermissionError):  # a folder may be writable but not readable
            sync_folder(each.parent)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with naming(path), open(path, "rb") as file:
        while block := file.read(BUFFER):
            digest.update(block)
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        with naming(folder):
            os.fsync(fd)
    finally:
        os.close(fd)
