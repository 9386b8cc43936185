"""Mirror a run's checkpoints in an object store, and bring the newest one back to an empty disk.

    MIRROR/step-00000123/
      shard-00000.safetensors, manifest.json    the checkpoint
      run.json, metrics.jsonl, origin/...       the run's other files, as they were right after it
      mirror.json                               size of every file, sha256 of every file except shards (manifest.json
                                                has those), its own sum; written last, removed first

All ranks write checkpoints into one folder, which they share, so rank 0 alone reads it and sends it.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from threading import Lock
from typing import TypedDict

from training.checkpoint import standalone, storage
from training.checkpoint.state import CHECKPOINTS, found, step_of
from training.config.schema import CheckpointConfig
from training.observe import metrics, trackers
from training.parallel.processes import rank
from upcycle.io import disk, publish, remote, strict
from upcycle.io.remote import Damaged, Store

LIST = "mirror.json"
LOCK = ".mirror.lock"  # in the run's folder, while a process brings a checkpoint back
SCRATCH = "mirror.upcycle.tmp"  # in the run's folder: what has been fetched so far
OTHERS = (standalone.RUN, metrics.FILE, trackers.STATE, f"{standalone.FOLDER}/*")  # the run's other files
STEPS = re.compile(r"step-\d{8,}", re.ASCII)


class Listed(TypedDict):
    """The content of mirror.json."""

    files: Mapping[str, remote.File]


class Mirror:
    """Send checkpoints to a store in a thread, one at a time, always the newest that is on disk.

    A failure is reported in one sentence, and the next checkpoint is another try."""

    def __init__(self, config: CheckpointConfig, run: Path) -> None:
        self.config, self.run = config, run
        self.thread, self.lock = ThreadPoolExecutor(1, "mirror"), Lock()
        self.wanted: Path | None = None  # to be sent next
        self.sending: Path | None = None
        self.failed: Path | None = None

    def want(self, step: Path) -> None:
        """Send a checkpoint as soon as the current one is sent, instead of any other that waits."""
        with self.lock:
            self.wanted = step
        self.thread.submit(self.send_wanted)

    def reading(self) -> set[Path]:
        """Return the checkpoints that must stay on disk, because they are being sent or will be."""
        with self.lock:
            return {step for step in (self.sending, self.wanted) if step is not None}

    def send_wanted(self, more: str = "tries again with the next checkpoint") -> None:
        """Send the wanted checkpoint, if it was not sent by an earlier call."""
        with self.lock:
            self.sending, self.wanted = self.wanted, None
        if self.sending is None:
            return
        self.failed = self.sending
        try:
            send(self.config, self.run, self.sending)
            self.failed = None
        except (OSError, ValueError) as error:
            warnings.warn(f"{self.sending.name} is not in the mirror: {' '.join(str(error).split())}; {more}")
        finally:
            with self.lock:
                self.sending = None

    def close(self) -> None:
        """Wait for the last checkpoint; try once more if it failed."""
        self.thread.shutdown()
        if self.failed is not None:
            self.wanted = self.failed
            self.send_wanted("the same command tries again")


@contextmanager
def mirrored(config: CheckpointConfig, run: Path) -> Iterator[Mirror | None]:
    """Yield the mirror of a run on rank 0, if the run has one; afterwards wait until all is sent."""
    if not config.mirror or rank() != 0:
        yield None
        return
    mirror = Mirror(config, run)
    try:
        yield mirror
    finally:
        mirror.close()


# ---- to the store


def send(config: CheckpointConfig, run: Path, step: Path) -> None:
    """Send a checkpoint with the run's other files, then remove older ones from the store as `keep` says."""
    store, files = Store(config.mirror), dict[str, Path | bytes]()
    for path in sorted(step.iterdir()):
        if storage.SHARD.fullmatch(path.name) or path.name == storage.MANIFEST:
            files[path.name] = path
    for path in sorted(path for pattern in OTHERS for path in run.glob(pattern)):
        name = path.relative_to(run).as_posix()
        if path.is_file() and remote.NAME.fullmatch(name):
            files[name] = path.read_bytes()  # at once, because the log grows
    listing: dict[str, remote.File] = {}
    for name, content in files.items():
        if isinstance(content, Path) and storage.SHARD.fullmatch(name):
            listing[name] = {"bytes": content.stat().st_size}
        else:
            files[name] = data = content.read_bytes() if isinstance(content, Path) else content
            listing[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    there = store.files()
    if not same(store, step.name, there, listing):
        files[LIST] = publish.signed({"files": listing})
        remote.push(files, f"{store.url}/{step.name}")
    remove_older(store, config, step_of(step), there)


def same(store: Store, step: str, there: Mapping[str, int], listing: Mapping[str, remote.File]) -> bool:
    """Return whether the store has this very checkpoint already, complete."""
    if f"{step}/{LIST}" not in there:
        return False
    with suppress(ValueError):
        return listed(store, step)[storage.MANIFEST] == listing[storage.MANIFEST]
    return False


def remove_older(store: Store, config: CheckpointConfig, newest: int, there: Mapping[str, int]) -> None:
    """Remove the checkpoints that `keep` and `keep_every` do not keep, and incomplete ones."""
    complete = [number for number in complete_steps(there) if number != newest]
    kept = {newest, *complete[: config.keep - 1]}
    if config.keep_every:
        kept |= {number for number in complete if number % config.keep_every == 0}
    for name in sorted({name.partition("/")[0] for name in there}):
        if STEPS.fullmatch(name) and number_of(name) not in kept:
            store.remove(f"{name}/{LIST}")
            store.remove(name)


def complete_steps(there: Mapping[str, int]) -> list[int]:
    """Return the steps whose list is in the store, newest first."""
    parts = [name.partition("/") for name in there]
    return sorted((number_of(step) for step, _, file in parts if file == LIST and STEPS.fullmatch(step)), reverse=True)


def number_of(step: str) -> int:
    return int(step.removeprefix("step-"))


# ---- from the store


def restore(config: CheckpointConfig, run: Path) -> None:
    """Bring the newest checkpoint of the mirror to the run's folder, unless the folder has one as new.

    Every rank may call this; the first one does it while the others wait."""
    if not config.mirror:
        return
    store = Store(config.mirror)
    if rank() == 0:
        store.check_writable()
    if not newer(store, run):
        return
    with remote.alone(run / LOCK, str(run)):
        steps, problem = newer(store, run), ""
        for number in steps:
            try:
                bring(store, number, run)
                return
            except Damaged as error:
                problem = str(error)
                warnings.warn(f"step {number} of the mirror is not used: {problem}; trying the one before")
        if steps and not found(run / CHECKPOINTS):
            raise ValueError(
                f"none of the {len(steps)} checkpoints in {store.url} is whole ({problem}); choose another mirror, or "
                "remove them to start from step 0"
            )


def newer(store: Store, run: Path) -> list[int]:
    """Return the complete checkpoints of a store, newest first, that are newer than all of the run's folder."""
    own = max(map(step_of, found(run / CHECKPOINTS)), default=-1)
    return [number for number in complete_steps(store.files()) if number > own]


def listed(store: Store, step: str) -> Mapping[str, remote.File]:
    """Return the files of a checkpoint in a store; raise Damaged if the list is not as it was written."""
    where, text = f"{store.url}/{step}/{LIST}", store.read(f"{step}/{LIST}")
    try:
        body = strict.parse_object(text, where)
        if body.get("sum") != publish.digest(body):
            raise ValueError(f"{where} has changed since it was written: its sum differs")
        strict.held(body, Listed, where)
    except ValueError as error:
        raise Damaged(str(error)) from None
    files = remote.regular(body["files"], where)
    for name in files:
        other = any(fnmatchcase(name, pattern) and name.count("/") == pattern.count("/") for pattern in OTHERS)
        if not (other or name == storage.MANIFEST or storage.SHARD.fullmatch(name)):
            raise Damaged(f"{where} names a file {strict.short(name)}, which no run writes")
    return files


def bring(store: Store, number: int, run: Path) -> None:
    """Write a checkpoint of a store and the run's other files to the run's folder, the checkpoint's name last.

    A restart continues with the files that a killed process has fetched."""
    step = f"step-{number:08d}"
    files, scratch, final = listed(store, step), run / SCRATCH / step, run / CHECKPOINTS / step
    remote.say(f"fetching {step} from {store.url}")
    storage.check_free(run, sum(file["bytes"] for file in files.values()))
    own = {name: file for name, file in files.items() if name == storage.MANIFEST or storage.SHARD.fullmatch(name)}
    Store(f"{store.url}/{step}").get_all(own, scratch / "own")
    Store(f"{store.url}/{step}").get_all({name: files[name] for name in files.keys() - own.keys()}, scratch / "others")
    try:
        if storage.read_whole(scratch / "own")["step"] != number:
            raise ValueError(f"{store.url}/{step} holds another step")
    except (OSError, ValueError) as error:
        raise Damaged(str(error).replace(str(scratch / "own"), f"{store.url}/{step}")) from None
    origin = run / standalone.FOLDER
    if not origin.exists() and (scratch / "others" / standalone.FOLDER).exists():  # at once, or it would be no run's
        publish.rename(scratch / "others" / standalone.FOLDER, origin)
    for path in sorted(path for path in (scratch / "others").rglob("*") if path.is_file()):
        target = run / path.relative_to(scratch / "others")
        disk.make_folder(target.parent)
        disk.copy(path, target)
    disk.make_folder(final.parent)
    publish.rename(scratch / "own", final)
    shutil.rmtree(run / SCRATCH, ignore_errors=True)
