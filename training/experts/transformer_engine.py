"""Transformer Engine's GroupedLinear with our stacked weights. bfloat16 on CUDA, no biases.

The module is a template on the meta device, which functional_call fills for one call, so that there is one copy of the
weights. It splits its input on the host, so the host waits once a layer, and a compiled layer has a graph break here.
"""

# Tested with Transformer Engine 2.12, compared with the source of 2.18 (pytorch/module/grouped_linear.py):
# GroupedLinear(num_gemms, in_features, out_features, bias=, params_dtype=, device=), parameters weight0 ... weight{n-1}
# of (out, in), and forward(inp, m_splits), where m_splits may be a list (before 2.14 or so it has to be).

from __future__ import annotations

import functools
import importlib

import torch
from torch import Tensor, nn

from training.experts import Capabilities, ExpertWeights
from training.experts.common import check, missing, narrow, only_bfloat16, sized

CAPABILITIES = Capabilities(refuses=functools.partial(narrow, "transformer_engine"))


def available() -> str:
    return missing("transformer_engine", "transformer_engine.pytorch")


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a traced graph would have each matrix as an input
def experts(x_RD: Tensor, weight_R: Tensor, count_E: Tensor, w: ExpertWeights, activation: str) -> Tensor:
    check(x_RD, weight_R, count_E, w)
    only_bfloat16("transformer_engine", x_RD, w, activation)
    return sized(x_RD, weight_R, count_E, w, activation, linear)


def linear(x_RK: Tensor, w_ENK: Tensor, sizes: list[int]) -> Tensor:
    matrices = {f"weight{e}": matrix for e, matrix in enumerate(w_ENK.unbind())}
    y_RN: Tensor = torch.func.functional_call(template(*w_ENK.shape, w_ENK.dtype), matrices, (x_RK, sizes))
    return y_RN


@functools.cache  # building a hundred parameters in each call costs more than the products
def template(experts: int, out: int, width: int, dtype: torch.dtype) -> nn.Module:
    te = importlib.import_module("transformer_engine.pytorch")
    module: nn.Module = te.GroupedLinear(experts, width, out, bias=False, params_dtype=dtype, device="meta")
    return module
