"""Flip one bit in every file of a run, a shard folder, an export and an adapter folder: is each flip named or harmless?

A flip is named if a reader refuses the file or warns of it by its name. It is harmless if every reader gives the same
answer as before: the same exports byte for byte, the same resumed run, the same tokens. Any other flip is silent, which
is a fault. `python -m tests.fuzz --bits 500 --seed 2611` calls this; tests/unit/test_fuzz.py has a small slice.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from evaluation.show import commands
from tests.parity import tiny
from tests.unit.training import test_data
from training import api
from training.checkpoint import layout, standalone
from training.checkpoint.export import exported
from training.checkpoint.state import found
from training.config.reading import read_config
from training.data.mixture import Mixture
from training.data.prepare import PrepareConfig, prepare
from training.data.shards import TokenShards, read_meta
from training.observe import metrics
from training.run import session
from training.run.loop import train
from upcycle.verifying import inspect

Use = Callable[[], object]
WORDS = [
    "data.sequence=24", "batch=4", "micro_batch=2", "log_every=1", "schedule.warmup=1", "schedule.peak=1e-3", "steps=6",
    "model.dtype=float32", "checkpoint.every=2", "checkpoint.asynchronous=false", "device=cpu", "lora.rank=2",
]  # fmt: skip
CLOCK = {"seconds_per_step", "tokens_per_s", "tflops", "mfu", "eta_s", "memory_gb"}


@dataclass
class Flips:
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)  # (folder, named | harmless | silent)
    harmless: Counter[str] = field(default_factory=Counter)  # by file
    silent: list[str] = field(default_factory=list)

    def line(self, folder: str) -> str:
        kinds = {kind: self.counts[folder, kind] for kind in ("named", "harmless", "silent")}
        return f"{folder:<10} {sum(kinds.values()):>5} flips: " + ", ".join(f"{n} {kind}" for kind, n in kinds.items())


def config(place: Path) -> Any:
    settings = {
        "source": str(place / "dense"), "experts": 4, "granularity": 2, "method": "virtual_group", "top_k": 2,
        "router": {"normalize": False, "init": {"std": 0.3}}, "scale": "calibrated",
        "calibration": {"texts": [str(place / "text.txt")], "tokens": 128, "sequence": 32},
    }  # fmt: skip
    words = [f"output={place / 'run'}", f"export={place / 'export'}", f"lora.export={place / 'adapters'}"]
    words += [f"data.train=[{place / 'shards'}]", f"model.upcycle={json.dumps(settings)}"]
    return read_config("", [*words, *WORDS])


def make(place: Path) -> None:
    """Make the folders, and take the newest checkpoint away, so that the run can resume."""
    tiny.make("llama", place / "dense", vocab_size=400, num_hidden_layers=1)
    test_data.make_tokenizer(place / "dense", bos=False)
    rows = test_data.jsonl(place / "a.jsonl", test_data.texts(40, 0))
    (place / "text.txt").write_text("\n".join(test_data.texts(20, 7)))
    prepare(PrepareConfig(str(place / "shards"), str(place / "dense"), (str(rows),), shard_tokens=500), quiet=True)
    train(config(place))
    newest = found(place / "run" / "checkpoints")[0]
    newest.rename(place / "last")


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


def tensors(origin: layout.Origin) -> str:
    sha = hashlib.sha256()
    for stored in origin.tensors:
        sha.update(origin.read(stored.name).float().numpy().tobytes())
    return f"{origin.spec} {dict(origin.config)} {sha.hexdigest()}"


def uses_of_run(place: Path) -> Iterator[Use]:
    run = place / "run"

    def export(source: Path) -> object:
        out = place / f"{source.name}-exported"
        return api.export(source, out), digests(out)

    def begun() -> str:
        made = standalone.upcycled(run)
        assert made is not None
        with layout.online(made, standalone.measured_before(run), text=True) as origin:
            return tensors(origin)

    def resumed() -> object:
        for name in ("export", "adapters"):
            (place / name).rename(place / f"{name}-before")
        with mock.patch.object(session, "draw"):  # a picture takes longer than the run
            train(config(place))
        rows = [{k: v for k, v in row.items() if k not in CLOCK and "time/" not in k} for row in metrics.read(run)]
        with torch.no_grad():
            saved = standalone.shards_of(run, None)
            sha = hashlib.sha256()
            for name in sorted(saved.tensors):
                sha.update(saved.read(name).view(-1).view(torch.uint8).numpy().tobytes() if saved.shape(name) else b"")
        return rows, sha.hexdigest(), digests(place / "export"), digests(place / "adapters")

    yield lambda: (commands.config_of(run), commands.command(run), standalone.plan_rows(run), standalone.dtype_of(run))
    yield lambda: metrics.read(run)
    for source in (run, *found(run / "checkpoints")):
        yield lambda source=source: export(source)  # type: ignore[misc]
    yield begun
    yield resumed


def uses_of_shards(place: Path) -> Iterator[Use]:
    def used() -> object:
        shards = TokenShards.open(place / "shards", 400)
        shards.verify()
        batch = Mixture([("x", shards, 1.0)], 64, 0).batch(0, 8)
        return read_meta(place / "shards"), batch.tokens.tolist(), [shards.document(i).tolist() for i in range(40)]

    yield used


def uses_of_export(place: Path) -> Iterator[Use]:
    def opened() -> object:
        with layout.opened(place / "export") as origin:
            return tensors(origin), origin.past

    yield lambda: inspect.check(place / "export")
    yield opened


USES: Mapping[str, Callable[[Path], Iterator[Use]]] = {
    "run": uses_of_run,
    "shards": uses_of_shards,
    "export": uses_of_export,
    "adapters": lambda place: iter([lambda: exported(place / "adapters")]),
}


def asked(use: Use) -> tuple[object, str]:
    """Return a reader's answer, and what it says: its refusal, its warnings and its output."""
    answer: object = None
    with warnings.catch_warnings(record=True) as warned, redirect_stdout(StringIO()) as out, redirect_stderr(out):
        warnings.simplefilter("always")
        try:
            answer = use()
        except (ValueError, OSError) as error:
            answer = "refused"
            out.write(f"{error}\n")
    return answer, "".join(f"{each.message}\n" for each in warned) + out.getvalue()


