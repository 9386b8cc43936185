"""Make people, places and events from a seed: names, facts, and sentences about them in many wordings.

A fact of a kind (the city of a person) has wordings that documents are trained on, wordings that only held-out
documents have, and questions, which end where the answer belongs. Entities are told, which means that training
documents are about them, or untold. Names are made of syllables, and no word of a name is used twice.

Python's own generator draws everything, because numpy's may draw other numbers in another version.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd
from pathlib import Path
from random import Random
from typing import TypedDict
from zlib import crc32

from upcycle.io import strict

HERE = Path(__file__).parent / "wordings"
SORTS = ("people", "places", "events")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
ONSETS = (
    "b", "br", "d", "dr", "f", "g", "gr", "h", "j", "k", "kr", "l", "m", "n", "p", "pr", "r", "s", "st", "t", "th",
    "tr", "v", "w", "y", "z",
)  # fmt: skip
VOWELS = "aeiou"
CODAS = (
    "b", "ck", "d", "f", "g", "k", "lm", "mp", "nd", "ng", "p", "rk", "rn", "sk", "st", "th", "v", "x", "z",
)  # fmt: skip
OTHERS = 7  # wrong alternatives of a question, at most
POOL = 200  # made-up values of each kind: firms, universities, rivers, persons, and first names
EVENTS = ("Festival", "Fair", "Regatta", "Congress", "Marathon", "Games", "Carnival", "Biennale")
UNIVERSITIES = ("University", "College", "Institute", "Academy")
FIRMS = ("Works", "Foods", "Lines", "Bank", "Motors", "Textiles", "Press", "Chemicals", "Logistics", "Insurance")


class Wording(TypedDict):
    values: str
    trained: str
    held_out: str
    questions: str


class Known(TypedDict):
    questions: str
    facts: str


@dataclass(frozen=True)
class Kind:
    name: str
    values: str  # the name of a list in values.yaml, or of a function of Pools
    trained: tuple[str, ...]
    held_out: tuple[str, ...]
    questions: tuple[str, ...]


@dataclass(frozen=True)
class Entity:
    sort: str  # one of SORTS
    name: str
    told: bool
    facts: Mapping[str, str]  # the value of each kind

    def say(self, wording: str, kind: str = "") -> str:
        """Return a wording about this entity; without a kind it is a question."""
        return filled(wording, self.name, self.facts.get(kind, ""))


@dataclass(frozen=True)
class Question:
    group: str  # told | untold | known
    sort: str
    kind: str
    entity: str  # questions with the same entity, or document, are one cluster
    prompt: str  # the answer comes after it and a space
    answer: str
    others: tuple[str, ...]  # wrong alternatives of the same kind

    def __post_init__(self) -> None:
        """Raise a ValueError if the question gives the answer away."""
        if re.search(rf"(?<!\w){re.escape(self.answer)}(?!\w)", self.prompt, re.IGNORECASE):
            raise ValueError(f"the question {self.prompt[-160:]!r} holds its answer {self.answer!r}; leave it out")
        if not self.answer.strip() or self.answer in self.others or self.prompt != self.prompt.rstrip():
            raise ValueError(
                f"the question {self.prompt[-160:]!r} has the answer {self.answer!r} and the alternatives "
                f"{list(self.others)}; the answer must be a text, must not be among them, and no space may end the "
                "question"
            )


def filled(wording: str, name: str, value: str) -> str:
    """Put a name and a value into a wording; a sentence begins with a capital letter."""
    text = re.sub("NAME|VALUE", lambda found: name if found[0] == "NAME" else value, wording).replace("\\n", "\n")
    return text[:1].upper() + text[1:]


@cache
def kinds(sort: str) -> tuple[Kind, ...]:
    """Return the kinds of facts of people, places or events."""
    file = HERE / f"{sort}.yaml"
    found: Mapping[str, Wording] = strict.held(strict.read_yaml(file), Mapping[str, Wording], str(file))
    return tuple(
        Kind(
            name, of["values"], tuple(of["trained"].splitlines()), tuple(of["held_out"].splitlines()),
            tuple(of["questions"].splitlines()),
        )
        for name, of in found.items()
    )  # fmt: skip


@cache
def lists() -> Mapping[str, tuple[str, ...]]:
    """Return the lists of real values."""
    file = HERE / "values.yaml"
    found: Mapping[str, str] = strict.held(strict.read_yaml(file), Mapping[str, str], str(file))
    return {name: tuple(text.split(", ")) for name, text in found.items()}


def known_questions() -> list[Question]:
    """List questions about real facts, which a model may know before it trains."""
    file, out = HERE / "known.yaml", list[Question]()
    found: Mapping[str, Known] = strict.held(strict.read_yaml(file), Mapping[str, Known], str(file))
    for kind, of in found.items():
        facts = dict(line.split(": ") for line in of["facts"].splitlines())
        draw = Random(f"known {kind}")
        for subject, answer in facts.items():
            prompt = filled(draw.choice(of["questions"].splitlines()), subject, "")
            others = alternatives(draw, answer, list(facts.values()), without=prompt)
            out.append(Question("known", "known", kind, subject, prompt, answer, others))
    return out


def alternatives(draw: Random, answer: str, values: Sequence[str], without: str = "") -> tuple[str, ...]:
    """Draw different wrong values, none of them in the text `without`."""
    others = [value for value in dict.fromkeys(values) if value != answer and value not in without]
    return tuple(draw.sample(others, min(OTHERS, len(others))))


class Pools:
    """Make names and values; no made-up word is used twice, and none is a word of a real value."""

    def __init__(self, seed: int) -> None:
        self.draw = Random(f"{seed} words")
        self.taken = {word.lower() for values in lists().values() for value in values for word in value.split()}
        self.first = [self.word(2) for _ in range(POOL)]
        words = [self.word(3) for _ in range(2 * POOL)]
        self.made: dict[str, tuple[str, ...]] = {
            "firms": tuple(f"{word} {self.draw.choice(FIRMS)}" for word in words[:POOL]),
            "universities": tuple(f"{word} {self.draw.choice(UNIVERSITIES)}" for word in words[POOL:]),
            "rivers": tuple(self.word(2) for _ in range(POOL)),
            "persons": tuple(self.person() for _ in range(POOL)),
        }

    def word(self, syllables: int) -> str:
        """Return a new word of several syllables, with a capital letter; no other such word begins with it."""
        while True:
            start = "".join(self.draw.choice(ONSETS) + self.draw.choice(VOWELS) for _ in range(syllables))
            found = start + self.draw.choice(CODAS)
            if not self.taken & {start, found}:
                self.taken |= {start, found}
                return found.capitalize()

    def person(self) -> str:
        return f"{self.draw.choice(self.first)} {self.word(3)}"

    def name(self, sort: str) -> str:
        """Return the name of a new entity."""
        if sort == "people":
            return self.person()
        return self.word(3) if sort == "places" else f"{self.word(3)} {self.draw.choice(EVENTS)}"

    def value(self, values: str, draw: Random) -> str:
        """Draw a value of a kind."""
        if values == "dates":
            return f"{draw.randrange(1, 29)} {draw.choice(MONTHS)} {draw.randrange(1930, 2005)}"
        if values == "years":
            return str(draw.randrange(1100, 1900))
        return draw.choice(self.made.get(values) or lists()[values])

    def other_values(self, values: str, answer: str, draw: Random) -> tuple[str, ...]:
        """Draw wrong alternatives of a value."""
        return alternatives(draw, answer, [self.value(values, draw) for _ in range(8 * OTHERS)])


@dataclass(frozen=True)
class World:
    seed: int
    entities: tuple[Entity, ...]
    pools: Pools

    def training(self, number: int) -> Iterator[str]:
        """Yield training documents: each told entity has `number` of them, with all its facts in random order.

        A kind's wordings take turns. The documents of an entity are far apart, because a model that reads several of
        them in one sequence would copy and not remember.
        """
        told = [entity for entity in self.entities if entity.told]
        draw = Random(f"{self.seed} documents")
        for turn in range(number):
            for entity in draw.sample(told, len(told)):
                yield self.document(entity, "trained", draw, turn)

    def document(self, entity: Entity, part: str, draw: Random, turn: int = 0) -> str:
        """Return a document with all facts of an entity in wordings of a part."""
        said = []
        for kind in draw.sample(kinds(entity.sort), len(entity.facts)):
            wordings: tuple[str, ...] = getattr(kind, part)
            said.append(entity.say(wordings[place(f"{entity.name} {kind.name}", turn, len(wordings))], kind.name))
        return " ".join(said)

    def questions(self, entity: Entity, group: str) -> Iterator[Question]:
        """Yield a question about each fact of an entity."""
        draw = Random(f"{self.seed} questions {entity.name}")
        for kind in kinds(entity.sort):
            prompt, answer = entity.say(draw.choice(kind.questions)), entity.facts[kind.name]
            others = self.pools.other_values(kind.values, answer, draw)
            yield Question(group, entity.sort, kind.name, entity.name, prompt, answer, others)


def place(key: str, turn: int, count: int) -> int:
    """Return a number below `count` for each turn; `count` turns have all numbers, in an order that the key decides."""
    mark, steps = crc32(key.encode()), [step for step in range(1, count + 1) if gcd(step, count) == 1]
    return (mark + turn * steps[mark // count % len(steps)]) % count


def made(seed: int, told: Mapping[str, int], untold: Mapping[str, int]) -> World:
    """Make a world with these numbers of told and untold entities of each sort."""
    pools, draw, out = Pools(seed), Random(f"{seed} facts"), list[Entity]()
    for sort in SORTS:
        for number in range(told[sort] + untold[sort]):
            facts = {kind.name: pools.value(kind.values, draw) for kind in kinds(sort)}
            out.append(Entity(sort, pools.name(sort), number < told[sort], facts))
    return World(seed, tuple(out), pools)
