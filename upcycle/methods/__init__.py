"""Initialisations, one file each: dense FFN(s) -> the FFN of one expert. Pure: no files, devices, ranks or globals.

    Options                               its keys under `method:` in the config, with defaults and check(sizes)
    EXACT                                 True if every copy is the dense FFN, neuron for neuron
    expert(donors, place, options) -> FFN
    same(place)                           (may be absent) experts with equal answers are equal, so they are made once
    needs(options) -> Needs               (may be absent) what it needs besides the FFN of `source`

`donors` are the dense FFNs of the layer that the method needs (of `source`, if it says nothing), already without the
neurons carved out for a shared expert. `place` says which expert is wanted.

Nothing else knows a method by its name: the rest of the converter reads a `Method`, which `load` makes of the file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from upcycle import plugin
from upcycle.config import build
from upcycle.ffn import FFN


@dataclass(frozen=True)
class Sizes:
    """What a method's options may depend on."""

    copies: int
    granularity: int


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
        """This expert's neurons if all experts lie end to end in one FFN (Needs.disjoint)."""
        ends = list(accumulate(self.widths))
        return slice(ends[self.index] - self.widths[self.index], ends[self.index])


@dataclass(frozen=True)
class Needs:
    """What a method needs of the plan around it; of a method that says nothing, the defaults."""

    # the FFNs that `expert` is given, in this order: `source`'s, and that of the donor of this copy (one donor a copy)
    donors: tuple[Literal["source", "own"], ...] = ("source",)
    rest: Literal["source", "mean"] = "source"  # all but the routed experts: from `source`, or the donors' mean
    disjoint: bool = False  # no neuron is in two experts: they are one FFN cut up, and lie end to end in it
    # the key and value that ask for neurons in an order measured on text, those that fire together side by side
    order: str = ""

    @property
    def mixes(self) -> bool:
        """Models besides `source` are in the experts."""
        return "own" in self.donors


@dataclass(frozen=True)
class Method:
    """What the converter knows of a method: its file's declarations, and the options that a config gives it."""

    name: str
    options: Any
    exact: bool
    needs: Needs
    make: Callable[[Sequence[FFN], Place, Any], FFN]
    same: Callable[[Place], int] | None

    def expert(self, donors: Sequence[FFN], place: Place) -> FFN:
        return self.make(donors, place, self.options)


def load(name: str, keys: Mapping[str, Any] | None = None) -> Method:
    """The method of this name. `keys`: its own, as `method:` of a config has them; defaults for those left out."""
    module = plugin.load(__name__, name)
    options = build(module.Options, keys or {}, "method.")
    optional = vars(module)
    needs = optional["needs"](options) if "needs" in optional else Needs()
    return Method(name, options, module.EXACT, needs, module.expert, optional.get("same"))


def positive(key: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{key} is {value}; it must be a number above 0")


def share(key: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{key} is {value}; it is a share, from 0 to 1")
