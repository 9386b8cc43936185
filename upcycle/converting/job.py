"""A conversion that several processes share and that may be killed at any time: which processes run, on which plan.

`job` is the context in which a process works; its `Watch` notices processes that have stopped. The state is on disk:

FOLDER.partial/.upcycle/
    job.json                  the plan and the source of this conversion
    rank-0.lock               held while the process of that rank lives
    rank-0.failed             why the process of that rank stopped
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upcycle.io import strict
from upcycle.io.disk import make_folder, write_atomic
from upcycle.io.publish import hold, opened

JOB = ".upcycle"
OBSERVED = "observed.safetensors"
POLL = 0.2  # seconds between looks at the other processes' work
PATIENCE = 60.0  # seconds that a process may start later than the others


@dataclass(frozen=True)
class Worker:
    """The rank of this process and the number of processes, as torchrun sets them."""

    rank: int = 0
    count: int = 1

    @staticmethod
    def here() -> Worker:
        rank, count = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
        if not (rank.isdecimal() and count.isdecimal() and int(rank) < int(count)):
            raise ValueError(f"the environment has RANK={rank} and WORLD_SIZE={count}; use torchrun, or unset both")
        if int(count) > 1 and "LOCAL_RANK" not in os.environ:  # left over: nobody else is running, or will
            raise ValueError(
                f"the environment has RANK={rank} and WORLD_SIZE={count} but no LOCAL_RANK, which torchrun sets too; "
                "use torchrun, or unset both"
            )
        return Worker(int(rank), int(count))


def read_json(path: Path) -> Any:
    """The parsed file; None if it is missing or not JSON."""
    try:
        return strict.read_json(path)
    except (OSError, ValueError):
        return None


class Watch:
    """Checks that the processes this one waits for are still running. Each holds its lock while it lives."""

    def __init__(self, partial: Path, worker: Worker) -> None:
        self.folder, self.worker, self.begun = partial / JOB, worker, time.time()
        self.seen: dict[int, float] = {}
        self.beats: dict[int, int] = {}

    def check(self, ranks: Collection[int]) -> None:
        """Raise a ValueError if a process of `ranks` stopped, or has been missing for longer than PATIENCE."""
        for rank in ranks:
            if rank == self.worker.rank or self.alive(rank):
                self.seen[rank] = time.time()
                continue
            reason, at = "it is not running; start all of them again, or unset WORLD_SIZE", 0.0
            with suppress(FileNotFoundError):
                failed = self.folder / f"rank-{rank}.failed"
                reason, at = failed.read_text(), failed.stat().st_mtime
            # a file older than this process may be left from the last run; its rank removes it on starting
            if at >= self.begun or time.time() - self.seen.get(rank, self.begun) > PATIENCE:
                raise ValueError(f"rank-{rank} of {self.worker.count} stopped: {reason}")

    def alive(self, rank: int) -> bool:
        """True if the process of that rank holds its lock. On a filesystem without locks: if it touched the file since
        the last look."""
        lock = self.folder / f"rank-{rank}.lock"
        try:
            with open(lock) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        except OSError:
            now = lock.stat().st_mtime_ns
            before, self.beats[rank] = self.beats.get(rank), now
            return before not in (None, now)


PARTS = re.compile(  # shards being written, of `convert` and of `prepare`: by their names ours
    r"(?:model(?:-\d{5,}-of-\d{5,})?\.safetensors|tokens-\d{5,}-\d{5,}\.bin)\.rank-(\d+)\.part", re.ASCII
)


def check_ours(partial: Path) -> None:
    """Raise a ValueError if there is a folder of somebody else's where unfinished work is to lie."""
    if partial.is_dir() and not (partial / JOB).is_dir() and any(partial.iterdir()):
        raise ValueError(
            f"{partial} is there and is no unfinished work of this program; move it, or choose another output"
        )


@contextmanager
def job(partial: Path, identity: Mapping[str, Any], worker: Worker, check: Any) -> Iterator[Watch]:
    """Take this process's place in the job, one process per rank, all with the same plan. `check` runs before the first
    write, and may refuse."""
    if worker.rank == 0:
        check_ours(partial)
        if not partial.exists():
            check()
        make_folder(partial / JOB)
    begun = time.time()
    while not (partial / JOB).is_dir():  # the other ranks wait for rank 0 to make the folder
        if time.time() - begun > PATIENCE:
            raise ValueError(
                f"{partial} was not begun by rank 0 within a minute; look at that process, or if there is none unset "
                f"RANK={worker.rank} and WORLD_SIZE={worker.count}"
            )
        time.sleep(POLL)
    with (
        opened(partial / JOB / f"rank-{worker.rank}.lock") as lock,
        hold(lock, f"{partial} as rank {worker.rank}"),
    ):
        if not os.fstat(lock.fileno()).st_nlink:  # renamed and removed after it was opened here
            raise ValueError(f"another process has just finished {partial}; run the same command again")
        failed = partial / JOB / f"rank-{worker.rank}.failed"
        failed.unlink(missing_ok=True)
        for old in partial.iterdir():  # left by this rank, or by a rank that this run does not have
            part = PARTS.fullmatch(old.name)
            if part and int(part[1]) % worker.count == worker.rank:
                old.unlink(missing_ok=True)
        try:
            if worker.rank == 0:
                start_job(partial, identity, check)
            await_job(partial, identity)
            yield Watch(partial, worker)
        except BaseException as error:
            if worker.count > 1 and (partial / JOB).is_dir():  # so that the others do not wait for this rank's shards
                write_atomic(failed, (str(error) or type(error).__name__).encode())
            raise


def check_first(partial: Path, output: Path) -> None:
    """Raise a ValueError if another process has made the output since this one looked for it."""
    if output.is_dir() and any(output.iterdir()):
        shutil.rmtree(partial / JOB, ignore_errors=True)
        with suppress(OSError):  # it holds something
            partial.rmdir()
        raise ValueError(f"another process has just made {output}; run the same command again, which looks at it")


def start_job(partial: Path, identity: Mapping[str, Any], check: Any) -> None:
    if read_json(partial / JOB / "job.json") == dict(identity):
        return
    if any((partial / JOB).glob("model*.json")) or (partial / JOB / OBSERVED).exists():
        raise ValueError(
            f"{partial} holds an unfinished conversion by another plan or of another source; finish it with "
            "its own config, or remove it"
        )
    check()
    write_atomic(partial / JOB / "job.json", json.dumps(identity, indent=1).encode())


def await_job(partial: Path, identity: Mapping[str, Any]) -> None:
    begun = time.time()
    while read_json(partial / JOB / "job.json") != dict(identity):  # rank 0 replaces a stale job.json
        if time.time() - begun > PATIENCE:
            raise ValueError(
                f"{partial} is not being made by rank 0, or by another plan or of another source than this process "
                "has; look at that process, and give all one config"
            )
        time.sleep(POLL)


@contextmanager
def explained(partial: Path) -> Iterator[None]:
    """Turn a full or unwritable disk into a ValueError of one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise ValueError(
                f"no room left while writing {error.filename or partial} ({error.strerror}); free some and run the "
                "same command again: what is finished is kept"
            ) from None
        if error.errno in (errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EPERM, errno.EIO):
            raise ValueError(
                f"{error.filename or partial} cannot be written ({error.strerror}); choose another output"
            ) from None
        raise
