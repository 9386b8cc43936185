"""Send all numbers at every exchange, without waiting (FedAsync; "Async Local-SGD" without its momentum): a baseline.

An island keeps back only the rounding errors of the wire. The server takes half of a delta, because it was learned from
an older model; our experiments chose this outer gain (docs/islands.md).
"""

from __future__ import annotations

from training.islands.rules.dgs import Pull, Push

__all__ = ["KEEPS", "SHARE", "Pull", "Push", "gain"]

SHARE: float | None = 1.0
KEEPS = False


def gain(islands: int) -> float:
    return 1.0 if islands == 1 else 0.5
