"""Split one FFN into disjoint experts (LLaMA-MoE, CMoE): each neuron is in one expert, so the MoE is not larger.

All experts together with equal weights compute the dense FFN. Only top-k of them do not, so a split model must be
trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from upcycle.arch.ffn import FFN
from upcycle.planning import rng
from upcycle.planning.methods import Needs, Place, Sizes

EXACT = False


@dataclass(frozen=True)
class Options:
    # contiguous | random | activation: groups neurons that fire together on `calibration.texts`; a shared
    # expert then gets the most active neurons, else the first
    by: str = "contiguous"

    def check(self, sizes: Sizes) -> None:
        if self.by not in ("contiguous", "random", "activation"):
            raise ValueError(f"method.by is {self.by!r}; write contiguous, random or activation")


def needs(options: Options) -> Needs:
    return Needs(disjoint=True, order="method.by=activation" if options.by == "activation" else "")


def expert(donors: Sequence[FFN], place: Place, options: Options) -> FFN:
    if options.by == "random":
        order = rng.permutation(donors[0].width, place.seed, "split", place.layer)
        return donors[0].neurons(order[place.own()])
    return donors[0].neurons(place.own())  # for activation, Maker.carved has already sorted the neurons
