"""Declare what an MoE architecture can hold, and say why it cannot hold a model."""

from __future__ import annotations

from dataclasses import dataclass
from math import isclose
from typing import Literal

from upcycle.arch.spec import DenseSpec, MoESpec

NO, YES, EITHER = frozenset({False}), frozenset({True}), frozenset({False, True})


@dataclass(frozen=True)
class Abilities:
    stock: bool = True  # transformers has the architecture, so the folder needs no code from us
    # -- the dense part
    blocks: frozenset[str] = frozenset({"pre"})
    norms: frozenset[str] = frozenset({"rms"})  # rms1p becomes rms by adding 1, so {"rms"} holds both
    qk_norms: frozenset[str] = frozenset({"none"})
    qkv_bias: frozenset[bool] = NO
    out_bias: frozenset[bool] = NO
    ffn_bias: frozenset[bool] = NO
    activations: frozenset[str] = frozenset({"silu", "gelu", "gelu_tanh", "relu"})
    not_gated: bool = False
    free_head_dim: bool = True  # head_dim may differ from hidden / heads
    partial_rotary: bool = False
    windows: Literal["none", "all", "any"] = "none"  # layers with sliding attention: none, all or none, any set
    multipliers: bool = False  # embed_scale, residual_scale, logit_scale, attention_scale
    ropes: bool = False  # layers with a window may have another rope, and some layers may have none
    caps: bool = False  # soft caps on attention scores and on logits
    # -- the MoE part
    scores: frozenset[str] = frozenset({"softmax"})
    normalize: frozenset[bool] = YES
    choices: frozenset[str] = frozenset({"any"})
    # the width of a shared expert: any, a multiple of the routed width, or the same as the routed width
    shared: Literal["none", "any", "multiple", "same"] = "none"
    mixed: Literal["none", "first-dense", "any"] = "none"  # which sets of layers may stay dense
    output_scale: bool = False  # has routed_scaling_factor
    uneven: bool = False  # experts of different widths
    router_fp32: bool = False  # computes router logits in float32 whatever the model's dtype


def relu2_as_gated(moe: MoESpec, can: Abilities) -> bool:
    """Return True if the target holds squared ReLU by a gate that equals `up`: relu(u) * u = relu(u)^2."""
    return moe.dense.activation == "relu2" and not moe.dense.gated and not can.not_gated and "relu" in can.activations


def refusals(can: Abilities, moe: MoESpec) -> list[str]:
    """Return the reasons why the target cannot hold `moe`, as short clauses; an empty list means that it can."""
    d = moe.dense
    checks = {
        f"block layout {d.block!r}": d.block in can.blocks,
        f"norm {d.norm!r}": d.norm in can.norms or (d.norm == "rms1p" and "rms" in can.norms),
        f"q/k norm {d.qk_norm!r} (it has {' or '.join(sorted(can.qk_norms))})": d.qk_norm in can.qk_norms,
        "biases on q, k, v" if d.qkv_bias else "q, k, v without biases": d.qkv_bias in can.qkv_bias,
        f"an attention output {'with' if d.out_bias else 'without'} bias": d.out_bias in can.out_bias,
        "biases in the FFN": d.ffn_bias in can.ffn_bias,
        f"activation {d.activation!r}": d.activation in can.activations or relu2_as_gated(moe, can),
        "an FFN without gate": d.gated or can.not_gated or relu2_as_gated(moe, can),
        f"head_dim {d.head_dim} that is not hidden/heads": can.free_head_dim or d.head_dim * d.heads == d.hidden,
        f"partial rotary {d.partial_rotary}": can.partial_rotary or d.partial_rotary == 1.0,
        "sliding windows": windows_fit(can, d),
        "embedding, residual, logit or attention multipliers": can.multipliers or not has_multipliers(d),
        "another rope in the layers with a window": can.ropes or d.window_rope is None,
        f"layers without rotary positions ({len(d.nope_layers)} of {d.layers})": can.ropes or not d.nope_layers,
        "soft caps": can.caps or not (d.attention_cap or d.logit_cap),
        f"{moe.score} scores": moe.score in can.scores,
        f"weights {'' if moe.weights_sum_to_one else 'not '}normalised over the chosen": moe.weights_sum_to_one
        in can.normalize,
        "a choice in each slice": moe.choice in can.choices,
        "a shared expert": not moe.shared or can.shared != "none",
        f"a shared expert of {moe.shared} neurons (it must be a multiple of the routed width)": not moe.shared
        or can.shared not in ("multiple", "same")
        or (moe.uniform and moe.shared % moe.width == 0),
        f"a shared expert of {moe.shared} neurons (it must be as wide as a routed expert)": not moe.shared
        or can.shared != "same"
        or (moe.uniform and moe.shared == moe.width),
        f"MoE in only {len(moe.layers)} of {d.layers} layers"
        + (" other than the last ones" if can.mixed == "first-dense" else ""): moe.all_layers
        or can.mixed == "any"
        or (can.mixed == "first-dense" and moe.first_dense is not None),
        "experts of different widths": moe.uniform or can.uneven,
        "a single expert (the router adds up the best two of a group)": moe.experts > 1 or "softmax" in can.scores,
        "an output scale": moe.output_scale == 1.0 or can.output_scale,
    }
    return [reason for reason, fits in checks.items() if not fits]


def has_multipliers(d: DenseSpec) -> bool:
    plain = d.embed_scale == d.residual_scale == d.logit_scale == 1.0
    return not (plain and isclose(d.attention_scale, d.head_dim**-0.5))


def windows_fit(can: Abilities, d: DenseSpec) -> bool:
    if d.window is None or not d.window_layers or d.window >= d.context or can.windows == "any":
        return True
    return can.windows == "all" and d.window_layers == tuple(range(d.layers))
