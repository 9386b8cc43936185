"""Convert a plan into a checkpoint folder: streamed, restartable, and shared by any number of processes.

    OUTPUT.partial/               the unfinished folder; its name keeps users from loading it by accident
        model-00001-of-00009.safetensors.rank-0.part   a shard that the process with rank-0.lock is writing
        model-00001-of-00009.safetensors        a complete shard
        .upcycle/                 the job's own files, removed when all is done
            job.json              the plan and the source of this conversion
            observed.safetensors  the measurements on text, so that a restart uses the same numbers
            rank-0.lock           held while the process of that rank lives
            rank-0.failed         why the process of that rank stopped
            model-00001-of-00009.json   size and sha256 of a shard and of everything read for it, written last: a
                                  shard without this file, or with a changed source, is written again
    OUTPUT/                       the same folder, renamed when it is complete

If a process dies, its complete shards remain and the next run keeps them. The bytes depend only on the plan and the
source: not on order, threads, processes or the number of restarts.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor
from tqdm import tqdm

from upcycle.arch import tokenizer
from upcycle.arch.registry import target
from upcycle.arch.spec import BYTES
from upcycle.config.reading import byte_size
from upcycle.converting import card, make
from upcycle.converting.make import Maker, Piece, piece
from upcycle.io import disk, publish, strict
from upcycle.io.checkpoint import Checkpoint
from upcycle.io.disk import write_atomic
from upcycle.io.job import (
    JOB,
    POLL,
    Watch,
    Worker,
    check_apart,
    check_first,
    explained,
    job,
    read_json,
    sweep_unfinished,
)
from upcycle.io.strict import Count
from upcycle.planning import request
from upcycle.planning.outputs import Output
from upcycle.planning.plan import UpcyclePlan

CARD = "README.md"  # not in the manifest, because its owner may edit it
OBSERVED = "observed.safetensors"
SHARD = r"model(?:-\d{5,}-of-\d{5,})?\.safetensors"
LANES = 4  # shards that one process writes at once


def convert(
    plan: UpcyclePlan, checkpoints: Sequence[Checkpoint], worker: Worker | None = None, *, quiet: bool = False
) -> Path:
    """Write the folder `plan.config.output` and return it; raise a ValueError on failure, and keep finished shards."""
    worker = worker or Worker.here()
    output = Path(plan.config.output)
    if not output.name:
        raise ValueError(f"output is {plan.config.output!r}; write the name of a new folder")
    check_apart("output", output, [checkpoint.folder for checkpoint in checkpoints])
    partial = output.with_name(output.name + ".partial")
    checkpoints[0].copied_files()  # raises before the first write if a file must not be published
    identity: dict[str, Any] = {"plan": plan.hash, "source": [c.fingerprint() for c in checkpoints]}
    if plan.needs_text:  # another text means another job
        identity["texts"] = [disk.sha256(Path(path)) for path in request.measured_texts(plan.config)]
    if complete(output, identity):
        if worker.rank == 0:
            check_current(plan, output, checkpoints)
        return output
    try:
        with (
            explained(partial),
            job(
                partial, identity, worker, lambda: check_space(plan, partial), SHARD,
                over=lambda: made(output, identity),
            ) as watch,
        ):  # fmt: skip
            if worker.rank == 0:
                check_first(partial, output)
            plan = replace(plan, observed=observations(plan, checkpoints, partial, watch, quiet=quiet))
            stale = stale_shards(plan, checkpoints, partial, worker)
            write_own_shards(plan, checkpoints, partial, worker, stale, quiet)
            if worker.rank == 0:
                wait_for_others(plan, partial, watch, stale)
                finish(plan, checkpoints, partial, identity)
                publish.rename(partial, output)
                shutil.rmtree(output / JOB, ignore_errors=True)
    except (OSError, ValueError):
        # not a failure: if all shards were finished before, rank 0 may rename the folder before a late rank opens it
        if worker.rank == 0 or not made(output, identity):
            raise
    return output


# ---- one job, many processes


def complete(output: Path, identity: Mapping[str, Any]) -> bool:
    """Return True if this plan already wrote the output; raise a ValueError if something else is there."""
    if made(output, identity):
        shutil.rmtree(output / JOB, ignore_errors=True)  # remains if the process was killed right after the rename
        check_whole(output)
        return True
    if not output.exists() and not output.is_symlink():
        return False
    if output.is_dir() and not any(output.iterdir()):
        return False  # os.rename replaces an empty folder
    if (output / publish.MANIFEST).is_file():
        found = read_json(output / publish.MANIFEST)
        others = [k for k in identity if not isinstance(found, dict) or found.get(k) != identity[k]]
        if not others:
            return complete(output, identity)  # another process finished it between the two reads
        raise ValueError(
            f"{output} holds the result of another plan or of an earlier state of the source (different: "
            f"{' and '.join(others)}); remove it or choose another output"
        )
    raise ValueError(f"{output} exists already; remove it or choose another output")


def made(output: Path, identity: Mapping[str, Any]) -> bool:
    found = read_json(output / publish.MANIFEST)
    return isinstance(found, dict) and {k: found.get(k) for k in identity} == dict(identity)


def check_whole(output: Path) -> None:
    """Raise a ValueError if the files of the output differ from its manifest."""
    manifest = output / publish.MANIFEST
    try:
        said = next(publish.damages(manifest, read_json(manifest)["files"]), "")
    except (KeyError, TypeError, AttributeError):
        said = f"{manifest} does not list its files"
    if said:
        raise ValueError(f"{said}, so {output} has changed since it was written; remove it and convert again")


def check_current(plan: UpcyclePlan, output: Path, checkpoints: Sequence[Checkpoint]) -> None:
    """Raise a ValueError if the source has changed since the conversion; reread it only if sizes or times differ."""
    manifest = read_json(output / publish.MANIFEST)
    try:
        strict.held(manifest["read"], Read, "read")
        sums = {name: line["sha256"] for name, line in manifest["files"].items()}
        copies = ((p, tokenizer.read(p, plan.tokenizer_class)) for p in checkpoints[0].copied_files())
        said = next((str(p) for p, data in copies if sums.get(p.name) != hashlib.sha256(data).hexdigest()), "")
        if not said and manifest["sources"] != [c.stamps() for c in checkpoints]:
            said = changed(manifest["read"], checkpoints, {})
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{output / publish.MANIFEST} does not record the sources of {output} as this version does ({error!r}); "
            f"remove {output} and convert again"
        ) from None
    if said:
        raise ValueError(f"{said} has changed since {output} was converted from it; remove {output} and convert again")


# one [donor, tensor, rows or None, sha256] for each read: Maker's sums, as JSON
Read = list[tuple[Count, str, tuple[Count, Count] | None, str]]


class Record(TypedDict):
    """The record of a finished shard."""

    bytes: Count
    sha256: str
    sources: list[Mapping[str, list[int]]]  # the stamps of each checkpoint
    read: Read


def changed(read: Read, checkpoints: Sequence[Checkpoint], known: dict[Piece, str]) -> str:
    """Name the first tensor that differs from the recorded read; '' if none. `known` caches the sha256 sums."""
    for donor, name, rows, sha in read:
        key = (donor, name, (rows[0], rows[1]) if rows else None)
        entry = checkpoints[donor].entries.get(name) if donor < len(checkpoints) else None
        try:
            if entry is not None and key not in known:
                known[key] = make.sha256(checkpoints[donor].read(name, key[2], check=False))
        except ValueError:  # the tensor now has fewer rows
            return f"tensor {name}"
        if known.get(key) != sha:
            return f"tensor {name} in {entry.file if entry else 'the source'}"
    return ""


def stale_shards(
    plan: UpcyclePlan, checkpoints: Sequence[Checkpoint], partial: Path, worker: Worker
) -> dict[str, publish.Stamp]:
    """Return {name: stamp} of finished shards that are damaged, or whose source tensors have changed.

    Each rank checks its own shards, to write them again; rank 0 checks all, to know which ones to wait for.
    """
    now, known, stale = [c.stamps() for c in checkpoints], dict[Piece, str](), dict[str, publish.Stamp]()
    mine = [name for i, (name, _) in enumerate(plan.shards) if worker.rank in (0, i % worker.count)]
    found = [(name, line, publish.stamp(partial / name)) for name in mine if (line := record(partial, name))]
    with ThreadPoolExecutor(LANES, "check") as pool:
        sums = list(pool.map(disk.sha256, [partial / name for name, _, _ in found]))
    for (name, line, seen), sha in zip(found, sums, strict=True):
        if sha != line["sha256"] or (line["sources"] != now and changed(line["read"], checkpoints, known)):
            stale[name] = seen
    return stale


def wait_for_others(plan: UpcyclePlan, partial: Path, watch: Watch, stale: Mapping[str, publish.Stamp]) -> None:
    def is_missing(name: str) -> bool:  # a rank removes the record before it writes a shard again
        return record(partial, name) is None or publish.stamp(partial / name) == stale.get(name)

    missing = {name: i % watch.worker.count for i, (name, _) in enumerate(plan.shards)}
    while missing := {name: rank for name, rank in missing.items() if is_missing(name)}:
        watch.check(set(missing.values()))
        time.sleep(POLL)


def check_space(plan: UpcyclePlan, partial: Path) -> None:
    folder = next(parent for parent in partial.parents if parent.exists())
    free = shutil.disk_usage(folder).free
    if free < plan.bytes * 1.01:
        raise ValueError(
            f"the output needs {plan.bytes / 1e9:.1f} GB and {folder} has {free / 1e9:.1f} GB free; free some "
            "or choose another output"
        )


# ---- shards


def write_own_shards(
    plan: UpcyclePlan,
    checkpoints: Sequence[Checkpoint],
    partial: Path,
    worker: Worker,
    stale: Collection[str],
    quiet: bool,
) -> None:
    """Write this rank's shards, a few at a time: while one waits for the disk, others read, compute and hash."""
    own = [shard for i, shard in enumerate(plan.shards) if i % worker.count == worker.rank]
    shards = [shard for shard in own if shard[0] in stale or record(partial, shard[0]) is None]
    total, left = (sum(out.bytes for _, group in some for out in group) for some in (own, shards))
    done = total - left  # bytes of an earlier run, which must not count in the rate
    bar = tqdm(None, "convert", total, unit="B", unit_scale=True, initial=done, disable=quiet or worker.rank > 0)
    stop = threading.Event()

    def advance(count: int) -> None:
        if stop.is_set():
            raise InterruptedError("another shard failed, or Ctrl-C")
        bar.update(count)

    lanes, cache = in_flight(plan, len(shards))
    maker, suffix = Maker(plan, checkpoints, cache, sums={}), f"rank-{worker.rank}.part"
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // lanes))
    try:
        with bar, ThreadPoolExecutor(lanes, "shard") as pool:
            futures = [pool.submit(write_shard, maker, partial, name, group, suffix, advance) for name, group in shards]
            try:
                for future in wait_for(futures, return_when=FIRST_EXCEPTION).done:
                    future.result()
            except BaseException:
                stop.set()  # do not finish the other shards: gigabytes may be left
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        torch.set_num_threads(threads)


