"""Copies that one corpus teaches: copy 0 is the anchor, the dense FFN itself, which never learns.

A router sends tokens that fit the corpus to the other copies, and all others to the anchor. They start equal, so the
start is the dense model; whatever the copies learn, a text whose tokens all stay has its function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from upcycle.arch.ffn import FFN
from upcycle.planning.methods import Needs, Place, Sizes

EXACT = True


@dataclass(frozen=True)
class Options:
    part: str = "part"  # the name of the part that the copies after the first are

    def check(self, sizes: Sizes) -> None:
        if sizes.copies < 2:
            raise ValueError(f"experts is {sizes.copies}; a part needs an anchor and at least one copy, so write 2")


def needs(options: Options) -> Needs:
    return Needs(part=options.part)


def expert(donors: Sequence[FFN], place: Place, options: Options) -> FFN:
    return place.shard(donors[0])


def same(place: Place) -> int:
    return place.part
