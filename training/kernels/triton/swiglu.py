"""The Triton kernels of swiglu.py; imported only where a kernel runs.

The kernels loop over tiles of rows and neurons, compute in float32 and round once. The backward sums d_weight over all
neurons of a row inside one program: without atomics, the bits are the same every time. Programs whose rows belong to no
expert return at once, so a receive buffer that is larger than its content costs little.
"""

# mypy: ignore-errors
# Triton's language only looks like Python: its pointers and blocks have no Python types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # elements of a program's tile: 16 of each operand for each of 128 threads


@triton.jit
def act_and_slope(x, ACT: tl.constexpr):
    if ACT == "silu":
        s = tl.sigmoid(x)
        return x * s, s * (1.0 + x * (1.0 - s))
    elif ACT == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        return x * cdf, cdf + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif ACT == "gelu_tanh":  # 0.5 (1 + tanh z) = sigmoid(2 z)
        s = tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
        return x * s, s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    elif ACT == "relu":
        return tl.where(x > 0, x, 0.0), tl.where(x > 0, 1.0, 0.0)
    elif ACT == "clamped_swiglu":
        c = tl.minimum(x, 7.0)
        s = tl.sigmoid(1.702 * c)
        return c * s, tl.where(x <= 7.0, s * (1.0 + 1.702 * c * (1.0 - s)), 0.0)
    else:
        tl.static_assert(ACT == "relu2")
        r = tl.where(x > 0, x, 0.0)
        return r * r, 2.0 * r


@triton.jit
def factor_and_slope(up, ACT: tl.constexpr):
    """Return the factor of the gate's activation, and its derivative by `up`."""
    if ACT == "clamped_swiglu":
        return tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0, tl.where(tl.abs(up) <= 7.0, 1.0, 0.0)
    else:
        return up, 1.0


