"""Write a suite's folder, and read it again.

train.jsonl       documents to train on, in a random order
told.jsonl        held-out documents about told entities, in wordings that no training document has
untold.jsonl      the same about entities that no training document names: what form and wording alone give
questions.jsonl   closed-book questions: told, untold, and known (real facts that a model may lose)
suite.json        the settings and the sha256 of each file; it is written last

The files are written in FOLDER.partial, which is then renamed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, TypedDict

from evaluation.facts import cloze
from evaluation.facts.world import SORTS, Question, known_questions, made
from upcycle.config.values import at_least, check_values, seed
from upcycle.io import strict
from upcycle.io.disk import sha256, sweep, write_atomic, write_blocks
from upcycle.io.job import JOB, Worker, check_first, explained, job
from upcycle.io.publish import rename

TRAIN, TOLD, UNTOLD, QUESTIONS = "train.jsonl", "told.jsonl", "untold.jsonl", "questions.jsonl"
FILES = (TRAIN, TOLD, UNTOLD, QUESTIONS)
ABOUT = "suite.json"
FORMAT = 2  # raise it with any change that makes other files from the same settings
BLOCK = 1 << 20  # characters that are written at once


@dataclass(frozen=True)
class WriteConfig:
    output: str = ""  # the folder to make
    # a folder, file or pattern of your own documents: ask about them, and make no people, places and events
    documents: str = ""
    people: int = 1000  # people that training documents are about
    places: int = 500  # the same for places
    events: int = 500  # the same for events
    tellings: int = 16  # training documents that tell the facts of each of them
    # entities of each sort that questions are about, told and untold, at most; the same for documents
    asked: int = 500
    seed: int = 0  # names, facts, wordings and orders follow from it; of documents, those that are held out

    def __post_init__(self) -> None:
        check_values(
            self, "",
            {"people places events": at_least(0, most=100_000), "tellings": at_least(1, most=1000),
             "asked": at_least(1, most=100_000), "seed": seed()},
        )  # fmt: skip
        if not self.output:
            raise ValueError("output is not set; write upcycle facts write output=FOLDER")
        if not self.people + self.places + self.events:
            raise ValueError("people, places and events are all 0; write for instance people=1000")

    @property
    def settings(self) -> dict[str, Any]:
        """Return the values that decide the content of the files."""
        found = {"format": FORMAT, **{key: value for key, value in asdict(self).items() if key != "output"}}
        return found | {"sources": cloze.sources(self.documents)} if self.documents else found


class Text(TypedDict):
    text: str
    entity: str


class About(TypedDict):
    kind: str
    settings: dict[str, Any]
    files: dict[str, str]
    counts: dict[str, int]


@dataclass(frozen=True)
class Suite:
    folder: Path
    mark: str  # digest of the files that are asked
    questions: tuple[Question, ...]
    texts: Mapping[str, tuple[Text, ...]]  # held-out documents, by group


# ---- write


def write(config: WriteConfig) -> About:
    """Write the files of a suite; do nothing if the folder has them already. Return what suite.json says."""
    folder, settings = Path(config.output), config.settings
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        about = written_before(folder, settings)
        shutil.rmtree(folder / JOB, ignore_errors=True)  # left if a kill came right after the rename
        return about
    files, counts = content(config), {}  # before the folder is made, because documents may be unfit
    partial = folder.with_name(f"{folder.name}.partial")
    with explained(partial), job(partial, settings, Worker(), lambda: None, adopt=lambda: None):
        check_first(partial, folder)
        sweep(partial)
        for name, rows in files.items():
            counts[name] = write_rows(partial / name, rows)
        sums = {name: sha256(partial / name) for name in FILES}
        about = {"kind": "facts", "settings": settings, "files": sums, "counts": counts}
        write_atomic(partial / ABOUT, (json.dumps(about, indent=1) + "\n").encode())
        rename(partial, folder)
        shutil.rmtree(folder / JOB, ignore_errors=True)
    return about


def written_before(folder: Path, settings: Mapping[str, Any]) -> About:
    """Return what suite.json says; raise a ValueError unless the folder is a whole suite with these settings."""
    try:
        about, _ = opened(folder)
    except ValueError as error:
        raise ValueError(f"{folder} is not empty and not a whole suite ({error}); choose another output") from None
    if about["settings"] != settings:
        key = next(key for key in settings if about["settings"].get(key) != settings[key])
        raise ValueError(
            f"{folder} is a suite with {key}={about['settings'].get(key)}, and {key}={settings[key]} is asked for; "
            "choose another output"
        )
    return about


def content(config: WriteConfig) -> dict[str, Iterable[Mapping[str, Any]]]:
    """Return the rows of each file."""
    if config.documents:
        train, *texts_of, asks = cloze.content(config.documents, config.asked, config.seed)
        return {
            TRAIN: train,
            TOLD: texts_of[0],
            UNTOLD: texts_of[1],
            QUESTIONS: map(asdict, [*asks, *known_questions()]),
        }
    told = {sort: getattr(config, sort) for sort in SORTS}
    world = made(config.seed, told, {sort: min(number, config.asked) for sort, number in told.items()})
    groups = {name: [e for e in world.entities if e.told == (name == "told")] for name in ("told", "untold")}
    asked = {
        name: [entity for sort in SORTS for entity in [e for e in group if e.sort == sort][: config.asked]]
        for name, group in groups.items()
    }
    draw = Random(f"{config.seed} held out")
    texts = {
        name: [{"text": world.document(e, "held_out", draw, turn), "entity": e.name} for turn, e in enumerate(group)]
        for name, group in asked.items()
    }
    questions = [q for name, group in asked.items() for entity in group for q in world.questions(entity, name)]
    return {
        TRAIN: ({"text": text} for text in world.training(config.tellings)),
        TOLD: texts["told"],
        UNTOLD: texts["untold"],
        QUESTIONS: map(asdict, [*questions, *known_questions()]),
    }


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows as lines of JSON, and return their number."""
    count = 0

    def blocks() -> Iterator[bytes]:
        nonlocal count
        block: list[str] = []
        size = 0
        for row in rows:
            block.append(json.dumps(row, ensure_ascii=False) + "\n")
            size, count = size + len(block[-1]), count + 1
            if size > BLOCK:
                yield "".join(block).encode()
                block, size = [], 0
        yield "".join(block).encode()

    write_blocks(path, blocks())
    return count


