"""Make a part: train new copies of a model's FFNs on documents, and write them as a small folder.

OUTPUT.work/documents.jsonl, general.jsonl   samples that the router's rows are measured on
OUTPUT.work/held.jsonl                       the last part of the second one, which training never reads
OUTPUT.work/held/NUMBER.jsonl                the same, for each of a few files
OUTPUT.work/rest.jsonl                       other general text, as much as training reads
OUTPUT.work/data, general, held[/NUMBER]     token shards of the documents, of the rest, and of what is held back
OUTPUT.work/run                              the training run, which resumes
OUTPUT/                                      the part
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf
from pathlib import Path
from random import Random

import torch
from tqdm import tqdm

from training.checkpoint import standalone
from training.checkpoint.export import Weights, facts_of
from training.config.reading import upcycle_config
from training.config.schema import TrainConfig
from training.config.stages import stages_of
from training.data.prepare import PrepareConfig, prepare
from training.experts import SPECIFICATION
from training.model.stock.model import model_of
from training.observe.flops import model_flops, spared_flops
from training.optim.slots import freeze
from training.run.parts import source, whole_on_meta
from upcycle.arch.spec import BYTES, MoESpec
from upcycle.arch.targets.upcycled import check_name
from upcycle.config.reading import read
from upcycle.config.ready import TRAIN
from upcycle.converting import card, part
from upcycle.io import disk
from upcycle.io.checkpoint import Checkpoint, load_checked, pinned
from upcycle.io.job import Worker
from upcycle.planning.size import dense_flops
from upcycle.text import tokens

CHARACTERS = 10  # of a sample for each token that is measured; no tokenizer needs as many
HELD = 4  # one of so many pieces of the general sample is held back: validation shall be of text that is not trained
GENERAL = 0.2  # of the samples that training reads: tokens of general text that leave the anchor shall do less harm
START = 2000  # characters of a document in a sample, so that the tokens that are measured are of many documents
PIECE = 4000  # characters of a .txt that count as a document
KINDS = 12  # files of general text, at most, that are validated one by one: a mean can hide what one kind loses
DOCUMENTS = 20  # or more make up the general text that training reads, so that no single one fills it
GOLDEN = (5**0.5 - 1) / 2  # its multiples modulo 1 are spread evenly, however many there are
LONGEST = 60  # characters of a set's name
ODD = re.compile(r"[^\w. -]|[^\u0000-\uffff]")  # characters that a dash replaces in a set's name

# sets of general text that is held back: the folder below OUTPUT.work, and the name in the log
Sets = Mapping[str, str]
ONE_SET: Sets = {"held": "general"}

Place = tuple[Path, int]  # a document: its file and its number there; a .txt is a document for each PIECE of it


@dataclass(frozen=True)
class AddConfig:
    model: str = ""  # the base's folder or Hub id; the first word
    documents: str = ""  # a folder or a file of the text to learn: .txt, .jsonl or .jsonl.zst
    # a folder or a file of text of the kind that the model must not change on: its tokens stay with the model's own FFN
    general: str = ""
    name: str = ""  # the part's name, a word such as law
    output: str = ""  # the part's folder

    def check(self) -> None:
        for key, example in (("model", "./llama"), ("documents", "./law"), ("name", "law"), ("output", "parts/law")):
            if not getattr(self, key):
                start = "the first word" if key == "model" else f"{key}={example}"
                raise ValueError(f"{key} is not set; write {start}")
        if not self.general:
            raise ValueError(
                "general is not set; write general=FOLDER, with text of every kind that must not change: a router "
                "learns from it which tokens stay with the model"
            )
        check_name(self.name)
        if Path(self.output).exists():
            raise ValueError(f"{self.output} exists already; remove it or choose another output")


def add(asked: AddConfig, words: Sequence[str], train: Callable[[TrainConfig], object]) -> Path:
    """Make the part `asked.output` and return it; `words` change the training config `part`. A stopped run resumes."""
    asked.check()
    output, work = Path(asked.output), Path(f"{asked.output}.work")
    documents, general = files(asked.documents), files(asked.general)
    config = configured(asked, words, work)
    calibration = upcycle_config(config.model).calibration
    disk.make_folder(work)
    sample(documents, work / "documents.jsonl", calibration.tokens * CHARACTERS)
    taken = sample(general, work / "general.jsonl", calibration.tokens * CHARACTERS)
    reads = round(GENERAL * config.steps * config.batch * config.data.sequence) * CHARACTERS
    kinds = hold_back(general, taken, work, reads)
    few = max(calibration.sequence, 1) * (enough(asked.model, work, calibration.tokens) // calibration.sequence)
    words = [*words, f"model.upcycle.calibration.tokens={few or calibration.tokens}"]
    config = configured(asked, words, work, kinds)
    sources = {
        "data": documents,
        "general": [work / "rest.jsonl"],
        **{kind: [work / f"{kind}.jsonl"] for kind in kinds},
    }
    for name, places in sources.items():
        prepare(PrepareConfig(str(work / name), asked.model, tuple(map(str, places))), Worker.here())
    for what, value in foreseen(config):
        print(f"{what:<19} {value}", file=sys.stderr)
    train(config)
    return write(work / "run", asked, output)


def configured(asked: AddConfig, words: Sequence[str], work: Path, kinds: Sets = ONE_SET) -> TrainConfig:
    """Return the training config of a part: the ready one with its own model, texts and folders, and then `words`.
    `kinds`: the sets of general text to validate on."""
    texts = [str(work / "general.jsonl"), str(work / "documents.jsonl")]
    train = [
        {"path": str(work / "data"), "name": asked.name, "weight": 1 - GENERAL},
        {"path": str(work / "general"), "name": f"not-{asked.name}", "weight": GENERAL},
    ]
    valid = [{"path": str(work / kind), "name": name} for kind, name in kinds.items()]
    own = [
        f"model.upcycle.source={asked.model}", f"model.upcycle.method.part={asked.name}", f"output={work / 'run'}",
        f"model.upcycle.router.init.texts={json.dumps(texts)}", f"data.train={json.dumps(train)}",
        f"data.valid={json.dumps(valid)}",
    ]  # fmt: skip
    config = read(TrainConfig, "part", [*own, *words], TRAIN)
    stages_of(config)
    return config


def files(place: str) -> list[Path]:
    """Return the text files of a folder, or the file itself."""
    path = Path(place)
    found = sorted(each for each in path.rglob("*") if each.name.endswith(tokens.SUFFIXES)) if path.is_dir() else [path]
    if not found:
        raise ValueError(f"{place} has no text; a text file's name ends in {', '.join(tokens.SUFFIXES)}")
    return found


def sample(paths: Sequence[Path], target: Path, characters: int) -> list[Place]:
    """Write the starts of documents, about so many characters; return each line's document."""
    found = starts(paths, characters)
    disk.write_atomic(target, "".join(line(text) for _, text in found).encode())
    return [place for place, _ in found]


