"""The router's logits and its choice of experts, with the accuracy of float32 but not its low speed.

A float32 weight is the sum of three bf16 numbers, bf16 products are exact in float32, and tensor cores add in float32.
So three bf16 products, each at ten times the rate of a float32 product, have an error of 1e-5 of a logit's size, and
equal rows of the weight give equal bits. The torch lines are the specification; they run on a CPU, and for float32 and
float64.

T tokens, N experts, K chosen, D hidden."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from upcycle.planning.routers import chosen


def logits(x_TD: Tensor, weight_ND: Tensor) -> Tensor:
    """Return x W^T in float32 or wider."""
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
        if ctx.needs_input_grad[0]:  # it is rounded to bf16, so 16 bits of each factor are enough
            w = split(weight_ND, 2)
            pairs = [(d[0], w[0]), (d[1], w[0]), *((d[0], part) for part in w[1:])]
            d_x_TD = torch.cat([a for a, _ in pairs], 1) @ torch.cat([b for _, b in pairs])
        if ctx.needs_input_grad[1]:
            d_weight_ND = added(product(torch.cat(d, 1).t(), x_TD), len(weight_ND), 0).to(weight_ND.dtype)
        return d_x_TD, d_weight_ND


def split(x: Tensor, parts: int) -> tuple[Tensor, ...]:
    """Return bf16 tensors of 8 bits each whose sum is x or close to x.

    The upper half of a float32 is the bf16 with the lower bits cut off. It is read as a view: no kernel runs, and a
    compiler cannot keep it in float32, which would make the remainder 0."""
    if x.dtype == torch.bfloat16:
        return (x,)
    out: list[Tensor] = []
    for _ in range(parts):
        x = x - out[-1] if out else x.contiguous()
        upper = x.view(torch.bfloat16).unflatten(-1, (-1, 2))[..., 1]  # type: ignore[no-untyped-call]
        out.append(upper)  # the second half in memory is the upper one
    return tuple(out)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return the float32 product of two bf16 matrices."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def added(y: Tensor, size: int, dim: int) -> Tensor:
    """Return the sum of y's parts of `size` along `dim`, the small ones first."""
    first, *rest = torch.split(y, size, dim)
    for part in reversed(rest):
        first = first + part
    return first


def choose(score_TN: Tensor, k: int, slices: int = 1) -> Tensor:
    """Return the columns of the k largest scores of each row, in order; with slices, of the k / slices largest in each
    class of columns n % slices. Among equals the lower index wins, which keeps a virtual group whole."""
    if score_TN.is_cuda and score_TN.dtype == torch.float32:
        from training.kernels.triton import router as router_triton

        found: Tensor = router_triton.choose(score_TN.contiguous(), k, slices)
        return found
    return chosen(score_TN, k, slices)


def fused(x_TD: Tensor, weight_ND: Tensor, k: int, slices: int) -> bool:
    """Return whether `route` can compute this: one choice in each class of experts, with sizes that fit its tiles."""
    experts, hidden = weight_ND.shape
    sizes = (
        k == slices > 1 and experts <= 128 and experts & (experts - 1) == 0 and experts > slices and hidden % 64 == 0
    )
    right = x_TD.is_cuda and x_TD.dtype == torch.bfloat16 and weight_ND.dtype == torch.float32
    return sizes and right and not torch.compiler.is_compiling()


@dataclass
class Rows:
    """Pass gradients of tokens' rows from the experts to the router, which adds its own gradient in the same pass."""

    given: tuple[Tensor, Tensor, int] | None = None  # rows, back_R and k of permute.gather
    turn: int = -1  # the backward pass that gave them

    def give(self, d_x_RD: Tensor, back_R: Tensor, k: int) -> None:
        self.given, self.turn = (d_x_RD, back_R, k), torch._C._current_graph_task_id()

    def taken(self) -> tuple[Tensor, Tensor, int] | None:
        """Return the rows that this backward pass gave, or None; rows that another pass left are dropped."""
        given, self.given = self.given, None
        return given if self.turn == torch._C._current_graph_task_id() else None


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight_ND: Tensor, slices: int, normalize: bool, scale: float, rows: Rows
    ) -> tuple[Tensor, ...]:
        from training.kernels.triton import router as router_triton

        logits_TN, scores_TN, expert_TK, weight_TK, parts = router_triton.route(
            x_TD.contiguous(), weight_ND.contiguous(), slices, normalize, scale
        )
        ctx.save_for_backward(x_TD, scores_TN, expert_TK, parts)
        ctx.options, ctx.rows = (normalize, scale), rows
        ctx.mark_non_differentiable(expert_TK)
        ctx.set_materialize_grads(False)
        return logits_TN, scores_TN, expert_TK, weight_TK, x_TD.view_as(x_TD)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        d_logits_TN: Tensor | None,
        d_scores_TN: Tensor | None,
        _: None,
        d_weight_TK: Tensor | None,
        d_x_TD: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        from training.kernels.triton import router as router_triton

        x_TD, scores_TN, expert_TK, parts = ctx.saved_tensors
        d_weight_TK = scores_TN.new_zeros(expert_TK.shape) if d_weight_TK is None else d_weight_TK
        d = router_triton.route_backward(
            scores_TN, expert_TK, d_weight_TK, d_scores_TN, d_logits_TN, x_TD.dtype, *ctx.options
        )
        size = scores_TN.shape[1]
        rows = ctx.rows.taken()
        if rows is not None and ctx.needs_input_grad[0]:
            d_x_RD, back_R, k = rows
            d_x_TD = router_triton.gathered(d_x_RD, back_R, k, d, parts, d_x_TD)
        elif ctx.needs_input_grad[0]:  # 16 bits of each factor, as in SplitLinear
            # in place, because the experts made this gradient only for the router
            d_x_TD = d[:, size:] @ parts if d_x_TD is None else d_x_TD.addmm_(d[:, size:], parts)
        d_weight_ND = None
        if ctx.needs_input_grad[1]:
            third, first, second = torch.split(product(d[:, : 3 * size].t(), x_TD), size)
            d_weight_ND = first + third + second
        return d_x_TD, d_weight_ND, None, None, None, None


def route(
    x_TD: Tensor, weight_ND: Tensor, slices: int, normalize: bool, scale: float, rows: Rows | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (logits_TN, scores_TN, expert_TK, weight_TK, x_TD), computed in one pass; call it only where `fused`.

    Scores are the softmax; experts are the best of each class n % slices; weights are their scores times `scale`,
    divided by their sum if `normalize`. Experts must read the returned x_TD: backward adds the router's part to its
    gradient in place, or to the sum of the rows that the experts leave in `rows`."""
    out: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = _Route.apply(  # type: ignore[no-untyped-call]
        x_TD, weight_ND, slices, normalize, scale, Rows() if rows is None else rows
    )
    return out


def summed(logits_TN: Tensor, expert_TK: Tensor, slices: int) -> Tensor | None:
    """Return means over tokens (probabilities, squared logsumexp, entropy, three numbers of coherence), or None if no
    kernel can compute them."""
    if not (logits_TN.is_cuda and logits_TN.dtype == torch.float32 and slices & (slices - 1) == 0 and len(logits_TN)):
        return None
    from training.kernels.triton import router as router_triton

    found: Tensor = router_triton.figures(logits_TN, expert_TK, slices).sum(0, dtype=torch.float64) / len(logits_TN)
    return found
