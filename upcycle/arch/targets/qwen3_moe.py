"""Qwen3-MoE: softmax, top-k, normalised or not; no shared expert; any layers; each head must have q/k norms."""

from __future__ import annotations

from typing import Any

from upcycle.arch.abilities import EITHER, Abilities
from upcycle.arch.families.common import ATTENTION, Config, Family, windows
from upcycle.arch.spec import MoESpec
from upcycle.arch.targets.common import Target, attention_bias, stepped_keys, stepped_moe, window_of_all
from upcycle.io import typed


def keys(moe: MoESpec) -> dict[str, Any]:
    window = window_of_all(moe)
    return {
        "intermediate_size": moe.dense.ffn,
        "moe_intermediate_size": moe.width,
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        **stepped_keys(moe),
        "attention_bias": attention_bias(moe),
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": 0 if window else moe.dense.layers,
        "router_aux_loss_coef": 0.001,
        "output_router_logits": False,
    }


def own(config: Config) -> dict[str, Any]:
    """Return the window fields for all layers or for none; ignore max_window_layers."""
    return windows(config, default=4096) if typed.flag(config, "use_sliding_window") else {}


TARGET = Target(
    Family("qwen3_moe", context=32768, kv_heads=4, flags=ATTENTION, fixed={"qk_norm": "head"}, own=own),
    Abilities(
        qk_norms=frozenset({"head"}), qkv_bias=EITHER, out_bias=EITHER, normalize=EITHER, mixed="any", windows="all"
    ),
    moe=stepped_moe,
    architecture="Qwen3MoeForCausalLM",
    keys=keys,
)
