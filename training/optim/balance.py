"""Balance the load of experts: losses, selection bias, capacity. Everything stays on the device.

Shapes: T tokens, E experts, K experts chosen a token, S sequences of L tokens, N MoE layers.

The loop sees one object, which attaches itself to the model's MoE blocks:

    balance = Balance(config, model, scale=1 / micro_batches)
    ...forward and backward of every micro-batch...      # losses join the gradient by themselves
    balance.end_step(skip)                               # selection biases move
    if due: print(balance.load.fetch())                  # the only wait
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.kernels import router
from training.model.moe import MoE, Routing
from training.optim.loads import Reduce, RouterLoad, coherence, expert_counts, token_entropy
from upcycle.config.values import check_values, finite, one_of

SCOPES = ("micro_batch", "sequence", "global")
POLICIES = ("probability", "position")
TOGETHER = 2**25  # logits whose statistics are computed at once: 128 MiB


@dataclass(frozen=True)
class BalanceConfig:
    # weight of the balance loss; 1e-3 to 1e-2 are best for upcycling, and without it experts die (arXiv 2410.07524)
    aux_weight: float = 0.01
    # the tokens whose load is balanced: micro_batch | sequence (each sequence separately, strict) | global: all ranks
    # and the step's micro-batches so far, so that a micro-batch of one domain may prefer its experts (arXiv 2501.11873)
    aux_scope: str = "global"
    z_weight: float = 0.0  # weight of the z-loss, which keeps logits small; 1e-3 changed nothing in upcycling
    bias_rate: float = 0.0  # rate of DeepSeek-V3's selection bias, for example 1e-3; use it with aux_weight 1e-4 or 0
    # 0: no token is dropped; 1: an expert takes as many tokens as in perfect balance (docs/choose.md: costs)
    capacity_factor: float = 0.0
    # which tokens a full expert keeps: probability (highest weight) | position (first come)
    drop_policy: str = "probability"
    # pad the rows for other ranks to the capacity: sizes are known, the host never waits, memory does not fragment;
    # faster at a factor of about 1, and buffers grow with it. DeepEP 2.x, and 1.x between nodes, ignore it
    pad_to_capacity: bool = False

    def __post_init__(self) -> None:
        off = finite(", 0 switches it off")
        rules = {"aux_scope": one_of(SCOPES), "drop_policy": one_of(POLICIES)}
        check_values(self, "balance.", {**rules, "aux_weight z_weight bias_rate capacity_factor": off})
        if self.pad_to_capacity and not self.capacity_factor:
            raise ValueError(
                "balance.pad_to_capacity needs a capacity, and balance.capacity_factor is 0; set that to 1, or drop "
                "pad_to_capacity"
            )


def probabilities(logits_TE: Tensor, score: str) -> Tensor:
    """Return each expert's probability in the balance loss: its share of the token's scores."""
    if score == "sigmoid":  # sigmoid(x) / sum, without 0 / 0 if every logit is very negative
        logits_TE = F.logsigmoid(logits_TE)
    return logits_TE.softmax(-1)


def shares(count_E: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the share of the choices that went to each expert."""
    share_E = count_E.to(dtype)
    return share_E / share_E.sum(-1, keepdim=True).clamp(min=1)


def balance_loss(probability_TE: Tensor, share_E: Tensor) -> Tensor:
    """Return Switch Transformer's balance loss E * sum(f_i * P_i), from 1 in balance to E. Leading dimensions stay.

    f is the share of the choices that went to an expert and has no gradient; P is the mean probability. The loss is
    linear in P, so with the counts of the whole step the mean over micro-batches and ranks is the loss of the whole
    step. Scope "global" has the counts of the micro-batches so far, since no backward waits for the next forward.
    """
    return share_E.shape[-1] * (share_E * probability_TE.mean(-2)).sum(-1)


def z_loss(logits_TE: Tensor) -> Tensor:
    """Return ST-MoE's mean squared logsumexp. Leading dimensions stay."""
    return logits_TE.logsumexp(-1).square().mean(-1)


class AuxLoss(torch.autograd.Function):
    """Return x unchanged, and give y the gradient `slope` in backward, as if slope * y were part of the loss.

    So models need not return their router losses, and pipeline stages need not send them.
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
    """Lower the selection bias of busy experts and raise that of idle ones, by DeepSeek-V3's rule, from a step's
    counts.

    The bias changes the selection only. It is float32, because bf16 cannot add 1e-3 to 1.
    """
    assert bias_E.dtype in (torch.float32, torch.float64), "the selection bias stays float32"
    count = count_E.to(torch.float64)
    change = rate * torch.sign(count.mean(-1, keepdim=True) - count).to(bias_E.dtype)
    bias_E.add_(change if skip is None else torch.where(skip, torch.zeros_like(change), change))


def capacity(tokens: int, top_k: int, experts: int, factor: float) -> int:
    """Return the capacity of an expert: `factor` times its tokens in perfect balance, rounded up."""
    return min(tokens, math.ceil(factor * tokens * top_k / experts))


@torch.no_grad()
def capacity_mask(
    expert_TK: Tensor, weight_TK: Tensor, experts: int, factor: float, policy: str
) -> tuple[Tensor, Tensor]:
    """Return which choices fit into the capacity, and the share that is dropped. Ties go to the earlier token.

    A dropped choice gets weight 0; the others keep their weight. Two stable sorts never wait for the device.
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


