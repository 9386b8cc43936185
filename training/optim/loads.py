"""Count the routers' choices on the device and turn the counts into the statistics of the log.

Shapes: T tokens, E experts, K experts chosen a token, G slices of a dense FFN, N MoE layers, F figures. Counts are
int64: their sum is exact in any order, so a run repeats bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from training.kernels import permute

Reduce = Callable[[Tensor], Tensor]  # sums a tensor over the ranks that hold different tokens
# averaged over tokens, in addition to the counts
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

    Expert e * G + g is slice g of copy e. A dense FFN is one of each slice, from any copies. K choices should be n = K
    / G whole FFNs, with every slice n times. whole: the share of tokens for which this holds. missing and doubled: the
    slices that a token has fewer or more than n times. If G does not divide K, n is rounded up and no choice is whole.
    Choices that a full expert drops count too.
    """
    slices, times = granularity, -(-expert_TK.shape[-1] // granularity)
    held_TG = expert_counts((expert_TK % slices)[..., None, :], slices)
    missing_T, doubled_T = (held_TG < times).sum(-1), (held_TG > times).sum(-1)
    return torch.stack([missing_T + doubled_T == 0, missing_T, doubled_T]).double().mean(-1)


@dataclass(frozen=True)
class LayerLoad:
    """The statistics of one MoE layer over a logging interval; nan if not measured."""

    histogram: tuple[int, ...]  # choices of each expert
    max_over_mean: float  # 1 in balance; the slowest rank sets the pace
    entropy: float  # of the histogram, divided by log E: 1 in balance
    dropped: float  # share of the choices that the capacity dropped
    router_entropy: float  # mean over tokens, see token_entropy
    aux: float  # the balance loss before its weight: 1 in balance
    z: float  # the z-loss before its weight
    whole: float  # share of tokens; for this and the next two see coherence
    missing: float  # slices a token
    doubled: float


class RouterLoad:
    """The counts of all MoE layers on the device: for the current step, and since the last `fetch`.

    Call `count` once per forward, outside of recomputed parts, or choices count twice.
    """

    def __init__(self, layers: int, experts: int, device: torch.device | str = "cpu") -> None:
        self.step_NE = torch.zeros(layers, experts, dtype=torch.int64, device=device)
        self.total_NE = torch.zeros_like(self.step_NE)
        self.since_NE = torch.zeros_like(self.step_NE)  # since an island's last exchange, which starts it at 0
        # each figure's sum over tokens, and the number of tokens in it
        self.sums_N2F = torch.zeros(layers, 2, len(FIGURES), dtype=torch.float64, device=device)
        self.nothing = torch.full((), math.nan, dtype=torch.float64, device=device)

    def count(self, layer: int, expert_TK: Tensor) -> Tensor:
        """Add a micro-batch's choices and return the counts of the step so far; later calls change the same tensor."""
        return permute.count_(self.step_NE[layer], expert_TK)

    @torch.no_grad()
    def average(self, first: int, tokens: int, **means: Tensor | None) -> None:
        """Add a micro-batch's FIGURES for the layers from `first` on. A figure that is missing or not finite counts for
        no token."""
        found = [means.get(name) for name in FIGURES]
        layers = max(mean.numel() for mean in found if mean is not None)
        each = [(self.nothing if mean is None else mean.double()).expand(layers) for mean in found]
        mean_NF = torch.stack(each, 1)
        known_NF = mean_NF.isfinite()
        known = torch.stack([mean_NF.where(known_NF, 0), known_NF.double()], 1)
        self.sums_N2F[first : first + layers] += tokens * known

    def state_dict(self) -> dict[str, Tensor]:
        """Return the interval's sums at the end of a step, so that a resumed run logs the same numbers."""
        return {"total": self.total_NE, "figures": self.sums_N2F, "since": self.since_NE}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, own in self.state_dict().items():
            if name in state:  # older checkpoints have fewer figures
                own.copy_(state[name])

    @torch.no_grad()
    def end_step(self, reduce: Reduce | None = None) -> Tensor:
        """Return the step's counts, summed over ranks by `reduce`, and start the next step at 0."""
        count_NE = self.step_NE.clone()
        self.total_NE += count_NE
        self.since_NE += count_NE
        self.step_NE.zero_()
        return count_NE if reduce is None else reduce(count_NE)

    @torch.no_grad()
    def fetch(self, reduce: Reduce | None = None) -> list[LayerLoad]:
        """Copy the finished steps' statistics to the host and start the next interval at 0."""
        table = torch.cat([self.total_NE.double(), self.sums_N2F.flatten(1)], dim=1)
        rows = (table if reduce is None else reduce(table)).tolist()
        self.total_NE.zero_()
        self.sums_N2F.zero_()
        experts, figures = self.total_NE.shape[1], len(FIGURES)
        return [layer_load([int(n) for n in row[:experts]], row[experts:-figures], row[-figures:]) for row in rows]


def layer_load(histogram: list[int], sums: list[float], tokens: list[float]) -> LayerLoad:
    """Return a layer's statistics from its counts and from each figure's sum and number of tokens."""
    means = {name: s / n if n else math.nan for name, s, n in zip(FIGURES, sums, tokens, strict=True)}
    total = max(sum(histogram), 1)
    shares = [n / total for n in histogram if n]
    return LayerLoad(
        histogram=tuple(histogram),
        max_over_mean=max(histogram) * len(histogram) / total,
        entropy=-sum(p * math.log(p) for p in shares) / math.log(max(len(histogram), 2)),
        **means,
    )
