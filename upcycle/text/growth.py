"""Bound how much longer a tokenizer's own rules can make a text.

A tokenizer.json may replace each `a` by `aa` sixty times, or by a hundred million letters. The tokenizers package then
asks for more memory than there is, and the process aborts.
"""

from __future__ import annotations

import base64
import json
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

MOST = 80  # characters that may come from one; NFKC and then ByteLevel make 72
TOKENS = 64  # tokens that may be added to a text; published tokenizers add at most about five
BYTES = 4  # ByteLevel writes a character for each byte of one
LAST = 0x30000  # no character from here on is written as others in a normal form
SPAN = 5  # bytes of the longest text that a Precompiled rule looks up
KEYS = 1 << 20  # texts that a Precompiled rule may look up
NORMAL = ("NFC", "NFD", "NFKC", "NFKD")


def check_growth(tokenizer: Any, path: Path) -> None:
    """Raise a ValueError if the tokenizer's rules can make a text more than MOST times longer, or its template adds
    more than TOKENS tokens."""
    before = [rule for part in (tokenizer.normalizer, tokenizer.pre_tokenizer) for rule in rules(state(part))]
    for chain in (before, list(rules(state(tokenizer.decoder)))):
        if (times := growth(chain)) > MOST:
            raise ValueError(
                f"{path} has rules (Replace, Prepend, ByteLevel) that can make a text {times:.3g} times longer; at "
                f"most {MOST} times is allowed: take them out, or give the model's own tokenizer"
            )
    if (added := sum(map(tokens_of, rules(state(tokenizer.post_processor))))) > TOKENS:
        raise ValueError(
            f"{path} has a template that adds {added:,} tokens to each text; at most {TOKENS} are allowed: shorten it, "
            "or give the model's own tokenizer"
        )


def state(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())


def rules(part: Any) -> Iterator[Mapping[str, Any]]:
    """Yield each rule in a sequence of rules, in the order in which the tokenizer applies them."""
    if isinstance(part, list):
        for inner in part:
            yield from rules(inner)
    elif isinstance(part, Mapping):
        if "type" in part and part["type"] != "Sequence":
            yield part
        else:
            for inner in part.values():
                yield from rules(inner)


def tokens_of(rule: Mapping[str, Any]) -> int:
    """Return how many tokens a rule of the post-processor adds to a text."""
    if rule.get("type") != "TemplateProcessing":
        return 2
    names = [piece["SpecialToken"]["id"] for piece in rule["single"] if "SpecialToken" in piece]
    return sum(len(rule["special_tokens"][name]["ids"]) for name in names)


class Weights:
    """Hold how many characters the later rules make of each character."""

    def __init__(self) -> None:
        self.own: defaultdict[str, float] = defaultdict(lambda: 1.0)
        self.other = 1.0  # the weight of each character that `own` does not have

    def of(self, text: str) -> float:
        return sum(self.own.get(letter, self.other) for letter in text)

    def most(self) -> float:
        return max([self.other, *self.own.values()])

    def add(self, more: float) -> None:
        """Add to every weight."""
        self.other += more
        self.own.update({letter: weight + more for letter, weight in self.own.items()})

    def raise_to(self, least: float) -> None:
        """Raise every lower weight."""
        self.other = max(self.other, least)
        self.own.update({letter: max(weight, least) for letter, weight in self.own.items()})

    def replace(self, table: Mapping[str, str]) -> None:
        """Take account of a rule that writes each text of the table as another one, all at the same time."""
        made = {found: self.of(text) for found, text in table.items()}
        self.own.update({letter: 0.0 for letter in table if len(letter) == 1})
        for found, weight in made.items():
            for letter in set(found):
                self.own[letter] = max(self.own.get(letter, self.other), weight / len(found))


