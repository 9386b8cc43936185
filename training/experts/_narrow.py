"""Narrow experts from tokens to tokens, without a copy of each token for each choice; `grouped` uses them on Hopper.

Products of a few hundred neurons take so little time that passes over memory dominate. So the first product reads rows
from their tokens and ends with the activation, and the sums over an expert with many rows are computed in pieces.

T tokens, K chosen experts of each, R = T * K rows sorted by expert, E experts, F neurons, D hidden."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from training.experts import ExpertWeights, TokenFunction
from training.experts.common import recomputed
from training.kernels import permute, router

# limits near the measured cases, 65,536 tokens of 576: 32 and 64 experts of 384 neurons, 32 of 768, and 8 of 1,536
HIDDEN, TOKENS = 1024, 8192
WIDTHS = {512: 64, 768: 32, 1536: 8}  # neurons at most: experts at most


def near(tokens: int, experts: int, hidden: int, width: int) -> bool:
    """Return whether these kernels are faster, as far as measurements tell."""
    most = max((count for limit, count in WIDTHS.items() if width <= limit), default=0)
    return tokens >= TOKENS and experts <= most and hidden <= HIDDEN and hidden % 64 == width % 64 == 0


def fits(x_TD: Tensor, up: Tensor, down: Tensor) -> bool:
    """Return whether `ffn` can compute with these weights, (E, 2, F, D) and (E, D, F)."""
    if torch.compiler.is_compiling():  # the compiler cannot trace the next lines
        return False
    experts, hidden, width = down.shape
    plain = x_TD.is_cuda and x_TD.dtype == torch.bfloat16 and up.shape[1] == 2
    return plain and hopper(x_TD.device) and near(len(x_TD), experts, hidden, width)


def fused(x_TD: Tensor, up: Tensor, down: Tensor, activation: str) -> TokenFunction | None:
    return ffn if fits(x_TD, up, down) else None


def kept(tokens: int, experts: int, hidden: int, width: int, matrices: int) -> int | None:
    """Return how many numbers of each row stay for backward: h and its activation, or x and h if that is more.

    Return None where these kernels do not run."""
    if not near(tokens, experts, hidden, width):
        return None
    return max(hidden + matrices * width, (matrices + 1) * width)


@cache
def hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


class _FFN(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, up_EHD: Tensor, down_EDF: Tensor, activation: str,
        onto_TD: Tensor | None, rows: router.Rows | None,
    ) -> Tensor:  # fmt: skip
        from training.kernels.triton import narrow as narrow_triton

        x_TD, k = x_TD.contiguous(), expert_TK.shape[1]
        back_R, ends_E, token_R, weight_R = permute.sorted_rows(expert_TK, weight_TK, len(down_EDF))
        where = narrow_triton.cut(ends_E, len(back_R), narrow_triton.ROWS)
        h_RH, a_RF = narrow_triton.up(x_TD, token_R, weight_R, up_EHD, where, activation)
        # a is kept, because recomputing it made the backward kernel a fifth slower
        ctx.save_for_backward(x_TD, weight_R, back_R, token_R, ends_E, where, up_EHD, down_EDF, h_RH, a_RF)
        ctx.options = activation, k, rows
        if recomputed():
            return torch.empty_like(x_TD)
        return permute.gather(narrow_triton.products(a_RF, down_EDF, where, False), back_R, k, onto_TD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_TD: Tensor) -> tuple[Tensor | None, ...]:
        from training.kernels.triton import narrow as narrow_triton

        x_TD, weight_R, back_R, token_R, ends_E, where, up_EHD, down_EDF, h_RH, a_RF = ctx.saved_tensors
        needs_x, needs_weight, _, needs_up, needs_down, _, needs_onto, _ = ctx.needs_input_grad
        activation, k, rows = ctx.options
        d_y_RD = permute.spread(d_y_TD.contiguous(), back_R, k)
        d_h_RH, d_weight_R = narrow_triton.back(d_y_RD, down_EDF, h_RH, weight_R, where, activation)
        d_x_TD = d_up_EHD = d_down_EDF = None
        d_weight_TK = d_weight_R[back_R].view(-1, k) if needs_weight else None
        if needs_up or needs_down:
            size = narrow_triton.long_piece(len(back_R))
            pieces = narrow_triton.cut(ends_E, len(back_R), size, 1)
            if needs_down:
                d_down_EDF = narrow_triton.sums(a_RF, d_y_RD, None, ends_E, pieces, size, True)
            if needs_up:
                d_up_EHD = narrow_triton.sums(d_h_RH, x_TD, token_R, ends_E, pieces, size, False)
        if needs_x:
            d_x_RD = narrow_triton.products(d_h_RH, up_EHD, where, True)
            if rows is None:
                d_x_TD = permute.gather(d_x_RD, back_R, k)
            else:
                rows.give(d_x_RD, back_R, k)
        return d_x_TD, d_weight_TK, None, d_up_EHD, d_down_EDF, None, d_y_TD if needs_onto else None, None


def ffn(
    x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, w: ExpertWeights, activation: str,
    onto_TD: Tensor | None = None, rows: router.Rows | None = None, *, function: Any = _FFN,
) -> Tensor:  # fmt: skip
    """Run `function`, of this file or of another backend, as a TokenFunction."""
    y_TD: Tensor = function.apply(
        x_TD, weight_TK, expert_TK, w.up_EFD.contiguous(), w.down_EDF.contiguous(), activation, onto_TD, rows
    )
    return y_TD
