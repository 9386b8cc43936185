"""Make a sample from Python's standard library: texts, a tokenizer, token shards, a small trained Llama.

The demo and studies without a checkpoint (key `sample`) begin with it.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypedDict

from training.cli import prepare, train
from upcycle.arch.sample import make_llama
from upcycle.config.values import BATCH, LENGTH, above_zero, at_least, check_values, seed
from upcycle.io import strict
from upcycle.io.disk import write_atomic

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
PIECE = 2000  # characters of a document, which holds as many definitions of a file as fit
HELD_OUT = 10  # one file of ten is held out; of prose, a single file, one piece of ten
DENSE = "dense"
VOCABULARY, HIDDEN, LAYERS = 2**16, 2**12, 2**7  # the largest sizes: a sample is a toy


@dataclass(frozen=True)
class SampleConfig:
    output: str = "runs/sample"  # the folder to write
    seed: int = 0  # seed of the weights, of the routers and of the order of the text
    characters: int = 600_000  # characters of text of each domain, at most
    held_out: int = 30_000  # characters of each domain that are held out
    vocabulary: int = 2048  # size of the tokenizer's vocabulary
    hidden: int = 96  # width of the dense model
    layers: int = 4  # layers of the dense model
    first: int = 200  # training steps of the dense model
    batch: int = 8  # sequences of a step
    sequence: int = 256  # tokens of a sequence
    peak: float = 2e-3  # learning rate

    def __post_init__(self) -> None:
        rules = {
            "characters held_out first": at_least(1),
            "vocabulary": at_least(1, most=VOCABULARY),
            "hidden": at_least(1, most=HIDDEN),
            "layers": at_least(1, most=LAYERS),
            "batch": at_least(1, most=BATCH),
            "sequence": at_least(1, most=LENGTH),
            "peak": above_zero(),
            "seed": seed(),
        }
        check_values(self, "", rules)


def dense_model(stage: Stages, config: SampleConfig) -> None:
    """Make tokens/train and tokens/DOMAIN, and dense/, a model trained on tokens/train."""
    here = Path(config.output)
    stage("text", "Python's standard library, by subject", gather, here, config)
    stage("start", "A tokenizer for it, and a Llama with random weights", start, here, config)
    stage("tokens", "Text to tokens", tokens, here)
    stage("first", "The dense Llama learns", learn, config, here / "start", here / DENSE)


# ---- stages


class Done(TypedDict):
    """Hold the content of done.json."""

    settings: Mapping[str, Any]
    stages: Mapping[str, Mapping[str, float]]


class Stages:
    """Run stages in order, and record the finished ones, so that none runs twice."""

    def __init__(self, folder: Path, config: SampleConfig) -> None:
        self.file, self.number = folder / "done.json", 0
        settings = {key: value for key, value in asdict(config).items() if key != "output"}
        known = {"settings": settings, "stages": {}}
        if folder.is_dir() and not self.file.is_file() and any(folder.iterdir()):
            raise ValueError(f"{folder} exists and is not a sample; move it away, or write output=ANOTHER-FOLDER")
        if self.file.is_file():
            known = strict.held(strict.read_json(self.file), Done, str(self.file))
        if known["settings"] != settings:
            raise ValueError(f"{folder} was made with other settings; remove it, or write output=ANOTHER-FOLDER")
        self.known: dict[str, Any] = known
        self.done: dict[str, dict[str, float]] = known["stages"]
        folder.mkdir(parents=True, exist_ok=True)
        self.keep()

    def __call__(self, name: str, about: str, work: Callable[..., None], *arguments: object) -> None:
        self.number += 1
        if name in self.done:
            print(f"{self.number:>2}. {about}: done before, in {self.done[name]['seconds']:.0f} s", flush=True)
            return
        print(f"\n\033[1m{self.number:>2}. {about}\033[0m", flush=True)
        wall, processor = time.monotonic(), sum(os.times()[:4])  # of this process and its children
        work(*arguments)
        self.done[name] = {"seconds": time.monotonic() - wall, "cpu_seconds": sum(os.times()[:4]) - processor}
        self.keep()

    def keep(self) -> None:
        """Write the finished stages."""
        write_atomic(self.file, (json.dumps(self.known, indent=1) + "\n").encode())

    def total(self, kind: str) -> float:
        return sum(stage[kind] for stage in self.done.values())


class Stopped(Exception):
    """Say that a command failed with this exit code after printing the reason."""


def call(main: Callable[[Sequence[str]], int], verb: str, *words: object) -> None:
    """Run a command in this process, which saves another import of torch; print a line that works in any shell."""
    given = [str(word) for word in words]
    show(verb, given)
    if code := main(given):
        raise Stopped(code)


def show(verb: str, words: Sequence[str]) -> None:
    print(f"$ upcycle {verb} {shlex.join(words)}", flush=True)


# ---- text, tokenizer, model


def gather(here: Path, config: SampleConfig) -> None:
    """Write text/train and text/valid, one file for each domain; except for prose, no library file is in both."""
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
    """Yield (the name that decides whether the piece is held out, text), in an order unrelated to file names."""
    library = Path(sysconfig.get_path("stdlib"))
    files = {path for pattern in patterns for path in library.glob(pattern) if path.suffix == ".py"}
    for path in sorted(files, key=lambda path: zlib.crc32(path.relative_to(library).as_posix().encode())):
        name = path.relative_to(library).as_posix()
        if name.startswith("pydoc_data"):
            yield from import_module("pydoc_data.topics").topics.items()
            continue
        gathered = ""
        for block in path.read_text(encoding="utf-8", errors="replace").split(
            "\n\n\n"
        ):  # one definition each, by PEP 8
            if gathered and len(gathered) + len(block) > PIECE:
                yield name, gathered
                gathered = ""
            gathered += block[:PIECE] + "\n\n\n"
        yield name, gathered


def texts(here: Path, part: str) -> list[Path]:
    return [here / "text" / part / f"{domain}.jsonl" for domain in DOMAINS]


def start(here: Path, config: SampleConfig) -> None:
    """Write a byte-level BPE tokenizer of the training text, with a config.json and random weights."""
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
        words = [f"tokenizer={here / 'start'}", f"sources=[{','.join(map(str, sources))}]"]
        call(prepare.main, "prepare", here / "tokens" / name, *words)


def learn(config: SampleConfig, source: Path, export: Path) -> None:
    call(train.main, "train", *training(config, "first", source, export, config.first), "model.random=true")


def training(config: SampleConfig, name: str, source: Path, export: Path, steps: int) -> list[str]:
    """Return the words of a training command: all trainings read the same samples in the same order.

    The first training reads in another order and is not compared with any other.
    """
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
