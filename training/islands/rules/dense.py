"""The asynchronous baseline: all numbers, each time, at once (FedAsync; "Async Local-SGD" without its momentum).

Nothing is kept back but what the wire rounds. Half of a delta is taken, because it was learned from an older model: the
outer gain of our experiments (docs/islands.md).
"""

from __future__ import annotations

from training.islands.rules.dgs import Pull, Push

__all__ = ["KEEPS", "SHARE", "Pull", "Push", "gain"]

SHARE: float | None = 1.0
KEEPS = False


def gain(islands: int) -> float:
    return 1.0 if islands == 1 else 0.5
