"""The Triton kernels of permute.py; imported only where a kernel runs."""

# mypy: ignore-errors
# Triton's language only looks like Python: its pointers and blocks have no Python types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PIECE = 128  # choices of one program


@triton.jit
def count_kernel(expert_ptr, count_ptr, R, E, PIECE: tl.constexpr, BINS: tl.constexpr):
    """Write count[e, p], the number of choices of expert e in piece p."""
    at = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
    expert = tl.load(expert_ptr + at, mask=at < R, other=0).to(tl.int32)
    bins = tl.histogram(expert, BINS, mask=at < R)
    col = tl.arange(0, BINS)
    tl.store(count_ptr + col * tl.num_programs(0) + tl.program_id(0), bins, mask=col < E)


@triton.jit
def place_kernel(
    expert_ptr, until_ptr, count_ptr, back_ptr, weight_ptr, token_ptr, row_weight_ptr, R, K, SORT: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    """Write each choice's row: where its expert's rows of this piece begin, plus the expert's earlier choices in the
    piece. If SORT, also write each row's token and weight."""
    index = tl.arange(0, PIECE)
    at = tl.program_id(0) * PIECE + index
    expert = tl.load(expert_ptr + at, mask=at < R, other=0).to(tl.int32)
    before = (expert[:, None] == expert[None, :]) & (index[None, :] < index[:, None])
    here = expert * tl.num_programs(0) + tl.program_id(0)
    first = tl.load(until_ptr + here, mask=at < R, other=0) - tl.load(count_ptr + here, mask=at < R, other=0)
    row = (first + tl.sum(before.to(tl.int32), 1)).to(tl.int64)
    tl.store(back_ptr + at, row, mask=at < R)
    if SORT:
        tl.store(token_ptr + row, at // K, mask=at < R)
        tl.store(row_weight_ptr + row, tl.load(weight_ptr + at, mask=at < R, other=0.0), mask=at < R)


@triton.jit
def spread_kernel(x_ptr, back_ptr, out_ptr, R, D: tl.constexpr, K: tl.constexpr, COLS: tl.constexpr):
    token, col = tl.program_id(0).to(tl.int64), tl.arange(0, COLS)
    for start in range(0, D, COLS):
        keep = start + col < D
        x = tl.load(x_ptr + token * D + start + col, mask=keep)
        for slot in tl.static_range(K):
            row = tl.load(back_ptr + token * K + slot)
            tl.store(out_ptr + row * D + start + col, x, mask=keep & (row < R))


@triton.jit
def gather_kernel(
    y_ptr, back_ptr, onto_ptr, weight_ptr, out_ptr, R, D: tl.constexpr, K: tl.constexpr, COLS: tl.constexpr,
    ONTO: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    token, col = tl.program_id(0).to(tl.int64), tl.arange(0, COLS)
    for start in range(0, D, COLS):
        keep = start + col < D
        total = tl.zeros((COLS,), dtype=tl.float32)
        for slot in tl.static_range(K):
            row = tl.load(back_ptr + token * K + slot)
            y = tl.load(y_ptr + row * D + start + col, mask=keep & (row < R), other=0.0).to(tl.float32)
            if WEIGHT:
                y *= tl.load(weight_ptr + token * K + slot).to(tl.float32)
            total += y
        if ONTO:
            total += tl.load(onto_ptr + token * D + start + col, mask=keep, other=0.0).to(tl.float32)
        tl.store(out_ptr + token * D + start + col, total.to(out_ptr.dtype.element_ty), mask=keep)


def counts(expert_TK: Tensor, experts: int) -> Tensor:
    """Return the number of choices of each expert in each piece, (E, pieces) in int32."""
    rows = expert_TK.numel()
    pieces = triton.cdiv(rows, PIECE)
    # experts first, because a sum along the first dimension was the slowest part of a dispatch, 90 us
    count_EP = torch.empty(experts, pieces, dtype=torch.int32, device=expert_TK.device)
    if rows:
        bins = max(triton.next_power_of_2(experts), 2)
        count_kernel[(pieces,)](expert_TK, count_EP, rows, experts, PIECE=PIECE, BINS=bins)
    return count_EP


def places(expert_TK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    back_R, ends_E, *_ = sorted_rows(expert_TK, None, experts)
    count_E = ends_E.clone()
    count_E[1:] -= ends_E[:-1]
    return back_R, count_E


def sorted_rows(
    expert_TK: Tensor, weight_TK: Tensor | None, experts: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return (back_R, ends_E, token_R, weight_R): the rows of permute.places, each expert's end and, with weights, each
    row's token (int32) and weight, else None."""
    rows, device = expert_TK.numel(), expert_TK.device
    back_R = torch.empty(rows, dtype=torch.int64, device=device)
    token_R = weight_R = None
    if weight_TK is not None:
        token_R, weight_R = torch.empty(rows, dtype=torch.int32, device=device), weight_TK.new_empty(rows)
    if rows == 0:
        return back_R, torch.zeros(experts, dtype=torch.int32, device=device), token_R, weight_R
    count_EP = counts(expert_TK, experts)
    until_EP = count_EP.flatten().cumsum(0, dtype=torch.int32).view_as(count_EP)  # rows have this order
    place_kernel[(count_EP.shape[1],)](
        expert_TK, until_EP, count_EP, back_R, weight_TK, token_R, weight_R, rows, expert_TK.shape[-1],
        SORT=weight_TK is not None, PIECE=PIECE,
    )  # fmt: skip
    return back_R, until_EP[:, -1].contiguous(), token_R, weight_R


def spread(x_TD: Tensor, back_R: Tensor, k: int, rows: int) -> Tensor:
    out = torch.empty(rows, x_TD.shape[1], dtype=x_TD.dtype, device=x_TD.device)
    if out.numel():
        spread_kernel[(x_TD.shape[0],)](x_TD, back_R, out, rows, x_TD.shape[1], k, columns(x_TD), num_warps=4)
    return out


def gather(
    y_RD: Tensor, back_R: Tensor, k: int, onto_TD: Tensor | None = None, weight_TK: Tensor | None = None
) -> Tensor:
    out = torch.empty(back_R.shape[0] // k, y_RD.shape[1], dtype=y_RD.dtype, device=y_RD.device)
    if out.numel():
        gather_kernel[(out.shape[0],)](
            y_RD, back_R, onto_TD, weight_TK, out, y_RD.shape[0], y_RD.shape[1], k, columns(y_RD), onto_TD is not None,
            weight_TK is not None, num_warps=4,
        )  # fmt: skip
    return out


def columns(tensor: Tensor) -> int:
    return min(triton.next_power_of_2(tensor.shape[1]), 2048)
