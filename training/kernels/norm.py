"""RMSNorm and the addition to the residual stream before it, in one pass forward and one backward, on CUDA.

y = x / rms(x) * gain with x = stream + delta; the kernel rounds once, at the end. layers.Norm is the specification."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

WIDEST = 16_384  # the most dimensions that a program can hold at once


def on_kernel(x: Tensor) -> bool:
    return x.is_cuda and x.element_size() <= 4 and x.shape[-1] <= WIDEST  # float64 only checks gradients


def rms_norm(stream: Tensor, delta: Tensor | None, gain_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (x, y); use the returned x from here on, so that x gets one gradient."""
    x, y = _RmsNorm.apply(  # type: ignore[no-untyped-call]
        stream.contiguous(), None if delta is None else delta.contiguous(), gain_D, eps
    )
    return x, y


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stream: Tensor, delta: Tensor | None, gain_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        from training.kernels.triton import norm as norm_triton

        # an unused x has no gradient, and zeros instead would have to be read
        ctx.set_materialize_grads(False)
        x, y = norm_triton.forward(stream, delta, gain_D, eps)
        ctx.save_for_backward(x, gain_D)
        ctx.eps, ctx.added = eps, delta is not None
        return x if delta is not None else stream.view_as(stream), y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: Tensor | None, d_y: Tensor | None) -> tuple[Tensor | None, ...]:
        from training.kernels.triton import norm as norm_triton

        if d_y is None:
            return d_x, d_x if ctx.added else None, None, None
        x, gain_D = ctx.saved_tensors
        d_x = None if d_x is None else d_x.contiguous()
        total, d_gain_D = norm_triton.backward(d_y.contiguous(), d_x, x, gain_D, ctx.eps)
        return total, total if ctx.added else None, d_gain_D, None
