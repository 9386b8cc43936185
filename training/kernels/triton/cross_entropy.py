"""The Triton kernel of cross_entropy.py; imported only where it runs. A program loops over a token's logits."""

# mypy: ignore-errors
# Triton's language only looks like Python: its pointers and blocks have no Python types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLS, WARPS = 8192, 16


@triton.jit
def nats_kernel(
    logit_ptr, label_ptr, nats_ptr,
    V: tl.constexpr, SCALE: tl.constexpr, GRADIENT: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row, col = tl.program_id(0).to(tl.int64), tl.arange(0, COLS)
    label = tl.load(label_ptr + row)
    scored = label >= 0
    mine = logit_ptr + row * V
    right = tl.load(mine + tl.maximum(label, 0)).to(tl.float32) * SCALE
    # each column keeps its own sum over the blocks, relative to the largest value that it has seen so far
    most = tl.full((COLS,), -float("inf"), tl.float32)
    total = tl.zeros((COLS,), tl.float32)
    for start in range(0, V, COLS):
        x = tl.load(mine + start + col, mask=start + col < V, other=-float("inf")).to(tl.float32) * SCALE
        above = tl.maximum(most, x)
        # a column that has seen only -inf keeps the sum 0
        safe = tl.where(above == -float("inf"), 0.0, above)
        total = total * tl.exp(most - safe) + tl.exp(x - safe)
        most = above
    top = tl.max(most, 0)
    log_z = tl.log(tl.sum(total * tl.exp(most - top), 0)) + top
    tl.store(nats_ptr + row, tl.where(scored, log_z - right, 0.0))
    if GRADIENT:
        factor = tl.where(scored, SCALE, 0.0)
        for start in range(0, V, COLS):
            keep = start + col < V
            x = tl.load(mine + start + col, mask=keep, other=0.0).to(tl.float32) * SCALE
            grad = (tl.exp(x - log_z) - tl.where(start + col == label, 1.0, 0.0)) * factor
            tl.store(mine + start + col, grad.to(logit_ptr.dtype.element_ty), mask=keep)


def nats_(logits_TV: Tensor, label_T: Tensor, scale: float, gradient: bool) -> Tensor:
    tokens, vocab = logits_TV.shape
    assert logits_TV.is_contiguous()
    nats_T = torch.empty(tokens, dtype=torch.float32, device=logits_TV.device)
    if tokens:
        nats_kernel[(tokens,)](
            logits_TV, label_T.contiguous(), nats_T,
            V=vocab, SCALE=float(scale), GRADIENT=gradient,
            COLS=min(COLS, triton.next_power_of_2(vocab)), num_warps=WARPS,
        )  # fmt: skip
    return nats_T
