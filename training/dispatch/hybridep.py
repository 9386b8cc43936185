"""Hybrid-EP (DeepEP's branch hybrid-ep): it returns rows sorted by expert, and sums them on the way home.

It moves only bfloat16 and takes the same number of tokens from all ranks. The host waits once a dispatch unless `room`
is given. Its handle differs between versions, so this file never reads it, and passes arguments that both versions
know."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from training.dispatch import Capabilities, Dispatched, common
from training.kernels import swiglu

CHUNK = 64  # tokens that its kernels take at a time
CAPABILITIES = Capabilities(sorts=True, tells=True, wait=0.045, kernels=("hybrid_ep",))


def available() -> str:
    return common.missing("hybridep", "HybridEPBuffer")


def dispatcher(
    experts: int, ep_group: dist.ProcessGroup | None, etp_group: dist.ProcessGroup | None = None
) -> HybridEP:
    group = common.whole_experts("hybridep", ep_group, etp_group)
    return HybridEP(experts, group, importlib.import_module("deep_ep"))


@dataclass
class HybridEP(common.Routed):
    can = CAPABILITIES
    experts: int
    group: dist.ProcessGroup
    deep_ep: Any
    buffer: Any = None
    tokens: int = 0  # the most that a rank may send, the same on all ranks

    def dispatch(self, x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, room: int | None = None) -> Dispatched:
        common.only_bfloat16("hybridep", x_TD)
        most = -(-max(common.most_tokens(x_TD, self.group), 1) // CHUNK) * CHUNK
        local = self.experts // self.group.size()
        if self.buffer is None or most > self.tokens:
            self.buffer, self.tokens = self.deep_ep.HybridEPBuffer(self.group, x_TD.shape[1], most, local), most

        def first(x_TD: Tensor, weight_TK: Tensor) -> tuple[Tensor, Tensor, Tensor, Route]:
            x_TD = padded(x_TD, most)
            kept_TK = weight_TK != 0
            nothing = torch.zeros(len(x_TD), self.experts, dtype=torch.float32, device=x_TD.device)
            # if a token chooses an expert several times, the weights add up
            chances_TE = nothing[: len(expert_TK)].scatter_add(1, expert_TK, weight_TK.float())
            x_RD, weight_R, _, count_E, handle = self.buffer.dispatch_with_permute(
                hidden=x_TD,
                routing_map=padded(chances_TE != 0, most),
                probs=padded(chances_TE, most),
                num_of_experts_per_rank=local,
                num_permuted_tokens=None if room is None else self.experts * room,
                non_blocking=room is not None,
            )
            count_E = count_E.to(x_TD.device, torch.int32, non_blocking=True)
            route = Route(self.buffer, handle, most, len(x_RD), expert_TK, kept_TK, weight_TK.dtype, count_E)
            return x_RD, weight_R.to(weight_TK.dtype), count_E, route

        return common.dispatch(first, x_TD, weight_TK)


def padded(rows_TD: Tensor, most: int) -> Tensor:
    """Pad rows to `most` with zeros, which choose no expert; do not copy rows that need no padding."""
    short = most - len(rows_TD)
    return (functional.pad(rows_TD, (0, 0, 0, short)) if short else rows_TD).contiguous()


@dataclass(frozen=True)
class Route:
    buffer: Any
    handle: Any
    most: int  # tokens of each rank, with padding
    rows: int
    expert_TK: Tensor
    kept_TK: Tensor
    weights: torch.dtype
    count_E: Tensor

    def out(self, x_TD: Tensor) -> Tensor:
        x_RD, *_ = self.buffer.dispatch_with_permute(
            hidden=padded(x_TD, self.most), handle=self.handle, num_permuted_tokens=self.rows
        )
        return x_RD  # type: ignore[no-any-return]

    def home(self, y_RD: Tensor, weight_R: Tensor | None) -> tuple[Tensor, Tensor | None]:
        weight_R = None if weight_R is None else weight_R.float().contiguous()
        # its kernels may read rows that belong to no expert
        y_RD = swiglu.zero_tail(y_RD.contiguous(), self.count_E.cumsum(0, dtype=torch.int32))
        y_TD, weight_TE = self.buffer.combine_with_unpermute(hidden=y_RD, probs=weight_R, handle=self.handle)
        y_TD = y_TD[: len(self.expert_TK)]
        if weight_TE is None:
            return y_TD, None
        return y_TD, weight_TE.gather(1, self.expert_TK).where(self.kept_TK, 0).to(self.weights)