def starts(paths: Sequence[Path], characters: int) -> list[tuple[Place, str]]:
    """Return the starts of documents from all over the text, with about so many characters together. The first of them
    are from all over it too, because router rows are measured on the first tokens of a sample."""
    found = list(spread(paths, characters, START))
    return [found[at] for at in sorted(range(len(found)), key=lambda at: at * GOLDEN % 1)]


def hold_back(paths: Sequence[Path], taken: Sequence[Place], work: Path, characters: int) -> Sets:
    """Write the last lines of the sample of general text, and about so many characters of other documents from all over
    it. `taken`: the document of each line of the sample. Return the sets to validate on."""
    if len(taken) < HELD:
        raise ValueError(
            f"general has {len(taken)} pieces of text, and one of {HELD} is held back to see what training changes; "
            f"give more documents (a .txt has a piece for every {PIECE} characters)"
        )
    first = len(taken) - len(taken) // HELD
    lines = (work / "general.jsonl").read_text().splitlines(keepends=True)
    disk.write_atomic(work / "held.jsonl", "".join(lines[first:]).encode())
    longest = max(PIECE, characters // DOCUMENTS)
    rest = spread(paths, characters, longest, without=set(taken[first:]))
    disk.write_blocks(work / "rest.jsonl", (line(text).encode() for _, text in rest))
    paths = list(dict.fromkeys(path for path, _ in taken))
    if not 1 < len(paths) <= KINDS:
        return ONE_SET
    return by_file(paths, [(path, text) for (path, _), text in zip(taken[first:], lines[first:], strict=True)], work)


def by_file(paths: Sequence[Path], held: Sequence[tuple[Path, str]], work: Path) -> Sets:
    """Write the lines that are held back of each file, and return the sets; say which files have none."""
    found = {}
    disk.make_folder(work / "held")
    for number, (path, name) in enumerate(named(paths).items()):
        own = [text for place, text in held if place == path]
        disk.write_atomic(work / "held" / f"{number}.jsonl", "".join(own).encode())
        if own:
            found[f"held/{number}"] = name
        else:
            print(f"{'not validated':<19} {name}: it has too little text to hold some back", file=sys.stderr)
    return found


def named(paths: Sequence[Path]) -> dict[Path, str]:
    """Name each file after its place below the folder of them all, in characters that a config can hold."""
    above, names = os.path.commonpath([path.parent for path in paths]), dict[Path, str]()
    for number, path in enumerate(sorted(paths)):
        name = ODD.sub("-", str(path.relative_to(above)).removesuffix(".zst").rpartition(".")[0])[:LONGEST]
        names[path] = f"{name}-{number}" if not name or name in names.values() else name
    return names


def spread(
    paths: Sequence[Path], characters: int, longest: int, without: Container[Place] = ()
) -> Iterator[tuple[Place, str]]:
    """Yield documents from all over the text with about so many characters together, an equal share of each file that
    has as many. Cut a document after `longest` characters; where that gives less than half, after more."""

    def found() -> Iterator[tuple[Place, str]]:
        return ((place, text[:longest]) for place, text in numbered(paths) if place not in without)

    while True:
        sizes = Counter[Path]()
        for (path, _), text in found():
            sizes[path] += len(text)
        if 2 * sizes.total() >= characters or longest >= characters:
            break
        longest = 4 * longest + 1
    level, left = inf, float(characters)  # characters of each file
    for full, size in enumerate(sorted(sizes.values())):
        level = left / (len(sizes) - full)
        if size >= level:
            break
        left -= size
    draw, passed, count, due = Random(0), 0.0, 0, 0.0
    for (path, number), text in found():
        share = min(1.0, level / sizes[path])
        passed += share if share < 1 else 0
        if share == 1 or passed >= due:
            if share < 1:
                count += 1
                due = count + draw.random()  # somewhere in the next step, because kinds of text can take turns
            yield (path, number), text


def line(text: str) -> str:
    return json.dumps({"text": text}) + "\n"


def numbered(paths: Sequence[Path]) -> Iterator[tuple[Place, str]]:
    """Yield all documents that are not empty; those of a .txt, which is one, are its pieces."""
    size = sum(path.stat().st_size for path in paths if path.is_file())
    with tqdm(total=size, desc="read", unit="B", unit_scale=True, delay=2) as bar:
        for path in paths:
            texts = tokens.documents([path], watch=bar.update)
            if path.suffix == ".txt":
                texts = (text[start : start + PIECE] for text in texts for start in range(0, len(text), PIECE))
            yield from (((path, number), text) for number, text in enumerate(texts) if text)


def enough(model: str, work: Path, count: int) -> int:
    """Return how many tokens both samples have together to measure on, at most `count`."""
    with Checkpoint.open(model) as base:
        encode = tokens.encoder(base.folder)
    found = []
    for name in ("documents", "general"):
        ids = (id for text in tokens.documents([work / f"{name}.jsonl"]) for id in encode(text))
        found.append(sum(1 for _ in islice(ids, count // 2)))
    return 2 * min(found)


def foreseen(config: TrainConfig) -> list[tuple[str, str]]:
    """Return the size of the part, and the FLOPs of a training token."""
    with source(config) as origin:
        spec = origin.spec
    assert isinstance(spec, MoESpec)
    whole, length = whole_on_meta(spec, config), config.data.sequence
    freeze(whole, config.optim)
    learns = sum(p.numel() for p in whole.parameters() if p.requires_grad)
    flops = model_flops(spec, length) - spared_flops(whole, spec, length)
    return [
        ("the part", f"{card.human(learns)} parameters, {card.human(learns * BYTES[spec.dtype], 'B')}"),
        ("gradients, moments", f"{card.human(12 * learns, 'B')}"),
        ("a training token", f"{card.human(flops, 'FLOP')}, {flops / dense_flops(spec.dense, length):.2f} of dense"),
    ]


# ---- the part of a trained run


def write(run: Path, asked: AddConfig, output: Path) -> Path:
    """Write the part that a run trained."""
    origin, saved = standalone.kept(run), standalone.shards_of(run, None)
    assert isinstance(origin.spec, MoESpec)
    with torch.device("meta"):
        model = model_of(origin.spec, experts=SPECIFICATION, compute=torch.float32)
    with Checkpoint.open(asked.model) as base:
        record: part.Base = {"name": pinned(asked.model, base.folder), "files": part.sums_of(base)}
        terms = card.terms(base.folder)
    facts, measured = facts_of(run, saved.step), load_checked(run / standalone.FOLDER / standalone.OBSERVED)
    left = [(float(a), float(b)) for a, b in (measured[f"layers.{layer}.left"] for layer in origin.spec.layers)]
    weights = Weights(model, saved)
    return part.write(output, origin.spec, asked.name, weights.role, record, [facts], left, terms)
