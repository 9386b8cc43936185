"""Give every command values of every kind for its keys, and count what comes of it.

usage: python -m benchmarks.fuzz [key=value ...]

  python -m benchmarks.fuzz cases=1000 seed=2611
  python -m benchmarks.fuzz cases=250 first=500        # cases 500 to 749 of the same seed
  python -m benchmarks.fuzz cases=1 first=17 show=true  # one case, with everything that it prints

A case is a small, valid command with one or two keys changed, by their types and ranges. It follows from the seed and its
number alone, and runs in a process of its own with a bound on its memory. A case ends as one of these:

    done        the exit code is 0, or a verdict of verify and inspect
    refused     the exit code is 2, with one sentence
    stopped     it works longer than a person waits, and ends when it is asked to
    traceback   an exception that no sentence explains, a signal or another exit code
    hang        it does not end within two minutes, although it was asked to
    untrained   the run says that it is trained, but every step was skipped or its export is not finite
"""

from __future__ import annotations

import sys

from upcycle.cli import frame as cli

if __name__ == "__main__":  # before the imports below, because they take seconds
    cli.program("benchmarks.fuzz")

import collections
import contextlib
import dataclasses
import faulthandler
import importlib
import json
import os
import random
import resource
import shlex
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from safetensors import safe_open

from evaluation.ask.run import RunConfig
from evaluation.chat import ChatConfig
from evaluation.cli.compare import CompareConfig
from evaluation.cli.report import ReportConfig
from evaluation.cli.watch import WatchConfig
from evaluation.facts.suite import WriteConfig
from evaluation.judge.experts.routing import RoutingConfig
from evaluation.studies import sample
from evaluation.studies.plan import StudyConfig
from training.cli.join import JoinKeys
from training.cli.launch import LaunchKeys
from training.cli.prepare import PrepareKeys
from training.cli.remove import RemoveKeys
from training.config.schema import TrainConfig
from training.data.prepare import PrepareConfig
from training.estimating.bench import BenchConfig
from training.estimating.estimate import EstimateConfig
from training.estimating.recommend import RecommendConfig
from training.parts.add import AddConfig
from training.parts.upgrade import UpgradeConfig
from upcycle.cli import main as door
from upcycle.cli.inspect import InspectKeys
from upcycle.cli.plan import PlanKeys
from upcycle.cli.quantize import QuantizeKeys
from upcycle.cli.verify import VerifyKeys
from upcycle.config.reading import read
from upcycle.config.schema import UpcycleConfig
from upcycle.config.values import at_least, check_values

WAITS = (20.0, 30.0, 120.0)  # seconds after which a case is asked to stop, asked again, and ended
MEMORY = 12 << 30  # bytes of addresses of a case
VERDICTS = {("verify", 1), ("verify", 3), ("inspect", 1)}
KINDS = ("done", "refused", "stopped", "traceback", "hang", "untrained")
FAULTS = KINDS[3:]
LARGE = (2**16, 2**16 + 1, 2**20, 2**20 + 1, 2**24, 2**24 + 1, 2**31 - 1, 2**31, 10**12, 2**63 - 1, 2**63, 10**30)
WHOLE: tuple[Any, ...] = (
    -(10**30),
    -1,
    0,
    1,
    2,
    3,
    5,
    8,
    100,
    *LARGE,
    0.5,
    "1e30",
    "nan",
    "x",
    "",
    "null",
    "true",
    "[1,2]",
)
REAL: tuple[Any, ...] = (
    -1.0, 0, 1e-300, 1e-30, 1e-8, 0.01, 0.5, 1, 1.5, 3, 1e3, 1e6, 1e9, 1.1e9, 1e30, 1e300, 10**400, "nan", "inf", "-inf",
    "x", "", "null", "[1]",
)  # fmt: skip
WORDS = (
    "", "x", "0", "-1", "nan", "1e400", "null", "true", "[a]", "{a: 1}", "../x", "a\nb", "\x1b[31m", "x" * 300, "none", "auto",
    "all", "full", "experts", "attention", "selective", "bfloat16", "float16", "float32", "float64", "adamw", "muon", "constant",
    "linear", "cosine", "wsd", "softmax", "sigmoid", "each-slice", "any", "parts", "published", "calibrated", "mixtral",
    "upcycled", "qwen3_moe", "granitemoe", "normal", "independent", "virtual_group", "weights", "output", "global",
    "sequence", "position", "h100", "h200", "8xh100", "9999999999999xh100", "100B tokens", "1e22 FLOPs", "1e29", "1e30TB", "1KB", "1B",
    "99999999999999999999GB", "every:2", "every:99999999999999999999", "first-dense:1", "10-12", "1-99999999999999999999",
    "1Gb/s", "1e300Gb/s", "10.0.0.7:29600", "10.0.0.7:99999", "balanced", "chat", "cpu", "cpu:99", "topk-then-softmax", "reference",
)  # fmt: skip
METHODS = ("copy", "noise", "drop", "split", "virtual_group", "prune", "branch_train_mix", "x", "{name: noise, std: V}",
           "{name: drop, ratio: V}", "{name: noise, ratio: V}", "{name: split, by: random}")  # fmt: skip
