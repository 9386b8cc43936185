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
def choose_kernel(score_ptr, expert_ptr, T, N, K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)[None, :]
    score = tl.load(score_ptr + row[:, None] * N + col, mask=(row < T)[:, None] & (col < N), other=float("-inf"))
    score = tl.where(score == score, score, float("-inf"))  # NaN: such a step is skipped, but its indices must be some
    left = (score == score) & (col < N)
    for k in range(K):
        best = tl.max(tl.where(left, score, float("-inf")), 1)
        # the lowest index among equals; masked ones are none, however low the scores are
        at = tl.min(tl.where(left & (score == best[:, None]), col, COLS), 1)
        tl.store(expert_ptr + row * K + k, at.to(tl.int64), mask=row < T)
        left = left & (col != at[:, None])


def choose(score_TN: Tensor, k: int) -> Tensor:
    tokens, experts = score_TN.shape
    expert_TK = torch.empty(tokens, k, dtype=torch.int64, device=score_TN.device)
    if tokens:
        cols = max(triton.next_power_of_2(experts), 2)
        rows = max(1, TILE // cols)
        choose_kernel[(triton.cdiv(tokens, rows),)](score_TN, expert_TK, tokens, experts, k, ROWS=rows, COLS=cols)
    return expert_TK
