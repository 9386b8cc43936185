"""The router's products and its choice, in float32 accuracy without float32's speed.

A bf16 token times a float32 weight: the weight is the sum of three bf16 numbers (8 bits each of its 24), bf16 products
are exact in float32, and tensor cores add in float32, though they cut where others round. So three narrow products, at
ten times the rate of a float32 one, err by 1e-5 of a logit's size where bf16 logits err by 1e-2, and equal rows of the
weight still give equal bits. The torch lines are the specification; they run on a CPU, for float32 and for float64.

T tokens, N experts, K chosen, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from upcycle.routers import chosen


def logits(x_TD: Tensor, weight_ND: Tensor) -> Tensor:
    """x W^T in float32 at least."""
    if x_TD.is_cuda and x_TD.dtype == torch.bfloat16 and weight_ND.dtype in (torch.bfloat16, torch.float32):
        y_TN: Tensor = SplitLinear.apply(x_TD, weight_ND)  # type: ignore[no-untyped-call]
        return y_TN
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    return functional.linear(x_TD.to(wide), weight_ND.to(wide))


class SplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ND: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ND)
        return added(product(x_TD, torch.cat(split(weight_ND, 3)).t()), len(weight_ND), 1)

    @staticmethod
    def backward(ctx: Any, d_y_TN: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TD, weight_ND = ctx.saved_tensors
        d_x_TD = d_weight_ND = None
        d = split(d_y_TN, 3)
        if ctx.needs_input_grad[0]:  # rounded to bf16 in the end: 16 bits of each factor are enough
            w = split(weight_ND, 2)
            pairs = [(d[0], w[0]), (d[1], w[0]), *((d[0], part) for part in w[1:])]
            d_x_TD = torch.cat([a for a, _ in pairs], 1) @ torch.cat([b for _, b in pairs])
        if ctx.needs_input_grad[1]:
            d_weight_ND = added(product(torch.cat(d, 1).t(), x_TD), len(weight_ND), 0).to(weight_ND.dtype)
        return d_x_TD, d_weight_ND


def split(x: Tensor, parts: int) -> tuple[Tensor, ...]:
    """bf16 tensors of 8 bits each whose sum is x, or as near to it as `parts` come; a bf16 tensor is its own.

    A float32's upper half is the bf16 that it is when cut off: a view, for which no kernel runs. (And a compiler that
    sees x - x.to(bfloat16) computes it in float32, where it is 0.)
    """
    if x.dtype == torch.bfloat16:
        return (x,)
    out: list[Tensor] = []
    for _ in range(parts):
        x = x - out[-1] if out else x.contiguous()
        upper = x.view(torch.bfloat16).unflatten(-1, (-1, 2))[..., 1]  # type: ignore[no-untyped-call]
        out.append(upper)  # the second half in memory is the upper one
    return tuple(out)


def product(a: Tensor, b: Tensor) -> Tensor:
    """bf16 by bf16, float32 out."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def added(y: Tensor, size: int, dim: int) -> Tensor:
    """The sum of y's parts of `size` along `dim`, the small ones first."""
    first, *rest = torch.split(y, size, dim)
    for part in reversed(rest):
        first = first + part
    return first


def choose(score_TN: Tensor, k: int, slices: int = 1) -> Tensor:
    """The k largest of each row, in order; among equals the lower index, which keeps a virtual group whole. With
    slices, the k / slices largest of each class of columns, n % slices."""
    if score_TN.is_cuda and score_TN.dtype == torch.float32:
        from training.kernels import router_triton

        found: Tensor = router_triton.choose(score_TN.contiguous(), k, slices)
        return found
    return chosen(score_TN, k, slices)
