"""Gemma 2: Gemma with norms before and after attention and FFN, soft caps, and a window in every other layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from upcycle.arch.families import gemma
from upcycle.arch.families.common import Config, activation, cap, windows_by_type
from upcycle.arch.families.gemma import only_causal
from upcycle.io import typed


def sandwich(config: Config) -> dict[str, Any]:
    """Return the fields of a DenseSpec that Gemma 2 and 3 share."""
    only_causal(config)
    return {
        "activation": activation(config, "hidden_activation", "gelu_pytorch_tanh"),
        "embed_scale": float(typed.whole(config, "hidden_size")) ** 0.5,
        "attention_scale": typed.number(config, "query_pre_attn_scalar", 256) ** -0.5,
    }


def own(config: Config) -> dict[str, Any]:
    return {
        **sandwich(config),
        "attention_cap": cap(config, "attn_logit_softcapping", 50.0),
        "logit_cap": cap(config, "final_logit_softcapping", 30.0),
        **windows_by_type(config, every=2),
    }


FAMILY = replace(
    gemma.FAMILY,
    name="gemma2",
    kv_heads=4,
    fixed={"norm": "rms1p", "block": "sandwich"},
    own=own,
    names={
        "attn_out_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "ffn_out_norm": "post_feedforward_layernorm",
    },
)
