"""Initialisations, one file each: dense FFN(s) -> the FFN of one expert. Pure: no files, devices, ranks or globals.

    Options                               dataclass of the keys under `method:`, with defaults and check(sizes)
    EXACT                                 True if every copy is the dense FFN, neuron for neuron
    expert(donors, place, options) -> FFN
    same(place)                           (optional) a key: experts with equal keys are equal, so they are made once
    needs(options) -> Needs               (optional) what the method needs besides the FFN of `source`
    SLICES                                (optional) the granularity where each slice has its own choice and none is set
    EVIDENCE                              (optional) a sentence that the plan prints: where the method does not pay

`donors` are the dense FFNs of the layer that Needs.donors lists (by default that of `source`), without the neurons that
went to a shared expert. `place` says which expert to make.

Nothing else knows a method by its name: the rest of the converter reads a `Method`, which `load` makes of the file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from upcycle import plugin
from upcycle.arch.ffn import FFN
from upcycle.config.reading import build


@dataclass(frozen=True)
class Sizes:
    """The sizes against which a method checks its options."""

    copies: int
    granularity: int


@dataclass(frozen=True)
class Place:
    """The place of an expert: expert `index` is part `index % granularity` of copy `index // granularity`."""

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
        """The neurons of this expert where all experts lie end to end in one FFN (Needs.disjoint)."""
        ends = list(accumulate(self.widths))
        return slice(ends[self.index] - self.widths[self.index], ends[self.index])


@dataclass(frozen=True)
class Needs:
    """What a method needs from the plan. A method without `needs` has the defaults."""

    # the FFNs passed to `expert`, in this order. source: that of `source`; own: that of the donor of this copy
    donors: tuple[Literal["source", "own"], ...] = ("source",)
    rest: Literal["source", "mean"] = "source"  # all but the routed experts comes from `source`, or is the donors' mean
    disjoint: bool = False  # no neuron is in two experts: they are one FFN cut up, and lie end to end in it
    # the key=value that asks for neurons in an order measured on text, those that fire together side by side; else ""
    order: str = ""

    @property
    def mixes(self) -> bool:
        """True if the experts are made from donors, not from `source` alone."""
        return "own" in self.donors


@dataclass(frozen=True)
class Method:
    """A method as the converter sees it: the declarations of its file, and the options of a config."""

    name: str
    options: Any
    exact: bool
    needs: Needs
    make: Callable[[Sequence[FFN], Place, Any], FFN]
    same: Callable[[Place], int] | None
    evidence: str
    slices: int = 1  # the granularity, if none is set, where the router chooses in each slice

    def expert(self, donors: Sequence[FFN], place: Place) -> FFN:
        return self.make(donors, place, self.options)


def load(name: str, keys: Mapping[str, Any] | None = None) -> Method:
    """The method of this name. `keys`: those under `method:` of a config; defaults for those left out."""
    module = plugin.load(__name__, name)
    options = build(module.Options, keys or {}, "method.")
    declared = vars(module)
    needs = declared["needs"](options) if "needs" in declared else Needs()
    evidence, slices = declared.get("EVIDENCE", ""), declared.get("SLICES", 1)
    return Method(name, options, module.EXACT, needs, module.expert, declared.get("same"), evidence, slices)


def positive(key: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{key} is {value}; it must be a number above 0")


def share(key: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{key} is {value}; it is a share, from 0 to 1")
