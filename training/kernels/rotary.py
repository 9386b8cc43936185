"""Heads made ready for attention: the norm of each head (where a model has one) and the rotation, in one pass.

Apart they are three passes forward and four back over the largest activations of a layer. The torch lines are the
specification; the kernel rounds once, at the end. T tokens of H heads of A dimensions, of which 2 * half are rotated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rotate(x_BSHA: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns dimension i with dimension i + n/2 for the first n = 2 * cos.shape[-1] of a head; the rest passes."""
    half = cos.shape[-1]
    a, b, rest = x_BSHA[..., :half], x_BSHA[..., half : 2 * half], x_BSHA[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def on_kernel(x: Tensor) -> bool:
    return x.is_cuda and x.element_size() <= 4  # float64 is for checking gradients


def norm_rotate(x_BSHA: Tensor, gain_A: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """rotate(x / rms(x) * gain); without a gain only rotated. cos and sin: [B or 1, S, 1, half]. CUDA only."""
    y: Tensor = _NormRotate.apply(  # type: ignore[no-untyped-call]
        x_BSHA.contiguous(), gain_A, eps, cos.contiguous(), sin.contiguous()
    )
    return y


class _NormRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSHA: Tensor, gain_A: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        from training.kernels import rotary_triton

        ctx.save_for_backward(x_BSHA if gain_A is not None else None, gain_A, cos, sin)
        ctx.eps = eps
        return rotary_triton.forward(x_BSHA, gain_A, eps, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_BSHA: Tensor) -> tuple[Tensor | None, ...]:
        from training.kernels import rotary_triton

        x_BSHA, gain_A, cos, sin = ctx.saved_tensors
        d_x_BSHA, d_gain_A = rotary_triton.backward(d_y_BSHA.contiguous(), x_BSHA, gain_A, ctx.eps, cos, sin)
        return d_x_BSHA, d_gain_A, None, None, None