def flip(place: Path, count: int, seed: int, restore: Callable[[Path, Mapping[Path, bytes]], None]) -> Flips:
    """Flip `count` bits, spread over all files, one at a time, and ask all readers of the file's folder."""
    make(place)
    whole = {path: path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}
    healthy = {}
    for name, uses in USES.items():
        healthy[name] = [asked(use) for use in uses(place)]
        restore(place, whole)
        for answer, said in healthy[name]:
            assert answer != "refused" and "damaged" not in said, said
    files = [path for path, data in whole.items() if data and path.relative_to(place).parts[0] in USES]
    draw, flips = random.Random(seed), Flips()
    draw.shuffle(files)
    for number in range(count):
        path = files[number % len(files)]
        name, data = path.relative_to(place).parts[0], bytearray(whole[path])
        bit = draw.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        kind = "harmless"
        for use, (before, normal) in zip(USES[name](place), healthy[name], strict=True):
            answer, said = asked(use)
            if any(path.name in line for line in set(said.splitlines()) - set(normal.splitlines())):
                kind = "named"
                break
            if answer != before:
                kind = "silent"
                flips.silent.append(f"bit {bit} of {path.relative_to(place)}: {said[-300:]}")
                break
        flips.counts[name, kind] += 1
        if kind == "harmless":
            flips.harmless[str(path.relative_to(place))] += 1
        restore(place, whole)
        if number % 50 == 49:
            print("; ".join(map(flips.line, USES)), file=sys.stderr, flush=True)
    return flips
