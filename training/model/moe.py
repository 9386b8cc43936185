"""The MoE block: router, dispatch, experts and combine, plus an optional shared expert."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from training.dispatch import DEFAULT, Dispatcher, create
from training.experts import Backend, ExpertWeights, LowRank, TokenFunction, fused
from training.kernels import router
from training.model.layers import FeedForward, Linear, Region, once
from training.model.nf4 import Codes
from upcycle.arch.spec import MoESpec


class Routing(NamedTuple):
    """The router's result for each token; a tuple, because FSDP of torch 2.11 finds no tensors in dataclasses."""

    weight_TK: Tensor
    expert_TK: Tensor
    logits_TN: Tensor  # float32
    scores_TN: Tensor  # softmax or sigmoid of the logits
    room: int | None = None  # the most rows of these tokens that one expert takes; None: no limit
    # the tokens that experts must read, if the router's kernel adds its part to their gradient (kernels/router.py)
    x_TD: Tensor | None = None
    rows: router.Rows | None = None  # where the experts may leave the rows of that gradient instead


class Router(nn.Module):
    """Choose the experts of each token, in float32 throughout: bf16 logits tie, and ties route unevenly."""

    bias: Tensor | None
    region: Region  # replaced by recompute
    low: float = 0.0  # see Linear
    lora_a: Tensor
    lora_b: Tensor

    def __init__(self, spec: MoESpec) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(spec.experts, spec.dense.hidden))
        # affects which experts are chosen, not their weights; balance.py updates it, not gradients
        self.register_buffer("bias", torch.zeros(spec.experts) if spec.score == "sigmoid" else None)
        self.offset = nn.Parameter(torch.empty(spec.experts)) if spec.router_offset else None
        self.region = once

    def forward(self, x_TD: Tensor) -> Routing:
        routing: Routing = self.region(self.route)(x_TD)
        return routing

    def route(self, x_TD: Tensor) -> Routing:
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        bias, kind = self.bias, x_TD.device.type
        with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
            weight_ND = self.weight + self.low * (self.lora_b @ self.lora_a) if self.low else self.weight
            if self.spec.anchors:  # an anchor's rows never learn
                weight_ND = torch.cat([weight_ND[: self.spec.anchors].detach(), weight_ND[self.spec.anchors :]])
            plain = self.spec.score == "softmax" and bias is None and self.offset is None and self.spec.groups == 1
            if plain and router.fused(x_TD, weight_ND, self.spec.top_k, self.spec.slices):
                options = self.spec.slices, self.spec.weights_sum_to_one, self.spec.output_scale
                rows = router.Rows()
                logits_TN, scores_TN, expert_TK, weight_TK, x_TD = router.route(x_TD, weight_ND, *options, rows)
                return Routing(weight_TK, expert_TK, logits_TN, scores_TN, x_TD=x_TD, rows=rows)
            logits_TN = router.logits(x_TD, weight_ND)
            if self.offset is not None:
                logits_TN = logits_TN + self.offset.to(wide)
        scores_TN = logits_TN.sigmoid() if self.spec.score == "sigmoid" else logits_TN.softmax(-1)
        choice_TN = scores_TN if bias is None else scores_TN + bias.to(wide)
        # ties go to the lower index, which keeps a virtual group whole; equal rows of the weight give equal logits
        rank_TN = (choice_TN if bias is not None else logits_TN).detach()
        if self.spec.groups > 1:
            rank_TN = of_best_groups(rank_TN, self.spec.groups, self.spec.group_top_k)
        expert_TK = router.choose(rank_TN, self.spec.top_k, self.spec.slices)
        if self.spec.score == "softmax" and self.spec.order == "topk-then-softmax":
            weight_TK = logits_TN.gather(1, expert_TK).softmax(-1)
        else:
            weight_TK = scores_TN.gather(1, expert_TK)
            if self.spec.normalize:
                weight_TK = weight_TK / (weight_TK.sum(-1, keepdim=True) + 1e-20)  # sigmoids can all be zero
        if self.spec.top_k == 1 and self.spec.weights_sum_to_one and not self.weight.requires_grad:
            weight_TK = weight_TK.detach()  # it is always 1: its gradient would be zero, and take time
        return Routing(weight_TK * self.spec.output_scale, expert_TK, logits_TN, scores_TN)


def of_best_groups(score_TN: Tensor, groups: int, kept: int) -> Tensor:
    """Return the scores, with -inf for the experts that are not in the best groups (MoESpec.groups)."""
    score_TGM: Tensor = score_TN.unflatten(1, (groups, -1))  # type: ignore[no-untyped-call]
    best_TG = score_TGM.topk(2, dim=-1).values.sum(-1)
    left_TG = torch.ones_like(best_TG, dtype=torch.bool).scatter_(1, router.choose(best_TG, kept), False)
    return score_TGM.masked_fill(left_TG[:, :, None], -math.inf).flatten(1)


