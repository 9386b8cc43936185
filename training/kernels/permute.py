"""Move rows to their experts and back: find each row's place, copy tokens to their rows, and sum each token's rows.

The torch lines are the specification and run on a CPU. T tokens, K experts chosen a token, R = T * K rows; back_R[t * K
+ j] is the row of token t's choice j."""

from __future__ import annotations

import torch
from torch import Tensor


def places(expert_TK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return (back_R, int32 count_E): rows are sorted by expert, and the rows of an expert in the order of tokens."""
    if expert_TK.is_cuda:
        from training.kernels.triton import permute as permute_triton

        found: tuple[Tensor, Tensor] = permute_triton.places(expert_TK.contiguous(), experts)
        return found
    flat_R = expert_TK.flatten()
    order_R = torch.argsort(flat_R, stable=True)
    back_R = torch.empty_like(order_R)
    back_R[order_R] = torch.arange(order_R.numel(), device=order_R.device)
    count_E = torch.zeros(experts, dtype=torch.int32, device=flat_R.device)
    return back_R, count_E.scatter_add_(0, flat_R, torch.ones_like(flat_R, dtype=torch.int32))


def sorted_rows(expert_TK: Tensor, weight_TK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (back_R, ends_E, token_R, weight_R): each choice's row, each expert's end, each row's token and weight."""
    if expert_TK.is_cuda:
        from training.kernels.triton import permute as permute_triton

        back_R, ends_E, token_R, weight_R = permute_triton.sorted_rows(
            expert_TK.contiguous(), weight_TK.contiguous(), experts
        )
        assert token_R is not None and weight_R is not None
        return back_R, ends_E, token_R, weight_R
    back_R, count_E = places(expert_TK, experts)
    choice_R = torch.argsort(back_R)
    token_R = (choice_R // expert_TK.shape[1]).int()
    return back_R, count_E.cumsum(0, dtype=torch.int32), token_R, weight_TK.flatten()[choice_R]


def count_(total_E: Tensor, expert_TK: Tensor) -> Tensor:
    """Add the number of choices of each expert to an int64 total; unlike bincount this does not wait for the device."""
    if expert_TK.is_cuda:
        from training.kernels.triton import permute as permute_triton

        return total_E.add_(permute_triton.counts(expert_TK.contiguous(), len(total_E)).sum(1))
    flat_R = expert_TK.flatten().long()
    return total_E.scatter_add_(0, flat_R, torch.ones_like(flat_R))


def spread(x_TD: Tensor, back_R: Tensor, k: int, rows: int | None = None) -> Tensor:
    """Copy token t to row back_R[t * k + j] of `rows` rows (None: all), reading each token once.

    A choice whose row is beyond the last gets no copy, and a row without a choice may hold anything."""
    rows = back_R.shape[0] if rows is None else rows
    if kernels_run(x_TD):
        from training.kernels.triton import permute as permute_triton

        out: Tensor = permute_triton.spread(x_TD.contiguous(), back_R, k, rows)
        return out
    y_RD = x_TD.new_empty(rows, x_TD.shape[1])
    made_R = back_R < rows
    y_RD[back_R[made_R]] = x_TD.repeat_interleave(k, 0)[made_R]
    return y_RD


def gather(
    y_RD: Tensor, back_R: Tensor, k: int, onto_TD: Tensor | None = None, weight_TK: Tensor | None = None
) -> Tensor:
    """Return for each token t the sum of rows back_R[t * k], ..., back_R[t * k + k - 1], in that order and in float32.

    Each row is multiplied by its weight if weights are given, and `onto_TD` is added if given. Rows beyond the last one
    count as zero."""
    if kernels_run(y_RD):
        from training.kernels.triton import permute as permute_triton

        onto_TD, weight_TK = (None if t is None else t.contiguous() for t in (onto_TD, weight_TK))
        out: Tensor = permute_triton.gather(y_RD.contiguous(), back_R, k, onto_TD, weight_TK)
        return out
    rows, hidden = y_RD.shape
    y_RD = torch.cat([y_RD, y_RD.new_zeros(1, hidden)])
    y_TKD = y_RD[back_R.clamp(max=rows)].view(back_R.shape[0] // k, k, hidden)
    if weight_TK is not None:
        y_TKD = y_TKD * weight_TK.reshape(-1, k, 1)
    return (y_TKD if onto_TD is None else torch.cat([y_TKD, onto_TD[:, None]], 1)).sum(1).to(y_RD.dtype)


def kernels_run(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.element_size() <= 4  # float64 only checks gradients
