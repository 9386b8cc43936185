"""The activation of an expert times the routing weight, in one pass over memory: a = act(gate) * up * weight.

Backward recomputes `a` from h (200 MB a layer for Qwen3-30B) and returns it, because the gradient of `down` needs it.
The torch functions are the specification, in float32 or wider; they run on the CPU and for float64.

R rows sorted by expert, E experts, F neurons, H = 2F for gated FFNs ([gate | up]), else F. `ends_E` (int32) is where
each expert's rows end; rows after the last end belong to no expert, and their `a` and `d_h` may hold anything."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from upcycle.arch.ffn import ACTIVATIONS, gated_product


def on_kernel(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype != torch.float64  # float64 only checks gradients


def live(ends_E: Tensor, rows: int) -> Tensor:
    return torch.arange(rows, device=ends_E.device) < ends_E[-1]


def forward_reference(h_RH: Tensor, weight_R: Tensor, ends_E: Tensor, activation: str, gated: bool) -> Tensor:
    wide = torch.promote_types(h_RH.dtype, torch.float32)
    return product(h_RH.to(wide), weight_R.to(wide), activation, gated).to(h_RH.dtype)


def backward_reference(
    d_a_RF: Tensor, h_RH: Tensor, weight_R: Tensor, ends_E: Tensor, activation: str, gated: bool
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(h_RH.dtype, torch.float32)
    with torch.enable_grad():
        h, weight = h_RH.detach().to(wide).requires_grad_(), weight_R.detach().to(wide).requires_grad_()
        a_RF = product(h, weight, activation, gated)
        d_h, d_weight = torch.autograd.grad(a_RF, (h, weight), d_a_RF.to(wide))
    d_weight_R = torch.where(live(ends_E, len(h_RH)), d_weight, 0).to(weight_R.dtype)
    return d_h.to(h_RH.dtype), d_weight_R, a_RF.detach().to(h_RH.dtype)


def product(h_RH: Tensor, weight_R: Tensor, activation: str, gated: bool) -> Tensor:
    if not gated:
        return ACTIVATIONS[activation](h_RH) * weight_R[:, None]
    gate_RF, up_RF = h_RH.chunk(2, dim=1)
    return gated_product(activation, gate_RF, up_RF) * weight_R[:, None]


def forward(h_RH: Tensor, weight_R: Tensor, ends_E: Tensor, activation: str, gated: bool) -> Tensor:
    """Return a_RF = act(gate) * up * weight, or act(h) * weight if not gated."""
    if not on_kernel(h_RH):
        return forward_reference(h_RH, weight_R, ends_E, activation, gated)
    from training.kernels.triton import swiglu as swiglu_triton

    return swiglu_triton.forward(h_RH, weight_R, ends_E, activation, gated)


def backward(
    d_a_RF: Tensor, h_RH: Tensor, weight_R: Tensor, ends_E: Tensor, activation: str, gated: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return d_h_RH, d_weight_R and a_RF; a_RF may overwrite d_a_RF."""
    if not on_kernel(h_RH):
        return backward_reference(d_a_RF, h_RH, weight_R, ends_E, activation, gated)
    from training.kernels.triton import swiglu as swiglu_triton

    return swiglu_triton.backward(d_a_RF, h_RH, weight_R, ends_E, activation, gated)


def zero_tail(y_RD: Tensor, ends_E: Tensor) -> Tensor:
    """Write zeros to the rows after the last end, which grouped products leave uninitialized."""
    if not y_RD.is_cuda:
        y_RD[int(ends_E[-1]) :] = 0
        return y_RD
    from training.kernels.triton import swiglu as swiglu_triton

    return swiglu_triton.zero_tail(y_RD, ends_E)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        from training.kernels.triton import swiglu as swiglu_triton

        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return swiglu_triton.gated_forward(gate, up, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_a: Tensor) -> tuple[Tensor | None, ...]:
        from training.kernels.triton import swiglu as swiglu_triton

        gate, up = ctx.saved_tensors
        return *swiglu_triton.gated_backward(d_a.contiguous(), gate, up, ctx.activation), None


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return act(gate) * up of a dense FFN."""
    if not on_kernel(up) or torch.compiler.is_compiling():  # a compiler fuses this by itself
        return gated_product(activation, gate, up)
    a: Tensor = _Gated.apply(gate.contiguous(), up.contiguous(), activation)  # type: ignore[no-untyped-call]
    return a


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h_RH: Tensor, weight_R: Tensor, ends_E: Tensor, activation: str, gated: bool) -> Tensor:
        ctx.save_for_backward(h_RH, weight_R, ends_E)
        ctx.options = activation, gated
        return forward(h_RH, weight_R, ends_E, activation, gated)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_a_RF: Tensor) -> tuple[Tensor | None, ...]:
        d_a_RF = d_a_RF.clone(memory_format=torch.contiguous_format)  # autograd owns it, and `backward` overwrites it
        d_h_RH, d_weight_R, _ = backward(d_a_RF, *ctx.saved_tensors, *ctx.options)
        return d_h_RH, d_weight_R, None, None, None


def activate(h_RH: Tensor, weight_R: Tensor, ends_E: Tensor, activation: str, gated: bool) -> Tensor:
    """Run `forward` and `backward` as one autograd function, for backends whose products have their own gradients."""
    a_RF: Tensor = _Activate.apply(h_RH, weight_R, ends_E, activation, gated)  # type: ignore[no-untyped-call]
    return a_RF
