"""Compute the scale c: the sum of the routed experts times c equals the output of the dense FFN.

`gain` returns c for a config; `weight_factors` returns the factor of each weight matrix that has the same effect.

If the gate weights add up to 1, each part of a virtual group has the weight 1/G, so c = G for every router. If the
weights are not normalized, c depends on the router's probability mass on text, which scale=calibrated measures.
"""

from __future__ import annotations

import math
from typing import Any

from upcycle.arch.spec import MoESpec

NAMES = ("exact", "published", "calibrated", "none")


def parse(value: Any) -> str | float:
    """Return the config's `scale`: one of NAMES, or a number; raise a ValueError for anything else."""
    if isinstance(value, str) and value in NAMES:
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-9 <= value <= 1e9:
        raise ValueError(f"scale is {value!r}; write {', '.join(NAMES)} or a number above 0 (1e-9 to 1e9)")
    return float(value)


def whole(moe: MoESpec) -> float:
    """Return c if the gate weights add up to 1: granularity; for disjoint experts top_k, so that each counts once."""
    return float(moe.top_k if moe.disjoint else moe.granularity)


def uniform(moe: MoESpec) -> float:
    """Return the published c, which assumes equal gate weights (2410.07524, Eq. 2; in Megatron: pre-softmax)."""
    return moe.copies * moe.granularity**2 / moe.top_k if not moe.weights_sum_to_one else float(moe.granularity)


def gain(moe: MoESpec, scale: str | float, mass: float | None) -> float | None:
    """Return c for a config's `scale`; None if it is calibrated and the mass is not measured yet."""
    if scale == "exact":
        return whole(moe)
    if scale == "published":
        return uniform(moe)
    if scale == "calibrated":
        return None if mass is None else whole(moe) / mass
    return 1.0 if scale == "none" else float(scale)


def published_factor(moe: MoESpec) -> float:
    """Return Megatron's factor of every matrix: the cube root of c if gated or squared ReLU, else its square root."""
    c, d = uniform(moe), moe.dense
    return float(c ** (1 / 3) if d.gated or d.activation == "relu2" else c**0.5)


def weight_factors(moe: MoESpec, scale: str | float, c: float, *, gated: bool) -> dict[str, float]:
    """Return the factor of each FFN matrix of a routed expert; together they multiply its output by c / output_scale.

    Except for scale=published, only matrices in which the FFN is homogeneous are scaled, so the result is exact: up and
    down if gated, up (whose factor counts twice) and down for squared ReLU, else only down. The factor of up is a power
    of two, so half-precision weights are rounded at most once, and never if c is a power of two (as usual).
    `gated`: whether the target's FFN has a gate (see relu2_as_gated).
    """
    # each part has the whole down bias, so gate weights that add up to 1 already count the bias once
    down_bias = c / whole(moe) / moe.output_scale
    if scale == "published":
        s = published_factor(moe)
        return {"gate": s, "up": s, "down": s, "gate_bias": s, "up_bias": s, "down_bias": 1.0}
    c = c / moe.output_scale
    if gated:
        a = 2.0 ** round(math.log2(c) / 2)
        down = c / a
    elif moe.dense.activation == "relu2":
        a = 2.0 ** round(math.log2(c) / 3)
        down = c / a**2
    else:
        a, down = 1.0, c
    return {"gate": 1.0, "up": a, "down": down, "gate_bias": 1.0, "up_bias": a, "down_bias": down_bias}
