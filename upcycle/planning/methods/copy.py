"""Sparse upcycling (Komatsuzaki et al.): every expert is a copy of the dense FFN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from upcycle.arch.ffn import FFN
from upcycle.planning.methods import Place, Sizes

EXACT = True


@dataclass(frozen=True)
class Options:
    def check(self, sizes: Sizes) -> None:
        if sizes.granularity != 1:
            raise ValueError(
                f"method copy needs granularity=1, got granularity={sizes.granularity}; use method.name=virtual_group"
            )


def expert(donors: Sequence[FFN], place: Place, options: Options) -> FFN:
    return donors[0]


def same(place: Place) -> int:
    """Return one key for all experts: they have equal bytes, so one tensor is computed and written many times."""
    return 0
