"""Is upcycling real? `make demo`: from nothing to a report in a few minutes on a laptop's CPU, without network.

usage: python -m examples.demo [key=value ...]

  python -m examples.demo
  python -m examples.demo output=runs/again seed=1

A small dense Llama learns to read Python's standard library, which lies on every machine. It is converted, twice:
`copies`, 8 whole copies of each FFN of which a token takes 2, and `groups`, 4 copies cut into 4 parts of which a token
takes each part from the copy that its router likes best: one whole FFN. Then the dense model and both mixtures go on,
side by side, with the same tokens and the same settings but for those that a choice in each slice brings, which the end
names, and are compared: loss on files that none has seen, lm-eval's items, which expert is used where.

Each stage is commands that are printed before they run, so that a person can type them. A finished stage is skipped; an
interrupted one goes on where it stopped. `demo` below is the table of contents.

keys, with defaults and meaning: docs/config.md
"""

from __future__ import annotations

import sys

from upcycle.cli import frame as cli

if __name__ == "__main__":  # before the imports below, which take seconds
    cli.program("examples.demo")

import json
import os
import shlex
import shutil
import signal
import subprocess
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import yaml

from upcycle.arch.sample import make_llama
from upcycle.config.reading import read
from upcycle.io import strict
from upcycle.io.disk import write_atomic

if TYPE_CHECKING:
    from training.optim.config import OptimConfig

DOMAINS = {  # the standard library by subject, as patterns of files
    "network": ("asyncio/*", "email/*", "http/*", "urllib/*", "xmlrpc/*", "wsgiref/*", "s*server.py", "socket.py",
                "ssl.py", "*lib.py", "mailbox.py", "ipaddress.py"),
    "numeric": ("statistics.py", "fractions.py", "_pydecimal.py", "*datetime.py", "random.py", "calendar.py",
                "colorsys.py", "numbers.py", "heapq.py", "bisect.py", "_pylong.py", "turtle.py", "collections/*"),
    "prose": ("pydoc_data/topics.py",),  # the language's reference, in English
    "tests": ("unittest/*", "unittest/test/*", "doctest.py", "pdb.py", "bdb.py", "trace.py", "timeit.py",
              "test/test_*.py"),
    "text": ("re/*", "json/*", "html/*", "xml/*/*", "csv.py", "string.py", "textwrap.py", "difflib.py", "codecs.py",
             "configparser.py", "locale.py", "gettext.py", "argparse.py", "optparse.py", "tokenize.py", "pydoc.py"),
}  # fmt: skip
END = "<|end|>"
PIECE = 2000  # characters: a document is as many definitions of a file as fit
HELD_OUT = 10  # one file of ten; of prose, which is a single file, one piece of ten
DENSE, COPIES, GROUPS = ARMS = ("dense", "copies", "groups")


@dataclass(frozen=True)
class DemoConfig:
    output: str = "runs/demo"  # the folder of all that is made
    seed: int = 0  # of the weights, of the routers, of the order of the text
    characters: int = 600_000  # characters of text of each domain, at most
    held_out: int = 30_000  # characters of each domain that are kept for comparing
    vocabulary: int = 2048  # tokens of the tokenizer that is made
    hidden: int = 96  # width of the dense model
    layers: int = 4  # layers of the dense model
    first: int = 200  # steps of the dense model alone
    steps: int = 200  # steps that all go on
    batch: int = 8  # sequences a step
    sequence: int = 256  # tokens a sequence
    peak: float = 2e-3  # learning rate, of the first training and of all that go on


def demo(config: DemoConfig) -> int:
    here = Path(config.output)
    stage, dense, suite, unseen = Stages(here, config), here / DENSE, here / "suite.yaml", texts(here, "valid")
    # tiny is a ready config: 4 copies of 4 parts; with the free choice of a stock Mixtral groups fall apart
    learned = ",".join(map(str, texts(here, "train")))
    groups = ["tiny", "target=upcycled", "router.init.name=auto", f"calibration.texts=[{learned}]"]
    ways = {COPIES: ["experts=8", "top_k=2"], GROUPS: groups}
    routing = {arm: here / f"routing-{arm}.json" for arm in ways}
    dense_model(stage, config)
    for arm, words in ways.items():
        convert_words = [f"source={dense}", f"output={here / arm}", f"seed={config.seed}"]
        verify_words = [dense, here / arm, f"text=[{','.join(map(str, unseen))}]"]
        stage(f"convert {arm}", f"Upcycle it: {arm}", call, "upcycle", "convert", *words, *convert_words)
        stage(f"verify {arm}", "Is it the same function?", call, "upcycle", "verify", *verify_words)
    stage("train", f"Go on, side by side: {', '.join(ARMS)}", go_on, config)
    stage("suite", "lm-eval's tiny suite, and the text held out", write_suite, here, suite)
    for arm in ARMS:
        run_words = [suite, here / "trained" / arm, f"output={here / 'results' / arm}", "tokens=4096"]
        stage(f"ask {arm}", f"Ask {arm}", call, "evaluation", "run", *run_words)
    for arm in ways:
        options = [f"start={here / arm}", f"output={routing[arm]}", "tokens=8192", f"length={config.sequence}"]
        routing_words = [here / "trained" / arm, *unseen, *options]
        stage(f"routing {arm}", f"Which experts does {arm} use?", call, "evaluation", "routing", *routing_words)
    report_words = [here / kind / arm for kind in ("results", "runs") for arm in ARMS]
    report_words += [path for arm in ways for path in (routing[arm], here / arm)]
    report_keys = [f"output={here / 'report.html'}", "title=A dense Llama and its upcycled twins"]
    stage("report", "All of it on one page", call, "evaluation", "report", *report_words, *report_keys)
    print("\n".join(["", *summary(here, config, stage)]))
    return 0


