"""Check a config's values against a table of rules; one sentence names the first value that breaks its rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """Which values are right, and what to tell a user who wrote another one."""

    holds: Callable[[Any], bool]
    must: str


def at_least(least: float, more: str = "") -> Rule:
    """Return the rule of a number that has a lower bound."""
    return Rule(lambda value: value >= least, f"it must be at least {least}{more}")


def finite(more: str = "") -> Rule:
    """Return the rule of a finite number that is not negative."""
    return Rule(lambda value: math.isfinite(value) and value >= 0, f"it must be a number of at least 0{more}")


def above_zero(what: str = "it must be a number above 0") -> Rule:
    """Return the rule of a finite number above 0."""
    return Rule(lambda value: math.isfinite(value) and value > 0, what)


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