@triton.jit
def activation_kernel(
    h_ptr, weight_ptr, total_ptr, a_ptr,
    F: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    total = tl.load(total_ptr)
    if tl.program_id(0) * ROWS >= total:
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    keep = (row < total)[:, None] & (col < F)[None, :]
    row = row.to(tl.int64)  # rows times width can exceed 2^31
    at = row[:, None] * (2 * F if GATED else F) + col[None, :]
    weight = tl.load(weight_ptr + row, mask=row < total, other=0.0).to(tl.float32)
    act, _ = act_and_slope(tl.load(h_ptr + at, mask=keep, other=0.0).to(tl.float32), ACT)
    if GATED:
        up, _ = factor_and_slope(tl.load(h_ptr + at + F, mask=keep, other=0.0).to(tl.float32), ACT)
        act *= up
    a = act * weight[:, None]
    tl.store(a_ptr + row[:, None] * F + col[None, :], a.to(a_ptr.dtype.element_ty), mask=keep)


@triton.jit
def activation_backward_kernel(
    d_a_ptr, h_ptr, weight_ptr, total_ptr, d_h_ptr, d_weight_ptr, a_ptr,
    F: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    total = tl.load(total_ptr)
    if tl.program_id(0) * ROWS >= total:
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mine = row < total
    row = row.to(tl.int64)
    weight = tl.load(weight_ptr + row, mask=mine, other=0.0).to(tl.float32)[:, None]
    d_weight = tl.zeros([ROWS], tl.float32)
    for start in range(0, F, COLS):
        col = start + tl.arange(0, COLS)
        keep = mine[:, None] & (col < F)[None, :]
        at = row[:, None] * (2 * F if GATED else F) + col[None, :]
        at_a = row[:, None] * F + col[None, :]
        d_a = tl.load(d_a_ptr + at_a, mask=keep, other=0.0).to(tl.float32)
        act, slope = act_and_slope(tl.load(h_ptr + at, mask=keep, other=0.0).to(tl.float32), ACT)
        if GATED:
            up, bent = factor_and_slope(tl.load(h_ptr + at + F, mask=keep, other=0.0).to(tl.float32), ACT)
            tl.store(d_h_ptr + at + F, (d_a * weight * act * bent).to(d_h_ptr.dtype.element_ty), mask=keep)
            act, slope = act * up, slope * up
        tl.store(d_h_ptr + at, (d_a * weight * slope).to(d_h_ptr.dtype.element_ty), mask=keep)
        tl.store(a_ptr + at_a, (act * weight).to(a_ptr.dtype.element_ty), mask=keep)
        d_weight += tl.sum(d_a * act, 1)
    tl.store(d_weight_ptr + row, d_weight.to(d_weight_ptr.dtype.element_ty), mask=mine)


@triton.jit
def gated_kernel(gate_ptr, up_ptr, a_ptr, count, ACT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = at < count
    act, _ = act_and_slope(tl.load(gate_ptr + at, mask=keep, other=0.0).to(tl.float32), ACT)
    up, _ = factor_and_slope(tl.load(up_ptr + at, mask=keep, other=0.0).to(tl.float32), ACT)
    a = act * up
    tl.store(a_ptr + at, a.to(a_ptr.dtype.element_ty), mask=keep)


@triton.jit
def gated_backward_kernel(
    d_a_ptr, gate_ptr, up_ptr, d_gate_ptr, d_up_ptr, count, ACT: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = at < count
    d_a = tl.load(d_a_ptr + at, mask=keep, other=0.0).to(tl.float32)
    act, slope = act_and_slope(tl.load(gate_ptr + at, mask=keep, other=0.0).to(tl.float32), ACT)
    up, bent = factor_and_slope(tl.load(up_ptr + at, mask=keep, other=0.0).to(tl.float32), ACT)
    tl.store(d_gate_ptr + at, (d_a * slope * up).to(d_gate_ptr.dtype.element_ty), mask=keep)
    tl.store(d_up_ptr + at, (d_a * act * bent).to(d_up_ptr.dtype.element_ty), mask=keep)


@triton.jit
def zero_tail_kernel(y_ptr, total_ptr, R, D: tl.constexpr, COLS: tl.constexpr):
    row = tl.load(total_ptr).to(tl.int64) + tl.program_id(0)
    while row < R:
        for start in range(0, D, COLS):
            col = start + tl.arange(0, COLS)
            tl.store(y_ptr + row * D + col, tl.zeros([COLS], y_ptr.dtype.element_ty), mask=col < D)
        row += tl.num_programs(0)


def tile(width: int) -> dict[str, int]:
    """Return the rows and columns of a tile; the columns divide the width if possible, so that no lane is idle."""
    cols = min(width & -width, 1024)  # the largest power of two that divides it
    if cols < 128:
        cols = min(triton.next_power_of_2(width), 256)
    return {"ROWS": max(1, TILE // cols), "COLS": cols}


def forward(h_RH: Tensor, weight_R: Tensor, ends_E: Tensor, activation: str, gated: bool) -> Tensor:
    rows, width = h_RH.shape[0], h_RH.shape[1] // (2 if gated else 1)
    assert h_RH.is_contiguous() and weight_R.is_contiguous()
    a_RF, size = h_RH.new_empty(rows, width), tile(width)
    grid = (triton.cdiv(rows, size["ROWS"]), triton.cdiv(width, size["COLS"]))
    activation_kernel[grid](h_RH, weight_R, ends_E[-1:], a_RF, width, GATED=gated, ACT=activation, **size)
    return a_RF


def backward(
    d_a_RF: Tensor, h_RH: Tensor, weight_R: Tensor, ends_E: Tensor, activation: str, gated: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows, width = d_a_RF.shape
    assert h_RH.is_contiguous() and weight_R.is_contiguous() and d_a_RF.is_contiguous()
    d_h_RH, d_weight_R, size = torch.empty_like(h_RH), torch.zeros_like(weight_R), tile(width)
    grid = (triton.cdiv(rows, size["ROWS"]),)
    # a overwrites d_a, because the same program reads each element before it writes it
    activation_backward_kernel[grid](
        d_a_RF, h_RH, weight_R, ends_E[-1:], d_h_RH, d_weight_R, d_a_RF, width, GATED=gated, ACT=activation, **size
    )
    return d_h_RH, d_weight_R, d_a_RF


def gated_forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    a, count = torch.empty_like(up), up.numel()
    if count:
        gated_kernel[(triton.cdiv(count, TILE),)](gate, up, a, count, ACT=activation, BLOCK=TILE)
    return a


def gated_backward(d_a: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    d_gate, d_up, count = torch.empty_like(gate), torch.empty_like(up), up.numel()
    if count:
        gated_backward_kernel[(triton.cdiv(count, TILE),)](
            d_a, gate, up, d_gate, d_up, count, ACT=activation, BLOCK=TILE
        )
    return d_gate, d_up


def zero_tail(y_RD: Tensor, ends_E: Tensor) -> Tensor:
    assert y_RD.is_contiguous()
    rows, width = y_RD.shape
    # few programs that loop, because usually no rows are left, and then this must cost no more than a launch
    zero_tail_kernel[(min(rows, 256),)](y_RD, ends_E[-1:], rows, width, COLS=1024)
    return y_RD
