"""The specification of backends: one expert after the other, in plain torch. The host waits to read the counts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from training.experts import Capabilities, ExpertWeights
from training.experts.common import check
from upcycle.arch.ffn import ACTIVATIONS, gated_product

CAPABILITIES = Capabilities(speed=0, adapters=True)


def available() -> str:
    return ""


def experts(x_RD: Tensor, weight_R: Tensor, count_E: Tensor, w: ExpertWeights, activation: str) -> Tensor:
    check(x_RD, weight_R, count_E, w)
    counts = count_E.tolist()
    parts = []
    for e, x in enumerate(torch.split(x_RD[: sum(counts)], counts)):
        weight = weight_R[sum(counts[:e]) : sum(counts[: e + 1]), None]
        h = functional.linear(x, w.up_EFD[e], None if w.up_bias_EF is None else w.up_bias_EF[e])
        if w.low is not None:
            h = h + w.low.scale * (x @ w.low.up_a_EDr[e]) @ w.low.up_b_EHr[e].T
        if w.gated:
            gate, up = h.chunk(2, dim=1)
            a = gated_product(activation, gate, up)
        else:
            a = ACTIVATIONS[activation](h)
        a = (a * weight).to(x.dtype)  # the weights may be wider than the rows
        y = functional.linear(a, w.down_EDF[e])
        if w.low is not None:
            y = y + w.low.scale * (a @ w.low.down_a_EFr[e]) @ w.low.down_b_EDr[e].T
        if w.down_bias_ED is not None:
            y = y + (weight * w.down_bias_ED[e]).to(x.dtype)
        parts.append(y)
    parts.append(torch.zeros_like(x_RD[sum(counts) :]))
    return torch.cat(parts)