def growth(chain: list[Mapping[str, Any]]) -> float:
    """Return how many characters the chain of rules makes of one at most.

    Each character has a weight: how many characters the rules after it make of it. The rules are taken from the last
    to the first. Characters that a rule replaces weigh as much as what replaces them.
    """
    weights = Weights()
    for rule in reversed(chain):
        kind = rule.get("type")
        if kind == "ByteLevel":
            most = BYTES * weights.most()
            weights = Weights()
            weights.other = most
        elif kind in ("Prepend", "Metaspace"):
            weights.replace({" ": str(rule["replacement"])} if kind == "Metaspace" else {})
            weights.add(weights.of(str(rule.get("replacement" if kind == "Metaspace" else "prepend"))))
        elif kind == "Replace":
            pattern = rule.get("pattern")
            found = pattern.get("String") if isinstance(pattern, Mapping) else None
            made = weights.of(str(rule.get("content")))
            if found:
                for letter in set(found):
                    weights.own[letter] = max(weights.own.get(letter, weights.other), made / len(found))
            elif matches_nothing(pattern):
                weights.add(made)
            else:
                weights.raise_to(made)
        elif kind in NORMAL:
            if kind in ("NFC", "NFKC"):  # letters that become one weigh as much as that one
                joined = {text: letter for letter, text in table_of("NFD").items() if letter in weights.own}
                weights.replace({text: letter for text, letter in joined.items() if len(text) > 1})
            weights.replace(table_of(str(kind)))
        elif kind == "Lowercase":
            weights.replace(table_of("Lowercase"))
        elif kind == "BertNormalizer":
            weights.replace(table_of("Lowercase"))
            weights.replace(table_of("NFD"))
            weights.add(2 * weights.of(" "))
        elif kind == "Nmt":
            weights.raise_to(weights.of(" "))
        elif kind == "Precompiled":
            table, always = precompiled(str(rule.get("precompiled_charsmap") or ""))
            most = max(map(weights.of, always), default=0.0)
            weights.replace(table)
            weights.raise_to(most)
    return weights.most()


@cache
def table_of(kind: str) -> dict[str, str]:
    """Return the letters that a rule changes, and what it writes for each."""
    change = str.lower if kind == "Lowercase" else partial(unicodedata.normalize, kind)  # type: ignore[arg-type]
    return {letter: text for letter in map(chr, range(LAST)) if (text := change(letter)) != letter}


def precompiled(charsmap: str) -> tuple[dict[str, str], list[str]]:
    """Return what a Precompiled rule writes for each text, and what it writes for parts of letters.

    The rule has a double array (Darts): from each unit, the unit at its offset xor the next byte continues a text."""
    data = base64.b64decode(charsmap)
    size = int.from_bytes(data[:4], "little")
    units, strings = np.frombuffer(data[4 : 4 + size - size % 4], "<u4"), data[4 + size :]
    if not len(units):
        return {}, [strings.decode(errors="replace")]

    def offset(unit: Any) -> Any:
        return (unit >> 10) << ((unit & 512) >> 6)

    table, always = {}, []
    found = [(b"", int(offset(int(units[0]))))]
    for _ in range(SPAN):
        at = np.array([place for _, place in found], dtype=np.int64)[:, None] ^ np.arange(1, 256)
        inside = at < len(units)
        labels = units[np.where(inside, at, 0)] & np.uint32(0x800000FF)
        longer = []
        for row, byte in zip(*np.nonzero(inside & (labels == np.arange(1, 256))), strict=True):
            place = int(at[row, byte])
            unit, text = int(units[place]), found[row][0] + bytes([byte + 1])
            place ^= int(offset(unit))
            longer.append((text, place))
            if unit >> 8 & 1 and place < len(units):
                made = strings[int(units[place]) & 0x7FFFFFFF :].split(b"\0", 1)[0].decode(errors="replace")
                try:
                    table[text.decode()] = made
                except UnicodeDecodeError:
                    always.append(made)
        if len(found := longer) > KEYS:
            return {}, [strings.decode(errors="replace")]
    return table, always


def matches_nothing(pattern: Any) -> bool:
    """Return whether a pattern may also match between two characters, where nothing is."""
    expression = str(pattern.get("Regex") or "") if isinstance(pattern, Mapping) else ""
    try:
        empty = re.fullmatch(re.sub(r"\\[pP]\{[^}]*\}", ".", expression), "")  # Python's re has no \p{...}
    except (re.error, RecursionError, OverflowError):
        return True
    return bool(empty) or any(sign in expression for sign in ("(?", "^", "$", "\\b", "\\B", "\\A", "\\G", "\\Z", "\\z"))
