"""Load balance of the experts: losses, selection bias, capacity and statistics. All of it stays on the device.

Shapes: T tokens, E experts, K experts chosen a token, G slices of a dense FFN, S sequences of L tokens, N MoE layers, F
figures. Counts are int64: adding them up is exact in any order, so a run repeats bit for bit.

The loop sees one object, which attaches itself to the model's MoE blocks:

    balance = Balance(config, model, scale=1 / micro_batches)
    ...forward and backward of every micro-batch...      # losses join the gradient by themselves
    balance.end_step(skip)                               # selection biases move
    if due: print(balance.load.fetch())                  # the only wait
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.kernels import permute, router
from training.model.moe import MoE, Routing

SCOPES = ("micro_batch", "sequence", "global")
POLICIES = ("probability", "position")
TOGETHER = 2**25  # logits whose figures are made at once: 128 MiB
Reduce = Callable[[Tensor], Tensor]  # sums a tensor over the ranks that hold different tokens


@dataclass(frozen=True)
class BalanceConfig:
    # weight of the balance loss; 1e-3 ... 1e-2 are best for upcycling (arXiv 2410.07524), without it experts die; where
    # rows begin balanced (router.init.name=clusters) it was not missed within 13 M tokens
    aux_weight: float = 0.01
    # whose load is balanced: micro_batch | sequence (each on its own: strict) | global: of all ranks, in the step's
    # micro-batches so far (of one micro-batch a step: the whole step), which leaves a micro-batch of one domain free to
    # prefer its experts (arXiv 2501.11873, where counts are accumulated so too)
    aux_scope: str = "global"
    z_weight: float = 0.0  # weight of the z-loss, which keeps logits small; 1e-3 changed nothing in upcycling
    bias_rate: float = 0.0  # DeepSeek-V3's bias on the selection: 1e-3; usually with aux_weight 1e-4 or 0
    # 0: no token is dropped; 1: an expert takes as many as in perfect balance, which cost 0.04 nats on SmolLM2-135M
    # (1.25: 0.002 to 0.005, 2: nothing; docs/study.md)
    capacity_factor: float = 0.0
    drop_policy: str = "probability"  # who stays in a full expert: probability (highest weight) | position (first come)
    # what other ranks' experts are sent is padded to the capacity, so that all sizes are known and no dispatch keeps
    # the host waiting: faster and without fragments at a factor of about 1; buffers grow with the factor. DeepEP 2.x,
    # and 1.x between nodes, do as without
    pad_to_capacity: bool = False

    def __post_init__(self) -> None:
        if self.aux_scope not in SCOPES:
            raise ValueError(f"balance.aux_scope is {self.aux_scope!r}; it must be one of {', '.join(SCOPES)}")
        if self.drop_policy not in POLICIES:
            raise ValueError(f"balance.drop_policy is {self.drop_policy!r}; it must be one of {', '.join(POLICIES)}")
        if self.pad_to_capacity and not self.capacity_factor:
            raise ValueError(
                "balance.pad_to_capacity needs a capacity, and balance.capacity_factor is 0; set that to 1, or drop "
                "pad_to_capacity"
            )
        for name in ("aux_weight", "z_weight", "bias_rate", "capacity_factor"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"balance.{name} is {value}; it must be a number of at least 0, 0 switches it off")


def expert_counts(expert_TK: Tensor, experts: int) -> Tensor:
    """How often each expert was chosen: (..., T, K) -> (..., E). Not bincount, which waits for the device."""
    flat = expert_TK.flatten(-2).long()
    zeros = torch.zeros(*flat.shape[:-1], experts, dtype=torch.int64, device=flat.device)
    return zeros.scatter_add_(-1, flat, torch.ones_like(flat))


def probabilities(logits_TE: Tensor, score: str) -> Tensor:
    """What the balance loss calls the probability of an expert: the scores of all experts, summing to 1 a token."""
    if score == "sigmoid":  # sigmoid(x) / sum, without 0 / 0 where every logit is very negative
        logits_TE = F.logsigmoid(logits_TE)
    return logits_TE.softmax(-1)


def shares(count_E: Tensor, dtype: torch.dtype) -> Tensor:
    """The share of the choices that went to each expert."""
    share_E = count_E.to(dtype)
    return share_E / share_E.sum(-1, keepdim=True).clamp(min=1)


def balance_loss(probability_TE: Tensor, share_E: Tensor) -> Tensor:
    """Switch Transformer's E * sum(f_i * P_i): 1 in balance, up to E. Leading dimensions stay.

    f is the share of the choices that went to an expert and has no gradient; P is the mean probability. The loss is
    linear in P, so with the counts of the whole step in `share_E` the mean over micro-batches and ranks *is* the loss
    of the whole step. "global" comes near to that: it counts the micro-batches so far, of all ranks, since the backward
    of one does not wait for the forward of the next. A step of one micro-batch has exactly that loss. Dropped choices
    count too.
    """
    return share_E.shape[-1] * (share_E * probability_TE.mean(-2)).sum(-1)


def z_loss(logits_TE: Tensor) -> Tensor:
    """ST-MoE's mean squared logsumexp. Leading dimensions stay."""
    return logits_TE.logsumexp(-1).square().mean(-1)