class Stack(nn.Module):
    """The matrices of N experts, padded with zero neurons to one width.

    `up` is (N, 2, F, D) if gated (the gate first), else (N, 1, F, D), so that neurons have their own dimension, along
    which ranks divide the experts."""

    up: Tensor
    down: Tensor

    def __init__(self, spec: MoESpec, n: int) -> None:
        super().__init__()
        f, d, halves = max(spec.widths), spec.dense.hidden, 2 if spec.dense.gated else 1
        self.up = nn.Parameter(torch.empty(n, halves, f, d))
        self.down = nn.Parameter(torch.empty(n, d, f))
        self.up_bias = nn.Parameter(torch.empty(n, halves, f)) if spec.dense.ffn_bias else None
        self.down_bias = nn.Parameter(torch.empty(n, d)) if spec.dense.ffn_bias else None


class Experts(Stack):
    """The routed experts; those of an anchor come first and have a stack of their own, which never learns."""

    backend: Backend  # replaced by evaluation's watch while it measures the outputs of experts
    # replaced by shard: this rank's part, and copies that last for a step
    weights: Callable[[Experts, torch.dtype], ExpertWeights]
    low: float = 0.0  # see Linear; the adapters of up cover both halves
    up_lora_a: Tensor
    up_lora_b: Tensor
    down_lora_a: Tensor
    down_lora_b: Tensor

    def __init__(self, spec: MoESpec, backend: Backend) -> None:
        super().__init__(spec, spec.experts - spec.anchors)
        self.backend, self.activation, self.gated = backend, spec.dense.activation, spec.dense.gated
        self.anchor = Stack(spec, spec.anchors) if spec.anchors else None
        self.weights = whole_weights
        self.up_codes: Codes | None = None
        self.down_codes: Codes | None = None

    def whole(self) -> list[Tensor]:
        """Return the stacks of all experts, with the anchor's in front."""
        own = [(name, stack) for name, stack in self.named_parameters(recurse=False) if "lora" not in name]
        if (anchor := self.anchor) is None:
            return [stack for _, stack in own]
        return [torch.cat([anchor.get_parameter(name).to(stack), stack]) for name, stack in own]

    def encode(self) -> None:
        """Make room for codes of 4 bits; `up` and `down` keep their shapes and dtype, and no numbers."""
        up, down = self.up.detach(), self.down.detach()
        self.up_codes, self.down_codes = Codes(up), Codes(down)
        del self.up, self.down
        self.up, self.down = up.to("meta"), down.to("meta")

    @contextmanager
    def wide(self) -> Iterator[None]:
        """Give `up` and `down` their numbers while a caller fills them in, and encode them afterwards."""
        assert self.up_codes is not None and self.down_codes is not None
        shapes, device = (self.up, self.down), self.up_codes.code.device
        self.up, self.down = (torch.zeros_like(each, device=device) for each in shapes)
        yield
        self.up_codes.encode(self.up)
        self.down_codes.encode(self.down)
        self.up, self.down = shapes

    def matrices(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return `up` and `down` in `dtype`, decoded if they are codes."""
        if self.up_codes is None or self.down_codes is None:
            return self.up.to(dtype), self.down.to(dtype)
        return self.up_codes.decode(dtype).view_as(self.up), self.down_codes.decode(dtype).view_as(self.down)

    def decode(self) -> None:
        """Replace codes by the matrices that they stand for."""
        if self.up_codes is not None:
            up, down = self.matrices(self.up.dtype)
            self.up, self.down = nn.Parameter(up, False), nn.Parameter(down, False)
            self.up_codes = self.down_codes = None

    def forward(self, x_RD: Tensor, weight_R: Tensor, count_E: Tensor) -> Tensor:
        return self.backend.compute(x_RD, weight_R, count_E, self.weights(self, x_RD.dtype), self.activation)

    def fused(self, dispatcher: Dispatcher, x_TD: Tensor) -> TokenFunction | None:
        """Return a function that replaces dispatch, this module and combine, or None if there is none for them."""
        plain = self.gated and not self.low and self.up_bias is None and self.down_bias is None
        # FSDP gathers divided weights, and registered hooks run, only when this module is called
        if not plain or type(up := self.up) is not nn.Parameter or hooked(self):
            return None
        return fused(dispatcher, self.backend, x_TD, up, self.down, self.activation)


def hooked(module: nn.Module) -> bool:
    """Return whether the module has hooks, which run only when the module is called."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks)


def whole_weights(experts: Experts, dtype: torch.dtype) -> ExpertWeights:
    up_bias = None if experts.up_bias is None else experts.up_bias.to(dtype).flatten(1, 2)
    down_bias = None if experts.down_bias is None else experts.down_bias.to(dtype)
    up, down = experts.matrices(dtype)
    own = ExpertWeights(up.flatten(1, 2), down, experts.gated, up_bias, down_bias, low_rank(experts, dtype))
    return after_anchor(experts, own, dtype)


def after_anchor(
    experts: Experts, own: ExpertWeights, dtype: torch.dtype, part: Callable[[Tensor], Tensor] = lambda whole: whole
) -> ExpertWeights:
    """Return the weights with those of the anchor in front, if there is one; `part(whole)` returns this rank's part."""
    if (anchor := experts.anchor) is None:
        return own

    def joined(first: Tensor | None, rest: Tensor | None) -> Tensor | None:
        if first is None or rest is None:
            return None
        first = part(first).to(dtype)
        return torch.cat([first.flatten(1, 2) if first.dim() > rest.dim() else first, rest])

    up, down = joined(anchor.up, own.up_EFD), joined(anchor.down, own.down_EDF)
    assert up is not None and down is not None
    up_bias, down_bias = joined(anchor.up_bias, own.up_bias_EF), joined(anchor.down_bias, own.down_bias_ED)
    return ExpertWeights(up, down, own.gated, up_bias, down_bias, own.low)


def low_rank(
    experts: Experts, dtype: torch.dtype, part: Callable[[str, Tensor], Tensor] = lambda _, whole: whole
) -> LowRank | None:
    """Return the adapters in `dtype`, or None without adapters; `part(name, whole)` returns this rank's part of one."""
    if not experts.low:
        return None
    names = "up_lora_a", "up_lora_b", "down_lora_a", "down_lora_b"
    up_a, up_b, down_a, down_b = (part(name, getattr(experts, name)).to(dtype) for name in names)
    return LowRank(up_a, up_b, down_a, down_b, experts.low)


class MoE(nn.Module):
    dispatcher: Dispatcher  # replaced by shard: experts that are on several ranks
    # replaced by balance: sees every routing and may change its weights (auxiliary losses, capacity, statistics); by
    # bench: balanced routing; and during evaluation by evaluation's engine (None) and watch (counts)
    balance: Callable[[Routing], Routing] | None
    region: Region  # replaced by recompute: around everything after the routing; by shard: out of torch.compile

    def __init__(self, spec: MoESpec, backend: Backend, dispatcher: Dispatcher | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.dispatcher = dispatcher or create(DEFAULT, spec.experts, None)
        self.router, self.experts = Router(spec), Experts(spec, backend)
        self.shared = FeedForward(spec.dense, spec.shared) if spec.shared else None
        self.shared_gate = Linear(spec.dense.hidden, 1) if spec.shared_gate else None
        self.balance, self.region = None, once

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.added(x_BSD, None)

    def added(self, x_BSD: Tensor, onto_BSD: Tensor | None) -> Tensor:
        """Return the weighted sum of the experts' outputs for x, added to `onto_BSD` if that is given."""
        x_TD = x_BSD.flatten(0, 1)
        routing = self.balanced(self.router(x_TD))
        x_TD = x_TD if routing.x_TD is None else routing.x_TD
        onto_TD = None if onto_BSD is None else onto_BSD.flatten(0, 1)
        choice = routing.weight_TK, routing.expert_TK, routing.room
        y_TD: Tensor = self.region(self.routed)(x_TD, *choice, onto_TD, self.rows_left(routing))
        return y_TD.view_as(x_BSD)

    def joins(self, x_BSD: Tensor) -> bool:
        """Return whether the experts' last kernel may add to the residual stream; hooks on this block forbid that."""
        if self.shared is not None or hooked(self):
            return False
        return self.experts.fused(self.dispatcher, x_BSD.flatten(0, 1)) is not None

    def rows_left(self, routing: Routing) -> router.Rows | None:
        """Return where experts leave rows of a gradient for the router to sum, or None below the kernel's minimum of 16
        experts."""
        return routing.rows if self.spec.experts >= 16 else None

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # differs by layer: each would be compiled again
    def balanced(self, routing: Routing) -> Routing:
        return routing if self.balance is None else self.balance(routing)

    def routed(
        self, x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, room: int | None = None,
        onto_TD: Tensor | None = None, rows: router.Rows | None = None,
    ) -> Tensor:  # fmt: skip
        if (together := self.experts.fused(self.dispatcher, x_TD)) is not None:
            weights = self.experts.weights(self.experts, x_TD.dtype)
            y_TD = together(x_TD, weight_TK, expert_TK, weights, self.experts.activation, onto_TD, rows)
        else:
            sent = self.dispatcher.dispatch(x_TD, weight_TK, expert_TK, room)
            y_RD = self.experts(sent.x_RD, sent.weight_R, sent.count_E)
            y_TD = self.dispatcher.combine(y_RD, sent.handle).to(x_TD.dtype)
            y_TD = y_TD if onto_TD is None else onto_TD + y_TD
        if self.shared is not None:
            shared_TD = self.shared(x_TD)
            y_TD = y_TD + (shared_TD if self.shared_gate is None else shared_TD * self.shared_gate(x_TD).sigmoid())
        return y_TD