def in_flight(plan: UpcyclePlan, shards: int) -> tuple[int, int]:
    """Return (shards to write at once, bytes of the cache).

    Each lane needs memory for a layer's FFN, once as read and once as written. All lanes together use at most the size
    of a full shard, so a large model gets fewer lanes instead of more memory.
    """
    d = plan.dense
    layer = 2 * sum(prod(shape) for shape in d.ffn_shapes().values()) * max(BYTES[d.dtype], BYTES[plan.moe.dtype])
    lanes = max(1, min(LANES, shards, byte_size(plan.config.max_shard) // layer))
    return lanes, lanes * layer


def write_shard(
    maker: Maker, partial: Path, name: str, outputs: list[Output], suffix: str, advance: Callable[[int], None]
) -> None:
    """Write one shard: compute the next part while this one is copied and hashed and the previous one is written."""
    part_file, parts = partial / f"{name}.{suffix}", [part for output in outputs for part in output.parts]
    record_file(partial, name).unlink(missing_ok=True)  # if the shard is written again
    with (
        disk.renamed(part_file, partial / name),
        ThreadPoolExecutor(1, "make") as pool,
        disk.Stream(part_file) as stream,
    ):
        ahead: Future[Tensor] | None = pool.submit(maker.part, parts[0])
        stream.write(disk.header(outputs))
        for following in [*parts[1:], None]:
            assert ahead is not None
            tensor = ahead.result()
            ahead = pool.submit(maker.part, following) if following is not None else None
            stream.write(tensor)
            advance(tensor.nbytes)
    assert maker.sums is not None
    pieces = {piece(source) for part in parts for source in part.sources}
    line = {
        "bytes": stream.bytes,
        "sha256": stream.sha256,
        "sources": [c.stamps() for c in maker.checkpoints],
        "read": [[*key, maker.sums[key]] for key in sorted(pieces, key=repr)],
    }
    write_atomic(record_file(partial, name), json.dumps(line).encode())


def record_file(partial: Path, name: str) -> Path:
    return partial / JOB / f"{name.removesuffix('.safetensors')}.json"


def record(partial: Path, name: str) -> dict[str, Any] | None:
    """Read the record of a complete shard; return None if the shard must be written."""
    file = record_file(partial, name)
    found = read_json(file)
    try:
        line: dict[str, Any] = strict.held(found, Record, str(file))
        return line if (partial / name).stat().st_size == line["bytes"] else None
    except (FileNotFoundError, ValueError):
        return None


# ---- measurements on text, and all files except the weights


def observations(
    plan: UpcyclePlan, checkpoints: Sequence[Checkpoint], partial: Path, watch: Watch, *, quiet: bool
) -> dict[str, Tensor]:
    """Return the plan's measurements on text; rank 0 takes them, or reads an earlier run's, while the others wait."""
    from safetensors.torch import save

    path = partial / JOB / OBSERVED
    if not plan.needs_text:
        if plan.observed and watch.worker.rank == 0:  # the plan already has them
            write_atomic(path, save(dict(plan.observed)))
        return dict(plan.observed)
    from upcycle.text import measure

    if watch.worker.rank == 0 and not is_whole(path):
        path.with_suffix(".sha256").unlink(missing_ok=True)
        write_atomic(path, save(measure.measure(plan, checkpoints, quiet=quiet)))
        write_atomic(path.with_suffix(".sha256"), disk.sha256(path).encode())
    while not is_whole(path):
        watch.check([0])
        time.sleep(POLL)
    return measure.read(path, plan)


def is_whole(path: Path) -> bool:
    """Return True if a file has the sha256 that was written next to it."""
    try:
        return path.with_suffix(".sha256").read_text() == disk.sha256(path)
    except FileNotFoundError:
        return False


def finish(plan: UpcyclePlan, checkpoints: Sequence[Checkpoint], partial: Path, identity: Mapping[str, Any]) -> None:
    """Write all files except weights (index, config, tokenizer, card, manifest), and remove temporary files."""
    records = {}
    for name, _ in plan.shards:
        if (found := record(partial, name)) is None:
            raise ValueError(f"{record_file(partial, name)} is gone, though its shard was written; start again")
        records[name] = found
    read = {json.dumps(line[:3]): line for found in records.values() for line in found["read"]}
    beside = [partial / "config.json"]
    write_atomic(beside[0], json.dumps(plan.hf_config, indent=2).encode() + b"\n")
    if len(plan.shards) > 1:
        weight_map = {out.name: name for name, group in plan.shards for out in group}
        index = {"metadata": {"total_size": plan.bytes}, "weight_map": dict(sorted(weight_map.items()))}
        beside.append(partial / "model.safetensors.index.json")
        write_atomic(beside[-1], json.dumps(index, indent=2).encode() + b"\n")
    modeling = target(plan.target).modeling
    copied = {path.name: path for path in (*checkpoints[0].copied_files(), *([modeling] if modeling else []))}
    if plan.observed:
        copied[publish.MEASURED] = partial / JOB / OBSERVED
    for name, path in copied.items():
        beside.append(partial / name)
        tokenizer.copy(path, beside[-1], plan.tokenizer_class)
    write_atomic(partial / CARD, card.text(plan, checkpoints[0].folder, copied).encode())
    manifest = {
        **identity,
        "format": 1,
        "seed": plan.config.seed,
        "from": plan.config.source,
        "donors": list(plan.config.donors),
        "target": plan.target,
        "promise": card.promised(plan),
        "config": card.settings(plan),
        "method": plan.config.method,  # as in the config, because the plan's hash covers it; `config` adds defaults
        "router_mass": {k.split(".")[1]: float(v) for k, v in plan.observed.items() if k.endswith(".mass")},
        "versions": card.versions(),
        "files": {name: {k: found[k] for k in ("bytes", "sha256")} for name, found in records.items()}
        | publish.listed(beside),
        "sources": [c.stamps() for c in checkpoints],
        "read": [read[key] for key in sorted(read)],
    }
    write_atomic(partial / publish.MANIFEST, publish.signed(manifest))
    sweep_unfinished(partial, SHARD)  # left by killed processes
    disk.sweep(partial)
