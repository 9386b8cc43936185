"""The norm of each head (if a model has one) and the rotation, in one pass, on CUDA.

Queries, keys and values come from one product, side by side, and their gradients are written side by side, so that
backward is one product too. The torch lines are the specification; the kernel rounds once. Heads have A dimensions; the
first 2 * half rotate.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rotate(x_BSHA: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate dimension i with dimension i + n/2 of the first n = 2 * cos.shape[-1] of a head; the rest is unchanged."""
    half = cos.shape[-1]
    a, b, rest = x_BSHA[..., :half], x_BSHA[..., half : 2 * half], x_BSHA[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def on_kernel(x: Tensor) -> bool:
    return x.is_cuda and x.element_size() <= 4  # float64 only checks gradients


def norm_rotate(
    x_BSN: Tensor, heads: Sequence[int], gains: Sequence[Tensor | None], eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, ...]:
    """Split x into groups of `heads` heads each; norm and rotate the first groups, one for each of `gains`.

    They become rotate(x / rms(x) * gain), or rotate(x) where the gain is None; the other groups are unchanged. cos and
    sin are [B or 1, S, 1, half]."""
    groups: tuple[Tensor, ...] = _NormRotate.apply(  # type: ignore[no-untyped-call]
        x_BSN.contiguous(), tuple(heads), eps, cos.contiguous(), sin.contiguous(), *gains
    )
    return groups


class _NormRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BSN: Tensor, heads: tuple[int, ...], eps: float, cos: Tensor, sin: Tensor, *gains: Tensor | None
    ) -> tuple[Tensor, ...]:
        from training.kernels.triton import rotary as rotary_triton

        width, normed = x_BSN.shape[2] // sum(heads), any(gain is not None for gain in gains)
        ctx.save_for_backward(x_BSN if normed else None, cos, sin, *gains)
        ctx.eps, ctx.groups = eps, groups_of(heads, width, len(gains))
        padded = (*gains, *[None] * (len(heads) - len(gains)))
        return tuple(
            rotary_triton.forward(x_BSN, first, count, width, turn, gain, eps, cos, sin)
            for (first, count, turn), gain in zip(ctx.groups, padded, strict=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_groups: Tensor) -> tuple[Tensor | None, ...]:
        from training.kernels.triton import rotary as rotary_triton

        x_BSN, cos, sin, *gains = ctx.saved_tensors
        d_x_BSN = d_groups[0].new_empty(*d_groups[0].shape[:2], sum(d.shape[2] * d.shape[3] for d in d_groups))
        padded = (*gains, *[None] * (len(d_groups) - len(gains)))
        d_gains = [
            rotary_triton.backward(d.contiguous(), d_x_BSN, x_BSN, first, turn, gain, ctx.eps, cos, sin)
            for d, (first, _, turn), gain in zip(d_groups, ctx.groups, padded, strict=True)
        ]
        return d_x_BSN, None, None, None, None, *d_gains[: len(gains)]


def groups_of(heads: Sequence[int], width: int, turned: int) -> list[tuple[int, int, bool]]:
    """Return for each group its start in a token's row, its number of heads, and whether it is rotated."""
    starts = itertools.accumulate(heads, initial=0)
    return [
        (start * width, count, index < turned) for index, (start, count) in enumerate(zip(starts, heads, strict=False))
    ]