def dense_model(stage: Stages, config: DemoConfig) -> None:
    """Makes tokens/train and tokens/DOMAIN, and dense/, a model trained on tokens/train."""
    here = Path(config.output)
    stage("text", "Python's standard library, by what it is about", gather, here, config)
    stage("start", "A tokenizer of it, and a Llama with random weights", start, here, config)
    stage("tokens", "Text to tokens", tokens, here)
    stage("first", "The dense Llama learns", learn, config, here / "start", here / DENSE)


# ---- stages


class Done(TypedDict):
    """What done.json holds."""

    settings: Mapping[str, Any]
    stages: Mapping[str, Mapping[str, float]]


class Stages:
    """Runs stages in order, and writes down which are done, so that none is done again."""

    def __init__(self, folder: Path, config: DemoConfig) -> None:
        self.file, self.number = folder / "done.json", 0
        settings = {key: value for key, value in asdict(config).items() if key != "output"}
        known = {"settings": settings, "stages": {}}
        if self.file.is_file():
            known = strict.held(strict.read_json(self.file), Done, str(self.file))
        if known["settings"] != settings:
            raise ValueError(f"{folder} was made with other settings; remove it, or write output=ANOTHER-FOLDER")
        self.known: dict[str, Any] = known
        self.done: dict[str, dict[str, float]] = known["stages"]
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, name: str, about: str, work: Callable[..., None], *arguments: object) -> None:
        self.number += 1
        if name in self.done:
            print(f"{self.number:>2}. {about}: done before, in {self.done[name]['seconds']:.0f} s", flush=True)
            return
        print(f"\n\033[1m{self.number:>2}. {about}\033[0m", flush=True)
        wall, processor = time.monotonic(), sum(os.times()[:4])  # of this process and those that it waited for
        work(*arguments)
        self.done[name] = {"seconds": time.monotonic() - wall, "cpu_seconds": sum(os.times()[:4]) - processor}
        write_atomic(self.file, (json.dumps(self.known, indent=1) + "\n").encode())

    def total(self, kind: str) -> float:
        return sum(stage[kind] for stage in self.done.values())


class Stopped(Exception):
    """A command failed with this exit code, and has said why."""


def call(program: str, *words: object) -> None:
    """Runs a command in this process, which saves importing torch again; the line that is shown works in any shell."""
    arguments = [str(word) for word in words]
    show(program, arguments)
    module = program if program == "upcycle prepare" else f"{program}.__main__"
    if code := import_module(module).main(arguments):
        raise Stopped(code)


def show(program: str, words: Sequence[str]) -> None:
    shown = program if program == "upcycle" else f"python -m {program}"
    print(f"$ {shown} {shlex.join(words)}", flush=True)


