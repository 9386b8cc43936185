"""The Triton kernels of updates.py; imported only where they run. They work element by element, in float32."""

# mypy: ignore-errors
# Triton's language only looks like Python: its pointers and blocks have no Python types.

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8


@triton.jit
def total_kernel(first_ptr, second_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = at < count
    first = tl.load(first_ptr + at, mask=keep).to(tl.float32)
    second = tl.load(second_ptr + at, mask=keep).to(tl.float32)
    tl.store(out_ptr + at, (first + second).to(out_ptr.dtype.element_ty), mask=keep)


@triton.jit
def adamw_kernel(
    master_ptr, gradient_ptr, first_ptr, second_ptr, copy_ptr, step_ptr, skip_ptr, excess_ptr, lr_ptr, count, decay,
    SHARE: tl.constexpr, COPIES: tl.constexpr, BETA1: tl.constexpr, BETA2: tl.constexpr, LOG1: tl.constexpr,
    LOG2: tl.constexpr, EPS: tl.constexpr, COPY: tl.constexpr, CLIP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update `count` elements of each of COPIES copies, which are stored one after another."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = (at < count) & (tl.load(skip_ptr) == 0)
    # bias corrections, because the means start at 0; in float64, because they are differences of numbers close to 1
    number = tl.load(step_ptr).to(tl.float64) + 1.0
    lr = tl.load(lr_ptr).to(tl.float32)
    rate = lr / (1.0 - tl.exp(number * LOG1)).to(tl.float32)
    root = tl.sqrt((1.0 - tl.exp(number * LOG2)).to(tl.float32))
    mean = tl.zeros((BLOCK,), tl.float32)
    if SHARE > 0:
        for copy in range(COPIES):
            mean += tl.load(gradient_ptr + copy * count + at, mask=keep, other=0.0).to(tl.float32)
        mean = mean * (SHARE / COPIES)
    for _ in range(COPIES):
        gradient = tl.load(gradient_ptr + at, mask=keep).to(tl.float32)
        master = tl.load(master_ptr + at, mask=keep)
        first = tl.load(first_ptr + at, mask=keep).to(tl.float32)
        second = tl.load(second_ptr + at, mask=keep).to(tl.float32)
        if SHARE > 0:
            gradient = (1.0 - SHARE) * gradient + mean
        if CLIP:
            gradient = gradient / tl.load(excess_ptr)
        first = BETA1 * first + (1.0 - BETA1) * gradient
        second = BETA2 * second + (1.0 - BETA2) * gradient * gradient
        master = master - lr * decay * master
        master = master - rate * first / (tl.sqrt(second) / root + EPS)
        tl.store(master_ptr + at, master, mask=keep)
        tl.store(first_ptr + at, first.to(first_ptr.dtype.element_ty), mask=keep)
        tl.store(second_ptr + at, second.to(second_ptr.dtype.element_ty), mask=keep)
        if COPY:
            tl.store(copy_ptr + at, master.to(copy_ptr.dtype.element_ty), mask=keep)
        at += count


def total(first: Tensor, second: Tensor, dtype: torch.dtype) -> Tensor:
    out = first if first.dtype == dtype else torch.empty_like(first, dtype=dtype)
    if count := first.numel():
        total_kernel[(triton.cdiv(count, BLOCK),)](first, second, out, count, BLOCK=BLOCK, num_warps=WARPS)
    return out


def adamw_(
    master: Tensor, gradient: Tensor, first: Tensor, second: Tensor, copy: Tensor | None, step: Tensor, skip: Tensor,
    excess: Tensor | None, *, lr: Tensor, decay: float, beta1: float, beta2: float, eps: float, share: float = 0.0,
    copies: int = 1,
) -> None:  # fmt: skip
    assert master.dtype == torch.float32 and master.numel() % copies == 0
    if count := master.numel() // copies:
        # 16 copies on an H200: 3.66 TB/s with few numbers a thread, 3.14 with 2048 a block; a copy of memory has 3.93
        block, warps = (512, 4) if share else (BLOCK, WARPS)
        adamw_kernel[(triton.cdiv(count, block),)](
            master, gradient, first, second, copy, step, skip, excess, lr, count, float(decay),
            SHARE=float(share), COPIES=copies, BETA1=beta1, BETA2=beta2, LOG1=log(beta1), LOG2=log(beta2), EPS=eps,
            COPY=copy is not None, CLIP=excess is not None, BLOCK=block, num_warps=warps,
        )  # fmt: skip


def log(beta: float) -> float:
    return math.log(beta) if beta else -1e9  # with beta 0 the mean is the last value and needs no correction