# ---- read


def opened(folder: Path) -> tuple[About, Path]:
    """Return what suite.json says; raise a ValueError if a file is missing or has changed."""
    path = folder / ABOUT
    if not path.is_file():
        raise ValueError(f"{folder} has no {ABOUT}; give a folder that `upcycle facts write` has finished")
    about: About = strict.held(strict.read_json(path), About, str(path))
    if about["kind"] != "facts" or set(about["files"]) != set(FILES):
        raise ValueError(f"{path} is not of `upcycle facts write`; give a folder that this command made")
    for name in FILES:
        if not (folder / name).is_file() or sha256(folder / name) != about["files"][name]:
            raise ValueError(f"{folder / name} is missing or was changed after it was written; write the suite again")
    return about, path


def read(folder: str | Path) -> Suite:
    """Read the questions and the held-out documents of a suite, and check every file."""
    place = Path(folder)
    about, _ = opened(place)
    questions = tuple(strict.held(row, Question, where) for where, row in rows_of(place / QUESTIONS))
    texts = {
        name: tuple(strict.held(row, Text, where) for where, row in rows_of(place / file))
        for name, file in (("told", TOLD), ("untold", UNTOLD))
    }
    mark = "".join(about["files"][name] for name in FILES[1:])
    return Suite(place, mark, questions, texts)


def rows_of(path: Path) -> Sequence[tuple[str, Any]]:
    return [(where, strict.parse(line, where)) for where, line in strict.read_lines(path)]
