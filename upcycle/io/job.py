"""Share the writing of one folder between several processes; a kill may stop any process at any time.

A process works inside the context manager `job`, whose `Watch` notices processes that have stopped. The state on disk:

FOLDER.partial/.upcycle/
    job.json                  the identity of the job: its plan and its source
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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upcycle.io import strict
from upcycle.io.disk import make_folder, write_atomic
from upcycle.io.publish import hold, opened

JOB = ".upcycle"
POLL = 0.2  # seconds between checks of the other processes' work
PATIENCE = 60.0  # seconds by which a process may start later than the others
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
CLOSED = (errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EPERM, errno.EIO)


@dataclass(frozen=True)
class Worker:
    """The rank of this process and the number of processes, as torchrun sets them."""

    rank: int = 0
    count: int = 1

    @staticmethod
    def here() -> Worker:
        """Return the worker of this process, from the environment variables RANK and WORLD_SIZE."""
        rank, count = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
        right = rank.isdecimal() and count.isdecimal() and int(rank) < int(count)
        alone = right and int(count) > 1 and "LOCAL_RANK" not in os.environ  # leftover variables
        if not right or alone:
            raise ValueError(
                f"the environment has RANK={rank} and WORLD_SIZE={count}"
                f"{' but not LOCAL_RANK, which torchrun also sets' if alone else ''}; use torchrun, or unset both"
            )
        return Worker(int(rank), int(count))


def read_json(path: Path) -> Any:
    """Return the parsed file; None if it is missing or not JSON. A file that the disk cannot read is not missing."""
    try:
        return strict.read_json(path)
    except (OSError, ValueError) as error:
        disk = error if isinstance(error, OSError) else error.__cause__  # strict says in a ValueError what failed
        if isinstance(disk, OSError) and not isinstance(disk, FileNotFoundError | NotADirectoryError):
            raise
        return None


class Watch:
    """Check that the processes that this one waits for are running. Each holds its lock while it runs."""

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
            reason, at = "it is not running; start all processes again, or unset WORLD_SIZE", 0.0
            with suppress(FileNotFoundError):
                failed = self.folder / f"rank-{rank}.failed"
                reason, at = failed.read_text(), failed.stat().st_mtime
            # an older file may be left from the last run; its rank removes it when it starts
            if at >= self.begun or time.time() - self.seen.get(rank, self.begun) > PATIENCE:
                raise ValueError(f"rank-{rank} of {self.worker.count} stopped: {reason}")

    def alive(self, rank: int) -> bool:
        """Return True if the process of that rank holds its lock, or, without file locks, touched the file lately."""
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


def unfinished(partial: Path, shard: str) -> Iterator[tuple[Path, int]]:
    """Yield each file NAME.rank-N.part whose NAME matches the pattern `shard`, with the rank N that wrote it."""
    for path in list(partial.iterdir()) if shard else []:
        if part := re.fullmatch(rf"(?:{shard})\.rank-(\d+)\.part", path.name, re.ASCII):
            yield path, int(part[1])


def sweep_unfinished(partial: Path, shard: str, worker: Worker | None = None) -> None:
    """Remove unfinished shards: of all ranks, or only of this worker and of ranks that this run does not have."""
    for path, rank in unfinished(partial, shard):
        if worker is None or rank % worker.count == worker.rank:
            path.unlink(missing_ok=True)


def check_ours(partial: Path) -> None:
    """Raise a ValueError if the partial folder exists and was not made by this program."""
    if partial.is_dir() and not (partial / JOB).is_dir() and any(partial.iterdir()):
        raise ValueError(
            f"{partial} exists and is not unfinished work of this program; move it, or choose another output"
        )


def check_apart(key: str, output: Path, inputs: Iterable[str | Path], suffix: str = "-moe") -> None:
    """Raise a ValueError if `output` is one of the inputs, lies in one, or contains one: inputs must not change."""
    made = output.resolve()
    for given in map(Path, inputs):
        read = given.resolve()
        if not read.exists() or not (read == made or read in made.parents or made in read.parents):
            continue
        how = "is the same as" if read == made else "lies in" if read in made.parents else "contains"
        place = (given.parent if given.name not in ("", "..") else read.parent) / f"{read.name}{suffix}"
        raise ValueError(f"{key}={output} {how} the input {given}; write another folder, for instance {key}={place}")


@contextmanager
def job(
    partial: Path,
    identity: Mapping[str, Any],
    worker: Worker,
    check: Callable[[], object],
    shard: str = "",
    adopt: Callable[[], object] | None = None,
    over: Callable[[], bool] = lambda: False,
) -> Iterator[Watch]:
    """Join the job as one rank; there is one process per rank, and all must have the same identity.

    `check` runs before the first write, and may raise. `shard` is the pattern of the names of files that ranks write.
    `adopt` decides which unfinished files of another identity to keep, and may raise; without `adopt`, unfinished files
    of another identity raise a ValueError. `over` returns True once rank 0 has finished the job, for which a late rank
    must not wait.
    """
    if worker.rank == 0:
        check_ours(partial)
        if not partial.exists():
            check()
        make_folder(partial / JOB)
    wait_until(
        lambda: (partial / JOB).is_dir() or over(),
        f"rank 0 did not start {partial} within a minute; check that process, or if there is none, unset "
        f"RANK={worker.rank} and WORLD_SIZE={worker.count}",
    )
    lock_file = partial / JOB / f"rank-{worker.rank}.lock"
    with opened(lock_file) as lock, hold(lock, f"{partial} as rank {worker.rank}"):
        if not os.fstat(lock.fileno()).st_nlink:  # another process removed it after we opened it
            raise ValueError(f"another process has just finished {partial}; run the same command again")
        failed = lock_file.with_suffix(".failed")
        failed.unlink(missing_ok=True)
        sweep_unfinished(partial, shard, worker)
        try:
            if worker.rank == 0:
                start_job(partial, identity, check, adopt)
            wait_until(  # rank 0 replaces a stale job.json
                lambda: over() or read_json(partial / JOB / "job.json") == dict(identity),
                f"rank 0 is not writing {partial}, or it has another plan or source than this process; check that "
                "process, and give all processes the same config",
            )
            if worker.rank and over():
                raise ValueError(f"another process has just finished {partial}; run the same command again")
            yield Watch(partial, worker)
        except BaseException as error:
            if worker.count > 1 and (partial / JOB).is_dir():  # so that others do not wait for this rank's shards
                write_atomic(failed, (str(error) or type(error).__name__).encode())
            raise


def check_first(partial: Path, output: Path) -> None:
    """Raise a ValueError if another process has written the output since this one checked for it."""
    if output.is_dir() and any(output.iterdir()):
        shutil.rmtree(partial / JOB, ignore_errors=True)
        with suppress(OSError):  # the folder is not empty
            partial.rmdir()
        raise ValueError(f"another process has just written {output}; run the same command again, which checks it")


def start_job(
    partial: Path, identity: Mapping[str, Any], check: Callable[[], object], adopt: Callable[[], object] | None
) -> None:
    """Write job.json; without `adopt`, raise a ValueError if the folder has unfinished work of another identity."""
    if read_json(partial / JOB / "job.json") == dict(identity):
        return
    if adopt is not None:
        adopt()
    elif any(path.name != "job.json" for kind in ("*.json", "*.safetensors") for path in (partial / JOB).glob(kind)):
        raise ValueError(
            f"{partial} has an unfinished conversion with another plan or another source; finish it with "
            "its own config, or remove it"
        )
    check()
    write_atomic(partial / JOB / "job.json", json.dumps(identity, indent=1).encode())


def wait_until(done: Callable[[], bool], otherwise: str) -> None:
    """Wait until `done` returns True; after PATIENCE seconds raise a ValueError with the sentence `otherwise`."""
    begun = time.time()
    while not done():
        if time.time() - begun > PATIENCE:
            raise ValueError(otherwise)
        time.sleep(POLL)


@contextmanager
def explained(partial: Path) -> Iterator[None]:
    """Turn the OSError of a full or unwritable disk into a ValueError of one sentence."""
    try:
        yield
    except OSError as error:
        file = error.filename or partial
        if error.errno in FULL:
            raise ValueError(
                f"no space left while writing {file} ({error.strerror}); free some and run the same command again: "
                "finished files are kept"
            ) from None
        if error.errno in CLOSED:
            raise ValueError(f"{file} cannot be written ({error.strerror}); choose another output") from None
        raise
