"""torch's grouped_mm: one kernel for all experts, which reads the counts on the device.

Backward keeps x, h = [gate | up] and routing weights, and recomputes the activation in the pass that computes its
gradient; a recomputed forward stops at h. In bfloat16 on Hopper and Blackwell the host never waits for the GPU; for
other dtypes and older GPUs torch itself falls back to a loop that waits. Unaligned sizes on CUDA are refused."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from training.experts import SPECIFICATION, Capabilities, ExpertWeights, Need, _narrow
from training.experts.common import check, recomputed
from training.kernels import swiglu
from training.kernels.products import ALIGNED, grouped_mm, products


def refuses(need: Need) -> str:
    step = ALIGNED // need.dtype.itemsize
    return unaligned(need.hidden, need.width, step, need.dtype) if need.device == "cuda" else ""


def unaligned(hidden: int, width: int, step: int, dtype: torch.dtype) -> str:
    """Return a sentence if sizes are not multiples of `step`, which grouped_mm needs on CUDA, or \"\"."""
    if dtype == torch.float64 or not (hidden % step or width % step):
        return ""
    return (
        f"expert_backend=grouped needs a hidden size and an expert width that are multiples of {step} in "
        f"{str(dtype).removeprefix('torch.')}, and got {hidden} and {width}; use {SPECIFICATION}"
    )


CAPABILITIES = Capabilities(
    speed=1,
    refuses=refuses,
    adapters=True,
    waitless=True,
    fused=_narrow.fused,
    kept=_narrow.kept,
    kernels=(
        "grouped", "groupproblemshape", "activation_kernel", "activation_backward_kernel", "up_kernel", "back_kernel",
        "rows_kernel", "sums_kernel", "sums_total_kernel", "cut_kernel",
    ),
)  # fmt: skip


def available() -> str:
    if grouped_mm is None:
        return f"expert_backend=grouped needs grouped_mm, which torch {torch.__version__} lacks; use {SPECIFICATION}"
    if torch.cuda.is_available() and importlib.util.find_spec("triton") is None:
        return f"expert_backend=grouped needs the triton package on CUDA, which is not installed; use {SPECIFICATION}"
    return ""


