"""The Triton kernels of router.py; imported only where they run."""

# mypy: ignore-errors
# Triton's language only looks like Python: its pointers and blocks have no Python types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024  # scores of a program
ROUTED, STEP = 128, 64  # tokens of a program of `route`, and dimensions that it reads at once
SUMMED = 64  # tokens of a program of `gathered`


@triton.jit
def choose_kernel(
    score_ptr, expert_ptr, T, N, K: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Choose K of the N scores of each of T rows; each token has S rows, and their scores are interleaved."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)[None, :]
    at_0 = (row // S * N * S + row % S)[:, None]
    score = tl.load(score_ptr + at_0 + col * S, mask=(row < T)[:, None] & (col < N), other=float("-inf"))
    score = tl.where(score == score, score, float("-inf"))  # a step with NaN is skipped, but needs valid indices
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


@triton.jit
def upper(x):
    """Return x cut to the bf16 in its upper half, as float32 (router.split)."""
    return (x.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def route_kernel(
    x_ptr, weight_ptr, logits_ptr, scores_ptr, expert_ptr, chosen_ptr, parts_ptr, T, scale,
    D: tl.constexpr, N: tl.constexpr, S: tl.constexpr, NORMALIZE: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Compute logits, their softmax, the best expert of each class n % S, and the weights of these experts; and, for
    backward, the parts [w0, w0, w1] of the weight."""
    row, n, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, N), tl.arange(0, STEP)
    live, wide = (row < T)[:, None], row.to(tl.int64)[:, None]
    first, second, third = (
        tl.zeros((ROWS, N), tl.float32),
        tl.zeros((ROWS, N), tl.float32),
        tl.zeros((ROWS, N), tl.float32),
    )
    for start in range(0, D, STEP):
        x = tl.load(x_ptr + wide * D + start + k[None, :], mask=live, other=0.0)
        at = n[None, :] * D + start + k[:, None]
        w = tl.load(weight_ptr + at)
        w0 = upper(w)
        w1 = upper(w - w0)
        w2 = upper(w - w0 - w1)
        first = tl.dot(x, w0.to(x.dtype), first)
        second = tl.dot(x, w1.to(x.dtype), second)
        third = tl.dot(x, w2.to(x.dtype), third)
        if tl.program_id(0) == 0:
            tl.store(parts_ptr + at, w0.to(parts_ptr.dtype.element_ty))
            tl.store(parts_ptr + N * D + at, w0.to(parts_ptr.dtype.element_ty))
            tl.store(parts_ptr + 2 * N * D + at, w1.to(parts_ptr.dtype.element_ty))
    logits = first + third + second
    at = wide * N + n[None, :]
    tl.store(logits_ptr + at, logits, mask=live)
    scores = tl.exp(logits - tl.max(logits, 1)[:, None])
    scores = scores / tl.sum(scores, 1)[:, None]
    tl.store(scores_ptr + at, scores, mask=live)
    rank = tl.where(logits == logits, logits, float("-inf")).reshape(ROWS, N // S, S)
    best = tl.argmax(rank, 1, tie_break_left=True)
    taken = tl.arange(0, N // S)[None, :, None] == best[:, None, :]
    weight = tl.sum(tl.where(taken, scores.reshape(ROWS, N // S, S), 0.0), 1)
    if NORMALIZE:
        weight = weight / (tl.sum(weight, 1)[:, None] + 1e-20)
    slot = tl.arange(0, S)[None, :]
    tl.store(expert_ptr + wide * S + slot, best.to(tl.int64) * S + slot, mask=live)
    tl.store(chosen_ptr + wide * S + slot, weight * scale, mask=live)


@triton.jit
def route_backward_kernel(
    scores_ptr, expert_ptr, d_chosen_ptr, d_scores_ptr, stride, d_logits_ptr, out_ptr, T, scale,
    N: tl.constexpr, S: tl.constexpr, NORMALIZE: tl.constexpr, SCORES: tl.constexpr, LOGITS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the logits as bf16 parts, side by side: [d2, d0, d1, d0]."""
    row, n = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, N)
    live, wide = (row < T)[:, None], row.to(tl.int64)[:, None]
    at, slot = wide * N + n[None, :], tl.arange(0, S)[None, :]
    scores = tl.load(scores_ptr + at, mask=live, other=0.0)
    best = (tl.load(expert_ptr + wide * S + slot, mask=live, other=0) // S).to(tl.int32)
    taken = tl.arange(0, N // S)[None, :, None] == best[:, None, :]
    d_weight = tl.load(d_chosen_ptr + wide * S + slot, mask=live, other=0.0) * scale
    if NORMALIZE:
        weight = tl.sum(tl.where(taken, scores.reshape(ROWS, N // S, S), 0.0), 1)
        total = tl.sum(weight, 1)[:, None] + 1e-20
        d_weight = (d_weight - tl.sum(d_weight * weight, 1)[:, None] / total) / total
    d = tl.where(taken, d_weight[:, None, :], 0.0).reshape(ROWS, N)
    if SCORES:
        d += tl.load(d_scores_ptr + wide * stride + n[None, :], mask=live, other=0.0)
    d = scores * (d - tl.sum(d * scores, 1)[:, None])
    if LOGITS:
        d += tl.load(d_logits_ptr + at, mask=live, other=0.0)
    d0 = upper(d)
    d1 = upper(d - d0)
    d2 = upper(d - d0 - d1)
    out_ptrs = out_ptr + wide * (4 * N) + n[None, :]
    tl.store(out_ptrs, d2.to(out_ptr.dtype.element_ty), mask=live)
    tl.store(out_ptrs + N, d0.to(out_ptr.dtype.element_ty), mask=live)
    tl.store(out_ptrs + 2 * N, d1.to(out_ptr.dtype.element_ty), mask=live)
    tl.store(out_ptrs + 3 * N, d0.to(out_ptr.dtype.element_ty), mask=live)


def route(x_TD: Tensor, weight_ND: Tensor, slices: int, normalize: bool, scale: float) -> tuple[Tensor, ...]:
    """Return (logits_TN, scores_TN, expert_TK, weight_TK, parts); `parts` is [w0, w0, w1] of the weight."""
    (tokens, hidden), experts = x_TD.shape, len(weight_ND)
    new = x_TD.new_empty
    logits_TN, scores_TN = (new(tokens, experts, dtype=torch.float32) for _ in range(2))
    expert_TK, weight_TK = new(tokens, slices, dtype=torch.int64), new(tokens, slices, dtype=torch.float32)
    parts = new(3 * experts, hidden)
    if tokens:
        route_kernel[(triton.cdiv(tokens, ROUTED),)](
            x_TD, weight_ND, logits_TN, scores_TN, expert_TK, weight_TK, parts, tokens, scale,
            hidden, experts, slices, NORMALIZE=normalize, ROWS=ROUTED, STEP=STEP, num_warps=4 if experts <= 32 else 8,
            num_stages=3,
        )  # fmt: skip
    return logits_TN, scores_TN, expert_TK, weight_TK, parts


def route_backward(
    scores_TN: Tensor, expert_TK: Tensor, d_weight_TK: Tensor, d_scores_TN: Tensor | None, d_logits_TN: Tensor | None,
    dtype: torch.dtype, normalize: bool, scale: float,
) -> Tensor:  # fmt: skip
    (tokens, experts), slices = scores_TN.shape, expert_TK.shape[1]
    out = scores_TN.new_empty(tokens, 4 * experts, dtype=dtype)
    stride = 0
    if d_scores_TN is not None:
        d_scores_TN = d_scores_TN if d_scores_TN.stride(1) == 1 else d_scores_TN.contiguous()
        stride = d_scores_TN.stride(0)
    d_logits_TN = None if d_logits_TN is None else d_logits_TN.contiguous()
    rows = max(1, 4096 // experts)
    if tokens:
        route_backward_kernel[(triton.cdiv(tokens, rows),)](
            scores_TN, expert_TK, d_weight_TK.contiguous(), d_scores_TN, stride, d_logits_TN, out, tokens, scale,
            experts, slices, NORMALIZE=normalize, SCORES=d_scores_TN is not None, LOGITS=d_logits_TN is not None,
            ROWS=rows, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def gathered_kernel(
    y_ptr, back_ptr, d_ptr, parts_ptr, onto_ptr, out_ptr, T,
    D: tl.constexpr, K: tl.constexpr, N: tl.constexpr, ONTO: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Compute the sum of each token's rows, plus d's last three parts times the weight's parts."""
    across: tl.constexpr = D // STEP
    row, n = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS), tl.arange(0, N)
    live, wide = (row < T)[:, None], row.to(tl.int64)[:, None]
    col = (tl.program_id(0) % across * STEP + tl.arange(0, STEP))[None, :]
    total = tl.zeros((ROWS, STEP), tl.float32)
    for slot in tl.static_range(K):
        at = tl.load(back_ptr + wide * K + slot, mask=live, other=0)
        total += tl.load(y_ptr + at * D + col, mask=live, other=0.0).to(tl.float32)
    if ONTO:
        total += tl.load(onto_ptr + wide * D + col, mask=live, other=0.0).to(tl.float32)
    share = tl.zeros((ROWS, STEP), tl.float32)
    for part in tl.static_range(3):
        d = tl.load(d_ptr + wide * (4 * N) + (1 + part) * N + n[None, :], mask=live, other=0.0)
        share = tl.dot(d, tl.load(parts_ptr + (part * N + n[:, None]) * D + col), share)
    tl.store(out_ptr + wide * D + col, (total + share).to(out_ptr.dtype.element_ty), mask=live)


def gathered(
    y_RD: Tensor, back_R: Tensor, k: int, d: Tensor, parts: Tensor, onto_TD: Tensor | None, rows=SUMMED, warps=4
) -> Tensor:
    """Return permute.gather(y_RD, back_R, k, onto_TD) + d[:, N:] @ parts, rounded once; needs at least 16 experts."""
    tokens, (threefold, hidden) = len(d), parts.shape
    out = y_RD.new_empty(tokens, hidden)
    if tokens:
        gathered_kernel[(triton.cdiv(tokens, rows) * (hidden // STEP),)](
            y_RD, back_R, d, parts, None if onto_TD is None else onto_TD.contiguous(), out, tokens, hidden, k,
            threefold // 3, ONTO=onto_TD is not None, ROWS=rows, STEP=STEP, num_warps=warps,
        )  # fmt: skip
    return out


@triton.jit
def figures_kernel(
    logits_ptr, expert_ptr, out_ptr, T, N, TIMES,
    K: tl.constexpr, G: tl.constexpr, COLS: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sum over a program's tokens: each probability, squared logsumexp, entropy, whether choices are whole FFNs, and
    the number of slices that are chosen too seldom and too often."""
    row, n = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)
    live, wide = row < T, row.to(tl.int64)[:, None]
    logits = tl.load(logits_ptr + wide * N + n[None, :], mask=live[:, None] & (n < N)[None, :], other=float("-inf"))
    logits = tl.where(live[:, None], logits, 0.0)
    top = tl.max(logits, 1)
    scores = tl.exp(logits - top[:, None])
    total = tl.sum(scores, 1)
    scores = tl.where(live[:, None], scores / total[:, None], 0.0)
    log = top + tl.log(total)
    entropy = log - tl.sum(scores * tl.where(scores > 0, logits, 0.0), 1)
    out_ptrs = out_ptr + tl.program_id(0) * (N + 5)
    tl.store(out_ptrs + n, tl.sum(scores, 0), mask=n < N)
    tl.store(out_ptrs + N, tl.sum(tl.where(live, log * log, 0.0), 0))
    tl.store(out_ptrs + N + 1, tl.sum(tl.where(live, entropy, 0.0), 0))
    slot, piece = tl.arange(0, SLOTS), tl.arange(0, G)
    expert = tl.load(expert_ptr + wide * K + slot[None, :], mask=live[:, None] & (slot < K)[None, :], other=0)
    held = (expert % G).to(tl.int32)[:, :, None] == piece[None, None, :]
    held = tl.sum((held & (slot < K)[None, :, None]).to(tl.int32), 1)
    missing = tl.where(live, tl.sum((held < TIMES).to(tl.int32), 1), 0)
    doubled = tl.where(live, tl.sum((held > TIMES).to(tl.int32), 1), 0)
    tl.store(out_ptrs + N + 2, tl.sum((live & (missing + doubled == 0)).to(tl.float32), 0))
    tl.store(out_ptrs + N + 3, tl.sum(missing.to(tl.float32), 0))
    tl.store(out_ptrs + N + 4, tl.sum(doubled.to(tl.float32), 0))


def figures(logits_TN: Tensor, expert_TK: Tensor, slices: int) -> Tensor:
    """Return the sums of figures_kernel, (programs, N + 5)."""
    (tokens, experts), k = logits_TN.shape, expert_TK.shape[1]
    cols = triton.next_power_of_2(experts)
    rows = max(1, 2 * TILE // cols)
    out = logits_TN.new_empty(triton.cdiv(tokens, rows), experts + 5)
    figures_kernel[(len(out),)](
        logits_TN.contiguous(), expert_TK.contiguous(), out, tokens, experts, -(-k // slices),
        K=k, G=slices, COLS=cols, SLOTS=triton.next_power_of_2(k), ROWS=rows,
    )  # fmt: skip
    return out
