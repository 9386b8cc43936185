"""The Triton kernels of rotary.py; imported only where a kernel runs.

A row is one head of one token. In backward a fixed number of programs loop over the rows, and each keeps its own sum of
the gain's gradient: without atomics, the bits are the same every time.
"""

# mypy: ignore-errors
# Triton's language only looks like Python: its pointers and blocks have no Python types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16  # of a program; these sizes were the fastest of those tried on an H100, forward and backward
BACK_ROWS, BACK_WARPS = 32, 2
PROGRAMS = 132 * 32  # that loop over the rows in backward


@triton.jit
def load3(ptr, start, keep, A, HALF, COLS: tl.constexpr, REST: tl.constexpr, TAIL: tl.constexpr):
    """Return the two rotated halves and the rest of the head, in float32. `start`: where each row begins."""
    col = tl.arange(0, COLS)
    mask = keep[:, None] & (col < HALF)[None, :]
    at = start[:, None] + col[None, :]
    a = tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(ptr + at + HALF, mask=mask, other=0.0).to(tl.float32)
    rest = a
    if REST:
        end = tl.arange(0, TAIL)
        at = start[:, None] + 2 * HALF + end[None, :]
        rest = tl.load(ptr + at, mask=keep[:, None] & (2 * HALF + end < A)[None, :], other=0.0).to(tl.float32)
    return a, b, rest


@triton.jit
def store3(ptr, start, keep, a, b, rest, A, HALF, COLS: tl.constexpr, REST: tl.constexpr, TAIL: tl.constexpr):
    col = tl.arange(0, COLS)
    mask = keep[:, None] & (col < HALF)[None, :]
    at = start[:, None] + col[None, :]
    tl.store(ptr + at, a.to(ptr.dtype.element_ty), mask=mask)
    tl.store(ptr + at + HALF, b.to(ptr.dtype.element_ty), mask=mask)
    if REST:
        end = tl.arange(0, TAIL)
        at = start[:, None] + 2 * HALF + end[None, :]
        tl.store(ptr + at, rest.to(ptr.dtype.element_ty), mask=keep[:, None] & (2 * HALF + end < A)[None, :])


@triton.jit
def load_gain(ptr, A, HALF, COLS: tl.constexpr, REST: tl.constexpr, TAIL: tl.constexpr):
    col = tl.arange(0, COLS)
    a = tl.load(ptr + col, mask=col < HALF, other=0.0).to(tl.float32)[None, :]
    b = tl.load(ptr + HALF + col, mask=col < HALF, other=0.0).to(tl.float32)[None, :]
    rest = a
    if REST:
        end = tl.arange(0, TAIL)
        rest = tl.load(ptr + 2 * HALF + end, mask=2 * HALF + end < A, other=0.0).to(tl.float32)[None, :]
    return a, b, rest