LISTS = {  # lists and mappings whose items have numbers; V stands for one
    "groups": "[{match: router, lr: V}] [{match: '*', decay: V}] [{match: '*', lr: V}]",
    "train": "[{path: TOKENS, weight: V}] [{path: TOKENS, name: a},{path: TOKENS, name: b, weight: V}]",
    "valid": "[{path: TOKENS, tokens: V}]",
    "stages": "[{steps: V}] [{tokens: V}] [{steps: 1},{steps: 1, batch: V}] [{steps: 2, micro_batch: V}] "
    "[{steps: 2, schedule: {warmup: V}}] [{steps: 2, valid_every: V}] [{steps: 1, data: {sequence: V}}]",
    "samples": "{tiny_copy: [V]}",
    "layers": "[V] [0,V]",
    "scale": "V",
    "upcycle": "{source: DENSE, experts: V} {source: DENSE, top_k: V} {source: DENSE, shared: V} {source: DENSE, method: {name: "
    "noise, std: V}} {source: DENSE, calibration: {tokens: V}}",
    "sample": "{hidden: V} {layers: V} {vocabulary: V} {batch: V} {sequence: V} {first: V} {peak: V} {characters: V}",
    "base": "{batch: V} {steps: V} {data: {sequence: V}}",
}


@dataclass(frozen=True)
class FuzzConfig:
    cases: int = 1000  # number of cases
    seed: int = 2611  # seed of the cases
    first: int = 0  # number of the first case
    show: bool = False  # print all that the cases print

    def __post_init__(self) -> None:
        check_values(self, "", {"cases": at_least(1), "seed first": at_least(0)})


@dataclass(frozen=True)
class Command:
    """A small, valid command in the sample's folder, and the configs whose keys are changed."""

    words: str
    configs: tuple[type[Any], ...]
    left_out: tuple[str, ...] = ()  # keys that would reach the network, or that make the command another one
    share: int = 1  # how often it is drawn


RUN = (
    "output=out data.train=[TOKENS] data.valid=[VALID] data.sequence=32 batch=2 micro_batch=2 steps=2 schedule.warmup=1 "
    "schedule.final=0 model.dtype=float32 export=export device=cpu log_every=1"
)
TRAIN = f"model.upcycle.source=DENSE model.upcycle.experts=2 model.upcycle.top_k=1 {RUN}"
ISLANDS = ("islands.serve", "islands.join", "islands.listen")
ADD = (
    "DENSE documents=TEXT general=TEXT name=law output=out steps=1 batch=2 data.sequence=32 device=cpu "
    "schedule.warmup=0 model.upcycle.calibration.sequence=32"
)
COMMANDS = {
    "plan": Command("source=DENSE experts=2 top_k=1", (UpcycleConfig, PlanKeys), ("output",), 3),
    "convert": Command("source=DENSE experts=2 top_k=1 output=out", (UpcycleConfig,), (), 3),
    "verify": Command("DENSE MOE tokens=64 sequence=32", (VerifyKeys,), ("dense", "moe"), 2),
    "inspect": Command("MOE", (InspectKeys,), ("folder",)),
    "quantize": Command("MOE output=out method=gguf data=[TEXT] tokens=64", (QuantizeKeys,), ("model", "converter")),
    "push": Command("MOE a/b dry_run=true", (InspectKeys,), ("folder",)),
    "prepare": Command("out tokenizer=DENSE sources=[TEXT]", (PrepareConfig, PrepareKeys), (), 2),
    "train": Command(TRAIN, (TrainConfig,), ISLANDS, 10),
    "export": Command("RUN out", (InspectKeys,), ("folder",)),
    "add": Command(ADD, (AddConfig,), ("model", "documents", "general")),
    "join": Command("DENSE MOE output=out", (JoinKeys,), ("base", "parts")),
    "remove": Command("MOE name=law output=out", (RemoveKeys,), ("folder",)),
    "upgrade": Command("MOE DENSE DENSE documents=TEXT output=out", (UpgradeConfig,), ("part", "old", "new")),
    "recommend": Command("DENSE gpus=8xh100 tokens=1B", (RecommendConfig,), (), 2),
    "estimate": Command(f"{TRAIN} gpus=8 hardware=h100 budget=1B price=2", (EstimateConfig, TrainConfig), ISLANDS, 5),
    "bench": Command(
        "architecture=DENSE/config.json data.sequence=32 steps=1 warmup=0 batch=2 device=cpu",
        (BenchConfig,),
        ISLANDS,
        5,
    ),
    "eval": Command("tiny MOE limit=1 output=out device=cpu", (RunConfig,), ("checkpoint", "suite", "model"), 3),
    "chat": Command("MOE prompt=hello tokens=4 temperature=0 device=cpu", (ChatConfig,), ("model",), 2),
    "compare": Command("RESULTS RESULTS", (CompareConfig,)),
    "launch": Command(
        "slurm model.source=DENSE data.train=[TOKENS] gpus=8 output=out", (LaunchKeys,), ("template", "submit")
    ),
    "watch": Command("TEXT", (WatchConfig,), ("folder",)),  # it holds no run, so nothing is served
    "routing": Command("MOE TEXT tokens=64 sequence=32", (RoutingConfig,), ("checkpoint",), 2),
    "facts": Command("write output=out people=4 places=0 events=0 tellings=2 asked=2", (WriteConfig,)),
    "report": Command("RUN MOE output=report.html", (ReportConfig,)),
    "study": Command("tiny output=out judge=true", (StudyConfig,), ("judge",), 2),
}


