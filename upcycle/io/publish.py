"""Publish a finished folder under its name, safely: one writer, all files on the disk first, no foreign file touched.

Every command that writes a folder or several files uses these steps:

    alone(lock, what)         hold a lock that names its holder; the lock of a dead process is taken over
    disk.Stream, .copy, .write_atomic       write each file to the disk before the rename
    listed(paths)             size and sha256 of all files, for the manifest
    rename(partial, output)   rename the folder and sync its parent
    damages(manifest, files)  list the files that have changed since they were written
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import socket
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from upcycle.io import disk

MANIFEST = "upcycle.json"
# measurements on text, or experts chosen by them; a safetensors file, whose suffix no loader of weights looks for
MEASURED = "upcycle.measured"
LOCK = ".lock"  # the lock file in a folder that is written in place
TRIES = 5  # attempts to take a lock, because another process may hold it briefly to test it
POLL = 0.1  # seconds between attempts
NO_SUM = "{} has no sum, so damage to it would not be noticed; an older version wrote it"
BEAT = 5.0  # seconds between touches of the lock file on a filesystem without locks
SMALL = 16 << 20  # bytes; `damages` always reads files up to this size
Stamp = tuple[int, int] | None  # (inode, modification time in ns) of a file, which identifies it; None if it is missing


# ---- one process at a time


def opened(lock: Path) -> IO[str]:
    """Open a lock file without changing its content; create it if missing; a link raises an OSError."""
    return open(lock, "a+", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o666))


def acquire(lock: IO[str], what: str) -> bool:
    """Take the lock and write this process into it; return False on a filesystem without locks."""
    try:
        taken = flocked(lock)
    except OSError:
        taken, locks = not beats(lock), False
    else:
        locks = True
    if not taken:
        raise ValueError(f"another process is writing {what}{holder(lock)}; wait for it, or stop it")
    sign(lock, os.getpid())
    return locks


def sign(lock: IO[str], process: int) -> None:
    """Write the process id, host and time of the holder into a lock file."""
    with disk.naming(Path(lock.name)):
        lock.seek(0)
        lock.truncate(0)
        text = f"{process} {socket.gethostname()} {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}\n"
        disk.write_all(lock.fileno(), memoryview(text.encode()))  # close() would write a buffer that the disk refused


def flocked(lock: IO[str]) -> bool:
    """Try to take the lock and return True on success; raise an OSError on a filesystem without locks."""
    for _ in range(TRIES):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(POLL)  # another process may only be testing the lock, see job.Watch.alive
    return False


def beats(lock: IO[str]) -> bool:
    """Return True if the process named in a lock file is alive; for filesystems without locks."""
    found = said(lock)
    if found is None:
        return False
    if found[1] == socket.gethostname():
        try:
            os.kill(found[0], 0)  # signal 0 only tests whether the process exists
        except ProcessLookupError:
            return False
        except PermissionError:  # it exists and belongs to another user
            return True
        return found[0] != os.getpid()
    before = os.fstat(lock.fileno()).st_mtime_ns
    time.sleep(1.5 * BEAT)
    return os.fstat(lock.fileno()).st_mtime_ns != before


def said(lock: IO[str]) -> tuple[int, str, str] | None:
    """Read (process id, host, time) from a lock file; return None if it does not have them."""
    lock.seek(0)
    found = re.fullmatch(r"(\d{1,9}) ([\w.-]{1,253}) ([\dTZ:-]{1,30})\n", lock.read(400))
    return (int(found[1]), found[2], found[3]) if found else None


def holder(lock: IO[str]) -> str:
    found = said(lock)
    return f" (process {found[0]} on {found[1]}, since {found[2]})" if found else ""


@contextmanager
def hold(lock: IO[str], what: str) -> Iterator[None]:
    """Hold the lock; on a filesystem without locks, touch the file every BEAT seconds. See job.Watch.alive."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(BEAT):
            with suppress(OSError):
                os.utime(lock.fileno())

    if not acquire(lock, what):
        threading.Thread(target=beat, daemon=True).start()
    try:
        yield
    finally:
        done.set()


@contextmanager
def alone(lock: Path, what: Path) -> Iterator[None]:
    """Hold the lock on `what`; afterwards remove the lock file, and the empty folders that were made for it."""
    with ExitStack() as stack:
        made = [folder for folder in (lock.parent, *lock.parent.parents) if not folder.exists()]
        while True:
            disk.make_folder(lock.parent)
            with suppress(FileNotFoundError):  # the previous holder has just removed the folder
                file = stack.enter_context(opened(lock))
                stack.enter_context(hold(file, str(what)))
                if os.fstat(file.fileno()).st_nlink:
                    break
                stack.pop_all().close()  # the previous holder removed the file after we opened it
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
            with suppress(OSError):  # not empty
                for folder in made:
                    folder.rmdir()


def write_own(path: Path, data: bytes) -> None:
    """Write the only file of a command, as write_atomic does, and remove what killed processes left next to it."""
    with alone(path.with_name(f".{path.name}.lock"), path):
        disk.sweep(path.parent, {path.name})
        disk.write_atomic(path, data)


# ---- manifest and rename


def listed(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Return {name: {bytes, sha256}} of files, for a manifest."""
    return {path.name: {"bytes": path.stat().st_size, "sha256": disk.sha256(path)} for path in sorted(paths)}


def digest(manifest: Mapping[str, Any]) -> str:
    """Return the sha256 of a manifest without its `sum`."""
    body = {key: value for key, value in manifest.items() if key != "sum"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def signed(manifest: Mapping[str, Any]) -> bytes:
    return json.dumps({**manifest, "sum": digest(manifest)}, indent=2).encode() + b"\n"


def unsigned(found: Mapping[str, Any], path: Path, advice: str) -> dict[str, Any]:
    """Return a JSON object that `signed` wrote, without its sum. Raise a ValueError with this advice if the sum is
    another one; warn if there is none, as in files of older versions."""
    if "sum" not in found:
        warnings.warn(NO_SUM.format(path), stacklevel=3)
    elif found["sum"] != digest(found):
        raise ValueError(f"{path} has changed since it was written: its sum differs; {advice}")
    return {key: value for key, value in found.items() if key != "sum"}


def rename(partial: Path, output: Path) -> None:
    """Rename a folder whose files are on the disk, and sync its parent; foreign files in the folder move along."""
    disk.sync_folder(partial)
    os.rename(partial, output)
    disk.sync_folder(output.parent)


def stamp(file: Path) -> Stamp:
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def damages(manifest: Path, files: Mapping[str, Mapping[str, Any]], *, every: bool = False) -> Iterator[str]:
    """Yield a clause for each file in the folder of `manifest` that differs from its line in `files`.

    Each file must exist with its size. The sha256 is compared for small files, for files that changed after the
    manifest was written, and with `every` for all files.
    """
    written = manifest.stat().st_ctime_ns
    for name, line in files.items():
        path = manifest.with_name(Path(name).name)
        if not path.is_file():
            yield f"{path} is missing"
            continue
        status = path.stat()
        if status.st_size != line["bytes"]:
            yield f"{path} has {status.st_size} bytes, but {line['bytes']} were written"
            continue
        is_read = every or status.st_size <= SMALL or status.st_ctime_ns > written
        if is_read and disk.sha256(path) != line["sha256"]:
            yield f"{path} has changed since it was written: its sha256 differs"
