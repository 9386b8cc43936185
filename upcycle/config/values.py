"""Check a config's values against a table of rules; one sentence names the first value that breaks its rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

# The largest values that a key accepts. They are far above every use, and small enough that a sum, a clock, a random
# generator or an index of torch can hold them.
COUNT = 2**31 - 1  # of things that are counted: steps, items, files
TOKENS = 10**15  # of tokens of a text or a run
LENGTH = 2**24  # of tokens of a sequence
BATCH = 2**20  # of sequences in a step
FACTOR = 1e9  # of a weight, a rate or a factor
MINUTES = 1e6  # of a time to wait
SEED = 2**63 - 1


@dataclass(frozen=True)
class Rule:
    """Which values are right, and what to tell a user who wrote another one."""

    holds: Callable[[Any], bool]
    must: str
    most: float | None = None  # the largest number that is right


def at_least(least: float, more: str = "", *, most: float = COUNT) -> Rule:
    """Return the rule of a number that has a lower and an upper bound."""
    return Rule(lambda value: value >= least, f"it must be at least {least}{more}", most)


def finite(more: str = "", *, most: float = FACTOR) -> Rule:
    """Return the rule of a finite number that is not negative."""
    return Rule(lambda value: math.isfinite(value) and value >= 0, f"it must be a number of at least 0{more}", most)


def above_zero(what: str = "it must be a number above 0", *, most: float = FACTOR) -> Rule:
    """Return the rule of a finite number above 0."""
    return Rule(lambda value: math.isfinite(value) and value > 0, what, most)


def seed() -> Rule:
    """Return the rule of a seed."""
    return at_least(0, most=SEED)


def share_of_one(what: str = "it must be a number from 0 to 1") -> Rule:
    """Return the rule of a number from 0 to 1."""
    return Rule(lambda value: 0 <= value <= 1, what)


def one_of(known: Collection[str]) -> Rule:
    """Return the rule of a word from a list."""
    return Rule(lambda value: value in known, f"it must be one of {', '.join(known)}")


def check_values(config: object, where: str, rules: Mapping[str, Rule]) -> None:
    """Raise a ValueError for the first value that breaks its rule.

    A key of `rules` names one or several fields, separated by spaces. A field that is None was left out and is right.
    """
    for names, rule in rules.items():
        for name in names.split():
            value = getattr(config, name)
            if value is not None and not rule.holds(value):
                raise ValueError(f"{where}{name} is {value!r}; {rule.must}")
            if value is not None and rule.most is not None and value > rule.most:
                raise ValueError(f"{where}{name} is {value!r}; it must be at most {shown(rule.most)}")


def shown(number: float) -> str:
    """Write a number for a person: 2,147,483,647 or 1e+09."""
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"
