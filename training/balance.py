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
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.model.moe import MoE, Routing

SCOPES = ("micro_batch", "sequence", "global")
POLICIES = ("probability", "position")
Reduce = Callable[[Tensor], Tensor]  # sums a tensor over the ranks that hold different tokens


@dataclass(frozen=True)
class BalanceConfig:
    aux_weight: float = 0.01  # weight of the balance loss; 1e-3 ... 1e-2 are best for upcycling, without it experts die
    # whose load is balanced: micro_batch | sequence (each on its own: strict) | global: of all ranks, in the step's
    # micro-batches so far (of one micro-batch a step: the whole step), which leaves a micro-batch of one domain free to
    # prefer its experts (arXiv 2501.11873, where counts are accumulated so too)
    aux_scope: str = "global"
    z_weight: float = 0.0  # weight of the z-loss, which keeps logits small; 1e-3 changed nothing in upcycling
    bias_rate: float = 0.0  # DeepSeek-V3's bias on the selection: 1e-3; usually with aux_weight 1e-4 or 0
    capacity_factor: float = 0.0  # 0: no token is dropped; 1: an expert takes as many as in perfect balance
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


def balance_loss(probability_TE: Tensor, count_E: Tensor) -> Tensor:
    """Switch Transformer's E * sum(f_i * P_i): 1 in balance, up to E. Leading dimensions (sequences) are averaged.

    f is the share of the choices that went to an expert and has no gradient; P is the mean probability. The loss is
    linear in P, so with the counts of the whole step as `count_E` the mean over micro-batches and ranks *is* the loss
    of the whole step. "global" comes near to that: it counts the micro-batches so far, of all ranks, since the backward
    of one does not wait for the forward of the next. A step of one micro-batch has exactly that loss. Dropped choices
    count too.
    """
    share_E = count_E.to(probability_TE.dtype)
    share_E = share_E / share_E.sum(-1, keepdim=True).clamp(min=1)
    return count_E.shape[-1] * (share_E * probability_TE.mean(-2)).sum(-1).mean()


def z_loss(logits_TE: Tensor) -> Tensor:
    """ST-MoE's mean squared logsumexp."""
    return logits_TE.logsumexp(-1).square().mean()


class RouterLoss(NamedTuple):
    total: Tensor  # weighted
    aux: Tensor | None  # the balance loss as it is; None without a weight
    z: Tensor


def router_loss(
    config: BalanceConfig,
    logits_TE: Tensor,
    probability_TE: Tensor,
    expert_TK: Tensor,
    count_E: Tensor,
    sequences: int = 1,
    reduce: Reduce | None = None,
) -> RouterLoss:
    """Balance and z-loss of one layer's micro-batch, tokens in order of `sequences` sequences of one length.

    `count_E`: for scope micro_batch, of the micro-batch over all ranks; for global, of the step so far. `reduce`: for
    scope sequence, sums counts over the ranks that a sequence is spread over.
    """
    total, aux = torch.zeros((), dtype=logits_TE.dtype, device=logits_TE.device), None
    if config.aux_weight:
        if config.aux_scope == "sequence":
            experts = logits_TE.shape[-1]
            probability_TE = probability_TE.view(sequences, -1, experts)
            count_E = expert_counts(expert_TK.view(sequences, -1, expert_TK.shape[-1]), experts)
            count_E = count_E if reduce is None else reduce(count_E)
        aux = balance_loss(probability_TE, count_E)
        total = total + config.aux_weight * aux
    z = z_loss(logits_TE if config.z_weight else logits_TE.detach())
    return RouterLoss(total + config.z_weight * z if config.z_weight else total, aux, z)


class AuxLoss(torch.autograd.Function):
    """`x = AuxLoss.apply(x, loss)`: x unchanged, and in backward `loss` gets the gradient 1.

    The model need not return its router losses, and a pipeline stage need not send them. The gradient is 1 whatever the
    main loss was multiplied with, so scale `loss` by the same factor (1 / micro-batches) yourself.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype, ctx.device = loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones((), dtype=ctx.dtype, device=ctx.device)


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
    """Mean over tokens of the router's entropy, divided by log E: 1 is undecided, 0 is certain."""
    entropy_T: Tensor = torch.special.entr(probability_TE).sum(-1)
    return entropy_T.mean() / math.log(max(probability_TE.shape[-1], 2))


