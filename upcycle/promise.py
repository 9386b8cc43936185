"""What a plan promises: exact or not, why not, and the error to expect.

The expected error is not a table: the plan's own method, router and scale are run on a small Gaussian FFN in float64, with
router logits as spread as they will be in the real model. No tensor of the source is read for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from upcycle import rng, routers, scale
from upcycle.ffn import FFN
from upcycle.spec import MoESpec

HIDDEN, TOKENS, PART = 64, 256, 16  # of the small FFN: hidden size, tokens, neurons of the narrowest part


@dataclass(frozen=True)
class Estimate:
    """Of one MoE block against the dense FFN, over Gaussian tokens."""

    error: float  # root mean square of the difference over that of the dense output
    gain: float  # how much larger the output is, in the dense output's direction
    cosine: float


@dataclass(frozen=True)
class Promise:
    exact: bool
    reasons: tuple[str, ...]  # why not exact; or what to know although it is
    estimate: Estimate | None  # None: it depends on the donors
    tolerance: float  # of verify: largest logit difference over the largest logit, in float32


def compare(y: Tensor, want: Tensor) -> Estimate:
    dot = float((y * want).sum())
    square = float((want * want).sum())
    return Estimate(
        error=math.sqrt(float((y - want).square().sum()) / square),
        gain=dot / square,
        cosine=dot / math.sqrt(square * max(float((y * y).sum()), 1e-300)),
    )


def moe_output(x_TD: Tensor, moe: MoESpec, rows_ND: Tensor, experts: list[FFN], activation: str) -> Tensor:
    """The reference MoE block, without shared expert: sum over the chosen of weight * expert."""
    weight_TK, expert_TK = routers.weights(x_TD, rows_ND, moe)
    y_TD = torch.zeros_like(x_TD)
    for index, ffn in enumerate(experts):
        token, slot = (expert_TK == index).nonzero(as_tuple=True)
        if token.numel():
            y_TD[token] += weight_TK[token, slot, None] * ffn(x_TD[token], activation)
    return y_TD * moe.output_scale


def estimate(
    moe: MoESpec, method: str, make: Callable[[FFN, MoESpec, int], FFN], kind: str | float, init: str, std: float, seed: int, gated: bool
) -> Estimate:
    """`make(ffn, moe, index)` is the method's expert on the small FFN."""
    parts = moe.experts if method == "split" else moe.granularity
    part = PART if parts < 64 else 4
    shared = math.ceil(part * parts * moe.shared / max(moe.dense.ffn - moe.shared, 1)) if moe.shared else 0
    small = replace(
        moe,
        dense=replace(moe.dense, hidden=HIDDEN, ffn=part * parts + shared, ffn_bias=False),
        widths=(part,) * moe.experts,
        shared=shared,
    )

    def draw(name: str, *shape: int) -> Tensor:
        return rng.normal(shape, seed, "estimate", name).double() / (shape[1] ** 0.5 if name != "tokens" else 1)

    x, f = draw("tokens", TOKENS, HIDDEN), small.dense.ffn
    gate = {"gate": draw("gate", f, HIDDEN)} if gated else {}
    if gated and not moe.dense.gated:
        gate["gate"] = draw("up", f, HIDDEN)  # relu2_as_gated
    dense = FFN.of(**gate, up=draw("up", f, HIDDEN), down=draw("down", HIDDEN, f))
    activation = "relu" if gated and not moe.dense.gated else moe.dense.activation
    independent = method == "split" or init == "independent"
    rows = routers.normal(moe.experts if independent else moe.copies, HIDDEN, std * (moe.dense.hidden / HIDDEN) ** 0.5, seed, 0)
    rows = routers.repeated(rows.double(), moe.experts)
    mass = float(routers.weights(x, rows, small)[0].sum(-1).mean()) if kind == "calibrated" else None
    c = scale.gain(small, method, kind, mass)
    assert c is not None
    factors = scale.weight_factors(small, method, kind, c, gated=gated)
    routed = dense.neurons(slice(shared, None))
    experts = [make(routed, small, i).scaled(factors) for i in range(moe.experts)]
    experts = [FFN.of(**{m: e[m].double() for m in e.matrices}) for e in experts]
    y = moe_output(x, small, rows, experts, activation)
    if shared:
        y = y + dense.neurons(slice(shared))(x, activation)
    return compare(y, dense(x, activation))
