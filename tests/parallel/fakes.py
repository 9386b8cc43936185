"""Stand-ins for DeepEP's three classes, with their signatures, that move real data over gloo and check what the real
ones check. They are stricter than the real ones: rows of one expert, and tokens of one rank, arrive in an order that
cannot be guessed, and a handle fits only the buffer and the sizes it was made for.

Signatures: tag v1.2.1 (Buffer), 2.1.0 (ElasticBuffer), branch hybrid-ep at 94a9f8f and at 7febc6e (HybridEPBuffer).
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

waits = 0  # how often the real ones would have made the host wait for the device to count its rows


def waited() -> None:
    global waits
    waits += 1


def gathered(value: Any, group: dist.ProcessGroup) -> list[Any]:
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, value, group=group)
    return found


class Move:
    """An exchange of tokens. `arrivals`: pairs (rank, token), in the order in which they arrive at this rank."""

    def __init__(self, group: dist.ProcessGroup, sends_TP: Tensor) -> None:
        self.group, self.tokens = group, len(sends_TP)
        self.arrivals: list[tuple[int, int]] = []
        for rank, sends in enumerate(gathered(sends_TP, group)):
            mine = sends[:, group.rank()].nonzero().flatten()
            draw = torch.Generator().manual_seed(rank + 10 * group.rank())
            self.arrivals += [(rank, int(t)) for t in mine[torch.randperm(len(mine), generator=draw)]]

    def out(self, rows_TD: Tensor) -> Tensor:
        assert rows_TD.is_contiguous() and len(rows_TD) == self.tokens
        everything = gathered(rows_TD, self.group)
        rows = [everything[rank][token] for rank, token in self.arrivals]
        return torch.stack(rows) if rows else rows_TD.new_empty(0, *rows_TD.shape[1:])

    def home(self, rows_ND: Tensor) -> Tensor:
        assert rows_ND.is_contiguous() and len(rows_ND) == len(self.arrivals)
        out = rows_ND.new_zeros(self.tokens, *rows_ND.shape[1:])
        for rows, arrivals in gathered((rows_ND, self.arrivals), self.group):
            for row, (rank, token) in zip(rows, arrivals, strict=True):
                if rank == self.group.rank():
                    out[token] += row
        return out


def padded(rows: Tensor, count: int) -> Tensor:
    """The rows, and nan up to `count`, which stands for memory that nobody wrote."""
    assert len(rows) <= count, "more rows than there is room for"
    return torch.cat([rows, rows.new_full((count - len(rows), *rows.shape[1:]), float("nan"))])


def chosen(topk_idx: Tensor, experts: int) -> Tensor:
    """(T, E): whether a token chose an expert."""
    hot = torch.zeros(len(topk_idx), experts + 1, dtype=torch.bool)
    return hot.scatter(1, topk_idx.long().where(topk_idx >= 0, experts), True)[:, :experts]


# ---- 1.x


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks * 100

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class Buffer:
    num_sms = 20

    def __init__(
        self, group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=24,
        allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False, explicitly_destroy=False, comm=None,
    ) -> None:  # fmt: skip
        self.group, self.group_size, self.num_nvl_bytes = group, group.size(), num_nvl_bytes

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(
        self, topk_idx, num_experts, previous_event=None, async_finish=False, allocate_on_comm_stream=False
    ):
        assert topk_idx.dtype == torch.int64 and topk_idx.is_contiguous()
        hot = chosen(topk_idx, num_experts)
        in_rank = hot.view(len(hot), self.group_size, num_experts // self.group_size).any(2)
        return in_rank.sum(0).int(), None, hot.sum(0).int(), in_rank, None

    def dispatch(
        self, x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None, is_token_in_rank=None,
        num_tokens_per_expert=None, topk_idx=None, topk_weights=None, expert_alignment=1, num_worst_tokens=0,
        config=None, previous_event=None, async_finish=False, allocate_on_comm_stream=False,
    ):  # fmt: skip
        assert x.dim() == 2 and x.is_contiguous() and x.shape[1] * x.element_size() % 16 == 0
        assert self.num_nvl_bytes >= Config().get_nvl_buffer_size_hint(x.shape[1] * x.element_size(), self.group_size)
        assert expert_alignment == 1 and not async_finish
        if handle is not None:
            assert topk_idx is None and topk_weights is None and not num_worst_tokens
            *_, tokens, move, _, _ = handle
            return padded(move.out(x), tokens), None, None, None, None, None
        assert num_tokens_per_rank is not None and is_token_in_rank is not None and num_tokens_per_expert is not None
        assert topk_idx.dtype == torch.int64 and topk_weights.dtype == torch.float32
        assert topk_idx.is_contiguous() and topk_weights.is_contiguous() and topk_idx.shape == topk_weights.shape
        move = Move(self.group, is_token_in_rank)
        local = len(num_tokens_per_expert) // self.group_size
        idx = move.out(topk_idx) - local * self.group.rank()
        here = (idx >= 0) & (idx < local)
        weights = move.out(topk_weights).where(here, 0)
        counts = [int(((idx == e) & here).sum()) for e in range(local)]
        if not num_worst_tokens:
            waited()
        tokens = num_worst_tokens or len(idx)
        handle = (None, None, tokens, move, is_token_in_rank, None)
        if num_worst_tokens:
            counts, here = [], torch.cat([here, here.new_zeros(tokens - len(here), here.shape[1])])
            idx = torch.cat([idx, idx.new_zeros(tokens - len(idx), idx.shape[1])])
        return padded(move.out(x), tokens), idx.where(here, -1), padded(weights, tokens), counts, handle, None

    def combine(
        self, x, handle, topk_weights=None, bias=None, config=None, previous_event=None, async_finish=False,
        allocate_on_comm_stream=False,
    ):  # fmt: skip
        *_, tokens, move, _, _ = handle
        here = len(move.arrivals)
        assert len(x) == tokens
        if topk_weights is not None:
            assert topk_weights.dtype == torch.float32 and topk_weights.is_contiguous() and len(topk_weights) == tokens
            topk_weights = move.home(topk_weights[:here])
        return move.home(x[:here]), topk_weights, None


# ---- 2.x


class EPHandle:
    def __init__(self, move, row_NK, rows, counts, topk_idx, num_experts, tokens, num_sms) -> None:
        self.do_expand, self.num_experts, self.expert_alignment = True, num_experts, 1
        self.num_max_tokens_per_rank, self.num_sms, self.topk_idx = tokens, num_sms, topk_idx
        self.num_unaligned_recv_tokens_per_expert = counts
        self.num_recv_tokens_per_expert_list = counts.tolist()
        self.move, self.row_NK, self.rows = move, row_NK, rows


class ElasticBuffer:
    def __init__(
        self, group, num_bytes=None, num_cpu_bytes=0, num_max_tokens_per_rank=0, hidden=0, num_topk=0,
        use_fp8_dispatch=False, deterministic=False, allow_hybrid_mode=True, allow_multiple_reduction=True,
        prefer_overlap_with_compute=True, sl_idx=3, num_allocated_qps=0, num_cpu_timeout_secs=300,
        num_gpu_timeout_secs=100, explicitly_destroy=False,
    ) -> None:  # fmt: skip
        sizes = gathered((num_max_tokens_per_rank, hidden, num_topk), group)
        assert len(set(sizes)) == 1 and num_max_tokens_per_rank > 0, sizes
        self.group, self.tokens, self.hidden, self.k = group, num_max_tokens_per_rank, hidden, num_topk

    def dispatch(
        self, x, topk_idx=None, topk_weights=None, cumulative_local_expert_recv_stats=None, num_experts=None,
        num_max_tokens_per_rank=None, expert_alignment=None, num_sms=0, num_qps=0, previous_event=None,
        previous_event_before_epilogue=None, async_with_compute_stream=False, allocate_on_comm_stream=False,
        handle=None, do_handle_copy=True, do_cpu_sync=None, do_expand=False, do_zero_padding=False,
        use_tma_aligned_col_major_sf=False,
    ):  # fmt: skip
        assert num_sms > 0, "the real one would ask nvidia-smi, and before it looks into the handle"
        assert x.is_contiguous() and x.shape[1] == self.hidden and len(x) <= self.tokens and do_expand
        if handle is not None:
            assert topk_idx is None and not do_cpu_sync and num_sms == handle.num_sms and handle.do_expand == do_expand
            return self.expanded(x, handle), None, None, handle, None
        assert topk_idx.dtype == topk_idx_t and topk_idx.is_contiguous() and topk_weights.is_contiguous()
        assert topk_weights.dtype == torch.float32 and topk_idx.shape[1] == self.k
        assert num_max_tokens_per_rank == self.tokens and do_cpu_sync
        waited()
        ranks, rank = self.group.size(), self.group.rank()
        local = num_experts // ranks
        hot = chosen(topk_idx, num_experts)
        move = Move(self.group, hot.view(len(hot), ranks, local).any(2))
        idx = move.out(topk_idx) - local * rank
        here = (idx >= 0) & (idx < local)
        flat = idx.where(here, local).flatten()
        # rows by expert, those of one expert in any order
        shuffled = torch.randperm(flat.numel(), generator=torch.Generator().manual_seed(rank))
        order = shuffled[flat[shuffled].argsort(stable=True)]
        row = torch.empty_like(order)
        row[order] = torch.arange(len(order))
        counts = torch.bincount(flat, minlength=local + 1)[:local].int()
        rows = int(counts.sum())
        row_NK = row.where(here.flatten(), -1).view_as(idx)
        handle = EPHandle(move, row_NK, rows, counts, topk_idx.clone(), num_experts, self.tokens, num_sms)
        weights = topk_weights.new_empty(rows)
        weights[row_NK[here]] = move.out(topk_weights)[here]
        return self.expanded(x, handle), None, weights, handle, None

    def expanded(self, x: Tensor, handle: EPHandle) -> Tensor:
        there = handle.move.out(x)
        out = x.new_empty(handle.rows, x.shape[1])
        for n, k in (handle.row_NK >= 0).nonzero().tolist():
            out[handle.row_NK[n, k]] = there[n]
        return out

    def combine(
        self, x, handle, topk_weights=None, bias=None, num_sms=0, num_qps=0, previous_event=None,
        previous_event_before_epilogue=None, async_with_compute_stream=False, allocate_on_comm_stream=False,
    ):  # fmt: skip
        assert x.is_contiguous() and x.shape == (handle.rows, self.hidden)
        here = handle.row_NK >= 0
        sums = x.new_zeros(len(here), self.hidden)
        for n, k in here.nonzero().tolist():
            sums[n] += x[handle.row_NK[n, k]]
        combined = handle.move.home(sums)
        if topk_weights is None:
            return combined, None, None
        assert topk_weights.shape == (handle.rows,) and topk_weights.dtype == torch.float32
        back = torch.zeros(here.shape)
        back[here] = topk_weights[handle.row_NK[here]]
        back_TK = handle.move.home(back)
        # the real one promises nothing where a token chose no expert (-1)
        return combined, back_TK.where(handle.topk_idx >= 0, float("nan")), None


topk_idx_t = torch.int64


# ---- Hybrid-EP


class HybridBase:
    parts = 11

    def __init__(
        self, group, hidden_dim, max_num_of_tokens_per_rank, num_local_experts, use_fp8=False,
        num_sms_dispatch_api=None, num_sms_combine_api=None, num_sms_preprocessing_api=None, num_blocks_permute=None,
        num_blocks_unpermute=None, load_cached_kernels=False, use_shared_buffer=True, enable_custom_allgather=False,
        num_of_hybrid_ep_ranks_per_nvlink_domain=None, use_mnnvl=None,
    ) -> None:  # fmt: skip
        self.group, self.hidden, self.local = group, hidden_dim, num_local_experts

    def first(self, hidden: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Any, ...]:
        assert routing_map.dtype == torch.bool and probs.dtype == torch.float32 and probs.shape == routing_map.shape
        assert routing_map.is_contiguous() and probs.is_contiguous() and len(hidden) == len(routing_map)
        ranks, rank = self.group.size(), self.group.rank()
        assert len(set(gathered(len(hidden), self.group))) == 1, "all ranks must bring equally many tokens"
        assert routing_map.shape[1] == self.local * ranks
        moves = [  # one an expert
            Move(self.group, torch.stack([routing_map[:, r * self.local + e] for r in range(ranks)], 1))
            for e in range(self.local)
        ]
        counts = torch.tensor([len(move.arrivals) for move in moves])
        weights = [move.out(probs)[:, rank * self.local + e] for e, move in enumerate(moves)]
        return moves, torch.cat(weights), counts

    def sent(self, hidden: Tensor, moves: list[Move]) -> Tensor:
        assert hidden.is_contiguous() and hidden.shape[1] == self.hidden
        return torch.cat([move.out(hidden) for move in moves])

    def sums(self, hidden: Tensor, probs: Tensor | None, moves: list[Move], rows: int) -> tuple[Tensor, Tensor | None]:
        assert hidden.is_contiguous() and len(hidden) == rows
        sizes = [len(move.arrivals) for move in moves]
        assert not hidden[sum(sizes) :].any(), "the real one may read them"
        there = hidden[: sum(sizes)]
        parts = [move.home(part.contiguous()) for move, part in zip(moves, there.split(sizes), strict=True)]
        total = torch.stack(parts).sum(0)
        if probs is None:
            return total, None
        assert probs.dtype == torch.float32 and probs.shape == hidden.shape[:1]
        ranks, rank = self.group.size(), self.group.rank()
        out = torch.zeros(len(total), ranks * self.local)
        for e, (move, part) in enumerate(zip(moves, probs[: sum(sizes)].split(sizes), strict=True)):
            wide = torch.zeros(len(part), ranks * self.local)
            wide[:, rank * self.local + e] = part
            out += move.home(wide)
        return total, out

    def run_dispatch(
        self, hidden: Tensor, routing_map: Any, probs: Any, rows: int | None, handle: Any, non_blocking: bool
    ) -> tuple[Any, ...]:
        if handle is None:
            moves, weights, counts = self.first(hidden, routing_map, probs)
            if not non_blocking:
                waited()
            rows = int(counts.sum()) if rows is None else rows
            handle = (moves, rows, *[None] * (self.parts - 2))
            return padded(self.sent(hidden, moves), rows), padded(weights, rows), None, counts, handle
        moves, expected, *rest = handle
        assert len(rest) == self.parts - 2
        assert rows == expected, "with a handle, the number of rows must be said"
        return padded(self.sent(hidden, moves), expected), None, None, None, handle


class HybridEPBuffer(HybridBase):
    def dispatch_with_permute(
        self, *, hidden, topk_idx=None, topk_weights=None, num_of_experts_per_rank=None, num_of_experts=None,
        use_fp8=None, routing_map=None, probs=None, scaling_factor=None, num_permuted_tokens=None, pad_multiple=None,
        handle=None, non_blocking=False, fuse_permute_dispatch=False, num_dispatched_tokens=None, use_host_meta=None,
    ):  # fmt: skip
        return self.run_dispatch(hidden, routing_map, probs, num_permuted_tokens, handle, non_blocking)

    def combine_with_unpermute(
        self, *, hidden, probs=None, handle=None, pad_multiple=None, fuse_unpermute_combine=False,
        num_dispatched_tokens=None,
    ):  # fmt: skip
        return self.sums(hidden, probs, *handle[:2])


class OldHybridEPBuffer(HybridBase):
    parts = 9

    def dispatch_with_permute(
        self, *, hidden, topk_idx=None, topk_weights=None, num_of_experts_per_rank=None, num_of_experts=None,
        use_fp8=None, routing_map=None, probs=None, scaling_factor=None, num_permuted_tokens=None, pad_multiple=None,
        handle=None, non_blocking=False, num_dispatched_tokens=None, use_host_meta=None,
    ):  # fmt: skip
        return self.run_dispatch(hidden, routing_map, probs, num_permuted_tokens, handle, non_blocking)

    def combine_with_unpermute(self, *, hidden, probs=None, handle=None, pad_multiple=None, num_dispatched_tokens=None):
        return self.sums(hidden, probs, *handle[:2])


def package(name: str) -> types.ModuleType:
    """The module deep_ep of one of its generations."""
    module = types.ModuleType("deep_ep")
    classes: dict[str, dict[str, Any]] = {
        "1.x": {"Buffer": Buffer},
        "2.x": {"Buffer": Buffer, "ElasticBuffer": ElasticBuffer, "topk_idx_t": topk_idx_t},
        "hybrid": {"Buffer": Buffer, "HybridEPBuffer": HybridEPBuffer},
        "old hybrid": {"Buffer": Buffer, "HybridEPBuffer": OldHybridEPBuffer},
    }
    module.__dict__.update(classes[name])
    return module