@triton.jit
def load_angle(cos_ptr, sin_ptr, row, keep, H, POSITIONS, HALF, COLS: tl.constexpr):
    col = tl.arange(0, COLS)
    at = ((row // H) % POSITIONS)[:, None] * HALF + col[None, :]
    mask = keep[:, None] & (col < HALF)[None, :]
    return (
        tl.load(cos_ptr + at, mask=mask, other=0.0).to(tl.float32),
        tl.load(sin_ptr + at, mask=mask, other=0.0).to(tl.float32),
    )


@triton.jit
def square_sum(a, b, rest, REST: tl.constexpr):
    total = tl.sum(a * a, 1) + tl.sum(b * b, 1)
    if REST:
        total += tl.sum(rest * rest, 1)
    return total


@triton.jit
def heads_kernel(
    x_ptr, gain_ptr, cos_ptr, sin_ptr, y_ptr, R, H, POSITIONS, WIDTH, FIRST,
    EPS: tl.constexpr, A: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, REST: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    keep = row < R
    start = row // H * WIDTH + FIRST + row % H * A
    a, b, rest = load3(x_ptr, start, keep, A, HALF, COLS, REST, TAIL)
    if NORM:
        scale = tl.rsqrt(square_sum(a, b, rest, REST) / A + EPS)[:, None]
        gain_a, gain_b, gain_rest = load_gain(gain_ptr, A, HALF, COLS, REST, TAIL)
        a, b = a * scale * gain_a, b * scale * gain_b
        if REST:
            rest = rest * scale * gain_rest
    if TURN:
        cos, sin = load_angle(cos_ptr, sin_ptr, row, keep, H, POSITIONS, HALF, COLS)
        a, b = a * cos - b * sin, b * cos + a * sin
    store3(y_ptr, row * A, keep, a, b, rest, A, HALF, COLS, REST, TAIL)


@triton.jit
def heads_backward_kernel(
    d_y_ptr, x_ptr, gain_ptr, cos_ptr, sin_ptr, d_x_ptr, d_gain_ptr, R, H, POSITIONS, WIDTH, FIRST,
    EPS: tl.constexpr, A: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, REST: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    if NORM:
        gain_a, gain_b, gain_rest = load_gain(gain_ptr, A, HALF, COLS, REST, TAIL)
        sum_a = tl.zeros([COLS], tl.float32)
        sum_b = tl.zeros([COLS], tl.float32)
        sum_rest = tl.zeros([TAIL if REST else COLS], tl.float32)
    begin = tl.program_id(0).to(tl.int64) * ROWS
    while begin < R:
        row = begin + tl.arange(0, ROWS)
        keep = row < R
        start = row // H * WIDTH + FIRST + row % H * A
        a, b, rest = load3(d_y_ptr, row * A, keep, A, HALF, COLS, REST, TAIL)
        if TURN:
            cos, sin = load_angle(cos_ptr, sin_ptr, row, keep, H, POSITIONS, HALF, COLS)
            a, b = a * cos + b * sin, b * cos - a * sin  # the inverse rotation
        if NORM:
            x_a, x_b, x_rest = load3(x_ptr, start, keep, A, HALF, COLS, REST, TAIL)
            scale = tl.rsqrt(square_sum(x_a, x_b, x_rest, REST) / A + EPS)[:, None]
            x_a, x_b = x_a * scale, x_b * scale
            sum_a += tl.sum(a * x_a, 0)
            sum_b += tl.sum(b * x_b, 0)
            a, b = a * gain_a, b * gain_b
            along = tl.sum(a * x_a, 1) + tl.sum(b * x_b, 1)
            if REST:
                x_rest = x_rest * scale
                sum_rest += tl.sum(rest * x_rest, 0)
                rest = rest * gain_rest
                along += tl.sum(rest * x_rest, 1)
            along = (along / A)[:, None]
            a, b = scale * (a - x_a * along), scale * (b - x_b * along)
            if REST:
                rest = scale * (rest - x_rest * along)
        store3(d_x_ptr, start, keep, a, b, rest, A, HALF, COLS, REST, TAIL)
        begin += tl.num_programs(0) * ROWS
    if NORM:
        col = tl.arange(0, COLS)
        mine = d_gain_ptr + tl.program_id(0) * A
        tl.store(mine + col, sum_a, mask=col < HALF)
        tl.store(mine + HALF + col, sum_b, mask=col < HALF)
        if REST:
            end = tl.arange(0, TAIL)
            tl.store(mine + 2 * HALF + end, sum_rest, mask=2 * HALF + end < A)


def sizes(shape: torch.Size, cos: Tensor) -> tuple[tuple[int, int, int], dict[str, int]]:
    batch, length, heads, width = shape
    half = cos.shape[-1]
    rest = width - 2 * half
    assert cos.shape[0] in (1, batch) and cos.shape[1] == length
    tile = {"ROWS": ROWS, "COLS": triton.next_power_of_2(half), "REST": rest > 0}
    return (batch * length * heads, heads, cos.shape[0] * length), tile | {"TAIL": triton.next_power_of_2(max(rest, 1))}


# `first`: where in a token's row of x the heads begin. The backward passes of all groups write into one d_x, because
# one product computed x, and its backward reads one tensor.


def forward(
    x_BSN: Tensor, first: int, heads: int, width: int, turn: bool,
    gain_A: Tensor | None, eps: float, cos: Tensor, sin: Tensor,
) -> Tensor:  # fmt: skip
    y_BSHA = x_BSN.new_empty(*x_BSN.shape[:2], heads, width)
    sized, tile = sizes(y_BSHA.shape, cos)
    heads_kernel[(triton.cdiv(sized[0], ROWS),)](
        x_BSN, gain_A, cos, sin, y_BSHA, *sized, x_BSN.shape[2], first,
        EPS=eps, A=width, HALF=cos.shape[3], NORM=gain_A is not None, TURN=turn, **tile,
    )  # fmt: skip
    return y_BSHA


def backward(
    d_y_BSHA: Tensor, d_x_BSN: Tensor, x_BSN: Tensor | None, first: int, turn: bool,
    gain_A: Tensor | None, eps: float, cos: Tensor, sin: Tensor,
) -> Tensor | None:  # fmt: skip
    """Write this group's part of d_x; return the gain's gradient, or None without a gain."""
    sized, tile = sizes(d_y_BSHA.shape, cos)
    width = d_y_BSHA.shape[3]
    tile |= {"ROWS": BACK_ROWS, "num_warps": BACK_WARPS}
    programs = min(PROGRAMS, triton.cdiv(sized[0], BACK_ROWS))
    parts_PA = d_y_BSHA.new_empty(programs, width, dtype=torch.float32) if gain_A is not None else None
    heads_backward_kernel[(programs,)](
        d_y_BSHA, x_BSN, gain_A, cos, sin, d_x_BSN, parts_PA, *sized, d_x_BSN.shape[2], first,
        EPS=eps, A=width, HALF=cos.shape[3], NORM=gain_A is not None, TURN=turn, **tile,
    )  # fmt: skip
    return None if parts_PA is None or gain_A is None else parts_PA.sum(0).to(gain_A.dtype)
