"""Products of rows with weights in FP8 (e4m3), each row of both with its own scale; the weights' gradients in bfloat16.

Rounding to 8 bits costs a relative error of a few percent a product, which is noise to training but no longer parity:
choose it for speed, with bf16 for the run it is compared with. torch's _scaled_grouped_mm, on Hopper.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from training.experts import ExpertWeights, grouped
from training.experts.common import check, only_bfloat16
from training.kernels import swiglu

LARGEST = 448.0  # of float8_e4m3fn
ALIGNED = 16  # elements, which are bytes


def available() -> str:
    if not hasattr(torch, "_scaled_grouped_mm"):
        return f"experts=grouped_fp8 needs _scaled_grouped_mm, which torch {torch.__version__} has not; use grouped"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return "experts=grouped_fp8 needs a Hopper GPU, and there is none; use experts=grouped"
    return grouped.available()


def experts(x_RD: Tensor, weight_R: Tensor, count_E: Tensor, w: ExpertWeights, activation: str) -> Tensor:
    check(x_RD, weight_R, count_E, w)
    only_bfloat16("grouped_fp8", x_RD, w)
    hidden, width = w.down_EDF.shape[1:]
    if hidden % ALIGNED or width % ALIGNED:
        raise ValueError(
            f"experts=grouped_fp8 needs a hidden size and an expert width that are multiples of {ALIGNED}, and got "
            f"{hidden} and {width}; use experts=grouped"
        )
    ends_E = count_E.cumsum(0, dtype=torch.int32)
    h_RH = product(x_RD, w.up_EFD, ends_E)
    a_RF = swiglu.activate(h_RH, weight_R.contiguous(), ends_E, activation, w.gated)
    return product(a_RF, w.down_EDF, ends_E)


def product(x_RK: Tensor, w_ENK: Tensor, ends_E: Tensor) -> Tensor:
    y_RN: Tensor = Product.apply(x_RK.contiguous(), w_ENK.contiguous(), ends_E)  # type: ignore[no-untyped-call]
    return y_RN


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RK: Tensor, w_ENK: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(x_RK, w_ENK, ends_E)
        return in_fp8(x_RK, w_ENK, ends_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_RN: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_RK, w_ENK, ends_E = ctx.saved_tensors
        d_y_RN = d_y_RN.contiguous()
        d_x_RK = in_fp8(d_y_RN, w_ENK.transpose(1, 2).contiguous(), ends_E) if ctx.needs_input_grad[0] else None
        d_w_ENK = grouped.products(d_y_RN.t(), x_RK, ends_E) if ctx.needs_input_grad[1] else None
        return d_x_RK, d_w_ENK, None


def in_fp8(x_RK: Tensor, w_ENK: Tensor, ends_E: Tensor) -> Tensor:
    """Each row of x times the transpose of its expert's matrix."""
    if len(x_RK) == 0:
        return x_RK.new_zeros(0, w_ENK.shape[1])
    (x, x_scale_R), (w, w_scale_EN) = rounded(x_RK), rounded(w_ENK)
    y_RN = torch._scaled_grouped_mm(
        x, w.transpose(1, 2), x_scale_R, w_scale_EN, offs=ends_E, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return swiglu.zero_tail(y_RN, ends_E)  # rows of no expert hold what was in memory, which nobody may see


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x / scale in e4m3, scale), where each row's scale takes its largest element to the largest that e4m3 has."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp_min(1e-12) / LARGEST
    return (x.float() / scale).to(torch.float8_e4m3fn), scale.squeeze(-1)
