"""Branch-Train-MiX (Sukhbaatar et al., 2403.07816): expert e is the FFN of donor e.

The donors are dense models, trained separately from one seed model. All tensors outside the experts are the donors'
average, or come from `source`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from upcycle.arch.ffn import FFN
from upcycle.planning.methods import Needs, Place, Sizes

EXACT = False


@dataclass(frozen=True)
class Options:
    rest: str = "average"  # tensors outside the experts: average (of the donors) | base (from `source`)

    def check(self, sizes: Sizes) -> None:
        if self.rest not in ("average", "base"):
            raise ValueError(f"method.rest is {self.rest!r}; write average or base")


def needs(options: Options) -> Needs:
    return Needs(donors=("own",), rest="mean" if options.rest == "average" else "source")


def expert(donors: Sequence[FFN], place: Place, options: Options) -> FFN:
    return place.shard(donors[0])
