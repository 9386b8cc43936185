"""Drop-Upcycling (Nakamura et al., 2502.19261): each expert keeps most neurons and redraws a share `ratio` of them.

`paper`: each expert redraws one set of neurons in all its matrices: a share 1 - ratio stays intact.
`released`: as in the published code, each matrix has its own set, so only (1 - ratio)^3 of the neurons of a gated FFN
stay intact. The two start from very different models (cosine 0.63 and 0.20 to the dense output at ratio 0.5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from upcycle.arch.ffn import FFN, NEURON_DIM
from upcycle.planning import rng
from upcycle.planning.methods import Place, Sizes, share

EXACT = False
EVIDENCE = (
    "method drop pays off only after about 100 B tokens: it starts far from the dense model, and its authors trained "
    "500 B; with fewer tokens use method.name=copy"
)


@dataclass(frozen=True)
class Options:
    ratio: float = 0.5  # share of the neurons that are redrawn
    mode: str = "paper"  # paper: one set of neurons per expert | released: a different set in each matrix

    def check(self, sizes: Sizes) -> None:
        share("method.ratio", self.ratio)
        if self.mode not in ("paper", "released"):
            raise ValueError(f"method.mode is {self.mode!r}; write paper or released")


def expert(donors: Sequence[FFN], place: Place, options: Options) -> FFN:
    ffn = place.shard(donors[0])
    expert_key = (place.layer, place.index)

    def redraw(matrix: str, w: Tensor) -> Tensor:
        dim = NEURON_DIM.get(matrix)
        if dim is None:
            return w
        draw_key = expert_key if options.mode == "paper" else (*expert_key, matrix)
        chosen = rng.permutation(ffn.width, place.seed, "drop", *draw_key)[: int(options.ratio * ffn.width)]
        if not chosen.numel():
            return w
        w = w.to(torch.promote_types(w.dtype, torch.float32), copy=True)
        old = w.index_select(dim, chosen)
        mean, std = old.mean(), old.std(correction=0)  # of the replaced neurons in this matrix
        new = mean + std * rng.normal(tuple(old.shape), place.seed, "drop values", *expert_key, matrix)
        return w.index_copy_(dim, chosen, new.to(w.dtype))

    return ffn.map(redraw)
