"""Every command that publishes, crashed at its n-th system call that writes, and started again.

    python -m tests.crashes                        every call of every command, in every way: minutes
    python -m tests.crashes --each 5 convert       five of them, drawn by --seed

A command runs in a fork of this process in which open (to write), write, fsync, rename, unlink, mkdir and rmdir below one
folder are counted, and reads of what the command is given. At the n-th of them comes one of

    kill   SIGKILL before it                lost    SIGKILL, and what was not synced is gone, as when the power fails
    half   SIGKILL after half of it         full    it and all later ones find the disk full
    eio    it fails once                    int     Ctrl-C
    stop   SIGSTOP, and the same command runs next to it; then it continues
    read   the n-th open or read of a file fails once

Processes that a command starts (of a study, of islands.local) are forks too. Each counts on from its parent's calls and
meets the same fault. After a crash they must end by themselves.

Two more do not count calls: `moment` is SIGKILL at a random moment, and `limit` lets the system refuse files above a
random size (RLIMIT_FSIZE), which libraries in C and Rust meet too.

A command that fails must end with exit code 2 and one sentence that names the file. Its inputs must stay as they were,
and no output may look whole. Then the command runs undisturbed, and must end with the bytes that it makes undisturbed
from the start. Files of somebody else lie where it works, and must be there afterwards.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import ctypes
import errno
import hashlib
import importlib
import io
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

WRITES = ("kill", "lost", "half", "full", "eio", "int", "stop")
KINDS = (*WRITES, "read", "moment", "limit")
FOREIGN = {"notes.tmp": b"mine", "model.safetensors.part": b"mine too", "config.json.123.tmp": b"and this"}
ENDED = 300  # seconds
REAPER = 36  # Linux's PR_SET_CHILD_SUBREAPER: processes without a parent become children of this one


class Calls:
    """Counts the calls below `root`, and does something at one of them."""

    def __init__(self, root: Path, kind: str, at: int, inputs: Path) -> None:
        self.root, self.kind, self.at, self.count, self.reads = str(root), kind, at, 0, 0
        self.inputs = str(inputs)
        self.lock = threading.RLock()
        self.files: dict[tuple[int, int], list[Any]] = {}  # (device, inode) -> [descriptor, (size, time) as synced]
        self.folders: dict[tuple[int, int], bool] = {}  # whether its entries are on the disk
        self.unsynced: list[str] = []
        self.real: dict[str, Callable[..., Any]] = {}

    def install(self) -> None:
        for name in ("read", "pread", "preadv", "readv"):
            setattr(os, name, self.reading(getattr(os, name)))
        for name in ("open", "write", "fsync", "rename", "replace", "unlink", "remove", "mkdir", "rmdir"):
            self.real[name] = getattr(os, name)
            setattr(os, name, self.patched(name))
        self.real["io.open"] = io.open
        io.open = builtins.open = self.opened  # type: ignore[assignment]

    def patched(self, name: str) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            where = self.place(name, given, named)
            if where is None:
                return self.real[name](*given, **named)
            with self.lock:
                self.before(name, given, where)
                if name in ("rename", "replace"):
                    self.check_renamed(Path(given[0]))
                made = self.real[name](*given, **named)
                self.after(name, given, where, made)
                return made

        return call

    def reading(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(fd: int, *given: Any) -> Any:
            self.before_read(os.readlink(f"/proc/self/fd/{fd}"), named=False)
            return real(fd, *given)

        return call

    def before_read(self, path: str, *, named: bool = True) -> None:
        if not (path.startswith(self.inputs + os.sep) or self.below(path)):
            return
        self.reads += 1
        if self.kind == "read" and self.reads == self.at:
            raise OSError(errno.EIO, os.strerror(errno.EIO), *([path] if named else []))

    def opened(self, file: Any, mode: str = "r", *given: Any, **named: Any) -> Any:
        if isinstance(file, str | os.PathLike) and not set(mode) & set("wax+"):
            return self.opened_to_read(os.path.abspath(os.fspath(file)), file, mode, *given, **named)
        if not isinstance(file, str | os.PathLike) or not set(mode) & set("wax+") or not self.below(os.fspath(file)):
            return self.real["io.open"](file, mode, *given, **named)
        with self.lock:
            if not named.get("opener"):  # which comes to os.open
                self.before("open", (file,), str(file))
            made = self.real["io.open"](file, mode, *given, **named)
            self.after("open", (file,), str(file), made.fileno())
            return made

    def opened_to_read(self, path: str, file: Any, mode: str, *given: Any, **named: Any) -> Any:
        self.before_read(path)
        calls = self

        class Raw(io.FileIO):
            def readinto(self, buffer: Any) -> int | None:
                calls.before_read(path, named=False)
                return super().readinto(buffer)

            def readall(self) -> bytes:
                calls.before_read(path, named=False)
                return super().readall()

        if given or {*named} - {"encoding", "errors", "newline"} or not os.path.isfile(path):
            return self.real["io.open"](file, mode, *given, **named)
        buffered = io.BufferedReader(Raw(file, "rb"))
        return buffered if "b" in mode else io.TextIOWrapper(buffered, **named)

    def below(self, path: Any) -> bool:
        return os.path.abspath(os.fsdecode(path)).startswith(self.root + os.sep)

    def place(self, name: str, given: Any, named: Any) -> str | None:
        """The path that a call is about, if it counts."""
        if name in ("write", "fsync"):
            path = os.readlink(f"/proc/self/fd/{given[0]}")
        elif named.get("dir_fd") is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{named['dir_fd']}"), os.fsdecode(given[0]))
        elif isinstance(given[0], int):
            return None
        else:
            path = os.path.abspath(os.fsdecode(given[0]))
        if name == "open" and not given[1] & (os.O_WRONLY | os.O_RDWR):
            if not os.path.isdir(path):
                self.before_read(path)
            return None
        return path if self.below(path) else None

    def before(self, name: str, given: Any, where: str) -> None:
        self.count += 1
        if self.kind == "full" and self.count >= self.at and name in ("open", "write", "mkdir", "fsync"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *([where] if name in ("open", "mkdir") else []))
        if self.count != self.at:
            return
        if self.kind == "half" and name == "write":
            self.real["write"](given[0], given[1][: len(given[1]) // 2])
        if self.kind in ("kill", "half"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "lost":
            for descriptor, synced in self.files.values():
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, synced[0] if synced else 0)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "eio":
            raise OSError(errno.EIO, os.strerror(errno.EIO), *([where] if name not in ("write", "fsync") else []))
        if self.kind == "int":
            os.kill(os.getpid(), signal.SIGINT)
        if self.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)

    def after(self, name: str, given: Any, where: str, made: Any) -> None:
        if name == "open":
            status = os.fstat(made)
            if (status.st_dev, status.st_ino) not in self.files:
                writable = self.real["open"](f"/proc/self/fd/{made}", os.O_RDWR)
                self.files[status.st_dev, status.st_ino] = [writable, None]
        elif name == "fsync":
            status = os.fstat(given[0])
            key = status.st_dev, status.st_ino
            if key in self.files:
                self.files[key][1] = (status.st_size, status.st_mtime_ns)
            else:
                self.folders[key] = True
        if name in ("open", "mkdir", "rename", "replace"):  # a name that comes back after a crash does no harm
            for path in (where, *(map(os.fsdecode, given[1:2]) if name in ("rename", "replace") else ())):
                with contextlib.suppress(OSError):
                    parent = os.stat(os.path.dirname(path))
                    self.folders[parent.st_dev, parent.st_ino] = False

    def check_renamed(self, source: Path) -> None:
        """Notes what was renamed and was not on the disk."""
        inside = [source, *source.rglob("*")] if source.is_dir() else [source]
        for path in inside:
            if ".upcycle" in path.parts[-2:]:
                continue
            status = path.lstat()
            key = status.st_dev, status.st_ino
            if path.is_dir():
                if self.folders.get(key) is False:
                    self.unsynced.append(f"folder {path}")
            elif key in self.files and self.files[key][1] != (status.st_size, status.st_mtime_ns):
                self.unsynced.append(str(path))

    def check_left(self, folders: list[Path]) -> None:
        """Notes what lies there at the end and is not on the disk."""
        for folder in folders:
            self.check_renamed(folder)


@dataclass(frozen=True)
class Ran:
    code: int
    said: str
    calls: int = 0
    reads: int = 0
    unsynced: tuple[str, ...] = ()
    pid: int = 0


@dataclass(frozen=True)
class Command:
    name: str
    run: Callable[[Path], int]  # the folder that it makes things in
    result: Callable[[Path], Any]  # what must be the same
    outputs: Callable[[Path], list[Path]]  # must be on the disk
    partials: Callable[[Path], list[Path]]  # where files of others may lie
    codes: frozenset[int] = frozenset({0, 2, 130})
    whole: Callable[[Path], list[Path]] = lambda here: []  # if one of these is there, the command has ended
    kinds: tuple[str, ...] = KINDS
    before: Callable[[Path], object] = lambda here: None  # lays there what the command finds
    lines: int = 1  # one of so many last lines must name the file of a failed call


class Forked:
    """A process of `upcycle` as subprocess.Popen starts it, but a fork: without the seconds of its imports, and with
    the same fault."""

    def __init__(
        self, command: list[str], *, root: Path, calls: Calls, env: dict[str, str], stdout: Any = None,
        preexec_fn: Callable[[], object] | None = None, pass_fds: Collection[int] = (), **_: Any,
    ) -> None:  # fmt: skip
        sys.stdout.flush()
        sys.stderr.flush()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        code = 99
        try:
            os.environ.update(env)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if preexec_fn is not None:
                preexec_fn()
            for number in (1, 2) if stdout is not None else ():
                os.dup2(stdout.fileno(), number)
            for name in os.listdir("/proc/self/fd"):  # locks and sockets of the parent
                if int(name) > 2 and int(name) not in pass_fds:
                    with contextlib.suppress(OSError):
                        os.close(int(name))
            calls.files.clear()
            calls.unsynced.clear()
            calls.kind = "" if calls.kind == "stop" else calls.kind  # its parent would wait for it
            from upcycle.__main__ import main

            code = main(command[command.index("upcycle") + 1 :] if "upcycle" in command else command[4:])
            write_facts(root / f"child.{os.getpid()}", calls)
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
        os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None and (found := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(found[1])
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (ENDED if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("upcycle", timeout or ENDED)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork_their_processes(root: Path, calls: Calls) -> None:
    """Let a study and islands.local start forks."""
    import tqdm

    from evaluation.studies import running
    from training.islands import run

    tqdm.tqdm.monitor_interval = 0  # a thread, which a fork would not have
    made = SimpleNamespace(
        Popen=lambda command, **more: Forked(command, root=root, calls=calls, **more),
        DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired,
    )  # fmt: skip
    running.subprocess = run.subprocess = made  # type: ignore[attr-defined]


def write_facts(path: Path, calls: Calls) -> None:
    facts = json.dumps({"calls": calls.count, "reads": calls.reads, "unsynced": calls.unsynced}).encode()
    file = calls.real["open"](path, os.O_WRONLY | os.O_CREAT, 0o666)
    calls.real["write"](file, facts)


def started(command: Command, here: Path, root: Path, kind: str = "", at: int = 0) -> int:
    """Forks; the child runs the command. `at`: the call, or the size of a file in bytes that `limit` allows."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        said = os.open(root / f"said.{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(said, 1)
        os.dup2(said, 2)
        calls = Calls(here, kind, at, root / "place")
        calls.install()
        fork_their_processes(root, calls)
        code = limited(command, here, at) if kind == "limit" else command.run(here)
        calls.check_left(command.outputs(here) if code == 0 else [])
        write_facts(root / f"facts.{os.getpid()}", calls)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
    os._exit(code)


def limited(command: Command, here: Path, size: int) -> int:
    """Run the command while the system refuses to let a file grow beyond `size`, and print afterwards."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            return command.run(here)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
            os.write(2, said.getvalue().encode())


def ended(pid: int, root: Path) -> Ran:
    deadline = time.monotonic() + ENDED
    while not (found := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    said, facts = (root / f"said.{pid}"), (root / f"facts.{pid}")
    text = said.read_text(errors="replace") if said.exists() else ""
    children = [*root.glob("child.*")]
    every = [json.loads(path.read_text()) for path in (facts, *children) if path.exists()]
    for path in (said, facts, *children):
        path.unlink(missing_ok=True)
    return Ran(
        os.waitstatus_to_exitcode(found[1]),
        text,
        max((more["calls"] for more in every), default=0),
        max((more["reads"] for more in every), default=0),
        tuple(path for more in every for path in more["unsynced"]),
        pid,
    )


def orphans_end() -> None:
    """Wait for processes whose parent is gone."""
    end, killed = time.monotonic() + ENDED, []
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if not pid and time.monotonic() > end:
            killed += [int(word) for word in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
            for each in killed:
                os.kill(each, signal.SIGKILL)
        time.sleep(0 if pid else 0.01)
    wanted(not killed, "processes that do not end when their parent is gone:", killed)


class Faults(Exception):
    pass


def wanted(true: bool, *said: object) -> None:
    if not true:
        raise Faults(" ".join(map(str, said)))


def crashed(command: Command, here: Path, root: Path, kind: str, at: int, want: Any) -> str:
    """One crash and what comes after it. Returns what the crash did."""
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir()
    command.before(here)
    inputs = digests(root / "place")
    pid = started(command, here, root, kind, at)
    if kind == "stop":
        return beside(command, here, root, pid, want)
    if kind == "moment":
        time.sleep(at / 1000)
        os.kill(pid, signal.SIGKILL)
    first = ended(pid, root)
    orphans_end()
    crash = first.code == -signal.SIGKILL
    wanted(crash or first.code in command.codes, "exit code", first.code, first.said[-1500:])
    for said in (first.said, *(log.read_text(errors="replace") for log in here.rglob("*.log"))):
        wanted("Traceback" not in said, "a traceback:", said[-3000:])
    wanted(inputs == digests(root / "place"), "an input has changed:", differing(digests(root / "place"), inputs))
    if kind in ("full", "eio", "read", "limit") and first.code == 2:
        last = [line for line in first.said.splitlines() if line.strip()][-command.lines :]
        wanted(any(str(root) in line for line in last), "names no file:", *last)
    if first.code:
        whole = [path for path in command.whole(here) if path.exists()]
        found = command.result(here) if whole else want
        if isinstance(found, dict):  # .upcycle is removed after the rename
            found = {name: value for name, value in found.items() if not str(name).startswith(".upcycle/")}
        wanted(found == want, "looks whole and is not:", whole)
    if not crash and kind not in ("kill", "half", "lost"):  # which may have met a process that the command started
        litter = [*here.rglob("*.upcycle.tmp"), *here.rglob("*.part")]
        wanted(not litter, "a failed write left", litter)
    places = [f for f in command.partials(here) if f.is_dir() and (f.suffix != ".partial" or (f / ".upcycle").is_dir())]
    # a command refuses a folder with nothing of its own in it but files of others
    places = [folder for folder in places if folder == here or {path.name for path in folder.iterdir()} - {".lock"}]
    placed = [(folder, name) for folder in places for name in FOREIGN]
    for folder, name in placed:
        (folder / name).write_bytes(FOREIGN[name])
    if kind == "read" and "is not used: " in first.said:  # an older checkpoint replaces one that cannot be read
        return f"exit code {first.code}"
    try:
        finished(command, here, root, want)
    except Faults as refused:
        if "and is not a run; write output=" not in str(refused):
            raise
        for folder, name in placed:  # a run that had hardly begun next to files of somebody is refused
            (folder / name).unlink()
        finished(command, here, root, want)
        placed = []
    for folder, name in placed:
        now = [
            f / name for f in (folder, folder.with_name(folder.name.removesuffix(".partial"))) if (f / name).is_file()
        ]
        wanted(bool(now) and now[0].read_bytes() == FOREIGN[name], "a file of somebody else is gone:", folder / name)
    return "killed" if crash else f"exit code {first.code}"


def finished(command: Command, here: Path, root: Path, want: Any) -> None:
    again = ended(started(command, here, root), root)
    orphans_end()
    was_done = again.code == 2 and "exists already" in again.said  # upcycle export says so
    wanted(again.code == 0 or was_done, "the rerun ends with", again.code, again.said[-3000:])
    found = command.result(here)
    wanted(found == want, "other bytes:", differing(found, want))
    wanted(not again.unsynced, "not on the disk:", again.unsynced)
    litter = [
        p for p in here.rglob("*") if p.name in (".upcycle", ".lock") or p.name.endswith((".upcycle.tmp", ".html.lock"))
    ]
    wanted(not litter, "left behind:", litter)


def beside(command: Command, here: Path, root: Path, pid: int, want: Any) -> str:
    """The first process stands still; a second one of the same command comes."""
    _, status = os.waitpid(pid, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        for name in ("said", "facts"):
            (root / f"{name}.{pid}").unlink(missing_ok=True)
        return "was over"
    try:
        second = ended(started(command, here, root), root)
    finally:
        os.kill(pid, signal.SIGCONT)
    first = ended(pid, root)
    orphans_end()
    for ran in (first, second):
        wanted(ran.code in (0, 2) and "Traceback" not in ran.said, "exit code", ran.code, ran.said[-3000:])
    refused = "another process is writing" in second.said
    if refused:
        who = f"process {pid} on {socket.gethostname()}"
        unsigned = "(process " not in second.said  # the first one stands before it has written who it is
        wanted(second.code == 2 and (unsigned or who in second.said), "does not name", who, second.said[-1000:])
        wanted(first.code == 0, "the first one ends with", first.code, first.said[-3000:])
    wanted(0 in (first.code, second.code), "neither came to its end:", first.said[-1000:], second.said[-1000:])
    finished(command, here, root, want)
    return "the second one was refused" if refused else f"the second one ended with {second.code}"


def differing(found: Any, want: Any) -> Any:
    if isinstance(found, dict) and isinstance(want, dict):
        return sorted(str(k) for k in found.keys() | want.keys() if found.get(k) != want.get(k))
    return found


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in FOREIGN
    }


# ---- the commands


def commands(place: Path) -> dict[str, Command]:
    """`place`: what they read."""
    from evaluation.cli import report
    from evaluation.judge import logged, results
    from tests import islands
    from tests.unit.evaluation.written import save
    from training.__main__ import main as train
    from training.checkpoint.export import exported
    from training.cli import export, prepare
    from training.islands.link import frames
    from training.observe.metrics import read
    from training.parallel.processes import alone
    from upcycle.__main__ import main as upcycle
    from upcycle.cli import frame as cli

    def run_folder(here: Path) -> Any:
        return {**run_of(here / "run"), **digests(here / "export")}

    def run_of(run: Path) -> dict[str, Any]:
        clock = {"seconds_per_step", "tokens_per_s", "tflops", "mfu", "eta_s", "memory_gb"}
        rows = [{n: v for n, v in row.items() if n not in clock and not n.startswith("time/")} for row in read(run)]
        last = max((run / "checkpoints").glob("step-*"))
        return {"rows": rows, "step": last.name, **digests(last)}

    @cli.command()
    def save_results(words: list[str]) -> int:
        """What `upcycle eval` does with its answers."""
        folder = Path(words[0])
        task = results.Task("t", "t", {"acc": 1.0}, {}, {"acc": True}, 50, 50, 0, "1", "loglikelihood")
        run = results.Evaluation(
            results.Model("m", "m", "f", "llama", 1, 1, "float32"), "tiny", "", {}, {}, "", 0.0, {}, {"t": task}
        )
        items = [results.Item("t", i, f"{i}", "p", "x", {"acc": 1.0}, (-1.5,)) for i in range(50)]
        with alone(folder):
            save(folder, run, items)
        return 0

    def report_sums(here: Path) -> Any:
        found = json.loads((here / "report.json").read_text())["files"]
        return {name: hashlib.sha256((here / name).read_bytes()).hexdigest() == found[name]["sha256"] for name in found}

    def maker(name: str, run: Callable[[Path], int], output: str) -> Command:
        """Return a command that makes a folder and renames it."""
        made, partial = (lambda here: [here / output]), (lambda here: [here / f"{output}.partial"])
        return Command(name, run, lambda here: digests(here / output), made, partial, whole=made)

    def writer(name: str, run: Callable[[Path], int], file: str, result: Callable[[Path], Any]) -> Command:
        """Return a command that writes one file."""
        made = lambda here: [here / file]  # noqa: E731
        return Command(name, run, result, made, lambda here: [here], whole=made)

    def reader(name: str, *words: str) -> Command:
        """Return a command that writes nothing."""
        return Command(
            name,
            lambda here: upcycle([name, *words]),
            lambda here: 0,
            lambda here: [],
            lambda here: [],
            codes=frozenset({0, 1, 2, 130}),  # inspect and verify end with 1 if something is wrong
            kinds=("read",),
        )

    def asked(here: Path) -> Any:
        found = logged.load(here / "eval")
        last = logged.newest(here / "eval")
        assert last is not None
        answers = sorted(last.parent.glob(f"samples_*{logged.time_of(last)}*"))
        return found.tasks, found.groups, [hashlib.sha256(path.read_bytes()).hexdigest() for path in answers]

    def parsed(path: Path, *clock: str) -> Any:
        return {name: value for name, value in json.loads(path.read_text()).items() if name not in clock}

    @cli.command()
    def serve(words: list[str]) -> int:
        """Do what a server of islands does with the pushes of two islands."""
        _, journal, server = islands.made(Path(words[0]))
        server.close()
        try:
            for name in "ab":
                one = islands.Islander(name, 1, 6)
                if name not in journal.center.members:
                    journal.add(frames.JOIN, name)
                for number in range(5):
                    data = one.message()
                    one.seq += 1
                    if one.seq > journal.center.members[name].seq:
                        journal.add(frames.PUSH, name, one.seq, data)
                    if number == 2 and journal.number < 1 + (name == "b"):
                        journal.save()
        finally:
            journal.close()
        return 0

    def state(here: Path) -> Any:
        tensors, facts = islands.kept(here / "server")
        return facts["members"], {name: hashlib.sha256(t.numpy().tobytes()).hexdigest() for name, t in tensors.items()}

    def again_scored(folder: Path) -> int:
        """Score on a suite in place of the scores on another one, which must be there until the new ones are."""
        try:
            assert logged.load(folder).tasks
        except ValueError as error:  # a read that was made to fail
            print(f"upcycle: {error}", file=sys.stderr)
            return 2
        return upcycle(["facts", "score", dense, f"suite={place / 'suite'}", f"output={folder}", "device=cpu"])

    def studied(here: Path) -> Any:
        found = parsed(here / "study" / "study.json")
        return found["failures"], [run_of(folder) for folder in sorted((here / "study" / "runs").glob("*/seed-0"))]

    def islands_of(here: Path) -> Any:
        """Return what does not depend on which island comes first."""
        return [folder.name for folder in sorted((here / "run").glob("island-?"))], exported(here / "export")

    dense = str(place / "dense")
    few = ["experts=2", "max_shard=60KB"]
    texts = [f"tokenizer={dense}", f"sources=[{place / 'a.jsonl'},{place / 'b.jsonl'}]", "shard_tokens=300"]
    training = [
        "data.sequence=24", "batch=2", "micro_batch=2", "log_every=1", "schedule.warmup=0", "schedule.peak=1e-3",
        "model.dtype=float32", "steps=2", "checkpoint.every=1", "device=cpu", f"data.train=[{place / 'tokens'}]",
        f"model.source={dense}",
    ]  # fmt: skip
    small = ["stack=false", "batch=1", "micro_batch=1", "data.sequence=16", "model.dtype=float32"]
    few_facts = ["people=4", "places=0", "events=0", "tellings=2", "asked=2"]
    book, moe = str(place / "book.txt"), str(place / "moe")
    gguf = ["method=gguf", f"converter={place / 'converter.py'}"]
    all_of = [
        maker("convert", lambda here: upcycle(["convert", f"source={dense}", f"output={here / 'moe'}", *few]), "moe"),
        maker("prepare", lambda here: prepare.main([str(here / "out"), *texts]), "out"),
        maker("quantize", lambda here: upcycle(["quantize", moe, f"output={here / 'out'}", *gguf]), "out"),
        maker("export", lambda here: export.main([str(place / "run"), str(here / "out")]), "out"),
        Command(
            "train",
            lambda here: train([f"output={here / 'run'}", f"export={here / 'export'}", *training]),
            run_folder,
            lambda here: [*(p for p in (here / "run").iterdir() if p.name != "plots.png"), here / "export"],
            lambda here: [here / "run", here / "export.partial"],
            frozenset({0, 2, 75, 130}),
        ),
        Command(
            "results",
            lambda here: save_results([str(here / "eval")]),
            lambda here: replace(logged.load(here / "eval"), place="", seconds=0.0),
            lambda here: [here / "eval"],
            lambda here: [here / "eval"],
        ),
        Command(
            "report",
            lambda here: report.main([str(place / "run"), f"output={here / 'report.html'}"]),
            report_sums,
            lambda here: [here / "report.html", here / "report.md", here / "report.json"],
            lambda here: [here],
        ),
        Command(
            "adapters",
            lambda here: train([f"output={here / 'run'}", f"lora.export={here / 'peft'}", "lora.rank=2", *training]),
            lambda here: {**digests(max((here / "run" / "checkpoints").glob("step-*"))), **digests(here / "peft")},
            lambda here: [*(p for p in (here / "run").iterdir() if p.name != "plots.png"), here / "peft"],
            lambda here: [here / "run", here / "peft.partial"],
            frozenset({0, 2, 75, 130}),
        ),
        Command(
            "eval",
            lambda here: upcycle(
                [
                    "eval",
                    "perplexity",
                    dense,
                    f"texts=[{book}]",
                    f"output={here / 'eval'}",
                    "device=cpu",
                    "max_length=64",
                ]
            ),
            asked,
            lambda here: [path for path in (here / "eval").iterdir() if path.name != "cache"],
            lambda here: [],  # it refuses a folder with files of others
        ),
        Command(
            "islands",
            lambda here: serve([str(here / "server")]),
            state,
            lambda here: [],
            lambda here: [here / "server"],
        ),
        writer(
            "routing",
            lambda here: upcycle(["routing", moe, book, f"output={here / 'routing.json'}", "sequence=32"]),
            "routing.json",
            lambda here: parsed(here / "routing.json"),
        ),
        writer(
            "compare",
            lambda here: upcycle(
                ["compare", str(place / "eval"), str(place / "eval2"), f"output={here / 'compared.json'}"]
            ),
            "compared.json",
            lambda here: parsed(here / "compared.json"),
        ),
        maker("facts-write", lambda here: upcycle(["facts", "write", f"output={here / 'out'}", *few_facts]), "out"),
        Command(
            "facts-score",
            lambda here: upcycle(
                ["facts", "score", dense, f"suite={place / 'suite'}", f"output={here / 'eval'}", "device=cpu"]
            ),
            asked,
            lambda here: [here / "eval"],
            lambda here: [],  # it refuses a folder with files of others
            whole=lambda here: [*(here / "eval").glob("results_*.json")],
        ),
        Command(
            "facts-score-again",  # where older scores of another suite are
            lambda here: again_scored(here / "eval"),
            asked,
            lambda here: [here / "eval"],
            lambda here: [here / "eval"],
            before=lambda here: shutil.copytree(place / "older", here / "eval"),
        ),
        Command(
            "study",
            lambda here: upcycle(["study", str(place / "study.yaml"), f"output={here / 'study'}"]),
            studied,
            lambda here: [here / "study" / "study.json", here / "study" / "study.html"],
            lambda here: [],
            kinds=tuple(kind for kind in KINDS if kind != "limit"),
        ),
        Command(
            "local",
            lambda here: train(
                [
                    f"output={here / 'run'}",
                    f"export={here / 'export'}",
                    "islands.local=2",
                    "islands.every=1",
                    "islands.patience=1",
                    *training,
                ]
            ),
            islands_of,
            lambda here: [here / "export"],
            lambda here: [],
            kinds=tuple(kind for kind in KINDS if kind != "limit"),
            lines=1000,
        ),
        writer(
            "measure",
            lambda here: upcycle(["estimate", f"measure={here / 'mine.yaml'}", "device=cpu"]),
            "mine.yaml",
            lambda here: sorted(yaml.safe_load((here / "mine.yaml").read_text())),
        ),
        reader("estimate", f"model.source={dense}", "gpus=1"),
        reader("bench", f"architecture={dense}/config.json", "device=cpu", *small),
        reader("verify", dense, moe),
        reader("inspect", moe, "check=true"),
        reader("plan", f"source={dense}"),
        reader("recommend", dense, "gpus=1xh100", "tokens=1M"),
    ]
    return {command.name: command for command in all_of}


def set_up(place: Path, names: Collection[str]) -> None:
    """Makes what the commands read."""
    from tests.unit.training.test_data import jsonl, make_tokenizer, texts
    from upcycle.__main__ import main as upcycle
    from upcycle.arch.sample import make_llama

    shape = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 400, "max_position_embeddings": 64, "dtype": "float32",
    }  # fmt: skip
    make_tokenizer(make_llama(place / "dense", shape), bos=False)
    settings = place / "dense" / "tokenizer_config.json"
    settings.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}))
    for name in "ab":
        jsonl(place / f"{name}.jsonl", texts(40, ord(name)))
    (place / "book.txt").write_text("\n".join(texts(20, 7)))
    known = commands(place)
    (place / "converter.py").write_text("import sys; open(sys.argv[-1], 'w').write('GGUF')")
    if {"routing", "verify", "inspect", "quantize"} & {*names}:
        assert known["convert"].run(place) == 0
    if {"facts-score", "facts-score-again"} & {*names}:
        assert known["facts-write"].run(place) == 0
        (place / "out").rename(place / "suite")
        (place / "suite").rename(place / "own")
        assert upcycle(["facts", "write", f"output={place / 'suite'}", "people=3", "places=0", "events=0"]) == 0
        assert known["facts-score"].run(place) == 0
        (place / "eval").rename(place / "older")
        shutil.rmtree(place / "suite")
        (place / "own").rename(place / "suite")
    if "compare" in names:
        assert known["results"].run(place) == 0
        shutil.copytree(place / "eval", place / "eval2")
    if {"train", "adapters", "export", "report", "study", "local"} & {*names}:
        assert known["prepare"].run(place) == 0
        (place / "out").rename(place / "tokens")
        source, tokens = str(place / "dense"), [str(place / "tokens")]
        base = {
            "data": {"train": tokens, "valid": tokens, "sequence": 24}, "batch": 2, "micro_batch": 2, "steps": 2,
            "schedule": {"warmup": 0}, "model": {"dtype": "float32"}, "checkpoint": {"every": 1}, "device": "cpu", "log_every": 1,
        }  # fmt: skip
        arms = {
            "dense": {"model": {"source": source}},
            "copies": {"model": {"upcycle": {"source": source, "experts": 2}}},
        }
        (place / "study.yaml").write_text(yaml.safe_dump({"base": base, "arms": arms, "seeds": [0], "output": "study"}))
        assert known["train"].run(place) == 0


def drawn(command: Command, whole: Ran, options: Any, chance: random.Random, took: float) -> list[tuple[str, int, str]]:
    """Return the cases of a command. `took`: its milliseconds when nothing disturbs it."""
    most = dict.fromkeys(WRITES, whole.calls) | {"read": whole.reads}
    found = []
    for kind in (kind for kind in command.kinds if kind in options.kinds):
        if kind == "moment":
            own = [chance.randrange(1, max(2, int(took))) for _ in range(20)]
        elif kind == "limit":
            own = [int(2 ** chance.uniform(0, 17)) for _ in range(20)]
        else:
            own = list(range(1, most[kind] + 1))
        if options.each:  # as many of each kind
            own = chance.sample(own, min(len(own), -(-options.each // len(command.kinds))))
        found += [(command.name, at, kind) for at in own]
    return sorted(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="*")
    parser.add_argument("--each", type=int, default=0, help="crashes of a command; 0: every call in every way")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0, help="no crash begins after so many; 0: all of them")
    parser.add_argument("--kinds", nargs="*", default=KINDS)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    os.environ.pop("RANK", None)
    ctypes.CDLL(None).prctl(REAPER, 1)
    chance, failed, done, began = random.Random(options.seed), 0, Counter[str](), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name).resolve()
        place, here = root / "place", root / "here"
        place.mkdir()
        if not (pid := os.fork()):  # this process starts no thread, which a fork would not have
            os.dup2(os.open(root / "set-up", os.O_WRONLY | os.O_CREAT), 1)
            os.dup2(1, 2)
            set_up(place, options.commands or commands(place))
            (root / "modules").write_text("\n".join(sys.modules))
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0, (root / "set-up").read_text()
        for module in (root / "modules").read_text().split():  # or every fork would import them again
            with contextlib.suppress(Exception):
                importlib.import_module(module)
        wholes, cases = {}, []
        for command in commands(place).values():
            if options.commands and command.name not in options.commands:
                continue
            here.mkdir()
            command.before(here)
            start = time.monotonic()
            whole = ended(started(command, here, root), root)
            assert whole.code == 0, whole.said
            wholes[command.name] = command, whole.calls, command.result(here)
            shutil.rmtree(here)
            if whole.unsynced:
                failed += 1
                print(f"FAULT {command.name}: published and not on the disk: {whole.unsynced}", flush=True)
            own = drawn(command, whole, options, chance, 1000 * (time.monotonic() - start))
            cases += chance.sample(own, min(options.each or len(own), len(own)))
        outcomes = {name: Counter[str]() for name in wholes}
        chance.shuffle(cases)
        for name, at, kind in cases:
            if options.seconds and time.monotonic() - began > options.seconds:
                break
            command, calls, want = wholes[name]
            try:
                what = crashed(command, here, root, kind, at, want)
            except Faults as fault:
                failed += 1
                print(f"FAULT {name}, {kind} at call {at} of {calls}: {fault}", flush=True)
                continue
            if what != "was over" and (kind not in ("kill", "lost", "half", "moment") or what == "killed"):
                done[kind] += 1
                outcomes[name][f"{kind}: {what}"] += 1
    for name, found in outcomes.items():
        said = ", ".join(f"{count} {what}" for what, count in sorted(found.items()))
        print(f"{name}: {sum(found.values())} crashes at {wholes[name][1]} calls: {said}")
    print(f"{sum(done.values())} crashes and reruns as they should be ({dict(sorted(done.items()))}), {failed} faults")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
