"""The Triton kernels of dispatch/nvlink.py: rows between GPUs that reach each other's memory; imported where they run.

The addresses of the ranks' slots are an int64 tensor, so one kernel serves any number of ranks. Only `meet` waits for
another rank. It is one program with a bounded loop, so it cannot block the collective that the other rank waits for.

P ranks, T tokens of a rank, K choices of a token, D width, E experts, L experts on a rank, R rows that this rank has
memory for. A slot holds rows (T of D on the way out, P * T of D on the way home), chosen experts and weights (T of K
each); experts begin at byte EXPERT, weights at byte WEIGHT."""

# mypy: ignore-errors
# Triton's language only looks like Python: its pointers and blocks have no Python types.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

PIECE = 128  # choices that a program of `count` and `place` takes


@triton.jit
def meet_kernel(pad_ptrs, state_ptr, me, PATIENCE, P: tl.constexpr):
    """Wait until all ranks are here. state[0]: number of meetings; state[1]: 1 + a rank that did not come in time."""
    meeting = tl.load(state_ptr) + 1
    tl.debug_barrier()
    for p in range(P):
        there = tl.load(pad_ptrs + p).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(there + me, meeting, sem="release", scope="sys")
    here = tl.load(pad_ptrs + me).to(tl.pointer_type(tl.int32))
    waits = tl.where(tl.load(state_ptr + 1) == 0, PATIENCE, 0)  # after a rank did not come, do not wait again
    for p in range(P):
        tries = 0
        seen = tl.atomic_add(here + p, 0, sem="acquire", scope="sys")
        while (seen - meeting < 0) & (tries < waits):
            seen = tl.atomic_add(here + p, 0, sem="acquire", scope="sys")
            tries += 1
        if (seen - meeting < 0) & (waits > 0):  # without a wait, others may only be late
            tl.store(state_ptr + 1, 1 + p)
    tl.debug_barrier()
    tl.store(state_ptr, meeting)


@triton.jit
def put_kernel(
    x_ptr, expert_ptr, weight_ptr, slot_ptr, kept_ptr, total_ptr, EXPERT, WEIGHT, OWN, E, L,
    D: tl.constexpr, K: tl.constexpr, COLS: tl.constexpr, CHOICES: tl.constexpr, BINS: tl.constexpr,
    ROUTED: tl.constexpr,
):  # fmt: skip
    """Write this rank's tokens to its own slot, for others to read; if ROUTED, also their choices and weights. Dropped
    choices and padding get expert E, which does not exist. Tokens from OWN on are padding."""
    token, col = tl.program_id(0).to(tl.int64), tl.arange(0, COLS)
    out_ptr = tl.multiple_of(slot_ptr.to(tl.pointer_type(x_ptr.dtype.element_ty)), 16)
    for start in tl.static_range(0, D, COLS):
        keep = (start + col < D) & (token < OWN)
        x = tl.load(x_ptr + token * D + start + col, mask=keep)
        tl.store(out_ptr + token * D + start + col, x, mask=keep)
    if ROUTED:
        slot = tl.arange(0, CHOICES)
        keep = (slot < K) & (token < OWN)
        weight = tl.load(weight_ptr + token * K + slot, mask=keep, other=0.0).to(tl.float32)
        expert = tl.load(expert_ptr + token * K + slot, mask=keep & (weight != 0.0), other=E).to(tl.int32)
        there = (slot_ptr + EXPERT).to(tl.pointer_type(tl.int32))
        tl.store(there + token * K + slot, expert, mask=slot < K)
        tl.store(kept_ptr + token * K + slot, expert, mask=slot < K)
        there = (slot_ptr + WEIGHT).to(tl.pointer_type(tl.float32))
        tl.store(there + token * K + slot, weight, mask=slot < K)
        if token == 0:
            e = tl.arange(0, BINS)
            tl.store(total_ptr + e, tl.zeros((BINS,), dtype=tl.int32), mask=e < L)