def coherence(expert_TK: Tensor, granularity: int) -> Tensor:
    """(whole, missing, doubled), means over tokens: do a token's choices make up whole FFNs?

    Expert e * G + g is slice g of copy e, and a dense FFN is one of each slice, of whatever copies. K choices should be
    n = K / G whole FFNs, so that every slice is there n times. whole: the share of tokens where it is so. missing,
    doubled: how many of the G slices a token has less often, and more often, than n times. Where G does not divide K, n
    is rounded up: no choice is whole then, and the last FFN's missing slices count. A choice that a full expert drops
    counts as made.
    """
    slices, times = granularity, -(-expert_TK.shape[1] // granularity)
    held_TG = expert_counts((expert_TK % slices)[:, None], slices)
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
    dropped: float  # share of the choices
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
        # each figure's sum over tokens, and the number of tokens in it
        self.sums_N2F = torch.zeros(layers, 2, len(FIGURES), dtype=torch.float64, device=device)
        self.nothing = torch.full((), math.nan, dtype=torch.float64, device=device)

    @torch.no_grad()
    def count(self, layer: int, count_E: Tensor) -> Tensor:
        """Adds a micro-batch; returns the counts of the step so far (a copy: backward may still need it)."""
        self.step_NE[layer] += count_E
        return self.step_NE[layer].clone()

    @torch.no_grad()
    def average(self, layer: int, tokens: int, **means: Tensor | None) -> None:
        """Adds a micro-batch's FIGURES; one that is left out, or not finite, counts for no token."""
        found = (means.get(name) for name in FIGURES)
        mean_F = torch.stack([self.nothing if mean is None else mean.double() for mean in found])
        known_F = mean_F.isfinite()
        self.sums_N2F[layer] += tokens * torch.stack([mean_F.where(known_F, 0), known_F.double()])

    def state_dict(self) -> dict[str, Tensor]:
        """The interval's sums at a step's end, so that a resumed run logs the same numbers too."""
        return {"total": self.total_NE, "figures": self.sums_N2F}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.total_NE.copy_(state["total"])
        if "figures" in state:  # older checkpoints have none: they begin at 0
            self.sums_N2F.copy_(state["figures"])

    @torch.no_grad()
    def end_step(self, reduce: Reduce | None = None) -> Tensor:
        """The step's counts, over all ranks if `reduce` sums over them; the next step starts at 0."""
        count_NE = self.step_NE.clone()
        self.total_NE += count_NE
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
        self.config, self.scale, self.sequences = config, scale, sequences
        self.reduce, self.reduce_sequence = reduce, reduce_sequence
        self.blocks = [module for module in model.modules() if isinstance(module, MoE)]
        if config.bias_rate and any(block.router.bias is None for block in self.blocks):
            raise ValueError(
                f"balance.bias_rate is {config.bias_rate}, but routers with softmax scores have no selection bias; set "
                "it to 0 and use aux_weight"
            )
        experts = self.blocks[0].spec.experts if self.blocks else 0
        device = self.blocks[0].router.weight.device if self.blocks else "cpu"
        self.load = RouterLoad(len(self.blocks), experts, device)
        for number, block in enumerate(self.blocks):
            block.balance = partial(self.route, number)

    def route(self, number: int, routing: Routing) -> Routing:
        if not torch.is_grad_enabled():
            return routing
        config, score = self.config, self.blocks[number].spec.score
        tokens, experts = routing.logits_TN.shape
        weight_TK, dropped, room = routing.weight_TK, torch.zeros_like(self.load.nothing), None
        if config.capacity_factor:
            factor, k = config.capacity_factor, routing.expert_TK.shape[1]
            keep_TK, dropped = capacity_mask(routing.expert_TK, weight_TK, experts, factor, config.drop_policy)
            weight_TK = weight_TK.where(keep_TK, 0)
            room = capacity(tokens, k, experts, factor) if config.pad_to_capacity else None
        # of softmax routers the scores are the probabilities
        probability_TE = routing.scores_TN if score == "softmax" else probabilities(routing.logits_TN, score)
        count_E = expert_counts(routing.expert_TK, experts)
        seen_E = self.load.count(number, count_E)
        if config.aux_weight and config.aux_scope != "sequence":
            count_E = seen_E if config.aux_scope == "global" else count_E
            count_E = count_E if self.reduce is None else self.reduce(count_E)
        loss = router_loss(
            config, routing.logits_TN, probability_TE, routing.expert_TK, count_E, self.sequences, self.reduce_sequence
        )
        if config.aux_weight or config.z_weight:
            weight_TK = AuxLoss.apply(weight_TK, loss.total * self.scale)  # type: ignore[no-untyped-call]
        self.load.average(
            number,
            tokens,
            dropped=dropped,
            router_entropy=token_entropy(probability_TE.detach()),
            aux=loss.aux,
            z=loss.z,
            **self.slices(routing.expert_TK),
        )
        return replace(routing, weight_TK=weight_TK, room=room)

    def slices(self, expert_TK: Tensor) -> dict[str, Tensor]:
        """The figures of coherence, where it is known that experts are copies of slices."""
        spec = self.blocks[0].spec
        if not spec.copies_of_slices:
            return {}
        return dict(zip(("whole", "missing", "doubled"), coherence(expert_TK, spec.granularity), strict=True))

    @torch.no_grad()
    def end_step(self, skip: Tensor | None = None) -> None:
        """Moves the selection biases; call it after the optimiser's step, with the same `skip`."""
        count_NE = self.load.end_step(self.reduce if self.config.bias_rate else None)
        if self.config.bias_rate:
            for block, count_E in zip(self.blocks, count_NE, strict=True):
                assert block.router.bias is not None
                update_bias_(block.router.bias, count_E, self.config.bias_rate, skip)
