"""The Triton kernel of router.py; imported only where a kernel runs."""

# mypy: ignore-errors
# Triton's language only looks like Python: its pointers and blocks have no Python types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024  # scores of a program


@triton.jit
def choose_kernel(
    score_ptr, expert_ptr, T, N, K: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """T rows of N scores each, S rows to a token, whose scores are interleaved; K are chosen of each row."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)[None, :]
    at_0 = (row // S * N * S + row % S)[:, None]
    score = tl.load(score_ptr + at_0 + col * S, mask=(row < T)[:, None] & (col < N), other=float("-inf"))
    score = tl.where(score == score, score, float("-inf"))  # NaN: such a step is skipped, but needs valid indices
    left = (score == score) & (col < N)
    for k in range(K):
        best = tl.max(tl.where(left, score, float("-inf")), 1)
        # the lowest index among equals; masked columns never count, however low the scores are
        at = tl.min(tl.where(left & (score == best[:, None]), col, COLS), 1)
        tl.store(expert_ptr + row * K + k, at.to(tl.int64) * S + row % S, mask=row < T)
        left = left & (col != at[:, None])


def choose(score_TN: Tensor, k: int, slices: int = 1) -> Tensor:
    tokens, experts = score_TN.shape
    expert_TK = torch.empty(tokens, k, dtype=torch.int64, device=score_TN.device)
    if tokens:
        cols = max(triton.next_power_of_2(experts // slices), 2)
        rows = max(1, TILE // cols)
        grid = (triton.cdiv(tokens * slices, rows),)
        sizes = tokens * slices, experts // slices, k // slices, slices
        choose_kernel[grid](score_TN, expert_TK, *sizes, ROWS=rows, COLS=cols)
    return expert_TK
