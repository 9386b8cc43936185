"""The Triton kernels of permute.py; imported only where a kernel runs. A program for each row that is written."""

# mypy: ignore-errors
# Triton's language only looks like Python: its pointers and blocks have no Python types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def spread_kernel(x_ptr, order_ptr, out_ptr, D, K: tl.constexpr, COLS: tl.constexpr):
    row, col = tl.program_id(0).to(tl.int64), tl.arange(0, COLS)
    token = tl.load(order_ptr + row) // K
    for start in range(0, D, COLS):
        keep = start + col < D
        tl.store(out_ptr + row * D + start + col, tl.load(x_ptr + token * D + start + col, mask=keep), mask=keep)


@triton.jit
def gather_kernel(y_ptr, back_ptr, out_ptr, D, K: tl.constexpr, COLS: tl.constexpr):
    token, col = tl.program_id(0).to(tl.int64), tl.arange(0, COLS)
    for start in range(0, D, COLS):
        keep = start + col < D
        total = tl.zeros((COLS,), dtype=tl.float32)
        for slot in tl.static_range(K):
            row = tl.load(back_ptr + token * K + slot)
            total += tl.load(y_ptr + row * D + start + col, mask=keep, other=0.0).to(tl.float32)
        tl.store(out_ptr + token * D + start + col, total.to(out_ptr.dtype.element_ty), mask=keep)


def spread(x_TD: Tensor, order_R: Tensor, k: int) -> Tensor:
    out = torch.empty(order_R.shape[0], x_TD.shape[1], dtype=x_TD.dtype, device=x_TD.device)
    if out.numel():
        spread_kernel[(out.shape[0],)](x_TD, order_R, out, x_TD.shape[1], k, columns(x_TD), num_warps=4)
    return out


def gather(y_RD: Tensor, back_R: Tensor, k: int) -> Tensor:
    out = torch.empty(back_R.shape[0] // k, y_RD.shape[1], dtype=y_RD.dtype, device=y_RD.device)
    if out.numel():
        gather_kernel[(out.shape[0],)](y_RD, back_R, out, y_RD.shape[1], k, columns(y_RD), num_warps=4)
    return out


def columns(tensor: Tensor) -> int:
    return min(triton.next_power_of_2(tensor.shape[1]), 2048)
