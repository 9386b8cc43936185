"""Copies (or virtual groups) with Gaussian noise on all or some neurons, which makes the experts different."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from upcycle.arch.ffn import FFN, NEURON_DIM
from upcycle.planning import rng
from upcycle.planning.methods import Place, Sizes, positive, share

EXACT = False


@dataclass(frozen=True)
class Options:
    std: float = 0.01  # standard deviation of the noise, absolute as mergekit's noise_scale
    ratio: float = 1.0  # share of the neurons that get noise, drawn for each expert

    def check(self, sizes: Sizes) -> None:
        positive("method.std", self.std)
        share("method.ratio", self.ratio)


def expert(donors: Sequence[FFN], place: Place, options: Options) -> FFN:
    ffn = place.shard(donors[0])
    chosen = rng.permutation(ffn.width, place.seed, "noise", place.layer, place.index)[: int(options.ratio * ffn.width)]

    def add(matrix: str, w: Tensor) -> Tensor:
        dim = NEURON_DIM.get(matrix)
        if dim is None:
            return w  # down's bias belongs to no neuron
        w = w.to(torch.promote_types(w.dtype, torch.float32), copy=True)
        part = w.index_select(dim, chosen)
        part += options.std * rng.normal(tuple(part.shape), place.seed, "noise", place.layer, place.index, matrix)
        return w.index_copy_(dim, chosen, part)

    return ffn.map(add)
