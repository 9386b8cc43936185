"""Count what routers choose, on the device, and turn it into the figures that a person reads.

Shapes: T tokens, E experts, K experts chosen a token, G slices of a dense FFN, N MoE layers, F figures. Counts are
int64: adding them up is exact in any order, so a run repeats bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from training.kernels import permute

Reduce = Callable[[Tensor], Tensor]  # sums a tensor over the ranks that hold different tokens
# what is averaged over tokens besides the counts
FIGURES = ("dropped", "router_entropy", "aux", "z", "whole", "missing", "doubled")


def expert_counts(expert_TK: Tensor, experts: int) -> Tensor:
    """Count how often each expert was chosen: (..., T, K) -> (..., E). torch.bincount waits for the device."""
    flat = expert_TK.flatten(-2).long()
    zeros = torch.zeros(*flat.shape[:-1], experts, dtype=torch.int64, device=flat.device)
    return zeros.scatter_add_(-1, flat, torch.ones_like(flat))


def token_entropy(probability_TE: Tensor) -> Tensor:
    """Return the mean over tokens of the router's entropy, divided by log E: 1 is undecided, 0 is certain."""
    entropy_T: Tensor = torch.special.entr(probability_TE).sum(-1)
    return entropy_T.mean(-1) / math.log(max(probability_TE.shape[-1], 2))


def coherence(expert_TK: Tensor, granularity: int) -> Tensor:
    """Return whether a token's choices make up whole FFNs: (whole, missing, doubled), means over tokens.

    Expert e * G + g is slice g of copy e, and a dense FFN is one of each slice, of whatever copies. K choices should be
    n = K / G whole FFNs, so that every slice is there n times. whole: the share of tokens where it is so. missing,
    doubled: how many of the G slices a token has less often, and more often, than n times. Where G does not divide K, n
    is rounded up: no choice is whole then. A choice that a full expert drops counts as made.
    """
    slices, times = granularity, -(-expert_TK.shape[-1] // granularity)
    held_TG = expert_counts((expert_TK % slices)[..., None, :], slices)
    missing_T, doubled_T = (held_TG < times).sum(-1), (held_TG > times).sum(-1)
    return torch.stack([missing_T + doubled_T == 0, missing_T, doubled_T]).double().mean(-1)


@dataclass(frozen=True)
class LayerLoad:
    """The figures of one MoE layer over a logging interval; nan where it was not measured."""

    histogram: tuple[int, ...]  # choices an expert
    max_over_mean: float  # 1 in balance; what the slowest rank waits for
    entropy: float  # of the histogram, divided by log E: 1 in balance
    dropped: float  # share of the choices, where a capacity drops any
    router_entropy: float  # mean over tokens, see token_entropy
    aux: float  # the balance loss before its weight: 1 in balance
    z: float  # the z-loss before its weight
    whole: float  # share of tokens; these three see coherence
    missing: float  # slices a token
    doubled: float


class RouterLoad:
    """Counts of all MoE layers, kept on the device: of the current step, and of the interval since the last `fetch`.

    Call `add` once a forward, outside of what activation checkpointing recomputes, or choices count twice.
    """

    def __init__(self, layers: int, experts: int, device: torch.device | str = "cpu") -> None:
        self.step_NE = torch.zeros(layers, experts, dtype=torch.int64, device=device)
        self.total_NE = torch.zeros_like(self.step_NE)
        self.since_NE = torch.zeros_like(self.step_NE)  # since an island's last exchange, which starts it at 0
        # each figure's sum over tokens, and the number of tokens in it
        self.sums_N2F = torch.zeros(layers, 2, len(FIGURES), dtype=torch.float64, device=device)
        self.nothing = torch.full((), math.nan, dtype=torch.float64, device=device)

    def count(self, layer: int, expert_TK: Tensor) -> Tensor:
        """Add a micro-batch's choices; return the counts of the step so far, which the next ones change."""
        return permute.count_(self.step_NE[layer], expert_TK)

    @torch.no_grad()
    def average(self, first: int, tokens: int, **means: Tensor | None) -> None:
        """Add a micro-batch's FIGURES, of the layers from the first one on; one that is left out, or not finite, counts
        for no token."""
        found = [means.get(name) for name in FIGURES]
        layers = max(mean.numel() for mean in found if mean is not None)
        each = [(self.nothing if mean is None else mean.double()).expand(layers) for mean in found]
        mean_NF = torch.stack(each, 1)
        known_NF = mean_NF.isfinite()
        known = torch.stack([mean_NF.where(known_NF, 0), known_NF.double()], 1)
        self.sums_N2F[first : first + layers] += tokens * known

    def state_dict(self) -> dict[str, Tensor]:
        """Return the interval's sums at a step's end, with which a resumed run logs the same numbers."""
        return {"total": self.total_NE, "figures": self.sums_N2F, "since": self.since_NE}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, own in self.state_dict().items():
            if name in state:  # a checkpoint of older figures has fewer
                own.copy_(state[name])

    @torch.no_grad()
    def end_step(self, reduce: Reduce | None = None) -> Tensor:
        """Return the step's counts, over all ranks if `reduce` sums over them; the next step starts at 0."""
        count_NE = self.step_NE.clone()
        self.total_NE += count_NE
        self.since_NE += count_NE
        self.step_NE.zero_()
        return count_NE if reduce is None else reduce(count_NE)

    @torch.no_grad()
    def fetch(self, reduce: Reduce | None = None) -> list[LayerLoad]:
        """Copy the steps that ended to the host, once a logging interval; the next interval starts at 0."""
        table = torch.cat([self.total_NE.double(), self.sums_N2F.flatten(1)], dim=1)
        rows = (table if reduce is None else reduce(table)).tolist()
        self.total_NE.zero_()
        self.sums_N2F.zero_()
        experts, figures = self.total_NE.shape[1], len(FIGURES)
        return [layer_load([int(n) for n in row[:experts]], row[experts:-figures], row[-figures:]) for row in rows]


def layer_load(histogram: list[int], sums: list[float], tokens: list[float]) -> LayerLoad:
    """Return a layer's figures from its counts, and from each figure's sum over tokens and number of tokens."""
    means = {name: s / n if n else math.nan for name, s, n in zip(FIGURES, sums, tokens, strict=True)}
    total = max(sum(histogram), 1)
    shares = [n / total for n in histogram if n]
    return LayerLoad(
        histogram=tuple(histogram),
        max_over_mean=max(histogram) * len(histogram) / total,
        entropy=-sum(p * math.log(p) for p in shares) / math.log(max(len(histogram), 2)),
        **means,
    )
