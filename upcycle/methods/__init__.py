"""Initialisations, one file each: dense FFN(s) -> the FFN of one expert. Pure: no files, devices, ranks or globals.

    Options                               its keys under `method:` in the config, with defaults and check(sizes)
    EXACT                                 True if every copy is the dense FFN, neuron for neuron
    expert(donors, place, options) -> FFN
    same(place)                           (may be absent) experts with equal answers are equal, so they are made once

`donors` are the dense FFNs of one layer (one per donor model), already without the neurons carved out for a shared
expert. `place` says which expert is wanted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

from upcycle.ffn import FFN


@dataclass(frozen=True)
class Sizes:
    """What a method's options may depend on."""

    copies: int
    granularity: int
    donors: int  # models given besides the base


@dataclass(frozen=True)
class Place:
    """Which expert: expert `index` is part `index % granularity` of copy `index // granularity`."""

    layer: int
    index: int
    copies: int
    granularity: int
    widths: tuple[int, ...]
    seed: int

    @property
    def copy(self) -> int:
        return self.index // self.granularity

    @property
    def part(self) -> int:
        # layout A: the parts of a copy lie next to each other, so ties broken by index keep a group whole
        return self.index % self.granularity

    def shard(self, ffn: FFN) -> FFN:
        """The contiguous slice of neurons that is this expert's part of a copy."""
        start = sum(self.widths[: self.part])
        return ffn.neurons(slice(start, start + self.widths[self.part]))

    def own(self) -> slice:
        """This expert's neurons if all experts lie end to end (`split`)."""
        ends = list(accumulate(self.widths))
        return slice(ends[self.index] - self.widths[self.index], ends[self.index])


def positive(key: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{key} is {value}; it must be a number above 0")


def share(key: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{key} is {value}; it is a share, from 0 to 1")
