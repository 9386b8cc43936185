"""The Triton kernels of norm.py; imported only where a kernel runs. A program holds a whole row.

In backward a fixed number of programs loop over the rows. Each loads its next row early, so that the memory is busy,
and keeps its own sum of the gain's gradient: without atomics, the bits are the same every time.
"""

# mypy: ignore-errors
# Triton's language only looks like Python: its pointers and blocks have no Python types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 132 * 8  # that loop over the rows in backward


@triton.jit
def norm_kernel(
    stream_ptr, delta_ptr, gain_ptr, x_ptr, y_ptr,
    ADD: tl.constexpr, EPS: tl.constexpr, D: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row, col = tl.program_id(0).to(tl.int64), tl.arange(0, COLS)
    keep = col < D
    x = tl.load(stream_ptr + row * D + col, mask=keep, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(delta_ptr + row * D + col, mask=keep, other=0.0).to(tl.float32)
        rounded = x.to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + row * D + col, rounded, mask=keep)
        x = rounded.to(tl.float32)  # the norm uses the rounded x, as the rest of the layer does
    gain = tl.load(gain_ptr + col, mask=keep, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / D + EPS) * gain
    tl.store(y_ptr + row * D + col, y.to(y_ptr.dtype.element_ty), mask=keep)


@triton.jit
def load_row(x_ptr, d_y_ptr, d_x_ptr, at, keep, ADD: tl.constexpr):
    x, d_y = tl.load(x_ptr + at, mask=keep, other=0.0), tl.load(d_y_ptr + at, mask=keep, other=0.0)
    return x, d_y, tl.load(d_x_ptr + at, mask=keep, other=0.0) if ADD else x


@triton.jit
def norm_backward_kernel(
    d_y_ptr, d_x_ptr, x_ptr, gain_ptr, total_ptr, d_gain_ptr, T,
    ADD: tl.constexpr, EPS: tl.constexpr, D: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, COLS)
    keep = col < D
    gain = tl.load(gain_ptr + col, mask=keep, other=0.0).to(tl.float32)
    d_gain = tl.zeros([COLS], tl.float32)
    row = tl.program_id(0).to(tl.int64)
    next_x, next_d_y, next_d_x = load_row(x_ptr, d_y_ptr, d_x_ptr, row * D + col, keep & (row < T), ADD)
    while row < T:
        x, d_y, stream = next_x.to(tl.float32), next_d_y.to(tl.float32), next_d_x
        at, row = row * D + col, row + tl.num_programs(0)
        # loads while this row is computed
        next_x, next_d_y, next_d_x = load_row(x_ptr, d_y_ptr, d_x_ptr, row * D + col, keep & (row < T), ADD)
        scale = tl.rsqrt(tl.sum(x * x, 0) / D + EPS)
        x *= scale
        d_gain += d_y * x
        d_y *= gain
        d_x = scale * (d_y - x * (tl.sum(d_y * x, 0) / D))
        if ADD:
            d_x += stream.to(tl.float32)
        tl.store(total_ptr + at, d_x.to(total_ptr.dtype.element_ty), mask=keep)
    tl.store(d_gain_ptr + tl.program_id(0) * D + col, d_gain, mask=keep)


def sizes(width: int) -> dict[str, int]:
    cols = triton.next_power_of_2(width)
    return {"D": width, "COLS": cols, "num_warps": max(1, min(32, cols // 512))}


def forward(stream: Tensor, delta: Tensor | None, gain_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    width = stream.shape[-1]
    x = stream if delta is None else torch.empty_like(stream)
    y = torch.empty_like(stream)
    if rows := stream.numel() // width:
        norm_kernel[(rows,)](stream, delta, gain_D, x, y, ADD=delta is not None, EPS=eps, **sizes(width))
    return x, y


def backward(d_y: Tensor, d_x: Tensor | None, x: Tensor, gain_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    total, rows = torch.empty_like(x), x.numel() // width
    programs = max(1, min(PROGRAMS, rows))
    parts_PD = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    norm_backward_kernel[(programs,)](
        d_y, d_x, x, gain_D, total, parts_PD, rows, ADD=d_x is not None, EPS=eps, **sizes(width)
    )
    return total, parts_PD.sum(0).to(gain_D.dtype)
