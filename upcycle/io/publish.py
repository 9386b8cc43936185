"""How what was made gets its name: one process writes it, all of it is on the disk before, and nobody else's file is
touched. Every command that makes a folder or several files goes this way:

    alone(lock, what)         a lock that names who holds it; that of a process that died is taken over
    disk.Stream, .copy, .write_atomic       each file is on the disk before anything is renamed
    listed(paths)             size and sha256 of all files, for the manifest
    rename(partial, output)   the folder gets its name, and its parent knows it
    damages(manifest, files)  is what lies there still what was published?
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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from upcycle.io import disk

MANIFEST = "upcycle.json"
# what a plan measured on text, or chose by that; safetensors, and no loader of weights knows the suffix
MEASURED = "upcycle.measured"
LOCK = ".lock"  # in a folder that is written in place
TRIES = 5  # at a lock, which another process may only be testing
POLL = 0.1  # seconds between them
BEAT = 5.0  # seconds between signs of life where there are no locks
SMALL = 16 << 20  # bytes of files that are always read again
Stamp = tuple[int, int] | None  # of a file, that of another one differs: inode and time of change; None if it is gone


# ---- one process at a time


def opened(lock: Path) -> IO[str]:
    """Open a lock file, made if it is not there; what it says of its holder stays, and a link is refused."""
    return open(lock, "a+", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o666))


def acquire(lock: IO[str], what: str) -> bool:
    """Take the lock and write into it who has it; return False on a filesystem without locks."""
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
    """Write into a lock file who holds it."""
    lock.seek(0)
    lock.truncate(0)
    lock.write(f"{process} {socket.gethostname()} {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}\n")
    lock.flush()


def flocked(lock: IO[str]) -> bool:
    """Try to take the lock; an OSError where there are none."""
    for _ in range(TRIES):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(POLL)  # perhaps another process only tests the lock, see job.Watch.alive
    return False


def beats(lock: IO[str]) -> bool:
    """Return whether the process named in a lock file gives signs of life, where there are no locks."""
    found = said(lock)
    if found is None:
        return False
    if found[1] == socket.gethostname():
        try:
            os.kill(found[0], 0)  # only asks whether there is one
        except ProcessLookupError:
            return False
        except PermissionError:  # somebody else's
            return True
        return found[0] != os.getpid()
    before = os.fstat(lock.fileno()).st_mtime_ns
    time.sleep(1.5 * BEAT)
    return os.fstat(lock.fileno()).st_mtime_ns != before


def said(lock: IO[str]) -> tuple[int, str, str] | None:
    """Read (process, host, since when) of a lock file; None if it does not say."""
    lock.seek(0)
    found = re.fullmatch(r"(\d{1,9}) ([\w.-]{1,253}) ([\dTZ:-]{1,30})\n", lock.read(400))
    return (int(found[1]), found[2], found[3]) if found else None


def holder(lock: IO[str]) -> str:
    found = said(lock)
    return f" (process {found[0]} on {found[1]}, since {found[2]})" if found else ""


@contextmanager
def hold(lock: IO[str], what: str) -> Iterator[None]:
    """Hold the lock; where there are none, touch the file every BEAT seconds instead. See job.Watch.alive."""
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
    """Hold the lock on `what`; remove the lock file after it, and empty folders that were made for it."""
    with ExitStack() as stack:
        made = [folder for folder in (lock.parent, *lock.parent.parents) if not folder.exists()]
        while True:
            disk.make_folder(lock.parent)
            with suppress(FileNotFoundError):  # the process before has just removed the folder that it had made
                file = stack.enter_context(opened(lock))
                stack.enter_context(hold(file, str(what)))
                if os.fstat(file.fileno()).st_nlink:
                    break
                stack.pop_all().close()  # the process before has removed the file after it was opened here
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
            with suppress(OSError):  # it holds something
                for folder in made:
                    folder.rmdir()


# ---- all files, and their name


def listed(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Return {name: size and sha256} of files, as a manifest has them."""
    return {path.name: {"bytes": path.stat().st_size, "sha256": disk.sha256(path)} for path in sorted(paths)}


def digest(manifest: Mapping[str, Any]) -> str:
    """Return the sha256 of a manifest without its `sum`."""
    body = {key: value for key, value in manifest.items() if key != "sum"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def signed(manifest: Mapping[str, Any]) -> bytes:
    return json.dumps({**manifest, "sum": digest(manifest)}, indent=2).encode() + b"\n"


def rename(partial: Path, output: Path) -> None:
    """Give a folder whose files are on the disk its name. What is in it and is not ours goes along."""
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
    """Yield a clause for each file in the folder of `manifest` that is not as `files` lists it.

    Each must be there with its size; read again are small ones, those touched after the manifest was written, or all.
    """
    written = manifest.stat().st_ctime_ns
    for name, line in files.items():
        path = manifest.with_name(Path(name).name)
        if not path.is_file():
            yield f"{path} is missing"
            continue
        status = path.stat()
        if status.st_size != line["bytes"]:
            yield f"{path} has {status.st_size} bytes, {line['bytes']} were written"
            continue
        is_read = every or status.st_size <= SMALL or status.st_ctime_ns > written
        if is_read and disk.sha256(path) != line["sha256"]:
            yield f"{path} is not the file that was written: its sha256 differs"