class AuxLoss(torch.autograd.Function):
    """`x = AuxLoss.apply(x, y, slope)`: x unchanged, and in backward y gets the gradient `slope`, which broadcasts to
    it: as if the sum of slope * y were a part of the loss.

    The model need not return its router losses, and a pipeline stage need not send them. The gradient is the same
    whatever the main loss was multiplied with, so scale `slope` by the same factor (1 / micro-batches) yourself.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        ctx.shape = y.shape
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.saved_tensors[0].expand(ctx.shape), None


@torch.no_grad()
def update_bias_(bias_E: Tensor, count_E: Tensor, rate: float, skip: Tensor | None = None) -> None:
    """DeepSeek-V3's rule, once an optimiser step, from the step's counts of all ranks: busy experts down, idle ones up.

    The bias only moves the selection: it is a float32 buffer of the model (in its checkpoint, not a parameter), added
    to the scores for top-k and to nothing else. float32 because bf16 cannot add 1e-3 to 1. Works on (N, E) at once.
    """
    assert bias_E.dtype in (torch.float32, torch.float64), "the selection bias stays float32"
    count = count_E.to(torch.float64)
    change = rate * torch.sign(count.mean(-1, keepdim=True) - count).to(bias_E.dtype)
    bias_E.add_(change if skip is None else torch.where(skip, torch.zeros_like(change), change))


def capacity(tokens: int, top_k: int, experts: int, factor: float) -> int:
    """How many tokens an expert takes: `factor` times its share in perfect balance, rounded up."""
    return min(tokens, math.ceil(factor * tokens * top_k / experts))


@torch.no_grad()
def capacity_mask(
    expert_TK: Tensor, weight_TK: Tensor, experts: int, factor: float, policy: str
) -> tuple[Tensor, Tensor]:
    """Which choices fit: (keep_TK, dropped share). A dropped choice gets weight 0: `weight_TK.where(keep_TK, 0)`.

    The others keep their weight (no renormalisation), so the token passes by on the residual stream. Ties go to the
    earlier token. Two stable sorts instead of a count on the host: nothing waits for the device.
    """
    T, K = expert_TK.shape
    flat = expert_TK.flatten().long()
    if policy == "probability":
        order = torch.argsort(weight_TK.detach().flatten(), descending=True, stable=True)
        order = order[torch.argsort(flat[order], stable=True)]
    else:
        order = torch.argsort(flat, stable=True)
    count_E = expert_counts(expert_TK, experts)
    first_E = count_E.cumsum(0) - count_E  # where an expert's queue starts
    place = torch.arange(T * K, device=flat.device) - first_E[flat[order]]
    keep = torch.empty_like(flat, dtype=torch.bool)
    keep[order] = place < capacity(T, K, experts, factor)
    return keep.view(T, K), 1 - keep.double().mean()


def token_entropy(probability_TE: Tensor) -> Tensor:
    """Mean over tokens of the router's entropy, divided by log E: 1 is undecided, 0 is certain. Leading dimensions
    stay."""
    entropy_T: Tensor = torch.special.entr(probability_TE).sum(-1)
    return entropy_T.mean(-1) / math.log(max(probability_TE.shape[-1], 2))


def coherence(expert_TK: Tensor, granularity: int) -> Tensor:
    """(whole, missing, doubled), means over tokens: do a token's choices make up whole FFNs? Leading dimensions stay.

    Expert e * G + g is slice g of copy e, and a dense FFN is one of each slice, of whatever copies. K choices should be
    n = K / G whole FFNs, so that every slice is there n times. whole: the share of tokens where it is so. missing,
    doubled: how many of the G slices a token has less often, and more often, than n times. Where G does not divide K, n
    is rounded up: no choice is whole then, and the last FFN's missing slices count. A choice that a full expert drops
    counts as made.
    """
    slices, times = granularity, -(-expert_TK.shape[-1] // granularity)
    held_TG = expert_counts((expert_TK % slices)[..., None, :], slices)
    missing_T, doubled_T = (held_TG < times).sum(-1), (held_TG > times).sum(-1)
    return torch.stack([missing_T + doubled_T == 0, missing_T, doubled_T]).double().mean(-1)


# what is averaged over tokens besides the counts
FIGURES = ("dropped", "router_entropy", "aux", "z", "whole", "missing", "doubled")


@dataclass(frozen=True)
class LayerLoad:
    """What a person reads of one MoE layer, over a logging interval; nan where it was not measured."""

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
        """Adds a micro-batch's choices; returns the counts of the step so far, which the next ones change."""
        return permute.count_(self.step_NE[layer], expert_TK)

    @torch.no_grad()
    def average(self, first: int, tokens: int, **means: Tensor | None) -> None:
        """Adds a micro-batch's FIGURES, of the layers from the first one on; one that is left out, or not finite,
        counts for no token."""
        found = [means.get(name) for name in FIGURES]
        layers = max(mean.numel() for mean in found if mean is not None)
        each = [(self.nothing if mean is None else mean.double()).expand(layers) for mean in found]
        mean_NF = torch.stack(each, 1)
        known_NF = mean_NF.isfinite()
        known = torch.stack([mean_NF.where(known_NF, 0), known_NF.double()], 1)
        self.sums_N2F[first : first + layers] += tokens * known

    def state_dict(self) -> dict[str, Tensor]:
        """The interval's sums at a step's end, so that a resumed run logs the same numbers too."""
        return {"total": self.total_NE, "figures": self.sums_N2F, "since": self.since_NE}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.total_NE.copy_(state["total"])
        if "figures" in state:  # older checkpoints have none: they begin at 0
            self.sums_N2F.copy_(state["figures"])
        if "since" in state:
            self.since_NE.copy_(state["since"])

    @torch.no_grad()
    def end_step(self, reduce: Reduce | None = None) -> Tensor:
        """The step's counts, over all ranks if `reduce` sums over them; the next step starts at 0."""
        count_NE = self.step_NE.clone()
        self.total_NE += count_NE
        self.since_NE += count_NE
        self.step_NE.zero_()
        return count_NE if reduce is None else reduce(count_NE)

    @torch.no_grad()
    def fetch(self, reduce: Reduce | None = None) -> list[LayerLoad]:
        """One copy to the host, once a logging interval, of the steps that ended; the next interval starts at 0."""
        table = torch.cat([self.total_NE.double(), self.sums_N2F.flatten(1)], dim=1)
        rows = (table if reduce is None else reduce(table)).tolist()
        self.total_NE.zero_()
        self.sums_N2F.zero_()
        experts, figures = self.total_NE.shape[1], len(FIGURES)
        return [layer_load([int(n) for n in row[:experts]], row[experts:-figures], row[-figures:]) for row in rows]