# ---- cases


@dataclass(frozen=True)
class Case:
    number: int
    verb: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.number}: upcycle {shlex.join([self.verb, *self.words])}"


def keys(kind: type[Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each key of a config and its parts, with its type."""
    hints = get_type_hints(kind)
    for name in (field.name for field in dataclasses.fields(kind)):
        if isinstance(hint := hints[name], type) and dataclasses.is_dataclass(hint):
            yield from keys(hint, f"{before}{name}.")
        else:
            yield before + name, hint


def value(key: str, hint: Any, draw: random.Random) -> str:
    """Draw a value for a key by its type."""
    last, kinds = key.rpartition(".")[2], (hint, *get_args(hint))
    if last == "method":
        text = draw.choice(METHODS)
    elif last in LISTS and draw.random() < 0.8:
        text = draw.choice(options(LISTS[last]))
    elif bool in kinds:
        text = draw.choice(["true", "false", "true", "false", "null", "1", "2", "x", ""])
    elif float in kinds:
        text = str(draw.choice(REAL))
    elif int in kinds:
        text = str(draw.choice(WHOLE))
    else:
        text = draw.choice(WORDS)
    if str(hint).startswith("tuple") and last not in LISTS:
        text = draw.choice([text, f"[{text}]", f"[{text},{text}]", "[]", "[[1]]", "[{a: 1}]"])
    return text.replace("V", str(draw.choice([*WHOLE, *REAL]))) if "V" in text and "VALID" not in text else text


def options(text: str) -> list[str]:
    """Split a list of YAML values at the spaces between them."""
    found, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == " " and not depth:
            found.append("")
        else:
            found[-1] += letter
    return found


def case(number: int, seed: int) -> Case:
    """Return a case, which follows from its number and the seed alone."""
    draw = random.Random(f"{seed} {number}")
    verb = draw.choices(list(COMMANDS), [command.share for command in COMMANDS.values()])[0]
    command = COMMANDS[verb]
    own = [(key, hint) for kind in command.configs for key, hint in keys(kind) if key not in command.left_out]
    changed = draw.sample(own, min(len(own), draw.choice([1, 1, 1, 2])))
    return Case(
        number, verb, (*shlex.split(command.words), *(f"{key}={value(key, hint, draw)}" for key, hint in changed))
    )


# ---- the sample


def make(here: Path) -> dict[str, str]:
    """Make a small dense model, an MoE, a run and results in a folder; return the names that stand for them."""
    config = sample.SampleConfig(
        str(here / "sample"),
        characters=20_000,
        held_out=3_000,
        vocabulary=400,
        hidden=32,
        layers=2,
        first=2,
        batch=2,
        sequence=64,
    )
    made = here / "sample"
    names = {
        "TOKENS": made / "tokens" / "train", "VALID": made / "tokens" / sample.texts(made, "valid")[0].stem,
        "TEXT": sample.texts(made, "valid")[0], "DENSE": made / sample.DENSE, "MOE": here / "moe", "RUN": here / "run",
        "RESULTS": here / "results",
    }  # fmt: skip
    found = {name: str(path) for name, path in names.items()}

    def call(line: str) -> None:
        assert door.main(filled(shlex.split(line), found)) == 0, line

    sample.dense_model(sample.Stages(made, config), config)
    call("convert source=DENSE output=MOE experts=2 top_k=1")
    call(f"train {TRAIN} output=RUN export=")
    call("eval tiny MOE output=RESULTS limit=1 device=cpu")
    return found


def filled(words: Sequence[str], names: dict[str, str]) -> list[str]:
    """Write the sample's folders into words."""
    out = list(words)
    for name, path in names.items():
        out = [word if word.startswith("islands.") else word.replace(name, path) for word in out]
    return out


# ---- one process for each case


def forked(
    work: Callable[[], int], here: Path, memory: int = MEMORY, waits: Sequence[float] = ()
) -> tuple[str, int, str]:
    """Run `work` in a fork that works in `here`; return (exit or stopped or hang, its exit code, what it printed)."""
    said, waits = here / "said.txt", waits or WAITS
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            os.setsid()
            os.chdir(here)
            handle = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(handle, stream)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            if memory:
                resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
            signal.signal(signal.SIGINT, signal.default_int_handler)
            faulthandler.register(signal.SIGUSR1, file=handle)
            try:
                code = work()
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    begun, asked, status = time.monotonic(), 0, None
    while status is None and asked < 3:
        time.sleep(0.02)
        status = ended(child)
        if status is None and time.monotonic() - begun > waits[asked]:
            asked += 1
            if asked == 3:
                os.kill(child, signal.SIGUSR1)  # where it hangs
                time.sleep(1)
            os.kill(child, signal.SIGKILL if asked == 3 else signal.SIGINT)
    if status is None:
        _, status = os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)  # processes that it started
    how = ("exit", "stopped", "stopped", "hang")[asked]
    return how, os.waitstatus_to_exitcode(status), said.read_text(errors="replace") if said.exists() else ""


def ended(child: int) -> int | None:
    """Return the status of a child that has ended, or None."""
    done, status = os.waitpid(child, os.WNOHANG)
    return status if done else None


def outcome(case: Case, names: dict[str, str]) -> tuple[str, str]:
    """Run a case; return its kind and all that it printed."""
    with tempfile.TemporaryDirectory(prefix="upcycle-fuzz-", ignore_cleanup_errors=True) as folder:
        here = Path(folder) / "here"
        here.mkdir()
        how, code, said = forked(lambda: door.main([case.verb, *filled(case.words, names)]), here)
        if "Traceback (most recent call last)" in said:
            return "traceback", said
        if how != "exit":
            return how, said
        if code == cli.USER_ERROR:
            return "refused", said
        if code and (case.verb, code) not in VERDICTS:
            return "traceback", f"{said}\nexit code {code}"
        wrong = untrained(here) if case.verb == "train" else ""
        return ("untrained", f"{said}\n{wrong}") if wrong else ("done", said)


def untrained(here: Path) -> str:
    """Return why a run that says it is trained is not, or ""."""
    rows = [json.loads(line) for file in here.glob("*/metrics.jsonl") for line in file.read_text().splitlines()]
    steps = [row for row in rows if "grad_norm" in row]
    if steps and all(row.get("skipped") for row in steps):
        return "every step was skipped"
    for file in here.glob("export/*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if not bool(tensors.get_tensor(name).isfinite().all()):
                    return f"{name} of {file} is not finite"
    return ""


def fuzz(config: FuzzConfig) -> dict[str, list[Case]]:
    """Run the cases, print each that ends badly, and return all by kind."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "offline"}
    for module in door.MODULES.values():
        importlib.import_module(module)
    found: dict[str, list[Case]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="upcycle-fuzz-", ignore_cleanup_errors=True) as folder:
        here, place = Path(folder), Path(folder) / "names.json"
        how, code, said = forked(
            lambda: place.write_text(json.dumps(make(here))) * 0, here, memory=0, waits=(600, 600, 600)
        )
        assert (how, code) == ("exit", 0), said
        names = json.loads(place.read_text())
        for number in range(config.first, config.first + config.cases):
            one = case(number, config.seed)
            try:
                kind, said = outcome(one, names)
            except KeyboardInterrupt:
                print(f"stopped before case {number}")
                break
            found[kind].append(one)
            if config.show or kind in FAULTS:
                print(f"{kind} {one}\n{said if config.show else said[-3000:]}", flush=True)
    return found


@cli.command()
def main(words: Sequence[str]) -> int:
    config = read(FuzzConfig, "", words)
    found = fuzz(config)
    for verb in COMMANDS:
        counts = collections.Counter(kind for kind, cases in found.items() for one in cases if one.verb == verb)
        print(f"{verb:<10}", ", ".join(f"{count} {kind}" for kind, count in counts.items()))
    print(
        f"{sum(map(len, found.values()))} cases of seed {config.seed}:",
        ", ".join(f"{len(found[kind])} {kind}" for kind in KINDS),
    )
    return 1 if any(found[kind] for kind in FAULTS) else 0
