"""Products of sorted rows with their experts' matrices, by torch's grouped_mm.

grouped_mm needs rows of a multiple of 16 bytes, and does not take float64. For rows of other sizes on the CPU, and for
float64, which only checks gradients, `products` is a loop over the same slices.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
ALIGNED = 16  # bytes


def products(a: Tensor, b: Tensor, ends_E: Tensor) -> Tensor:
    """Return each row times its expert's matrix, or for (M, R) by (R, N) the product of each expert's rows, (E, M, N).

    Rows are sorted by expert; `ends_E` holds the end of each expert's rows."""
    per_row = b.ndim == 3
    rows = (a if per_row else b).shape[0]  # not len(), which is five calls for a tensor
    shape = (rows, b.shape[2]) if per_row else (ends_E.shape[0], a.shape[0], b.shape[1])
    if rows == 0:
        return a.new_zeros(shape)
    if a.dtype != torch.float64 and (a.is_cuda or (aligned(a) and aligned(b))):
        assert grouped_mm is not None
        out: Tensor = grouped_mm(a, b, offs=ends_E)
        return out
    out, ends = a.new_zeros(shape), [0, *ends_E.tolist()]
    for e, (start, end) in enumerate(itertools.pairwise(ends)):
        if per_row:
            out[start:end] = a[start:end] @ b[e]
        else:
            out[e] = a[:, start:end] @ b[start:end]
    return out


def aligned(tensor: Tensor) -> bool:
    return all(s == 1 or s * tensor.element_size() % ALIGNED == 0 for s in tensor.stride())