@triton.jit
def count_kernel(
    slot_ptrs, chosen_ptr, count_ptr, total_ptr, EXPERT, me, C, E, L, pieces, PIECE: tl.constexpr, BINS: tl.constexpr
):  # fmt: skip
    """Write count[e, piece], the number of a piece's choices of this rank's expert e, and its sum total[e]. C: choices
    of a rank, in `pieces` pieces."""
    source, piece = tl.program_id(0) // pieces, tl.program_id(0) % pieces
    at = piece * PIECE + tl.arange(0, PIECE)
    address = tl.load(slot_ptrs + source) + EXPERT
    expert = tl.load(address.to(tl.pointer_type(tl.int32)) + at, mask=at < C, other=E) - me * L
    here = (expert >= 0) & (expert < L)
    tl.store(chosen_ptr + source.to(tl.int64) * C + at, tl.where(here, expert, L), mask=at < C)
    bins, e = tl.histogram(tl.where(here, expert, 0), BINS, mask=here), tl.arange(0, BINS)
    tl.store(count_ptr + e.to(tl.int64) * tl.num_programs(0) + tl.program_id(0), bins, mask=e < L)
    tl.atomic_add(total_ptr + e, bins, mask=(e < L) & (bins > 0), sem="relaxed")


@triton.jit
def first_kernel(
    count_ptr, total_ptr, state_ptr, here_ptr, L, pieces, R, BINS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Replace count[e, piece] by the row where that piece's rows of expert e begin. here[e]: number of e's rows that
    fit into memory. state[2]: number of rows that came, if not all of them fit."""
    e, all_e = tl.program_id(0), tl.arange(0, BINS)
    total = tl.load(total_ptr + all_e, mask=all_e < L, other=0)
    begin = tl.sum(tl.where(all_e < e, total, 0), 0)
    end = begin + tl.sum(tl.where(all_e == e, total, 0), 0)
    tl.store(here_ptr + e, tl.minimum(end, R) - tl.minimum(begin, R))
    if (e == L - 1) & (end > R):
        tl.atomic_max(state_ptr + 2, end, sem="relaxed")
    start = 0
    while start < pieces:
        at = start + tl.arange(0, BLOCK)
        row_ptr = count_ptr + e.to(tl.int64) * pieces + at
        count = tl.load(row_ptr, mask=at < pieces, other=0)
        tl.store(row_ptr, begin + tl.cumsum(count, 0) - count, mask=at < pieces)
        begin += tl.sum(count, 0)
        start += BLOCK


@triton.jit
def place_kernel(
    slot_ptrs, chosen_ptr, first_ptr, back_ptr, weight_ptr, WEIGHT, C, L, R, pieces, PIECE: tl.constexpr
):  # fmt: skip
    """Write the row of each choice of each rank, 2^31 - 1 if its expert is not here, and read each row's weight."""
    source, piece, index = tl.program_id(0) // pieces, tl.program_id(0) % pieces, tl.arange(0, PIECE)
    at = piece * PIECE + index
    expert = tl.load(chosen_ptr + source.to(tl.int64) * C + at, mask=at < C, other=L)
    here = expert < L
    before = (expert[:, None] == expert[None, :]) & (index[None, :] < index[:, None])
    first = tl.load(first_ptr + expert.to(tl.int64) * tl.num_programs(0) + tl.program_id(0), mask=here, other=0)
    row = tl.where(here, first + tl.sum(before.to(tl.int32), 1), 2147483647)
    tl.store(back_ptr + source.to(tl.int64) * C + at, row, mask=at < C)
    address = tl.load(slot_ptrs + source) + WEIGHT
    fits = here & (row < R)
    weight = tl.load(address.to(tl.pointer_type(tl.float32)) + at, mask=fits, other=0.0)
    tl.store(weight_ptr + row.to(tl.int64), weight, mask=fits)


@triton.jit
def pull_kernel(
    slot_ptrs, back_ptr, out_ptr, me, P, T, R, D: tl.constexpr, K: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """Read each token that has a choice here once, from its rank's slot, and write it to its rows."""
    source, token = (me + tl.program_id(0) % P) % P, (tl.program_id(0) // P).to(tl.int64)
    choice, col = (source * T + token) * K, tl.arange(0, COLS)
    address = tl.multiple_of(tl.load(slot_ptrs + source), 16)
    x_ptr = tl.multiple_of(address.to(tl.pointer_type(out_ptr.dtype.element_ty)), 16)
    first = R
    for slot in tl.static_range(K):
        first = tl.minimum(first, tl.load(back_ptr + choice + slot))
    if first < R:
        for start in tl.static_range(0, D, COLS):
            keep = start + col < D
            x = tl.load(x_ptr + token * D + start + col, mask=keep)
            for slot in tl.static_range(K):
                row = tl.load(back_ptr + choice + slot).to(tl.int64)
                tl.store(out_ptr + row * D + start + col, x, mask=keep & (row < R))


@triton.jit
def push_kernel(
    y_ptr, grad_ptr, slot_ptrs, back_ptr, WEIGHT, me, P, T, R,
    D: tl.constexpr, K: tl.constexpr, COLS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Write the sum of a token's rows here to its rank's slot, once; if WEIGHTED, also one number of each row. A token
    becomes nan if one of its rows did not fit into memory."""
    source, token = (me + tl.program_id(0) % P) % P, (tl.program_id(0) // P).to(tl.int64)
    choice, col = (source * T + token) * K, tl.arange(0, COLS)
    address = tl.multiple_of(tl.load(slot_ptrs + source), 16)
    out_ptr = tl.multiple_of(address.to(tl.pointer_type(y_ptr.dtype.element_ty)), 16)
    weight_ptr = (address + WEIGHT).to(tl.pointer_type(tl.float32))
    first, lost = 2147483647, 0
    for slot in tl.static_range(K):
        at = tl.load(back_ptr + choice + slot)
        first = tl.minimum(first, at)
        lost += ((at >= R) & (at < 2147483647)).to(tl.int32)
        if WEIGHTED:
            grad = tl.load(grad_ptr + at, mask=at < R, other=0.0)
            tl.store(weight_ptr + token * K + slot, grad.to(tl.float32), mask=at < R)
    if first < 2147483647:
        for start in tl.static_range(0, D, COLS):
            keep = start + col < D
            total = tl.zeros((COLS,), dtype=tl.float32)
            for slot in tl.static_range(K):
                row = tl.load(back_ptr + choice + slot).to(tl.int64)
                total += tl.load(y_ptr + row * D + start + col, mask=keep & (row < R), other=0.0).to(tl.float32)
            total = tl.where(lost > 0, float("nan"), total)
            out = out_ptr + (me * T + token) * D + start + col
            tl.store(out, total.to(y_ptr.dtype.element_ty), mask=keep)


@triton.jit
def sum_kernel(
    slot_ptr, kept_ptr, state_ptr, out_ptr, grad_ptr, WEIGHT, T, E, L, P: tl.constexpr,
    D: tl.constexpr, K: tl.constexpr, COLS: tl.constexpr, CHOICES: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Add the sums that the ranks of a token's experts sent, in the order of ranks; nan once a rank did not come."""
    token, col, slot = tl.program_id(0).to(tl.int64), tl.arange(0, COLS), tl.arange(0, CHOICES)
    expert = tl.load(kept_ptr + token * K + slot, mask=slot < K, other=E)
    in_ptr = tl.multiple_of(slot_ptr.to(tl.pointer_type(out_ptr.dtype.element_ty)), 16)
    alone = tl.load(state_ptr + 1) != 0
    for start in tl.static_range(0, D, COLS):
        keep = start + col < D
        total = tl.zeros((COLS,), dtype=tl.float32)
        for p in range(P):
            asked = tl.sum(((expert >= p * L) & (expert < (p + 1) * L)).to(tl.int32), 0) > 0
            total += tl.load(in_ptr + (p * T + token) * D + start + col, mask=keep & asked, other=0.0).to(tl.float32)
        total = tl.where(alone, float("nan"), total)
        tl.store(out_ptr + token * D + start + col, total.to(out_ptr.dtype.element_ty), mask=keep)
    if WEIGHTED:
        weight_ptr = (slot_ptr + WEIGHT).to(tl.pointer_type(tl.float32))
        grad = tl.load(weight_ptr + token * K + slot, mask=(slot < K) & (expert < E), other=0.0)
        tl.store(grad_ptr + token * K + slot, grad, mask=slot < K)


# ---- launches


class Slot(NamedTuple):
    """One buffer on each rank, with the layout of one dispatch."""

    addresses: Tensor  # of all ranks, int64
    me: int
    own: int  # this rank's address
    ranks: int
    tokens: int
    k: int
    expert: int  # bytes from the beginning
    weight: int


def meet(pads: Tensor, state: Tensor, me: int, patience: int) -> None:
    meet_kernel[(1,)](pads, state, me, patience, len(pads), num_warps=1)


def put(x_TD: Tensor, slot: Slot, choices: tuple[Tensor, Tensor, int] | None, local: int) -> tuple[Tensor, Tensor]:
    """Return (kept_TK, zeros for each local expert). `choices`: experts, weights, and the number of all experts."""
    (own, width), device = x_TD.shape, x_TD.device
    kept_TK = torch.empty(slot.tokens if choices else 0, slot.k, dtype=torch.int32, device=device)
    total_E = torch.empty(local, dtype=torch.int32, device=device)
    expert_TK, weight_TK, experts = choices or (kept_TK, kept_TK, 0)
    put_kernel[(slot.tokens,)](
        x_TD, expert_TK, weight_TK, slot.own, kept_TK, total_E, slot.expert, slot.weight, own, experts, local,
        width, slot.k, columns(x_TD), power(slot.k), power(local), choices is not None, num_warps=4,
    )  # fmt: skip
    return kept_TK, total_E


def count(slot: Slot, total_E: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return the local expert of each choice of each rank, and the number of choices of each expert in each piece."""
    choices, local, device = slot.tokens * slot.k, len(total_E), total_E.device
    pieces = triton.cdiv(choices, PIECE)
    chosen_C = torch.empty(slot.ranks * choices, dtype=torch.int32, device=device)
    count_EP = torch.empty(local, slot.ranks * pieces, dtype=torch.int32, device=device)
    count_kernel[(slot.ranks * pieces,)](
        slot.addresses, chosen_C, count_EP, total_E, slot.expert, slot.me, choices, experts, local, pieces,
        PIECE, power(local),
    )  # fmt: skip
    return chosen_C, count_EP


def place(
    slot: Slot, chosen_C: Tensor, count_EP: Tensor, total_E: Tensor, state: Tensor, rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (back_C, weight_R, count_E): each choice's row, each row's weight, and the rows of each expert."""
    (local, pieces), device = count_EP.shape, chosen_C.device
    back_C, count_E = torch.empty_like(chosen_C), torch.empty_like(total_E)
    weight_R = torch.empty(rows, dtype=torch.float32, device=device)
    block = min(power(pieces), 1024)
    first_kernel[(local,)](count_EP, total_E, state, count_E, local, pieces, rows, power(local), block)
    place_kernel[(pieces,)](
        slot.addresses, chosen_C, count_EP, back_C, weight_R, slot.weight, slot.tokens * slot.k, local, rows,
        pieces // slot.ranks, PIECE,
    )  # fmt: skip
    return back_C, weight_R, count_E


def pull(slot: Slot, back_C: Tensor, like: Tensor, rows: int) -> Tensor:
    out = torch.empty(rows, like.shape[1], dtype=like.dtype, device=like.device)
    if out.numel():
        pull_kernel[(slot.ranks * slot.tokens,)](
            slot.addresses, back_C, out, slot.me, slot.ranks, slot.tokens, rows, like.shape[1], slot.k, columns(like),
            num_warps=4,
        )  # fmt: skip
    return out


def push(slot: Slot, back_C: Tensor, y_RD: Tensor, weight_R: Tensor | None) -> None:
    rows, width = y_RD.shape
    push_kernel[(slot.ranks * slot.tokens,)](
        y_RD, y_RD if weight_R is None else weight_R, slot.addresses, back_C, slot.weight, slot.me, slot.ranks,
        slot.tokens, rows, width, slot.k, columns(y_RD), weight_R is not None, num_warps=4,
    )  # fmt: skip


def summed(
    slot: Slot, kept_TK: Tensor, state: Tensor, like: Tensor, tokens: int, experts: int, weighted: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the sums of this rank's tokens and, if `weighted`, the number of each choice's row, else None."""
    out = torch.empty(tokens, like.shape[1], dtype=like.dtype, device=like.device)
    grad_TK = torch.empty(tokens, slot.k, dtype=torch.float32, device=like.device) if weighted else None
    if tokens:
        sum_kernel[(tokens,)](
            slot.own, kept_TK, state, out, kept_TK if grad_TK is None else grad_TK, slot.weight, slot.tokens, experts,
            experts // slot.ranks, slot.ranks, like.shape[1], slot.k, columns(like), power(slot.k), weighted,
            num_warps=4,
        )  # fmt: skip
    return out, grad_TK


def columns(tensor: Tensor) -> int:
    return min(power(tensor.shape[1]), 2048)


def power(size: int) -> int:
    return max(triton.next_power_of_2(size), 2)
