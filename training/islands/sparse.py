"""Hold a few numbers of a model with their places, and find the largest numbers of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sparse:
    index: Tensor  # int64, ascending: places in a flat vector that the sender and the receiver both know
    value: Tensor  # rounded to the wire's bfloat16 already, as the receiver reads it; in the sender's dtype


def rounded(value: Tensor) -> Tensor:
    """Round as the wire does: to bfloat16, to the nearest even."""
    return value.to(torch.bfloat16).to(value.dtype)


def largest(x_SN: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the ascending flat places of each segment's `counts` largest numbers by size, without zeros."""
    width, found = x_SN.shape[1], []
    for row, count in enumerate(counts):
        if 0 < count < width:
            # the places are sorted afterwards, so topk need not sort
            found.append(x_SN[row].abs().topk(count, sorted=False).indices.sort().values + row * width)
        elif count:
            found.append(torch.arange(row * width, (row + 1) * width, device=x_SN.device))
    if not found:
        return torch.zeros(0, dtype=torch.int64, device=x_SN.device)
    index = torch.cat(found)
    return index[x_SN.flatten()[index] != 0]
