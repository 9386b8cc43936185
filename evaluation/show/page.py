"""Build a page from sections and blocks; page.html turns it into HTML (`rendered`).

A page fetches no script, no font and no picture, and a policy in its head forbids it. jinja2 escapes every text, so no
text becomes markup.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, Template
from markupsafe import Markup

HERE = Path(__file__).parent
HYPHEN = re.compile(r"(?<![\w.])-(?=[\d.])")  # a hyphen that stands for a minus
COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
NUMBER = re.compile(r"[+−-]?[\d.]|$")
Rows = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Text:
    text: str
    kind: str = "heading"  # heading | unit: a small line over a picture | note | code


@dataclass(frozen=True)
class Table:
    """Hold a table whose first column names the row; columns of numbers are aligned right."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def kinds(self) -> list[str]:
        return ["n" if all(NUMBER.match(row[i]) for row in self.rows) else "w" for i in range(len(self.head))]


@dataclass(frozen=True)
class Pairs:
    rows: Rows


@dataclass(frozen=True)
class Legend:
    """Show names with the line of their series; nothing for a single name."""

    series: Mapping[str, int]


@dataclass(frozen=True)
class Grid:
    blocks: Sequence[Any]
    kind: str = "charts"  # charts | tables: how wide a column is


@dataclass(frozen=True)
class Captioned:
    title: str
    unit: str
    block: Any


@dataclass(frozen=True)
class Folded:
    title: str
    blocks: Sequence[Any]


@dataclass(frozen=True)
class Tokens:
    """Show a text whose tokens have colours: (piece, what a pointer over it says, series, percent of the colour)."""

    pieces: Sequence[tuple[str, str, int, int]]


@dataclass(frozen=True)
class Section:
    title: str
    about: str
    blocks: Sequence[Any]  # without any the section is left out


@dataclass(frozen=True)
class Tile:
    about: str
    value: str
    detail: str
    kind: str = ""  # good | bad


MARK = rb"default-src 'none'; style-src 'unsafe-inline'"  # the policy in the head of each page


@dataclass(frozen=True)
class Page:
    title: str
    by: str
    tiles: Sequence[Tile]
    sentences: Sequence[str]
    sections: Sequence[Section]
    lead: str = ""


class Palette(dict[str, int]):
    """Give each name the same series in every picture; a new name gets the next one."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        super().__init__((name, number) for number, name in enumerate(dict.fromkeys(names)))

    def __missing__(self, name: str) -> int:
        self[name] = len(self)
        return self[name]

    def legend(self, names: Iterable[str]) -> Legend:
        return Legend({name: self[name] for name in names})


def rendered(page: Page) -> str:
    """Return the page as HTML."""
    return shown(template().render(page=page, style=Markup((HERE / "page.css").read_text())) + "\n")


def drawn(block: Any) -> str:
    """Return one block as HTML."""
    return macro("block", block)


def contents(page: Page) -> str:
    """Return the page as HTML without head and style, to put into another page."""
    return macro("content", page)


def macro(name: str, value: Any) -> str:
    module = template().make_module({"page": Page("", "", (), (), ()), "style": ""})
    return shown(str(getattr(module, name)(value)))


def shown(text: str) -> str:
    """Return the text with a code for each character that commands a terminal or turns the reading direction."""
    return COMMANDS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


@cache
def template() -> Template:
    environment = Environment(loader=FileSystemLoader(HERE), autoescape=True)
    environment.filters |= {"minus": minus, "kind": lambda block: type(block).__name__}
    return environment.get_template("page.html")


def minus(text: str) -> str:
    """Return the text with minus signs in place of hyphens before digits."""
    return HYPHEN.sub("−", text)


def tone(verdict: str) -> str:
    """Return the kind of a tile with this verdict."""
    return {"better": "good", "worse": "bad"}.get(verdict, "")


def better(higher: bool) -> str:
    return "higher is better" if higher else "lower is better"
