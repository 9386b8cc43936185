"""Passes over gradients, moments and weights of mixed dtypes, for which torch reaches a fifth of the memory's speed.

The torch lines (here, and in optim.adamw_) are the specification."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def on_kernel(*tensors: Tensor) -> bool:
    return all(t.is_cuda and t.is_contiguous() and t.element_size() <= 4 for t in tensors)  # float64 only checks


def total(first: Tensor, second: Tensor, dtype: torch.dtype) -> Tensor:
    """Return first + second in `dtype`; the sum overwrites `first` if that has the dtype."""
    if first.dtype == second.dtype == dtype or not on_kernel(first, second) or dtype.itemsize > 4:
        return first.to(dtype).add_(second)
    from training.kernels.triton import updates as updates_triton

    out: Tensor = updates_triton.total(first, second, dtype)
    return out


def mixed(tensors: Sequence[Tensor]) -> bool:
    """Return whether the tensors have several dtypes and our kernel can read them."""
    return len({t.dtype for t in tensors}) > 1 and on_kernel(*tensors)


def adamw_(
    master: Tensor, gradient: Tensor, first: Tensor, second: Tensor, copy: Tensor | None, step: Tensor, skip: Tensor,
    excess: Tensor | None, *, lr: Tensor, decay: float, beta1: float, beta2: float, eps: float, share: float = 0.0,
    copies: int = 1,
) -> None:  # fmt: skip
    """Update one tensor in place after `step` earlier updates, unless `skip` is true.

    `copy` gets the new master in its own dtype. Each gradient first moves by `share` to the mean of its copies, and is
    then divided by `excess`. The tensor holds `copies` equal parts: the first copies of all slices, then the second
    copies, and so on (training/optim/copies.py)."""
    from training.kernels.triton import updates as updates_triton

    updates_triton.adamw_(
        master, gradient, first, second, copy, step, skip, excess,
        lr=lr, decay=decay, beta1=beta1, beta2=beta2, eps=eps, share=share, copies=copies,
    )  # fmt: skip
