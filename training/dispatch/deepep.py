"""DeepEP (github.com/deepseek-ai/DeepEP): one copy of a token to each rank, whatever the number of its experts there.

    ElasticBuffer (2.x)  returns rows sorted by expert, and sums them on the way home
    Buffer (1.x)         returns tokens with their choices; our kernels copy them to rows, and sum the rows

Both move only bfloat16, and the host waits once a dispatch for the number of rows, except in 1.x inside a node with
`room`. A dispatch with a handle is the transpose of a combine with the same handle, and vice versa."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from training.dispatch import DEFAULT, Capabilities, Dispatched, Dispatcher, common
from training.kernels.permute import gather, places, spread

NODE = 8  # ranks that 1.x assumes to be one node
SMS = 24  # multiprocessors for communication; by default 2.x takes 4 where it cannot read NVLink's speed
CAPABILITIES = Capabilities(wait=0.061, kernels=("deep_ep", "intranode"))


def available() -> str:
    return common.missing("deepep", "ElasticBuffer", "Buffer")


def dispatcher(
    experts: int, ep_group: dist.ProcessGroup | None, etp_group: dist.ProcessGroup | None = None
) -> Dispatcher:
    group = common.whole_experts("deepep", ep_group, etp_group)
    if group.size() <= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        os.environ.setdefault("EP_DISABLE_GIN", "1")  # without it, 2.x asks for RDMA even inside a node
    deep_ep = importlib.import_module("deep_ep")
    if hasattr(deep_ep, "ElasticBuffer"):
        return Second(experts, group, deep_ep)
    check_nodes(group.size(), int(os.environ.get("LOCAL_WORLD_SIZE", "0")))
    return First(experts, group, deep_ep)


def check_nodes(ranks: int, local: int) -> None:
    """Raise a ValueError for nodes of other sizes than 1.x assumes: it reaches each NODE ranks by NVLink."""
    if 0 < local < min(ranks, NODE) or (ranks > NODE and local % NODE):
        raise ValueError(
            f"deepep 1.x assumes {NODE} ranks in a node, and mesh.ep={ranks} spans nodes of {local}; "
            f"write mesh.ep={max(n for n in range(1, local + 1) if ranks % n == 0)}, "
            f"mesh.dispatcher={DEFAULT}, or install deepep 2.x"
        )


def kept(weight_TK: Tensor, expert_TK: Tensor) -> Tensor:
    """Return the chosen experts, with -1 for a dropped choice, which DeepEP does not send."""
    return expert_TK.where(weight_TK != 0, -1).contiguous()


# ---- 2.x


@dataclass
class Second(common.Routed):
    can = CAPABILITIES
    experts: int
    group: dist.ProcessGroup
    deep_ep: Any
    buffer: Any = None
    tokens: int = 0  # the most that a rank may send, the same on all ranks

    def dispatch(self, x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, room: int | None = None) -> Dispatched:
        common.only_bfloat16("deepep", x_TD)
        self.make_buffer(common.most_tokens(x_TD, self.group), x_TD.shape[1], expert_TK.shape[1])

        def first(x_TD: Tensor, weight_TK: Tensor) -> tuple[Tensor, Tensor, Tensor, SecondRoute]:
            x_RD, _, weight_R, handle, _ = self.buffer.dispatch(
                x_TD.contiguous(),
                topk_idx=kept(weight_TK, expert_TK).to(self.deep_ep.topk_idx_t),
                topk_weights=weight_TK.float().contiguous(),
                num_experts=self.experts,
                num_max_tokens_per_rank=self.tokens,
                num_sms=SMS,
                do_expand=True,
                do_cpu_sync=True,
            )
            count_E = handle.num_unaligned_recv_tokens_per_expert
            route = SecondRoute(self.buffer, handle, kept(weight_TK, expert_TK) >= 0, weight_TK.dtype)
            return x_RD, weight_R.to(weight_TK.dtype), count_E, route

        return common.dispatch(first, x_TD, weight_TK)

    def make_buffer(self, most: int, hidden: int, k: int) -> None:
        """Create the buffer, unless it exists and has space for `most` tokens a rank, which is the same on all
        ranks."""
        if self.buffer is not None and most <= self.tokens:
            return
        self.tokens = max(most, 1)
        self.buffer = self.deep_ep.ElasticBuffer(
            self.group, num_max_tokens_per_rank=self.tokens, hidden=hidden, num_topk=k
        )


@dataclass(frozen=True)
class SecondRoute:
    buffer: Any
    handle: Any
    kept_TK: Tensor
    weights: torch.dtype

    def out(self, x_TD: Tensor) -> Tensor:
        # 2.x needs the number of multiprocessors before it reads the handle
        x_RD, *_ = self.buffer.dispatch(
            x_TD.contiguous(), handle=self.handle, do_expand=True, num_sms=self.handle.num_sms
        )
        return x_RD  # type: ignore[no-any-return]

    def home(self, y_RD: Tensor, weight_R: Tensor | None) -> tuple[Tensor, Tensor | None]:
        weight_R = None if weight_R is None else weight_R.float().contiguous()
        y_TD, weight_TK, _ = self.buffer.combine(y_RD.contiguous(), self.handle, topk_weights=weight_R)
        return y_TD, None if weight_TK is None else weight_TK.where(self.kept_TK, 0).to(self.weights)


# ---- 1.x


@dataclass
class First(common.Routed):
    can = CAPABILITIES
    experts: int
    group: dist.ProcessGroup
    deep_ep: Any
    buffer: Any = field(default=None)

    def dispatch(self, x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, room: int | None = None) -> Dispatched:
        common.only_bfloat16("deepep", x_TD)

        def first(x_TD: Tensor, weight_TK: Tensor) -> tuple[Tensor, Tensor, Tensor, FirstRoute]:
            self.make_buffer(x_TD)
            chosen_TK = kept(weight_TK, expert_TK).long()
            ranks, k = self.group.size(), expert_TK.shape[1]
            rows = None if room is None or ranks > NODE else self.experts * room
            to_rank, to_node, to_expert, is_in_rank, _ = self.buffer.get_dispatch_layout(chosen_TK, self.experts)
            x_ND, expert_NK, weight_NK, counts, handle, _ = self.buffer.dispatch(
                x_TD.contiguous(),
                num_tokens_per_rank=to_rank,
                num_tokens_per_rdma_rank=to_node,
                is_token_in_rank=is_in_rank,
                num_tokens_per_expert=to_expert,
                topk_idx=chosen_TK,
                topk_weights=weight_TK.float().contiguous(),
                num_worst_tokens=0 if rows is None else min(rows, ranks * len(x_TD)),
            )
            local, rows = self.experts // ranks, sum(counts) if rows is None else rows
            back_R, count_E = places(expert_NK.where(expert_NK >= 0, local), local + 1)
            back_R = back_R.where(expert_NK.flatten() >= 0, rows)  # choices of other ranks' experts: no row here
            route = FirstRoute(self.buffer, handle, back_R, k, rows, weight_TK.dtype)
            weight_R = common.put(weight_NK.flatten(), back_R, rows).to(weight_TK.dtype)
            return spread(x_ND, back_R, k, rows), weight_R, count_E[:-1].contiguous(), route

        return common.dispatch(first, x_TD, weight_TK)

    def make_buffer(self, x_TD: Tensor) -> None:
        if self.buffer is not None:
            return
        kind, ranks, row = self.deep_ep.Buffer, self.group.size(), x_TD.shape[1] * x_TD.element_size()
        kind.set_num_sms(SMS)
        configs = (kind.get_dispatch_config(ranks), kind.get_combine_config(ranks))
        near = max(config.get_nvl_buffer_size_hint(row, ranks) for config in configs)
        # inside a node there is no RDMA buffer, and a build without NVSHMEM fails when it is asked for the size
        far = max(config.get_rdma_buffer_size_hint(row, ranks) for config in configs) if ranks > NODE else 0
        self.buffer = kind(self.group, near, far)


@dataclass(frozen=True)
class FirstRoute:
    buffer: Any
    handle: Any
    back_R: Tensor  # for each choice of a token that arrived, its row; beyond the last row if its expert is not here
    k: int
    rows: int
    weights: torch.dtype

    def out(self, x_TD: Tensor) -> Tensor:
        x_ND, *_ = self.buffer.dispatch(x_TD.contiguous(), handle=self.handle)
        return spread(x_ND, self.back_R, self.k, self.rows)

    def home(self, y_RD: Tensor, weight_R: Tensor | None) -> tuple[Tensor, Tensor | None]:
        weight_NK = None if weight_R is None else common.take(weight_R.float(), self.back_R).view(-1, self.k)
        y_ND = gather(y_RD, self.back_R, self.k)  # summed before it is sent, so that a token goes home once
        y_TD, weight_TK, _ = self.buffer.combine(y_ND, self.handle, topk_weights=weight_NK)
        return y_TD, None if weight_TK is None else weight_TK.to(self.weights)
