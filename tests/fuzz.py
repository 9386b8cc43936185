"""One fuzz harness over every reader of the product: whatever a file holds, it is read or refused in a sentence, soon.

READERS has a row for each: how to make a valid sample, and how the product reads it. `fuzz` changes one file of the
sample at a time (values, structure, bytes; links, pipes, ${...}), by a seed and a number alone, and reads it. A fault is
whatever is neither an answer nor a ValueError or OSError (which the commands turn into a sentence and exit code 2), a
call of more than SECONDS, one that takes more than MEMORY, and one that shows a secret of the environment.

    python -m tests.fuzz                       # all readers, 1,000 mutants of each
    python -m tests.fuzz --count 3000 routing  # one, longer; --first 3000 goes on from there
    python -m tests.fuzz --bits 500            # one flipped bit in each file of a run, shards and exports: is it named?

tests/unit/test_fuzz.py has a small slice. Each reader runs in a process of its own, so that an abort is a fault too.
"""

from __future__ import annotations

import argparse
import bz2
import copy
import faulthandler
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pyarrow
import pyarrow.parquet
import yaml
import zstandard

from evaluation.ask import run as asking
from evaluation.ask import tasks
from evaluation.ask.load import end_tokens, load_tokenizer
from evaluation.ask.offline import splits
from evaluation.ask.remember import Remembered
from evaluation.ask.tasks import read_suite
from evaluation.facts import suite as facts_suite
from evaluation.judge.compare import compare
from evaluation.show import facts as shown_facts
from evaluation.show import live
from evaluation.show.page import rendered
from evaluation.show.report import as_json, markdown
from evaluation.show.sections import page
from evaluation.studies.judging import outcome
from evaluation.studies.plan import read_study
from tests import bits, parts
from tests.parity import test_siblings, tiny
from tests.unit.evaluation import test_compare, test_report, test_suite_sandbox, test_tasks
from tests.unit.training import test_data
from tests.unit.training.test_state import small
from tests.unit.upcycle.plans import readable
from training.checkpoint import layout, standalone
from training.checkpoint.state import Checkpoints
from training.checkpoint.storage import encode, sealed
from training.config import reading as training
from training.config.schema import ModelConfig
from training.data import prepare as preparing
from training.data.encoding import load_encoder
from training.data.mixture import Mixture
from training.data.prepare import PrepareConfig, prepare
from training.data.shards import TokenShards, read_meta
from training.observe import metrics
from training.optim.config import OptimConfig
from training.optim.guard import SpikeGuard
from training.parts import join as joining
from upcycle.config.reading import read
from upcycle.config.schema import Calibration, Router, UpcycleConfig
from upcycle.converting import card, part
from upcycle.converting import convert as converting
from upcycle.io import publish
from upcycle.io.checkpoint import Checkpoint
from upcycle.io.disk import sha256
from upcycle.io.job import Worker
from upcycle.io.publish import digest
from upcycle.planning.plan import build
from upcycle.text import templates
from upcycle.text.tokens import encoder
from upcycle.verifying import inspect, rebuild

SECONDS, MEMORY = 5.0, 1_000_000_000  # of the processor, because the machine may be busy
WAITING = 30.0  # seconds of a call that waits, or of a short one on a busy machine
SECRET = "UPCYCLE_FUZZ_SECRET"
HIDDEN = "sesame-open-4711"
VALUES: list[Any] = [
    None, "", "x", "2", "a\nb", "\x1b[31m", "\ud800", "<b>", "../../etc/passwd", "${oc.env:" + SECRET + "}", "x" * 3000, [], ["x"],
    [0], [None], [[]], {}, {"x": []}, {"name": 1}, 0, 1, 3, -1, 2**31, 10**9, 10**19, 2**63, 0.5, -0.0, -2.5, 1e9, 1e300,
    float("inf"), float("nan"), True, False,
]  # fmt: skip


class Late(BaseException):
    """The alarm. No Exception, so that nothing that is read in a `try` handles it."""


@dataclass(frozen=True)
class Reader:
    make: Callable[[Path], object]  # writes a valid sample into an empty folder
    read: Callable[
        [Path, Path], object
    ]  # of the folder, and of the file that was changed; text that it shows is returned
    files: tuple[str, ...]  # patterns of those that are changed
    sign: Callable[[Path], object] | None = None  # writes sums anew, as who changes a file on purpose would
    attack: Callable[[Path, random.Random], str] | None = None  # makes half of the mutants: what a stranger would write


@dataclass
class Report:
    name: str
    mutants: int = 0
    read: int = 0
    refused: int = 0
    slowest: float = 0.0
    memory: int = 0  # bytes that one call took at most
    faults: dict[str, list[int]] = field(default_factory=dict)  # what -> numbers of mutants

    def line(self) -> str:
        kinds = {kind: sum(len(n) for what, n in self.faults.items() if what.startswith(kind)) for kind in KINDS}
        faults = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count) or "0 faults"
        return (
            f"{self.name:<20} {self.mutants:>6} mutants: {self.read} read, {self.refused} refused, {faults}; "
            f"slowest {self.slowest:.2f} s, most memory {self.memory / 1e6:.0f} MB"
        )


KINDS = ("traceback", "hang", "memory", "leak", "abort", "long sentence")


# ---- mutants


def mutate(path: Path, draw: random.Random) -> str:
    """Changes a file and says how. What comes of it depends on its content and on `draw` alone."""
    if draw.random() < 0.04:
        return strange(path, draw)
    data = path.read_bytes()
    try:
        made = STRUCTURED[path.suffix](data, draw) if draw.random() < 0.75 else None
    except (KeyError, ValueError, IndexError, RecursionError):  # of no such kind, or with nothing in it to change
        made = None
    how, out = made or scrambled(data, draw)
    path.write_bytes(out)
    return how


