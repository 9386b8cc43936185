"""The number c by which the routed experts' sum is multiplied so that the MoE's output equals the dense FFN's.

`gain` is c for a config, `weight_factors` the factor of each weight matrix that brings c about.

If the chosen weights add up to 1, each part of a virtual group has the weight 1/G, so c = G whatever the router is.
Where weights are not normalised, c depends on the router's probability mass on text, which `calibrated` measures.
"""

from __future__ import annotations

import math
from typing import Any

from upcycle.arch.spec import MoESpec

NAMES = ("exact", "published", "calibrated", "none")


def parse(value: Any) -> str | float:
    """The config's `scale` checked: one of NAMES, or a number. A ValueError for anything else."""
    if isinstance(value, str) and value in NAMES:
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-9 <= value <= 1e9:
        raise ValueError(f"scale is {value!r}; write {', '.join(NAMES)} or a number above 0 (1e-9 to 1e9)")
    return float(value)


def whole(moe: MoESpec) -> float:
    """c if the chosen weights add up to 1: granularity, or top_k of disjoint experts, so that each counts once."""
    return float(moe.top_k if moe.disjoint else moe.granularity)


def uniform(moe: MoESpec) -> float:
    """c as published: if all experts had equal weights (2410.07524, Eq. 2; Megatron calls the case pre-softmax)."""
    return moe.copies * moe.granularity**2 / moe.top_k if not moe.weights_sum_to_one else float(moe.granularity)


def gain(moe: MoESpec, scale: str | float, mass: float | None) -> float | None:
    """c for a config's `scale`; None if it is calibrated and the mass is not measured yet."""
    if scale == "exact":
        return whole(moe)
    if scale == "published":
        return uniform(moe)
    if scale == "calibrated":
        return None if mass is None else whole(moe) / mass
    return 1.0 if scale == "none" else float(scale)


def published_factor(moe: MoESpec) -> float:
    """Megatron's factor of every matrix: the cube root of c for a gated or squared-ReLU FFN, else the square root."""
    c, d = uniform(moe), moe.dense
    return float(c ** (1 / 3) if d.gated or d.activation == "relu2" else c**0.5)


def weight_factors(moe: MoESpec, scale: str | float, c: float, *, gated: bool) -> dict[str, float]:
    """The factor of each FFN matrix of a routed expert, which together multiply its output by c / output_scale.

    Exact wherever the FFN is homogeneous: gated in up and down, squared ReLU with the square of up, else down alone.
    The first factor is a power of two, so that half-precision weights are rounded once at most, and not at all when c
    is itself a power of two (every usual granularity). `gated`: the target's form (see relu2_as_gated).
    """
    # down's bias is not cut: each part has all of it, and weights that add up to 1 count it once without whole(moe)
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