def layer_load(histogram: list[int], sums: list[float], tokens: list[float]) -> LayerLoad:
    means = {name: s / n if n else math.nan for name, s, n in zip(FIGURES, sums, tokens, strict=True)}
    total = max(sum(histogram), 1)
    shares = [n / total for n in histogram if n]
    return LayerLoad(
        histogram=tuple(histogram),
        max_over_mean=max(histogram) * len(histogram) / total,
        entropy=-sum(p * math.log(p) for p in shares) / math.log(max(len(histogram), 2)),
        **means,
    )


class Routed(NamedTuple):
    """A layer's routing of a micro-batch, as far as the log's figures need it."""

    layer: int
    logits_TE: Tensor
    expert_TK: Tensor
    share_SE: Tensor | None  # of the balance loss
    dropped: Tensor | None  # share of the choices


class Balance:
    """Watches and balances the routers of one model. Forward passes without gradients (validation) run as if it were
    not there: they drop nothing and count nothing.

    scale: the share of a micro-batch's tokens, on this rank, in the whole step's; set it anew when that changes. The
    router losses are means over tokens, so with this weight their plain sum over micro-batches and ranks is the step's.
    sequences: of a micro-batch; needed by scope sequence. reduce: sums counts over all ranks with other tokens;
    reduce_sequence: over those with other parts of the same sequences. Capacity is each rank's own: of its own tokens,
    an expert takes its share of these, whatever the other ranks have ("sub-sequence" dropping; nothing is exchanged).
    """

    def __init__(
        self,
        config: BalanceConfig,
        model: nn.Module,
        *,
        scale: float | Tensor = 1.0,
        sequences: int = 1,
        reduce: Reduce | None = None,
        reduce_sequence: Reduce | None = None,
    ) -> None:
        self.reduce, self.reduce_sequence = reduce, reduce_sequence
        self.blocks = [module for module in model.modules() if isinstance(module, MoE)]
        self.follow(config, scale, sequences)
        experts = self.blocks[0].spec.experts if self.blocks else 0
        device = self.blocks[0].router.weight.device if self.blocks else "cpu"
        self.load = RouterLoad(len(self.blocks), experts, device)
        self.routed: list[Routed] = []  # neighbouring layers of one micro-batch, whose figures are still to be made
        for number, block in enumerate(self.blocks):
            block.balance = partial(self.route, number)

    def follow(self, config: BalanceConfig, scale: float | Tensor, sequences: int) -> None:
        """From here on balance as `config` says."""
        if config.bias_rate and any(block.router.bias is None for block in self.blocks):
            raise ValueError(
                f"balance.bias_rate is {config.bias_rate}, but routers with softmax scores have no selection bias; set "
                "it to 0 and use aux_weight"
            )
        self.config, self.scale, self.sequences = config, scale, sequences

    def route(self, number: int, routing: Routing) -> Routing:
        if not torch.is_grad_enabled():
            return routing
        config, logits_TE, weight_TK = self.config, routing.logits_TN, routing.weight_TK
        tokens, experts = logits_TE.shape
        share_SE = dropped = room = None
        if config.capacity_factor:
            factor, k = config.capacity_factor, routing.expert_TK.shape[1]
            keep_TK, dropped = capacity_mask(routing.expert_TK, weight_TK, experts, factor, config.drop_policy)
            weight_TK = weight_TK.where(keep_TK, 0)
            room = capacity(tokens, k, experts, factor) if config.pad_to_capacity else None
        seen_E = self.load.count(number, routing.expert_TK)
        if config.aux_weight:
            # of softmax routers the scores are the probabilities
            soft = self.blocks[number].spec.score == "softmax"
            probability_TE = routing.scores_TN if soft else probabilities(logits_TE, "sigmoid")
            share_SE = shares(self.counts(seen_E, routing.expert_TK), probability_TE.dtype)
            # the loss is linear in the probabilities: its gradient is known, and what it comes to is only for the log
            slope_SE = share_SE * (config.aux_weight * self.scale * experts / tokens)
            by_sequence = probability_TE.view(len(slope_SE), -1, experts)
            weight_TK = AuxLoss.apply(weight_TK, by_sequence, slope_SE[:, None])  # type: ignore[no-untyped-call]
        if config.z_weight:
            z = z_loss(logits_TE)
            slope = torch.full_like(z, config.z_weight) * self.scale
            weight_TK = AuxLoss.apply(weight_TK, z, slope)  # type: ignore[no-untyped-call]
        self.measure(Routed(number, logits_TE.detach(), routing.expert_TK, share_SE, dropped))
        return routing._replace(weight_TK=weight_TK, room=room)

    def counts(self, seen_E: Tensor, expert_TK: Tensor) -> Tensor:
        """(S, E): what the balance loss calls the load, of all ranks, of each sequence or of everything."""
        if self.config.aux_scope == "sequence":
            parts_SLK = expert_TK.view(self.sequences, -1, expert_TK.shape[-1])
            count_SE = expert_counts(parts_SLK, len(seen_E))
            return count_SE if self.reduce_sequence is None else self.reduce_sequence(count_SE)
        count_E = seen_E if self.config.aux_scope == "global" else expert_counts(expert_TK, len(seen_E))
        return (count_E if self.reduce is None else self.reduce(count_E))[None]

    def measure(self, routed: Routed) -> None:
        """Remembers a layer's routing for the log's figures, which are made of neighbouring layers at once: they take
        dozens of small kernels, and a layer is too short for its own."""
        if self.routed and not (
            routed.layer == self.routed[-1].layer + 1
            and routed.logits_TE.shape == self.routed[-1].logits_TE.shape
            and (len(self.routed) + 1) * routed.logits_TE.numel() <= TOGETHER
        ):
            self.settle()
        self.routed.append(routed)

    @torch.no_grad()
    def settle(self) -> None:
        """Adds what is remembered to the figures."""
        routed, self.routed = self.routed, []
        if not routed:
            return
        spec, experts = self.blocks[0].spec, routed[0].logits_TE.shape[1]
        shared = [r.share_SE for r in routed if r.share_SE is not None]
        share_NSE = torch.stack(shared) if shared else None
        figures: dict[str, Tensor | None]
        aux = dropped = None
        sums = None
        if spec.score == "softmax" and (share_NSE is None or share_NSE.shape[1] == 1):
            sums = [router.summed(r.logits_TE, r.expert_TK, spec.granularity) for r in routed]
        if sums is not None and all(found is not None for found in sums):
            found_NF = torch.stack([found for found in sums if found is not None])
            mean_NE, (z, entropy), whole = found_NF[:, :experts], found_NF[:, experts:-3].T, found_NF[:, -3:].T
            if share_NSE is not None:
                aux = experts * (share_NSE[:, 0] * mean_NE).sum(-1)
            figures = {"aux": aux, "z": z, "router_entropy": entropy / math.log(max(experts, 2))}
        else:
            logits_NTE = torch.stack([r.logits_TE for r in routed])
            probability_NTE = probabilities(logits_NTE, spec.score)
            if share_NSE is not None:
                parts_NSLE = probability_NTE.unflatten(1, (share_NSE.shape[1], -1))  # type: ignore[no-untyped-call]
                aux = balance_loss(parts_NSLE, share_NSE).mean(-1)
            figures = {"aux": aux, "z": z_loss(logits_NTE), "router_entropy": token_entropy(probability_NTE)}
            whole = coherence(torch.stack([r.expert_TK for r in routed]), spec.granularity)
        if self.config.capacity_factor:
            dropped = torch.stack([r.dropped for r in routed if r.dropped is not None])
        figures["dropped"] = dropped
        if spec.copies_of_slices:
            figures |= dict(zip(("whole", "missing", "doubled"), whole, strict=True))
        self.load.average(routed[0].layer, len(routed[0].logits_TE), **figures)

    @torch.no_grad()
    def end_step(self, skip: Tensor | None = None) -> None:
        """Moves the selection biases; call it after the optimiser's step, with the same `skip`."""
        self.settle()
        count_NE = self.load.end_step(self.reduce if self.config.bias_rate else None)
        if self.config.bias_rate:
            for block, count_E in zip(self.blocks, count_NE, strict=True):
                assert block.router.bias is not None
                update_bias_(block.router.bias, count_E, self.config.bias_rate, skip)
