"""Bound how much longer a tokenizer's own rules can make a text.

A tokenizer.json may replace each `a` by `aa` sixty times, or by a hundred million letters. The tokenizers package then
asks for more memory than there is, and the process aborts.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

MOST = 64  # characters that may come from one; published tokenizers make at most about ten
BYTES = 4  # ByteLevel writes a character for each byte of one


def check_growth(tokenizer: Any, path: Path) -> None:
    """Raise a ValueError if a rule of the tokenizer can make a text more than MOST times longer."""
    before = [rule for part in (tokenizer.normalizer, tokenizer.pre_tokenizer) for rule in rules(state(part))]
    for chain in (before, list(rules(state(tokenizer.decoder)))):
        if (times := growth(chain)) > MOST:
            raise ValueError(
                f"{path} has rules (Replace, Prepend, ByteLevel) that can make a text {times:.3g} times longer; at "
                f"most {MOST} times is allowed: take them out, or give the model's own tokenizer"
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


def growth(chain: list[Mapping[str, Any]]) -> float:
    """Return how many characters the chain of rules makes of one at most.

    Each character has a weight: how many characters the rules after it make of it. The rules are taken from the last
    to the first. Characters that a rule replaces weigh as much as what replaces them.
    """
    weights: defaultdict[str, float] = defaultdict(lambda: 1.0)
    other = 1.0  # the weight of each character that `weights` does not have
    for rule in reversed(chain):
        kind = rule.get("type")
        if kind == "ByteLevel":
            other = BYTES * max([other, *weights.values()])
            weights.clear()
        elif kind in ("Prepend", "Replace"):
            content = str(rule.get("prepend") if kind == "Prepend" else rule.get("content"))
            made = sum(weights.get(letter, other) for letter in content)
            pattern = rule.get("pattern")
            found = pattern.get("String") if isinstance(pattern, Mapping) else None
            if kind == "Replace" and found:
                for letter in set(found):
                    weights[letter] = max(weights.get(letter, other), made / len(found))
            elif kind == "Prepend" or matches_nothing(pattern):
                weights = defaultdict(lambda: 1.0, {letter: weight + made for letter, weight in weights.items()})
                other += made
            else:
                weights = defaultdict(lambda: 1.0, {letter: max(weight, made) for letter, weight in weights.items()})
                other = max(other, made)
    return max([other, *weights.values()])


def matches_nothing(pattern: Any) -> bool:
    """Return whether a pattern may also match between two characters, where nothing is."""
    expression = str(pattern.get("Regex") or "") if isinstance(pattern, Mapping) else ""
    try:
        empty = re.fullmatch(re.sub(r"\\[pP]\{[^}]*\}", ".", expression), "")  # Python's re has no \p{...}
    except (re.error, RecursionError, OverflowError):
        return True
    return bool(empty) or any(sign in expression for sign in ("(?", "^", "$", "\\b", "\\B", "\\A", "\\G", "\\Z", "\\z"))
