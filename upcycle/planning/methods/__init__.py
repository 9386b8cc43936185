"""Methods that compute the FFN of one expert from dense FFNs, one file each.

A method knows no files, devices, ranks or global state. Its file declares:

    Options                               dataclass of the keys under `method:`, with defaults and check(sizes)
    EXACT                                 True if every copy has exactly the neurons of the dense FFN
    expert(donors, place, options) -> FFN
    same(place)                           (optional) a key: experts with equal keys are equal, and computed only once
    needs(options) -> Needs               (optional) the inputs of the method, if not only the FFN of `source`
    SLICES                                (optional) default granularity if the router chooses in each slice
    EVIDENCE                              (optional) a warning that the plan prints: when the method does not pay off

`donors` are the layer's dense FFNs that Needs.donors lists (by default only that of `source`), without the neurons of
the shared expert. `place` says which expert to compute.

No other code depends on a method's name: the converter uses the `Method` that `load` creates from the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from upcycle import plugin
from upcycle.arch.ffn import FFN
from upcycle.config.reading import build
from upcycle.config.values import FACTOR


@dataclass(frozen=True)
class Sizes:
    """The sizes that a method needs to check its options."""

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
        # the parts of a copy are adjacent, so ties broken by index keep a group whole
        return self.index % self.granularity

    def shard(self, ffn: FFN) -> FFN:
        """Return this expert's part of a copy: a contiguous slice of the neurons of `ffn`."""
        start = sum(self.widths[: self.part])
        return ffn.neurons(slice(start, start + self.widths[self.part]))

    def own(self) -> slice:
        """Return the range of this expert's neurons, if all experts together are one FFN (Needs.disjoint)."""
        ends = list(accumulate(self.widths))
        return slice(ends[self.index] - self.widths[self.index], ends[self.index])


@dataclass(frozen=True)
class Needs:
    """The inputs that a method needs from the plan; a method without `needs` has the defaults."""

    # the FFNs passed to `expert`, in this order. source: the FFN of `source`; own: the FFN of this copy's donor
    donors: tuple[Literal["source", "own"], ...] = ("source",)
    rest: Literal["source", "mean"] = "source"  # all tensors except routed experts: from `source`, or the donors' mean
    disjoint: bool = False  # no neuron is in two experts: all experts together are one FFN, in order
    # the config's key=value that requires an order of neurons measured on text (neurons that fire together are
    # adjacent); else ""
    order: str = ""
    part: str = ""  # the name of the part that all copies after the first are; else ""

    @property
    def mixes(self) -> bool:
        """Return True if the experts are computed from donors, not only from `source`."""
        return "own" in self.donors


@dataclass(frozen=True)
class Method:
    """A method for the converter: the declarations of its file, and the options of a config."""

    name: str
    options: Any
    exact: bool
    needs: Needs
    make: Callable[[Sequence[FFN], Place, Any], FFN]
    same: Callable[[Place], int] | None
    evidence: str
    slices: int = 1  # the default granularity if the router chooses in each slice

    def expert(self, donors: Sequence[FFN], place: Place) -> FFN:
        return self.make(donors, place, self.options)


def load(name: str, keys: Mapping[str, Any] | None = None) -> Method:
    """Load the method with this name. `keys`: the options under `method:` in a config; missing ones have defaults."""
    module = plugin.load(__name__, name)
    options = build(module.Options, keys or {}, "method.")
    declared = vars(module)
    needs = declared["needs"](options) if "needs" in declared else Needs()
    evidence, slices = declared.get("EVIDENCE", ""), declared.get("SLICES", 1)
    return Method(name, options, module.EXACT, needs, module.expert, declared.get("same"), evidence, slices)


def positive(key: str, value: float) -> None:
    if not 0 < value <= FACTOR:
        raise ValueError(f"{key} is {value}; it must be a number above 0, and at most {FACTOR:g}")


def share(key: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{key} is {value}; it must be a share from 0 to 1")