def side_by_side(program: str, commands: Mapping[str, Sequence[str]]) -> None:
    """Runs each command in a process of its own with its share of the cores: small models hardly gain by a second one.
    Each line of output comes with the command's name, and a signal is passed on to each process once. Raises Stopped if
    a command fails."""
    import torch

    root = Path(__file__).parent.parent
    paths = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    threads = max(1, torch.get_num_threads() // max(1, len(commands)))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": str(threads)}
    started: dict[str, subprocess.Popen[str]] = {}

    def pass_on(number: int, frame: object) -> None:
        for process in started.values():
            process.send_signal(number)

    def repeat(name: str) -> int:
        lines = started[name].stdout
        assert lines is not None
        for line in lines:
            print(f"{name:>8} | {line}", end="", flush=True)
        return started[name].wait()

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for name, words in commands.items():
            show(program, words)
            started[name] = subprocess.Popen(
                [sys.executable, "-u", "-m", program, *words], env=environment, text=True, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        with ThreadPoolExecutor(max(1, len(started))) as readers:
            codes = list(readers.map(repeat, started))
    except OSError:  # a command could not be started: the others would go on unseen
        for process in started.values():
            process.terminate()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if any(codes):
        raise Stopped(max(codes) if max(codes) > 0 else 130)


# ---- text


def gather(here: Path, config: DemoConfig) -> None:
    """Writes text/train and text/valid, a file for each domain. No library file is in both, but for the prose."""
    for domain, patterns in DOMAINS.items():
        parts: dict[str, list[str]] = {"train": [], "valid": []}
        room = {"train": config.characters, "valid": config.held_out}
        for name, piece in pieces(patterns):
            part = "valid" if zlib.crc32(name.encode()) % HELD_OUT == 0 else "train"
            if len(piece) <= room[part]:
                room[part] -= len(piece)
                parts[part].append(json.dumps({"text": piece}) + "\n")
        for part, lines in parts.items():
            folder = here / "text" / part
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(folder / f"{domain}.jsonl", "".join(lines).encode())
        print(f"{domain:8} {sum(map(len, parts['train'])):>9,} characters, {sum(map(len, parts['valid'])):,} held out")


def pieces(patterns: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(name that decides whether the piece is held out, text). Files come in an order unrelated to their names."""
    library = Path(sysconfig.get_path("stdlib"))
    files = {path for pattern in patterns for path in library.glob(pattern) if path.suffix == ".py"}
    for path in sorted(files, key=lambda path: zlib.crc32(path.relative_to(library).as_posix().encode())):
        name = path.relative_to(library).as_posix()
        if name.startswith("pydoc_data"):
            yield from import_module("pydoc_data.topics").topics.items()
            continue
        gathered = ""
        for block in path.read_text(encoding="utf-8", errors="replace").split("\n\n\n"):  # a definition each, by PEP 8
            if gathered and len(gathered) + len(block) > PIECE:
                yield name, gathered
                gathered = ""
            gathered += block[:PIECE] + "\n\n\n"
        yield name, gathered


def texts(here: Path, part: str) -> list[Path]:
    return [here / "text" / part / f"{domain}.jsonl" for domain in DOMAINS]


def start(here: Path, config: DemoConfig) -> None:
    """Writes a byte-level BPE of the training text, beside a config.json and random weights."""
    from tokenizers import ByteLevelBPETokenizer

    folder = here / "start"
    shutil.rmtree(folder, ignore_errors=True)
    shape = {
        "hidden_size": config.hidden, "intermediate_size": 4 * config.hidden, "num_hidden_layers": config.layers,
        "num_attention_heads": config.hidden // 16, "num_key_value_heads": 2,
        "vocab_size": config.vocabulary, "max_position_embeddings": config.sequence, "tie_word_embeddings": True,
        "bos_token_id": 0, "eos_token_id": 0, "dtype": "float32",
    }  # fmt: skip
    make_llama(folder, shape, seed=config.seed)
    tokenizer: Any = ByteLevelBPETokenizer()
    lines = (json.loads(line)["text"] for path in texts(here, "train") for line in path.open(encoding="utf-8"))
    tokenizer.train_from_iterator(lines, vocab_size=config.vocabulary, special_tokens=[END], show_progress=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "bos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings) + "\n")
    print(f"{folder}: {config.vocabulary} tokens, {config.layers} layers of width {config.hidden}")


def tokens(here: Path) -> None:
    for name, sources in {"train": texts(here, "train"), **{p.stem: [p] for p in texts(here, "valid")}}.items():
        call(
            "upcycle prepare", here / "tokens" / name, f"tokenizer={here / 'start'}",
            f"sources=[{','.join(map(str, sources))}]",
        )  # fmt: skip


# ---- training and asking


def learn(config: DemoConfig, source: Path, export: Path) -> None:
    call("training", *training(config, "first", source, export, config.first), "model.random=true")


def go_on(config: DemoConfig) -> None:
    """Trains the arms that are not finished yet, each from where it stopped."""
    here = Path(config.output)
    ends = {arm: here / "trained" / arm for arm in ARMS}
    left = {arm: training(config, arm, here / arm, end, config.steps) for arm, end in ends.items() if not end.is_dir()}
    side_by_side("training", left)


def training(config: DemoConfig, name: str, source: Path, export: Path, steps: int) -> list[str]:
    """The words of a training command. All arms read the same samples in the same order, a function of data.seed alone.
    The first training reads in another order, and is not compared with anything."""
    here, is_first = Path(config.output), name == "first"
    valid = [] if is_first else [str(here / "tokens" / domain) for domain in DOMAINS]
    quarter = -(-steps // 4)
    return [
        f"model.source={source}", f"output={here / 'runs' / name}", f"export={export}", f"steps={steps}",
        f"data.train=[{here / 'tokens' / 'train'}]", f"data.valid=[{','.join(valid)}]",
        f"data.sequence={config.sequence}", f"data.seed={2 * config.seed + is_first}", f"seed={config.seed}",
        "model.dtype=float32", f"batch={config.batch}", f"micro_batch={config.batch}",
        f"schedule.peak={config.peak}", f"schedule.final={config.peak / 10:g}",
        f"schedule.warmup={min(20, steps - 1)}", f"valid_every={quarter}", f"checkpoint.every={quarter}",
        "checkpoint.keep=1",
    ]  # fmt: skip


def write_suite(here: Path, file: Path) -> None:
    """Writes a suite: the tasks of the tiny one, and a text of each domain."""
    from evaluation.ask.tasks import SUITES, text_task

    tiny = yaml.safe_load((SUITES / "tiny.yaml").read_text())["tasks"]
    own = [{**task, "dataset_name": str(SUITES / task["dataset_name"])} for task in tiny]
    own += [text_task(str(path)) for path in texts(here, "valid")]
    write_atomic(file, yaml.safe_dump({"tasks": own}, sort_keys=False).encode())
    print(f"{file}: {len(own)} tasks")


# ---- what came of it


def summary(here: Path, config: DemoConfig, stage: Stages) -> list[str]:
    """Five lines on the result, whichever way it went."""
    from evaluation.judge.compare import compare_losses
    from evaluation.judge.curves import mean
    from evaluation.judge.logged import load
    from training.observe.metrics import read as read_metrics

    losses = compare_losses([here / "runs" / arm for arm in ARMS])
    start = read_metrics(here / "runs" / DENSE)[0]
    before = mean(start[f"valid/{domain}/loss"] for domain in DOMAINS)
    models = {arm: load(here / "results" / arm).model for arm in ARMS}
    first = config.first * config.batch * config.sequence
    sizes = {arm: f"{model.parameters / 1e6:.2f} M parameters" for arm, model in models.items()}
    cost = dict(zip(losses.runs, losses.flops_per_token, strict=True))
    control = mean(row.a for row in losses.at_equal_tokens[COPIES])

    def against_control(by_run: Any, arm: str) -> str:
        rows = by_run[arm]
        return (
            f"{arm} {mean(r.b for r in rows):.4f} ({mean(r.difference for r in rows):+.4f}, lower on "
            f"{sum(r.difference < 0 for r in rows)} of {len(rows)} domains)"
        )

    def verdict(arm: str) -> str:
        ahead = mean(row.difference for row in losses.at_equal_tokens[arm]) < 0
        return f"{arm} {'is' if ahead else 'is NOT'} ahead of the control"

    at_flops = ", ".join(
        f"{arm} {mean(r.difference for r in losses.at_equal_flops[arm]):+.4f} beside dense" for arm in (COPIES, GROUPS)
    )
    ratios = " and ".join(f"{(cost[arm] or 0) / (cost[DENSE] or 1):.2f}" for arm in (COPIES, GROUPS))
    settings = {arm: asdict(settings_of(here / arm)) for arm in (COPIES, GROUPS)}
    own = " ".join(f"optim.{key}={value}" for key, value in settings[GROUPS].items() if value != settings[COPIES][key])
    return [
        f"1. A dense Llama ({sizes[DENSE]}) read {first:,} tokens of the standard library: held-out loss {before:.4f} "
        "nats a token.",
        f"2. Upcycled to {COPIES} ({sizes[COPIES]}) and {GROUPS} ({sizes[GROUPS]}), each the same function at first "
        "(verify).",
        f"3. All read the same {losses.tokens:,.0f} tokens more: dense {control:.4f}, "
        f"{against_control(losses.at_equal_tokens, COPIES)}, {against_control(losses.at_equal_tokens, GROUPS)}: "
        f"{verdict(COPIES)}, {verdict(GROUPS)}. "
        f"All settings are the same, but for what {GROUPS} have by default: {own}.",
        f"4. A token of {COPIES} and {GROUPS} costs {ratios} times the FLOPs; at {losses.equal('FLOPs')}: {at_flops}.",
        f"5. {here / 'report.html'} shows all of it; took {stage.total('seconds'):.0f} s, "
        f"{stage.total('cpu_seconds'):.0f} s of CPU.",
    ]


def settings_of(folder: Path) -> OptimConfig:
    """The optimiser's settings that the model in a folder has where none are written."""
    from training.checkpoint.layout import opened
    from training.optim.config import OptimConfig, settled
    from upcycle.arch.spec import MoESpec

    with opened(folder) as origin:
        return settled(OptimConfig(), origin.spec if isinstance(origin.spec, MoESpec) else None)


@cli.command(resumes=True)
def main(words: Sequence[str]) -> int:
    try:
        return demo(read(DemoConfig, "", words))
    except Stopped as stopped:
        cli.say_stopped(resumes=True)
        return int(stopped.args[0])