class Routed(NamedTuple):
    """The routing of one layer and micro-batch, as the log's statistics need it."""

    layer: int
    logits_TE: Tensor
    expert_TK: Tensor
    share_SE: Tensor | None  # of the balance loss
    dropped: Tensor | None  # share of the choices


class Balance:
    """Measure and balance the routers of one model. Forward passes without gradients drop and count nothing.

    scale: this rank's tokens of a micro-batch divided by the tokens of the step, so that router losses, which are
    means, add up to the step's. sequences: sequences per micro-batch, for scope sequence. reduce: sums counts over all
    ranks with other tokens; reduce_sequence: over ranks with other parts of the same sequences. An expert's capacity
    depends on this rank's own tokens only.
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
        self.routed: list[Routed] = []  # layers of one micro-batch whose statistics are not computed yet
        for number, block in enumerate(self.blocks):
            block.balance = partial(self.route, number)

    def follow(self, config: BalanceConfig, scale: float | Tensor, sequences: int) -> None:
        """Use this balance config from now on."""
        if config.bias_rate and any(block.router.bias is None for block in self.blocks):
            raise ValueError(
                f"balance.bias_rate is {config.bias_rate}, but routers with softmax scores have no selection bias; set "
                "it to 0 and use aux_weight"
            )
        self.config, self.scale, self.sequences = config, scale, sequences

    def route(self, number: int, routing: Routing) -> Routing:
        """Return a layer's routing with its router losses attached and without the choices that exceed the capacity."""
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
            # the scores of a softmax router are its probabilities
            soft = self.blocks[number].spec.score == "softmax"
            probability_TE = routing.scores_TN if soft else probabilities(logits_TE, "sigmoid")
            share_SE = shares(self.counts(seen_E, routing.expert_TK), probability_TE.dtype)
            # the loss is linear in the probabilities, so its gradient is known; its value is only for the log
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
        """Return the load that the balance loss uses, (S, E): for each sequence, or one row for everything."""
        if self.config.aux_scope == "sequence":
            parts_SLK = expert_TK.view(self.sequences, -1, expert_TK.shape[-1])
            count_SE = expert_counts(parts_SLK, len(seen_E))
            return count_SE if self.reduce_sequence is None else self.reduce_sequence(count_SE)
        count_E = seen_E if self.config.aux_scope == "global" else expert_counts(expert_TK, len(seen_E))
        return (count_E if self.reduce is None else self.reduce(count_E))[None]

    def measure(self, routed: Routed) -> None:
        """Keep a layer's routing for the log's statistics, which are computed for several layers at once, because they
        take dozens of small kernels."""
        if self.routed and not (
            routed.layer == self.routed[-1].layer + 1
            and routed.logits_TE.shape == self.routed[-1].logits_TE.shape
            and (len(self.routed) + 1) * routed.logits_TE.numel() <= TOGETHER
        ):
            self.settle()
        self.routed.append(routed)

    @torch.no_grad()
    def settle(self) -> None:
        """Compute the statistics of the layers that are kept."""
        routed, self.routed = self.routed, []
        if not routed:
            return
        spec, experts = self.blocks[0].spec, routed[0].logits_TE.shape[1]
        shared = [r.share_SE for r in routed if r.share_SE is not None]
        share_NSE = torch.stack(shared) if shared else None
        aux = sums = None
        if spec.score == "softmax" and (share_NSE is None or share_NSE.shape[1] == 1):
            sums = [router.summed(r.logits_TE, r.expert_TK, spec.granularity) for r in routed]
        if sums is not None and all(found is not None for found in sums):
            found_NF = torch.stack([found for found in sums if found is not None])
            mean_NE, (z, entropy), whole = found_NF[:, :experts], found_NF[:, experts:-3].T, found_NF[:, -3:].T
            if share_NSE is not None:
                aux = experts * (share_NSE[:, 0] * mean_NE).sum(-1)
            entropy = entropy / math.log(max(experts, 2))
        else:
            logits_NTE = torch.stack([r.logits_TE for r in routed])
            probability_NTE = probabilities(logits_NTE, spec.score)
            if share_NSE is not None:
                parts_NSLE = probability_NTE.unflatten(1, (share_NSE.shape[1], -1))  # type: ignore[no-untyped-call]
                aux = balance_loss(parts_NSLE, share_NSE).mean(-1)
            z, entropy = z_loss(logits_NTE), token_entropy(probability_NTE)
            whole = coherence(torch.stack([r.expert_TK for r in routed]), spec.granularity)
        figures: dict[str, Tensor | None] = {"aux": aux, "z": z, "router_entropy": entropy}
        if self.config.capacity_factor:
            figures["dropped"] = torch.stack([r.dropped for r in routed if r.dropped is not None])
        if spec.copies_of_slices:
            figures |= dict(zip(("whole", "missing", "doubled"), whole, strict=True))
        self.load.average(routed[0].layer, len(routed[0].logits_TE), **figures)

    @torch.no_grad()
    def end_step(self, skip: Tensor | None = None) -> None:
        """Update the selection biases, after the optimiser's step and with the same `skip`."""
        self.settle()
        count_NE = self.load.end_step(self.reduce if self.config.bias_rate else None)
        if self.config.bias_rate:
            for block, count_E in zip(self.blocks, count_NE, strict=True):
                assert block.router.bias is not None
                update_bias_(block.router.bias, count_E, self.config.bias_rate, skip)