def experts(x_RD: Tensor, weight_R: Tensor, count_E: Tensor, w: ExpertWeights, activation: str) -> Tensor:
    check(x_RD, weight_R, count_E, w)
    hidden, width = w.down_EDF.shape[1:]
    step = ALIGNED // x_RD.element_size()
    if x_RD.is_cuda and (why := unaligned(hidden, width, step, x_RD.dtype)):
        raise ValueError(why)
    ends_E = count_E.cumsum(0, dtype=torch.int32)
    apply = _Experts.apply if x_RD.dtype == torch.bfloat16 else _apart
    y_RD: Tensor = apply(
        x_RD.contiguous(), weight_R.contiguous(), ends_E, w.up_EFD.contiguous(), w.down_EDF.contiguous(),
        w.up_bias_EF, w.down_bias_ED, activation, w.gated, *factors(w, step if x_RD.is_cuda else 1),
    )  # fmt: skip
    return y_RD


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_RD: Tensor, weight_R: Tensor, ends_E: Tensor, up_EHD: Tensor, down_EDF: Tensor,
        up_bias_EH: Tensor | None, down_bias_ED: Tensor | None, activation: str, gated: bool,
        low: float, *adapters: Tensor,
    ) -> Tensor:  # fmt: skip
        h_RH = products(x_RD, up_EHD.transpose(1, 2), ends_E)
        if low:
            up_a, up_b, down_a, down_b = adapters
            h_RH.add_(products(products(x_RD, up_a, ends_E), up_b.transpose(1, 2), ends_E), alpha=low)
        if up_bias_EH is not None:
            h_RH += of_rows(up_bias_EH, ends_E, len(x_RD))
        ctx.save_for_backward(x_RD, weight_R, ends_E, up_EHD, down_EDF, down_bias_ED, h_RH, *adapters)
        ctx.options, ctx.low = (activation, gated), low
        if recomputed():
            return torch.empty_like(x_RD)
        a_RF = swiglu.forward(h_RH, weight_R, ends_E, activation, gated)
        y_RD = products(a_RF, down_EDF.transpose(1, 2), ends_E)
        if low:
            y_RD.add_(products(products(a_RF, down_a, ends_E), down_b.transpose(1, 2), ends_E), alpha=low)
        if down_bias_ED is not None:
            y_RD += weight_R[:, None] * of_rows(down_bias_ED, ends_E, len(x_RD))
        return y_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_RD: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, weight_R, ends_E, up_EHD, down_EDF, down_bias_ED, h_RH, *adapters = ctx.saved_tensors
        needs_x, _, _, needs_up, needs_down, needs_up_bias, needs_down_bias, *_ = ctx.needs_input_grad
        low, learned = ctx.low, list[Tensor]()
        d_y_RD = d_y_RD.contiguous()
        d_a_RF = products(d_y_RD, down_EDF, ends_E)
        if low:
            up_a, up_b, down_a, down_b = adapters
            d_v_Rr = low * products(d_y_RD, down_b, ends_E)
            d_a_RF += products(d_v_Rr, down_a.transpose(1, 2), ends_E)
        d_h_RH, d_weight_R, a_RF = swiglu.backward(d_a_RF, h_RH, weight_R, ends_E, *ctx.options)
        d_down_EDF = products(d_y_RD.t(), a_RF, ends_E) if needs_down else None
        d_up_EHD = products(d_h_RH.t(), x_RD, ends_E) if needs_up else None
        if low:
            d_u_Rr = low * products(d_h_RH, up_b, ends_E)
            u_Rr, v_Rr = products(x_RD, up_a, ends_E), products(a_RF, down_a, ends_E)
            for left, right, factor in ((x_RD, d_u_Rr, 1), (d_h_RH, u_Rr, low), (a_RF, d_v_Rr, 1), (d_y_RD, v_Rr, low)):
                learned.append(products(left.t(), right, ends_E) * factor)
        d_x_RD = None
        if needs_x:
            d_x_RD = products(d_h_RH, up_EHD, ends_E)
            if low:
                d_x_RD += products(d_u_Rr, up_a.transpose(1, 2), ends_E)
        d_up_bias_EH = row_sums(d_h_RH, torch.ones_like(weight_R), ends_E) if needs_up_bias else None
        d_down_bias_ED = row_sums(d_y_RD, weight_R, ends_E) if needs_down_bias else None
        if down_bias_ED is not None:
            wide = torch.promote_types(d_y_RD.dtype, torch.float32)
            share_R = (d_y_RD.to(wide) * of_rows(down_bias_ED, ends_E, len(x_RD))).sum(1)
            d_weight_R += torch.where(swiglu.live(ends_E, len(x_RD)), share_R, 0)
        return d_x_RD, d_weight_R, None, d_up_EHD, d_down_EDF, d_up_bias_EH, d_down_bias_ED, None, None, None, *learned


# a compiled block stops in front of the experts in other dtypes: torch cannot trace the loop that they fall back to
_apart = torch.compiler.disable(_Experts.apply)  # type: ignore[no-untyped-call]


def factors(w: ExpertWeights, step: int) -> tuple[float, *tuple[Tensor, ...]]:
    """Return the adapters' scale and the adapters, or 0.0 alone without adapters; the rank must be a multiple of
    `step`, because grouped_mm needs that."""
    if w.low is None:
        return (0.0,)
    rank = w.low.up_a_EDr.shape[2]
    if rank % step:
        raise ValueError(
            f"expert_backend=grouped needs an adapter rank that is a multiple of {step}, and got {rank}; write "
            f"lora.rank={-(-rank // step) * step}"
        )
    adapters = w.low.up_a_EDr, w.low.up_b_EHr, w.low.down_a_EFr, w.low.down_b_EDr
    return w.low.scale, *(each.contiguous() for each in adapters)


# Biases are rare in experts, so they take separate passes, and the kernels do not support them.


def of_rows(bias_EN: Tensor, ends_E: Tensor, rows: int) -> Tensor:
    """Return the bias of each row's expert; rows without an expert get the last bias, and nobody reads them."""
    index_R = torch.searchsorted(ends_E, torch.arange(rows, dtype=torch.int32, device=ends_E.device), right=True)
    return bias_EN[index_R.clamp_(max=len(bias_EN) - 1)]


def row_sums(d_RN: Tensor, weight_R: Tensor, ends_E: Tensor) -> Tensor:
    """Return the weighted sum of each expert's rows in a fixed order: a product with a column repeated to 16 bytes."""
    columns_RC = weight_R.to(d_RN.dtype)[:, None].repeat(1, ALIGNED // d_RN.element_size())
    return products(d_RN.t(), columns_RC, ends_E)[:, :, 0].contiguous()
