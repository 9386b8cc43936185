"""A few numbers of a model: where they are and what they are, and which of a tensor's are the largest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sparse:
    index: Tensor  # int64, ascending: places in the flat vector that the sender and the receiver mean
    value: Tensor  # what the receiver reads: rounded to the wire's bfloat16 already, in the sender's dtype


def rounded(value: Tensor) -> Tensor:
    """As it is after the wire: bfloat16, to the nearest even."""
    return value.to(torch.bfloat16).to(value.dtype)


def largest(x_SN: Tensor, counts: Sequence[int]) -> Tensor:
    """Flat places, ascending, of each segment's `counts` largest numbers by size; zeros are left out."""
    width, found = x_SN.shape[1], []
    for row, count in enumerate(counts):
        if 0 < count < width:
            # unsorted: the places are sorted below anyhow
            found.append(x_SN[row].abs().topk(count, sorted=False).indices.sort().values + row * width)
        elif count:
            found.append(torch.arange(row * width, (row + 1) * width, device=x_SN.device))
    if not found:
        return torch.zeros(0, dtype=torch.int64, device=x_SN.device)
    index = torch.cat(found)
    return index[x_SN.flatten()[index] != 0]