def strange(path: Path, draw: random.Random) -> str:
    """What is no regular file of one's own; see also tests/unit/upcycle/test_checkpoint_hostile.py."""
    kind = draw.choice(["pipe", "loop", "folder", "nothing", "empty", "device", "dangling"])
    path.unlink()
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "loop":
            path.symlink_to(path.name)
        case "folder":
            path.mkdir()
        case "empty":
            path.write_bytes(b"")
        case "device":
            path.symlink_to("/dev/zero")
        case "dangling":
            path.symlink_to("nowhere")
    return kind


def scrambled(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    at, size = draw.randrange(len(data) + 1), draw.choice([1, 1, 2, 8, 64])
    how = draw.choice(["flip", "cut", "insert", "zero", "twice", "drop", "append"])
    out = bytearray(data)
    match how:
        case "flip" if at < len(out):
            out[at] ^= 1 << draw.randrange(8)
        case "cut":
            del out[at:]
        case "insert":
            out[at:at] = draw.choice(
                [draw.randbytes(size), b"[" * 3000, b'{"a":' * 3000, b"9" * 5000, b"\xff\xfe", b"\0"]
            )
        case "zero":
            out[at : at + size] = bytes(len(out[at : at + size]))
        case "twice":
            out[at:at] = out[max(0, at - size) : at]
        case "drop":
            del out[at : at + size]
        case "append":
            out += draw.choice([b"\0" * size, data[:size], b"\n[]\n", draw.randbytes(size)])
    return how, bytes(out)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value inside `value`."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def changed(value: Any, draw: random.Random) -> tuple[str, Any]:
    """A copy with one to three changes."""
    out, said = copy.deepcopy(value), []
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        ways = list(places(out))
        if not ways:
            return "another value", draw.choice(VALUES)
        # near the top as often as in the long tables below it
        depth = draw.randrange(max(map(len, ways))) + 1
        *way, last = draw.choice([w for w in ways if len(w) <= depth])
        at = out
        for step in way:
            at = at[step]
        how = draw.choice(["value", "value", "value", "value", "drop", "add", "swap", "wrap", "nudge", "deep"])
        said.append(f"{how} {'.'.join(map(str, [*way, last]))}")
        match how:
            case "value":
                at[last] = draw.choice(VALUES)
                said[-1] += f"={at[last]!r:.40}"
            case "drop":
                del at[last]
            case "add":
                if isinstance(at, dict):
                    at[draw.choice(["x", "", "name", "0", "\n"])] = draw.choice(VALUES)
                else:
                    at.insert(last, draw.choice([*VALUES, at[last]]))
            case "swap":
                other = draw.choice(list(at) if isinstance(at, dict) else range(len(at)))
                at[last], at[other] = at[other], at[last]
            case "wrap":
                at[last] = draw.choice([[at[last]], {"x": at[last]}, str(at[last]), [at[last]] * 3])
            case "nudge" if isinstance(at[last], int | float) and not isinstance(at[last], bool):
                at[last] = draw.choice(
                    [at[last] + 1, at[last] - 1, -at[last], at[last] * 2, at[last] * 10**6, float(at[last])]
                )
            case "deep":
                for _ in range(draw.choice([30, 300, 700])):
                    at[last] = [at[last]]
    return "; ".join(said), out


def in_json(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    how, value = changed(json.loads(data), draw)
    text = json.dumps(value).encode()
    if draw.random() < 0.05:  # a key twice
        text = re.sub(rb'("\w+": ?)', rb"\g<1>1, \g<1>", text, count=1)
    return how, text


def in_lines(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    lines = data.splitlines()
    at = draw.randrange(len(lines))
    match draw.choice(["change", "change", "change", "change", "drop", "twice", "blank", "join"]):
        case "change":
            how, lines[at] = in_json(lines[at], draw)
            return f"line {at}: {how}", b"\n".join(lines) + b"\n"
        case "drop":
            del lines[at]
        case "twice":
            lines.insert(at, lines[at])
        case "blank":
            lines.insert(at, b"")
        case _:
            return "lines joined", b" ".join(lines)
    return "lines", b"\n".join(lines) + b"\n"


def in_yaml(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    if draw.random() < 0.1:
        return "bomb", draw.choice(YAML_BOMBS) + data
    how, value = changed(yaml.safe_load(data), draw)
    value = json.loads(json.dumps(value)) if "\\ud800" not in repr(value) else value
    return how, yaml.safe_dump(value, sort_keys=False).encode("utf-8", "replace")


def in_safetensors(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    size = int.from_bytes(data[:8], "little")
    how, header = in_json(data[8 : 8 + size], draw)
    return how, len(header).to_bytes(8, "little") + header + data[8 + size :]


STRUCTURED = {".json": in_json, ".jsonl": in_lines, ".yaml": in_yaml, ".safetensors": in_safetensors}
YAML_BOMBS = [
    b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(b"%c: &%c [%s]\n" % (98 + i, 98 + i, b",".join([b"*%c" % (97 + i)] * 9)) for i in range(9)),
    b"x: &x [*x]\n", b"x: &x {<<: *x}\n", b"<<: {experts: 4}\n", b"? [1, 2]\n: 3\n", b"? {a: b}\n: 3\n", b"x: !!python/object/apply:os.getcwd []\n",
    b"x: !!binary '!'\n", b"x: 9999-99-99\n", b"x: !!timestamp 1\n", b"x: !!int x\n", b"x: 1_\n", b"x: 0o9\n", b"x: 1:99:99\n", b"x: " + b"[" * 3000 + b"\n",
    b"x: !!set [1]\n", b"--- 1\n--- 2\n", b"%YAML 9.9\n---\n", b"x: !!float ''\n", b"x: !!map 3\n", b"x: !!omap [1]\n", b"x: 0b\n", b"x: .\n",
]  # fmt: skip


# ---- the run


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Late

    timers = {signal.ITIMER_VIRTUAL: (signal.SIGVTALRM, seconds), signal.ITIMER_REAL: (signal.SIGALRM, WAITING)}
    before = {number: signal.signal(number, ring) for number, _ in timers.values()}
    for timer, (_, limit) in timers.items():
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        for timer in timers:
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def resident(key: str) -> int:
    """Bytes of this process in memory: VmRSS now, VmHWM at most since the last `forget`; 0 where that is not known."""
    try:
        found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def forget() -> None:
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def fuzz(name: str, count: int, place: Path, first: int = 0, said: Callable[[str], object] = lambda _: None) -> Report:
    """Reads mutants number `first` to first + count - 1 of a reader; place: an empty folder to work in."""
    reader, report = READERS[name], Report(name)
    os.environ[SECRET] = HIDDEN
    reader.make(place)
    whole = {path: path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}
    files = [path for path in whole if any(path.match(pattern) for pattern in reader.files)]
    assert files, reader.files
    for path in files:  # the sample itself is read, or every mutant would be refused for its sake
        reader.read(place, path)
        restore(place, whole)
    for number in range(first, first + count):
        said(str(number))
        draw = random.Random(f"{name} {number}")
        path = draw.choice(files)
        change = reader.attack if reader.attack and draw.random() < 0.5 else mutate
        how = f"{path.name}: {change(path, draw)}"
        if reader.sign is not None and path.is_file() and draw.random() < 0.9:
            with suppress(Exception):  # nothing that can be signed
                reader.sign(place)
        one(reader, place, path, number, how, report)
        restore(place, whole)
    return report


def one(reader: Reader, place: Path, path: Path, number: int, how: str, report: Report) -> None:
    report.mutants += 1
    if "FUZZ_CHILD" in os.environ:
        faulthandler.dump_traceback_later(4 * WAITING, exit=True)  # for what no signal interrupts
    forget()
    before, begun, shown, fault = resident("VmRSS"), time.process_time(), "", ""
    try:
        with (
            alarm(SECONDS),
            warnings.catch_warnings(),
            redirect_stdout(StringIO()) as out,
            redirect_stderr(StringIO()) as err,
        ):
            warnings.simplefilter("ignore")
            answer = reader.read(place, path)
        shown = f"{answer if isinstance(answer, str) else ''}{out.getvalue()}{err.getvalue()}"
        report.read += 1
    except (ValueError, OSError) as error:
        report.refused += 1
        shown = str(error)
        if len(shown) > 3000:
            fault = f"long sentence of {place_of(error)}"
    except Late as error:
        fault = f"hang in {place_of(error)}"
    except MemoryError as error:
        fault = f"memory: MemoryError in {place_of(error)}"
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        fault = f"traceback: {type(error).__name__} in {place_of(error)}: {' '.join(str(error).split())[:90]}"
    finally:
        faulthandler.cancel_dump_traceback_later()
    took, seconds = max(0, resident("VmHWM") - before), time.process_time() - begun
    report.slowest, report.memory = max(report.slowest, seconds), max(report.memory, took)
    if took > MEMORY and not fault:
        fault = f"memory: more than {MEMORY / 1e9:g} GB"
    if HIDDEN in shown and not fault:
        fault = "leak: a secret of the environment is shown"
    if fault:
        report.faults.setdefault(fault, []).append(number)
        if os.environ.get("FUZZ_SHOW"):
            print(f"{report.name} {number} ({how}): {fault}", file=sys.stderr)


def place_of(error: BaseException) -> str:
    """The last line of the product's own that the error came through."""
    own = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if re.search(r"/(upcycle|training|evaluation)/", f.filename)
    ]
    own = [f for f in own if "/site-packages/" not in f.filename]
    return f"{'/'.join(Path(own[-1].filename).parts[-2:])}:{own[-1].name}:{own[-1].lineno}" if own else "the harness"


def restore(place: Path, whole: Mapping[Path, bytes]) -> None:
    folders = {parent for path in whole for parent in path.parents} | {place}
    for path in sorted(place.rglob("*"), reverse=True):
        if path in whole and path.is_file() and not path.is_symlink():
            continue
        if path.is_dir() and not path.is_symlink():
            if path not in folders:
                shutil.rmtree(path)
        else:
            path.unlink()
    for path, data in whole.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_bytes() != data:
            path.write_bytes(data)


def in_child(name: str, first: int, count: int) -> Report:
    """`fuzz` in processes of its own; one that aborts is a fault of the mutant that it was at, and another goes on."""
    total, end = Report(name), first + count
    environment = {
        **os.environ,
        "FUZZ_CHILD": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
    while first < end:
        with tempfile.TemporaryDirectory() as folder:
            words = [sys.executable, "-m", "tests.fuzz", "--child", folder, "--first", str(first)]
            words += ["--count", str(end - first), name]
            ran = subprocess.run(words, env=environment, stdout=subprocess.PIPE)
            at = Path(folder, "at")
            last = int(at.read_text()) if at.exists() else -1
        if ran.returncode == 0:
            found = json.loads(ran.stdout.splitlines()[-1])
            for key in ("mutants", "read", "refused"):
                setattr(total, key, getattr(total, key) + found[key])
            total.slowest, total.memory = max(total.slowest, found["slowest"]), max(total.memory, found["memory"])
            for what, numbers in found["faults"].items():
                total.faults.setdefault(what, []).extend(numbers)
            break
        if last < 0:
            raise SystemExit(f"{name}: its sample cannot be made or read")
        total.faults.setdefault(f"abort: the process ended with {ran.returncode}", []).append(last)
        total.mutants += last + 1 - first
        first = last + 1
    return total


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("names", nargs="*", help=", ".join(READERS))
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--bits", type=int, default=0, help="flip this many single bits instead (tests/bits.py)")
    parser.add_argument("--seed", type=int, default=0, help="of --bits")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.bits:
        with tempfile.TemporaryDirectory() as folder:
            flips = bits.flip(Path(folder), options.bits, options.seed, restore)
        print("\n".join([*map(flips.line, bits.USES), *(f"    {n} {name}" for name, n in flips.harmless.items())]))
        print("\n".join(flips.silent))
        return 1 if flips.silent else 0
    if options.child:
        at, place = Path(options.child, "at"), Path(options.child, "place")
        place.mkdir()
        print(json.dumps(vars(fuzz(options.names[0], options.count, place, options.first, at.write_text))))
        return 0
    faults = 0
    for name in options.names or READERS:
        report = in_child(name, options.first, options.count)
        print(report.line(), flush=True)
        for what, numbers in sorted(report.faults.items(), key=lambda pair: -len(pair[1])):
            print(f"    {len(numbers):>5} {what} (number {', '.join(map(str, numbers[:3]))})", flush=True)
            faults += len(numbers)
    return 1 if faults else 0


# ---- the readers


def dense(folder: Path) -> None:
    for name in ("llama", "gemma3_text", "phi3"):
        tiny.make(name, folder / name)


def read_dense(folder: Path, path: Path) -> str:
    shown = inspect.describe(path.parent)
    with Checkpoint.open(path.parent) as checkpoint:
        made = build(UpcycleConfig(source=str(path.parent), experts=4), [checkpoint])
        shown += str(list(card.rows(made))) + card.text(made, path.parent)
    with layout.opened(path.parent) as origin:
        return shown + str(origin.spec)


def converted(**values: Any) -> None:
    config = UpcycleConfig(experts=4, **values)
    with Checkpoint.open(config.source) as checkpoint:
        converting.convert(build(config, [checkpoint]), [checkpoint], Worker(), quiet=True)


def moe(folder: Path) -> None:
    """A folder for each of some targets, as `convert` writes it, beside the dense model that it was made of."""
    source = tiny.make("llama", folder / "dense", num_hidden_layers=1)
    for target in ("mixtral", "granitemoe", "upcycled"):
        converted(source=str(source), output=str(folder / target), target=target)


def read_moe(folder: Path, path: Path) -> str:
    with layout.opened(path.parent) as origin:
        return inspect.describe(path.parent) + str(origin.spec)


def siblings(folder: Path) -> None:
    """Dense models of which all but the FFNs is carried over by name."""
    for name in ("ernie4_5", "lfm2", "granitemoehybrid", "qwen3_5"):
        test_siblings.made(name, folder / name)


def read_sibling(folder: Path, path: Path) -> str:
    with Checkpoint.open(path.parent) as checkpoint:
        config = UpcycleConfig(source=str(path.parent), experts=4, router=Router(score="auto"))
        made = build(config, [checkpoint])
        return inspect.describe(path.parent) + str(list(card.rows(made))) + card.text(made, path.parent)


def mixtures(folder: Path) -> None:
    """Models whose experts are copied or pruned, and a file that says how they were used."""
    source = tiny.make("llama", folder / "dense", num_hidden_layers=1)
    for target in ("qwen2_moe", "granitemoe", "glm4_moe"):
        router = Router(score="sigmoid" if target == "glm4_moe" else "softmax")
        converted(source=str(source), output=str(folder / target / "model"), target=target, router=router)
        row = {"layer": 0, "chosen": [5, 1, 0, 1], "saliency": [0.5, 0.25, 0.0, 1.5], "pruned": [0.5, 0.5, 0.5]}
        row |= {"bias": [0.0, 0.25]} if target == "glm4_moe" else {}
        found = {"kind": "routing", "source": "", "experts": 4, "keep": 3, "layers": [row]}
        (folder / target / "routing.json").write_text(json.dumps(found))
    sign_mixtures(folder)


def sign_mixtures(folder: Path) -> None:
    for path in folder.glob("*/routing.json"):
        with Checkpoint.open(path.parent / "model") as checkpoint:
            found = json.loads(path.read_text())
            path.write_text(json.dumps({**found, "source": checkpoint.fingerprint()}))


def read_mixture(folder: Path, path: Path) -> str:
    home, shown = folder / path.relative_to(folder).parts[0], ""
    by = {"by": str(home / "routing.json")}
    grown = {"copy": (2, 4), "prune": (3, 2)} | ({"utility": (6, 2)} if home.name == "glm4_moe" else {})
    with Checkpoint.open(home / "model") as checkpoint:
        for name, (experts, top_k) in grown.items():
            method = {"name": name} | (by if name != "copy" else {})
            config = UpcycleConfig(source=str(home / "model"), experts=experts, top_k=top_k, method=method)
            made = build(config, [checkpoint])
            shown += str(list(card.rows(made))) + card.text(made, home / "model")
    return shown


def read_manifest(folder: Path, path: Path) -> str:
    shown = inspect.describe(path.parent) + str(shown_facts.plan_rows(path.parent))
    inspect.check(path.parent)
    with layout.opened(path.parent) as origin:
        shown += str(origin.settings)
    manifest = inspect.read_whole_manifest(path.parent)
    with Checkpoint.open(path.parent) as made, Checkpoint.open(folder / "dense") as base:
        if manifest is not None:
            with rebuild.sources(base, manifest) as checkpoints:
                plan = rebuild.plan_of(path.parent, manifest, checkpoints)
                shown += " ".join(rebuild.faults(plan, checkpoints, made, manifest))
    return shown


def sign_manifests(folder: Path) -> None:
    for path in folder.glob("*/upcycle.json"):
        manifest = json.loads(path.read_text())
        path.write_text(json.dumps({**manifest, "sum": digest(manifest)}))


def read_part(folder: Path, path: Path) -> str:
    shutil.rmtree(folder / "out", ignore_errors=True)
    found = part.open_part(folder / "law")
    shown = part.text(found, tensors=True) + str(part.damages(found))
    joining.join(str(folder / "base"), [str(folder / "law")], str(folder / "out"))
    return shown + (folder / "out" / "README.md").read_text()


def sign_part(folder: Path) -> None:
    path = folder / "law" / part.RECORD
    record = {key: value for key, value in json.loads(path.read_text()).items() if key != "sum"}
    record["files"] = publish.listed([path.with_name(part.TENSORS)])
    path.write_bytes(publish.signed(record))


def read_joined(folder: Path, path: Path) -> str:
    for name in ("out", "again"):
        shutil.rmtree(folder / name, ignore_errors=True)
    shown = inspect.describe(folder / "joined")
    joining.remove(str(folder / "joined"), "law", str(folder / "out"))
    joining.remove(str(folder / "out"), "code", str(folder / "again"))
    return shown


def saved(folder: Path) -> None:
    state = small(3, box=[1, {"a": (2, None)}, "x"])
    state.parts = {**state.parts, "guard": SpikeGuard(OptimConfig())}
    with Checkpoints(
        folder / "checkpoints", asynchronous=False, settings=lambda step: {"seed": 0, "steps": 4}
    ) as checkpoints:
        checkpoints.save(3, state)
    (folder / "config.json").write_text("{}")


def read_saved(folder: Path, path: Path) -> None:
    state = small(0, box=0)
    standalone.load_step(state.model, folder, path.parent)  # type: ignore[arg-type]
    state.parts = {**state.parts, "guard": SpikeGuard(OptimConfig())}
    generators = random.getstate()
    try:
        with Checkpoints(
            folder / "checkpoints", asynchronous=False, settings=lambda step: {"seed": 0, "steps": 5}
        ) as checkpoints:
            checkpoints.load(state)
    finally:
        random.setstate(generators)


def sign_saved(folder: Path) -> None:
    """As who changes a checkpoint on purpose signs it: sizes and sums of the shards, and the manifest's own."""
    for path in folder.glob("checkpoints/*/manifest.json"):
        body = json.loads(path.read_bytes())
        for name in body["files"] if isinstance(body.get("files"), dict) else ():
            shard = path.parent / str(name)
            if shard.is_file() and isinstance(body["files"][name], dict):
                data = shard.read_bytes()
                body["files"][name] |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        body.pop("sha256", None)
        path.write_bytes(sealed(encode(body)))


def evaluated(folder: Path) -> None:
    rights = {"x": [0] * 6, "y": [1] * 4}
    test_compare.subjects(folder / "a", {"x": [0] * 3 + [1] * 3, "y": [1, 2] * 2}, rights)
    test_compare.subjects(folder / "b", {"x": [1] + [0] * 4 + [1], "y": [1, 2] * 2}, rights)


def evaluated_elsewhere(folder: Path) -> None:
    """As any lm-eval writes them: without what is ours."""
    evaluated(folder)
    for path in folder.glob("*/results_*.json"):
        value = json.loads(path.read_text())
        del value["upcycle"]
        path.write_text(json.dumps(value))


def sign_results(folder: Path) -> None:
    for path in folder.glob("*/results_*.json"):
        value = json.loads(path.read_text())
        own = value["upcycle"]
        for name in own["samples"]:
            own["samples"][name] = sha256(next(path.parent.glob(f"samples_{name}_*")))
        del own["sum"]
        own["sum"] = digest(value)
        path.write_text(json.dumps(value))


def read_evaluated(folder: Path, path: Path) -> str:
    return str(compare([folder / "a", folder / "b"])) + reported(folder / "a", folder / "b")


def reported(*paths: Path) -> str:
    """All three files of a report."""
    facts = shown_facts.gather([str(path) for path in paths], "title")
    return json.dumps(as_json(facts), allow_nan=False) + markdown(facts) + rendered(page(facts))


def trained(folder: Path) -> None:
    """Two runs with all that a report reads of a run."""
    for name, flops in (("dense", 10.0), ("moe", 20.0)):
        run = test_compare.log(folder / name, flops, {0: 5.0, 10: 4.0, 20: 3.0})
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        more = {"tokens_per_s": 9.0, "seconds_per_step": 0.1, "lr": 1e-3, "memory_gb": 1.0, "balance/whole": 0.5}
        more |= {f"balance/{layer}/{what}": 1.5 for layer in range(2) for what in ("max_over_mean", "whole", "missing")}
        rows = [row | (more if row["step"] else {}) for row in rows]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = training.read_config(
            "", ["model.source=dense", "data.train=[x]", "data.valid=[{name: code, path: v}]", "steps=20"]
        )
        (run / "run.json").write_text(json.dumps(asdict(config), default=str))
        run.with_suffix(".yaml").write_text(
            "model: {source: dense}\ndata: {train: [x], valid: [{name: code, path: v}]}\nsteps: 20\n"
        )
        upcycled = {"source": "dense", "experts": 4}
        (run / "origin").mkdir()
        (run / "origin" / "config.json").write_text(json.dumps(LLAMA))
        (run / "origin" / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
        record = {
            "model": {"source": "", "random": False, "upcycle": upcycled}, "files": ["generation_config.json"],
            "settings": {"granularity": 1, "method": {"name": "copy"}}, "plan": [["method", "copy"]],
        }  # fmt: skip
        (run / "origin" / "origin.json").write_text(json.dumps(record))
        (run / "checkpoints").mkdir()


LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip


def read_trained(folder: Path, path: Path) -> str:
    shown = reported(folder / "dense", folder / "moe") + str(compare([folder / "dense", folder / "moe"]))
    shown += str([outcome("a", 0, folder / name) for name in ("dense", "moe")])
    metrics.cut(folder / "dense", 15)
    return shown


def read_watched(folder: Path, path: Path) -> str:
    return "".join(live.page_of(name, run) for name, run in live.shown_in(folder).items())


def read_kept(folder: Path, path: Path) -> str:
    run = next(parent for parent in path.parents if parent.parent == folder)
    origin = standalone.kept(run)
    standalone.keeps(run, ModelConfig(source="dense"))
    return f"{origin.spec} {end_tokens(origin)} {standalone.upcycled(run)} {standalone.plan_rows(run)}"


def texts(folder: Path) -> None:
    documents = test_data.texts(12)
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("\n".join(documents))
    test_data.jsonl(folder / "text" / "b.jsonl", documents)
    test_data.jsonl(folder / "text" / "c.jsonl.zst", documents)
    bomb = zstandard.compress(b" " * (1 << 17) + b"\n" + json.dumps({"text": "x" * (1 << 17)}).encode())
    (folder / "text" / "d.jsonl.zst").write_bytes(bomb)
    pyarrow.parquet.write_table(pyarrow.table({"text": documents}), folder / "text" / "e.parquet")
    with pyarrow.ipc.new_stream(folder / "text" / "f.arrow", pyarrow.schema({"text": pyarrow.string()})) as file:
        file.write_table(pyarrow.table({"text": documents}))
    test_data.make_tokenizer(folder, bos=False)


def read_texts(folder: Path, path: Path) -> None:
    prepare(PrepareConfig(str(folder / "out"), str(folder), (str(folder / "text"),), shard_tokens=500), quiet=True)


def begun(folder: Path) -> None:
    """A folder of texts whose preparation was killed."""
    texts(folder)
    for name in ("d.jsonl.zst", "e.parquet", "f.arrow"):
        (folder / "text" / name).unlink()
    with mock.patch.object(preparing, "finish", side_effect=KeyboardInterrupt), suppress(KeyboardInterrupt):
        read_texts(folder, folder)


def shards(folder: Path) -> None:
    texts(folder)
    read_texts(folder, folder)
    shutil.rmtree(folder / "text")


def talks(folder: Path) -> None:
    """Conversations in each format, and a tokenizer with a template."""
    tokenizer(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    (folder / "text").mkdir()
    said = [("user", "how are the boats"), ("assistant", "grey"), ("user", "and the harbour"), ("assistant", "old")]
    messages = [{"role": role, "content": content} for role, content in said]
    shared = [{"from": "human" if role == "user" else "gpt", "value": content} for role, content in said]
    rows = [{"messages": messages}, {"conversations": shared}, {"prompt": "how", "completion": "so"}]
    (folder / "text" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 3))
    pyarrow.parquet.write_table(pyarrow.table({"messages": [messages] * 4}), folder / "text" / "b.parquet")


def facts(folder: Path) -> None:
    facts_suite.write(facts_suite.WriteConfig(str(folder / "suite"), people=2, places=1, events=0, tellings=1, asked=1))


def sign_facts(folder: Path) -> None:
    path = folder / "suite" / "suite.json"
    about = json.loads(path.read_text())
    about["files"] = {name: hashlib.sha256((path.parent / name).read_bytes()).hexdigest() for name in about["files"]}
    path.write_text(json.dumps(about))


def read_talks(folder: Path, path: Path) -> None:
    more: dict[str, Any] = {"kind": "chat", "sequence": 60, "shard_tokens": 200}
    prepare(PrepareConfig(str(folder / "out"), str(folder), (str(folder / "text"),), **more), quiet=True)


def talk_shards(folder: Path) -> None:
    talks(folder)
    read_talks(folder, folder)
    shutil.rmtree(folder / "text")


def read_shards(folder: Path, path: Path) -> None:
    opened = TokenShards.open(folder / "out", 400)
    opened.document(0), opened.document(opened.documents - 1), opened.head(20)
    Mixture([("x", opened, 1.0)], 64, 0).batch(0, 2)
    opened.verify()
    meta = read_meta(folder / "out")
    f"{meta['documents']:,} {meta['bytes'] / meta['tokens']:.2f}"


def sign_shards(folder: Path) -> None:
    path = folder / "out" / "meta.json"
    meta = json.loads(path.read_text())
    for row in meta["shards"]:
        for kind in (kind for kind in ("tokens", "documents", "scored") if kind in row):
            data = (path.parent / row[kind]["file"]).read_bytes()
            row[kind] |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    path.write_bytes(publish.signed(meta))


def tokenizer(folder: Path) -> None:
    test_data.make_tokenizer(folder, bos=True)
    settings = {"eos_token": "<eos>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def read_tokenizer(folder: Path, path: Path) -> None:
    encoder(folder)("a soft grey evening in the old harbour")
    made = load_encoder(folder, "")
    list(made.pieces([("a soft grey evening <eos>", True)], 0))
    load_tokenizer("x", SimpleNamespace(files=(folder / "tokenizer.json",)), "")("a soft grey evening")


def configs(folder: Path) -> None:
    (folder / "upcycle.yaml").write_text(
        "source: x\nexperts: 8\ntop_k: 2\nlayers: [1, 2]\nmethod: {name: noise, std: 0.1}\nrouter: {score: softmax, init: {std: 0.1, "
        "texts: [a, b]}}\ncalibration: {texts: [a.txt], tokens: 10}\nscale: exact\nmax_shard: 5GB\n"
    )
    (folder / "train.yaml").write_text(
        "output: out\nmodel: {source: x, dtype: float32}\ndata: {train: [{path: x, weight: 2.0}], valid: [y], sequence: 16}\noptim: "
        "{name: adamw, beta2: 0.95}\nschedule: {peak: 1e-3, warmup: 2}\nmesh: {ep: 1}\nsteps: 3\nbatch: 2\n"
    )
    (folder / "eval.yaml").write_text("suite: tiny\ncheckpoint: x\ntexts: [a.txt]\nmesh: {tp: 1}\nlimit: 3\n")
    (folder / "prepare.yaml").write_text("tokenizer: x\nsources: [a.txt, b]\nshard_tokens: 100\n")
    (folder / "study.yaml").write_text(
        "output: out\nseeds: [0, 1]\nbase: {model: {source: x}, data: {train: [d], valid: [v], sequence: 16}, steps: 3}\n"
        "arms: {dense: {}, moe: {match: flops, of: dense, model: {source: '', upcycle: {source: x, experts: 4}}}}\nmeans: {all: [v]}\n"
    )
    (folder / "suite.yaml").write_text(
        "tasks:\n  - task: own\n    dataset_path: jsonl\n    dataset_name: own.jsonl\n    test_split: test\n    output_type: "
        "multiple_choice\n    doc_to_text: '{{question}}'\n    doc_to_target: gold\n    doc_to_choice: '{{choices}}'\n    metric_list: "
        "[{metric: acc}]\nfewshot: 0\nnotes: {own: a note}\n"
    )


def read_configs(folder: Path, path: Path) -> None:
    file = str(path)
    if path.stem in ("eval", "suite"):
        asking.is_config(file)
    readers: dict[str, Callable[[], object]] = {
        "upcycle": lambda: read(UpcycleConfig, file),
        "train": lambda: training.read_config(file),
        "eval": lambda: asking.read_config([file]),
        "prepare": lambda: read(PrepareConfig, file, [], folder),
        "study": lambda: read_study(file),
        "suite": lambda: read_suite(file),
    }
    readers[path.stem]()


def measured(folder: Path) -> None:
    """A converted folder with what was measured on text, and an index of several files."""
    readable(tiny.make("llama", folder / "dense", num_hidden_layers=1), folder)
    again(folder)


def again(folder: Path) -> None:
    converted(
        source=str(folder / "readable"), output=str(folder / "moe"), scale="calibrated", max_shard="100KB",
        calibration=Calibration((str(folder / "letters.txt"),), 16, 8), router=Router(normalize=False),
    )  # fmt: skip


def read_measured(folder: Path, path: Path) -> str:
    shown = inspect.describe(folder / "moe", tensors=True)
    manifest = inspect.read_whole_manifest(folder / "moe")
    assert manifest is not None
    with Checkpoint.open(folder / "moe") as made, Checkpoint.open(folder / "readable") as base:
        made.fingerprint()
        with rebuild.sources(base, manifest) as checkpoints:
            plan = rebuild.plan_of(folder / "moe", manifest, checkpoints)
            shown += " ".join(rebuild.faults(plan, checkpoints, made, manifest))
            rebuild.weights(plan, checkpoints, made)
    return shown


def killed(folder: Path) -> None:
    """A conversion that was killed before its end."""
    with mock.patch.object(converting, "finish", side_effect=KeyboardInterrupt), suppress(KeyboardInterrupt):
        measured(folder)


def answers(folder: Path) -> None:
    known = Remembered(folder / "cache", "print")
    known.put({f"{number:032x}": [-1.5, True] for number in range(5)} | {"text": "an answer"})
    known.close()


def read_answers(folder: Path, path: Path) -> None:
    Remembered(folder / "cache", "print").close()


def published(folder: Path) -> None:
    """Data sets as their authors publish them, and a suite's own."""

    def write(name: str, text: str) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bz2.compress(text.encode()) if name.endswith(".bz2") else text.encode())

    def rows(*made: Mapping[str, Any]) -> str:
        return "".join(json.dumps(row) + "\n" for row in made * 2)

    subject = "question,choice0,choice1,choice2,choice3,answer\nq,a,b,c,d,1\n"
    for split in ("test", "dev"):
        write(f"mmlu/{split}/law_{split}.csv", subject)
    write("arc/arc_easy.jsonl", rows({"query": "Question: q\nAnswer:", "choices": ["a", "b"], "gold": 1}))
    write("piqa/piqa.jsonl", rows({"query": "Question: q\n", "choices": ["a", "b"], "gold": 1}))
    write("openbookqa/openbook_qa.jsonl", rows({"query": "q", "choices": ["a", "b"], "gold": 0}))
    write("boolq/boolq.jsonl", rows({"query": "Passage: p\nQuestion: q?", "gold": 1}))
    write(
        "winogrande/winogrande.jsonl", rows({"context_options": ["so a b", "so c b"], "continuation": "x", "gold": 1})
    )
    write("lambada/lambada_openai.jsonl", rows({"context": "a b", "continuation": "c"}))
    write("hellaswag/hellaswag_val_full.txt.bz2", "Act: one. two\n1\na\nb\nc\nd\n" * 2)
    write("truthfulqa/TruthfulQA.csv", "Question,Best Answer,Incorrect Answers\nq,a,b; c\n")
    write("gsm8k/test.jsonl", rows({"question": "q", "answer": "#### 1"}))
    write("gsm8k/train.jsonl", rows({"question": "q", "answer": "#### 1"}))
    write("wikitext2/wiki.test.raw.crlf.txt", " = Title = \n text \n = = Part = = \n text \n")
    write("own.jsonl", rows({"question": "q", "choices": ["a"], "gold": 0}))
    write("own.txt", "text")


PUBLISHED = {
    "mmlu": ("cais/mmlu", "law"), "arc": ("allenai/ai2_arc", "ARC-Easy"), "piqa": ("baber/piqa", ""),
    "openbookqa": ("allenai/openbookqa", "main"), "boolq": ("aps/super_glue", "boolq"),
    "winogrande": ("allenai/winogrande", "winogrande_xl"), "lambada": ("EleutherAI/lambada_openai", "default"),
    "hellaswag": ("Rowan/hellaswag", ""), "truthfulqa": ("truthfulqa/truthful_qa", "multiple_choice"),
    "gsm8k": ("openai/gsm8k", "main"), "wikitext2": ("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1"),
    "own.jsonl": ("jsonl", "own.jsonl"), "own.txt": ("text", "own.txt"),
}  # fmt: skip


def read_published(folder: Path, path: Path) -> None:
    splits(folder, *PUBLISHED[path.relative_to(folder).parts[0]])


RAN = "UPCYCLE_FUZZ_RAN"  # names the file that a suite's or a template's code would make
HOSTILE = [
    *(way.format(f'"${RAN}"').replace("touch", "touch --") for way in test_suite_sandbox.WAYS.values()),
    *test_suite_sandbox.LOOPS.values(),
]


def suites(folder: Path) -> None:
    """A suite of a task and of a task file, next to Python that must not run."""
    os.environ[RAN] = str(folder / "ran")
    (folder / "collection").mkdir()
    (folder / "collection" / "README.md").touch()
    (folder / "evil.py").write_text(f"import os\nopen(os.environ['{RAN}'], 'w').close()\nf = list\n")
    written = test_tasks.written(folder)
    asked = {"task": "asked", "output_type": "multiple_choice", "doc_to_choice": ["b", "c"], "num_fewshot": 1}
    asked |= {"fewshot_split": "test", "description": "d", "metric_list": [{"metric": "acc"}]}
    (folder / "x.yaml").write_text(yaml.safe_dump(written | asked))
    regex = [{"name": "f", "filter": [{"function": "regex", "regex_pattern": "(a+)"}, {"function": "take_first"}]}]
    rows = (json.dumps({"text": text, "word": "b"}) for text in "abc")
    (folder / "rows.jsonl").write_text("\n".join(rows))
    test_tasks.suite(folder, written | {"filter_list": regex, "process_docs": None}, str(folder / "x.yaml"))


def attack_suite(path: Path, draw: random.Random) -> str:
    """Put a command, a loop or a Python function at one of the suite's keys."""
    value = yaml.safe_load(path.read_text())
    *way, last = draw.choice([way for way in places(value) if way])
    at, sent = value, draw.choice([*HOSTILE, *(f"!function evil.{name}" for name in "fgf"), "(a+)+$"])
    for step in way:
        at = at[step]
    at[last] = sent
    path.write_text(re.sub(r"'(!function [\w.]+)'", r"\1", yaml.safe_dump(value)))
    return f"{last} is {sent}"


class Answers(test_suite_sandbox.Writes):
    def loglikelihood(self, requests: Any, **_: Any) -> list[Any]:
        return [(-1.0, False)] * len(requests)


def asked_suite(folder: Path, path: Path) -> None:
    try:
        # reading lm-eval's whole collection, as an unknown name does, takes longer than all else
        with mock.patch.object(templates, "SECONDS", 0.2), mock.patch.object(tasks, "LM_EVAL", folder / "collection"):
            asking.ask(Answers(), tasks.load(str(folder / "own.yaml")), 0)
    finally:
        assert not Path(os.environ[RAN]).exists(), "a suite ran code"


def templated(folder: Path) -> None:
    """A tokenizer with a chat template of its own, and a conversation."""
    talks(folder)
    os.environ[RAN] = str(folder / "ran")
    shutil.copy(
        Path(__file__).parent / "unit" / "training" / "chat_templates" / "qwen3.jinja", folder / "chat_template.jinja"
    )


def attack_template(path: Path, draw: random.Random) -> str:
    """Put a command or a loop between two tags of a template."""
    text, sent = path.read_text(), draw.choice(HOSTILE)
    at = draw.choice([0, *(found.end() for found in re.finditer(r"[%}]\}", text))])
    path.write_text(text[:at] + sent + text[at:])
    return f"{sent} at {at}"


def read_template(folder: Path, path: Path) -> None:
    try:
        with mock.patch.object(templates, "SECONDS", 0.2):
            read_talks(folder, path)
    finally:
        assert not Path(os.environ[RAN]).exists(), "a template ran code"


READERS: dict[str, Reader] = {
    "dense": Reader(dense, read_dense, ("config.json",)),
    "moe": Reader(moe, read_moe, ("mixtral/config.json", "granitemoe/config.json", "upcycled/config.json")),
    "siblings": Reader(siblings, read_sibling, ("config.json",)),
    "mixtures": Reader(mixtures, read_mixture, ("model/config.json", "routing.json"), sign_mixtures),
    "manifest": Reader(moe, read_manifest, ("upcycle.json",), sign_manifests),
    "part": Reader(parts.joined, read_part, ("law/part.*",), sign_part),
    "joined": Reader(parts.joined, read_joined, ("joined/upcycle.json", "joined/config.json"), sign_manifests),
    "weights": Reader(measured, read_measured, ("moe/*.safetensors", "moe/*.index.json")),
    "conversion": Reader(killed, lambda folder, path: again(folder), (".upcycle/*.json", ".upcycle/*.safetensors")),
    "checkpoint": Reader(saved, read_saved, ("manifest.json",), sign_saved),
    "state": Reader(saved, read_saved, ("shard-*.safetensors",), sign_saved),
    "run": Reader(trained, read_trained, ("metrics.jsonl", "run.json", "dense.yaml", "moe.yaml")),
    "watched": Reader(trained, read_watched, ("metrics.jsonl", "run.json", "origin/*.json")),
    "origin": Reader(trained, read_kept, ("origin/*.json",)),
    "texts": Reader(texts, read_texts, ("text/*",)),
    "preparation": Reader(begun, read_texts, (".upcycle/*.json",)),
    "shards": Reader(shards, read_shards, ("out/*",), sign_shards),
    "talks": Reader(talks, read_talks, ("text/*",)),
    "talk shards": Reader(talk_shards, read_shards, ("out/*",), sign_shards),
    "tokenizer": Reader(tokenizer, read_tokenizer, ("*.json",)),
    "configs": Reader(configs, read_configs, ("*.yaml",)),
    "results": Reader(evaluated, read_evaluated, ("results_*.json", "samples_*.jsonl"), sign_results),
    "lm-eval": Reader(evaluated_elsewhere, read_evaluated, ("results_*.json", "samples_*.jsonl")),
    "facts": Reader(facts, lambda folder, path: facts_suite.read(folder / "suite"), ("suite/*.json*",), sign_facts),
    "routing": Reader(test_report.routed, lambda folder, path: reported(path), ("*.json",)),
    "answers": Reader(answers, read_answers, ("*.jsonl",)),
    "published": Reader(published, read_published, ("*.*",)),
    "suite": Reader(suites, asked_suite, ("own.yaml", "x.yaml"), attack=attack_suite),
    "template": Reader(templated, read_template, ("chat_template.jinja",), attack=attack_template),
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
