"""Virtual-group upcycling (He et al., 2410.07524): E copies of the dense FFN, each cut into G parts.

Expert e * G + g is part g of copy e. The G experts of a copy share one router row (routers.py), so top-k takes whole
copies if top_k is a multiple of G. The weighted sum is then the dense output divided by G; the scale multiplies by G.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from upcycle.arch.ffn import FFN
from upcycle.planning.methods import Place, Sizes

EXACT = True
SLICES = 4  # 16 copies of 4 slices, top-4, were ahead of dense in docs/science.md


@dataclass(frozen=True)
class Options:
    def check(self, sizes: Sizes) -> None:
        pass


def expert(donors: Sequence[FFN], place: Place, options: Options) -> FFN:
    return place.shard(donors[0])


def same(place: Place) -> int:
    return place.part
