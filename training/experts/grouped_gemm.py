"""The grouped_gemm package: one cuBLAS product an expert, on several streams; the host waits once a layer."""

# Written against tgale96/grouped_gemm 0.1.6 (ebeae0b) and compared with grouped_gemm 0.3.0 and nv-grouped-gemm
# 1.1.4.post8 (fanshiqing/grouped_gemm, the fork Megatron uses). Each of them installs a module `grouped_gemm`, and they
# agree: ops.gmm(a_RK, b_EKN, batch_sizes, trans_b=False); batch_sizes int64 on the CPU, not all zero, all contiguous

from __future__ import annotations

import importlib
from functools import partial

import torch
from torch import Tensor

from training.experts import Capabilities, ExpertWeights
from training.experts.common import check, missing, narrow, only_bfloat16, sized

CAPABILITIES = Capabilities(refuses=partial(narrow, "grouped_gemm"))


def available() -> str:
    return missing("grouped_gemm", "grouped_gemm.ops")


def experts(x_RD: Tensor, weight_R: Tensor, count_E: Tensor, w: ExpertWeights, activation: str) -> Tensor:
    check(x_RD, weight_R, count_E, w)
    only_bfloat16("grouped_gemm", x_RD, w, activation)
    return sized(x_RD, weight_R, count_E, w, activation, linear)


def linear(x_RK: Tensor, w_ENK: Tensor, sizes: list[int]) -> Tensor:
    if not len(x_RK):  # gmm does not accept zero rows
        return x_RK @ w_ENK[0].T
    gmm = importlib.import_module("grouped_gemm.ops").gmm
    y_RN: Tensor = gmm(x_RK, w_ENK.contiguous(), torch.tensor(sizes), trans_b=True)
    return y_RN
