"""Run commands in their own processes, several at once, each on its device: start, watch and stop them.

A job is a sequence of commands. The files on disk decide the next command, so a job that was stopped continues. A
process holds its job's lock as long as it lives, even if the study that started it is gone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from tqdm import tqdm

from upcycle.cli.frame import printable
from upcycle.io import publish
from upcycle.io.disk import sweep
from upcycle.io.publish import LOCK, acquire, opened, sign

ROOT = Path(__file__).parents[2]
POLL = 0.5  # seconds between looks at the processes
LAST = 4096  # bytes at a log's end that are read for its last line


@dataclass(frozen=True)
class Job:
    name: str
    folder: Path  # the job writes this folder; its lock and log are next to it
    left: Callable[[], list[str] | None]  # the next command (python -m ...), or None when all is done
    steps: int = 0  # for the progress bar
    done: Callable[[], int] = field(default=lambda: 0)  # steps so far

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".log")


@dataclass
class Child:
    job: Job
    command: list[str]
    process: subprocess.Popen[bytes]
    lock: IO[str]


class Workers:
    """Run all jobs, a given number at once, each worker on its device."""

    def __init__(self, count: int, devices: Sequence[str] = (), threads: int = 1) -> None:
        self.count, self.devices, self.threads = count, devices, threads
        self.children: dict[int, Child] = {}  # by worker
        self.failures: dict[str, str] = {}

    def run(self, jobs: Sequence[Job]) -> dict[str, str]:
        """Run all jobs, and return a sentence for each job that failed, by name."""
        waiting, made = deque(jobs), {job.name: job.done() for job in jobs}
        total = sum(job.steps for job in jobs)
        with stopping(), tqdm(total=total, unit="step", disable=None if total else True) as bar:
            try:
                while self.fill(waiting):
                    bar.n = sum(made.values())
                    bar.refresh()
                    time.sleep(POLL)
                    self.look(made)
            except BaseException:
                self.stop()
                raise
        return self.failures

    def fill(self, waiting: deque[Job]) -> bool:
        """Give each idle worker a job with work left; return whether any work is running."""
        for worker in range(self.count):
            while waiting and worker not in self.children:
                self.start(worker, waiting.popleft())
        return bool(self.children)

    def look(self, made: dict[str, int]) -> None:
        """Record the steps of each child, and start the next command of those that have ended."""
        for worker, child in list(self.children.items()):
            over = child.process.poll() is not None
            made[child.job.name] = child.job.done()
            if over:
                self.ended(worker, child)

    def start(self, worker: int, job: Job, before: Sequence[str] = ()) -> None:
        """Start the next command of a job, if any is left; `before` is the command that has just ended."""
        command = job.left()
        if command is None:
            unlock(job.folder)
            return
        if command == before:  # the command ended without an error but did not write its files
            self.failures[job.name] = f"{job.name} did not finish: {last_line(job.log)} ({job.log})"
            return
        job.folder.parent.mkdir(parents=True, exist_ok=True)
        lock = opened(job.folder.with_suffix(".lock"))  # the child's, closed by `ended`
        try:
            acquire(lock, str(job.folder))
        except ValueError as error:
            lock.close()
            self.failures[job.name] = f"{job.name} was not started: {error}"
            return
        tqdm.write(printable(f"{job.name}: python -m {' '.join(command)}"))
        with open(job.log, "a") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=self.environment(worker), start_new_session=True, pass_fds=[lock.fileno()],
            )  # fmt: skip
        sign(lock, process.pid)
        self.children[worker] = Child(job, command, process, lock)

    def environment(self, worker: int) -> dict[str, str]:
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        found = {"OMP_NUM_THREADS": str(self.threads), **os.environ, "PYTHONPATH": paths}
        return found | device(self.devices, worker)

    def ended(self, worker: int, child: Child) -> None:
        del self.children[worker]
        child.lock.close()
        if code := child.process.returncode:
            said, log = last_line(child.job.log), child.job.log
            if code < 0:  # its last line is about its work and not about its end
                often = ", as where memory runs out" * (code == -signal.SIGKILL)
                why = f"was ended by signal {-code} ({signal.strsignal(-code)}{often}), after: {said}"
            else:
                why = f"failed: {said or f'exit code {code}'}"
            self.failures[child.job.name] = f"{child.job.name} {why} ({log})"
        else:
            self.start(worker, child.job, child.command)

    def stop(self) -> None:
        """Interrupt all children, which save after their step and end; a second interrupt kills them."""
        try:
            for child in self.children.values():
                child.process.send_signal(signal.SIGINT)
            if self.children:
                tqdm.write(f"waiting for {len(self.children)} to save; once more to stop at once", file=sys.stderr)
            for child in self.children.values():
                child.process.wait()
        except BaseException:
            for child in self.children.values():
                child.process.kill()
            raise
        finally:
            for child in self.children.values():
                child.process.wait()
                child.lock.close()
            self.children.clear()


def unlock(folder: Path) -> None:
    """Remove the lock file that a killed command left in a folder whose work is done, unless a process holds it."""
    if (folder / LOCK).exists():
        with suppress(ValueError), publish.alone(folder / LOCK, folder):
            pass


def device(devices: Sequence[str], worker: int) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": devices[worker % len(devices)]} if devices else {}


@contextmanager
def stopping() -> Iterator[None]:
    """Make SIGTERM act like Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, so that only one study writes into it."""
    folder.mkdir(parents=True, exist_ok=True)
    with opened(folder / "study.lock") as lock:
        acquire(lock, str(folder))
        sweep(folder)
        yield


def last_line(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LAST))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
