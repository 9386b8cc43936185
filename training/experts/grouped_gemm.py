"""The grouped_gemm package: cuBLAS, one product an expert, over several streams. bfloat16 on CUDA, no biases.

Its sizes live on the host, so a layer waits for the device once; that is what `grouped` is there to avoid.
"""

# Written against fanshiqing/grouped_gemm 1.1.4.post8 (15721c6), the fork Megatron uses, and tgale96/grouped_gemm 0.1.6
# (ebeae0b), which agree: ops.gmm(a_RK, b_EKN, batch_sizes, trans_b=False); batch_sizes int64 on the CPU, all contiguous

from __future__ import annotations

import importlib

import torch
from torch import Tensor
from torch.nn import functional

from training.experts import ExpertWeights, reference
from training.experts.common import check, missing, only_bfloat16
from training.kernels import swiglu


def available() -> str:
    return missing("grouped_gemm", "grouped_gemm.ops")


def experts(x_RD: Tensor, weight_R: Tensor, count_E: Tensor, w: ExpertWeights, activation: str) -> Tensor:
    check(x_RD, weight_R, count_E, w)
    only_bfloat16("grouped_gemm", x_RD, w)
    gmm = importlib.import_module("grouped_gemm.ops").gmm
    sizes_E = count_E.to("cpu", torch.int64)
    rows, ends_E = int(sizes_E.sum()), count_E.cumsum(0, dtype=torch.int32)
    if rows == 0:
        return reference.experts(x_RD, weight_R, count_E, w, activation)  # gmm asserts that there is something to do
    h_RH = gmm(x_RD[:rows].contiguous(), w.up_EFD.contiguous(), sizes_E, trans_b=True)
    a_RF = swiglu.activate(h_RH, weight_R[:rows].contiguous(), ends_E, activation, w.gated)
    y_RD: Tensor = gmm(a_RF, w.down_EDF.contiguous(), sizes_E, trans_b=True)
    return functional.pad(y_RD, (0, 0, 0, len(x_RD) - rows)) if rows < len(x_RD) else y_RD
