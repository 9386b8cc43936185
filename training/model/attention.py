"""The attention product itself, between projections: a seam. Here it is SDPA over the whole sequence; context.py puts a
ring in its place, evaluation a cache of keys and values.

Shapes: B sequences, S positions, H query heads (G key heads), A dimensions of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

# cuDNN's kernel first: forward and backward at 492 TFLOP/s on an H200, where Flash-2, the default, reaches 274
BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class Attend(Protocol):
    """Causal: position i sees j <= i, of its own document where documents are given, within the layer's window."""

    def __call__(self, q_BSHA: Tensor, k_BSGA: Tensor, v_BSGA: Tensor, documents_BS: Tensor | None) -> Tensor: ...


@dataclass(frozen=True)
class Sdpa:
    window: int | None
    scale: float

    def __call__(self, q_BSHA: Tensor, k_BSGA: Tensor, v_BSGA: Tensor, documents_BS: Tensor | None) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in (q_BSHA, k_BSGA, v_BSGA))
        mask = visible(q.shape[2], self.window, documents_BS, q.device)
        with sdpa_kernel(BACKENDS, set_priority=True):
            y = functional.scaled_dot_product_attention(
                q, k, v, mask, is_causal=mask is None, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        return y.transpose(1, 2)


def visible(length: int, window: int | None, documents_BS: Tensor | None, device: torch.device) -> Tensor | None:
    """[B or 1, 1, S, S], True where a token may look; None if it may look at everything before it."""
    if documents_BS is None and (window is None or window >= length):
        return None
    at = torch.arange(length, device=device)
    back = at[:, None] - at[None, :]
    mask = (back >= 0) if window is None else (back >= 0) & (back < window)
    if documents_BS is None:
        return mask[None, None]
    return mask[None, None] & (documents_BS[:, None, :, None] == documents_BS[:, None, None, :])
