"""Say how much of the long sweeps a run takes: SWEEPS=all takes every case, and without the word each behaviour has one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
ALL = os.environ.get("SWEEPS") == "all"


def swept(one_of_each: Sequence[T], others: Sequence[T]) -> list[T]:
    """Return the cases that show each behaviour once, and with SWEEPS=all the other cases too."""
    return [*one_of_each, *(others if ALL else ())]
