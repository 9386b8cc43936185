"""Gemma 2: Gemma with a norm on both sides of attention and FFN, soft caps, and a window in every other layer."""

from __future__ import annotations

from typing import Any

from upcycle.arch.families import common
from upcycle.arch.families.common import Config, Source
from upcycle.arch.spec import DenseSpec
from upcycle.io import typed

IGNORED = common.ROTARY_BUFFERS


def read(config: Config) -> DenseSpec:
    return common.dense(
        config,
        "gemma2",
        context=8192,
        kv_heads=4,
        head_dim=256,
        tied=True,
        **sandwich(config),
        attention_cap=common.cap(config, "attn_logit_softcapping", 50.0),
        logit_cap=common.cap(config, "final_logit_softcapping", 30.0),
        **common.windows_by_type(config, every=2),
        bos=2,
        eos=1,
        pad=0,
    )


def sandwich(config: Config) -> dict[str, Any]:
    """What Gemma 2 and 3 share, as fields of a DenseSpec."""
    if typed.flag(config, "use_bidirectional_attention"):
        raise ValueError("config.json has use_bidirectional_attention; only causal models can be upcycled")
    bias = typed.flag(config, "attention_bias")
    return {
        "activation": common.activation(config, "hidden_activation", "gelu_pytorch_tanh"),
        "norm": "rms1p",
        "block": "sandwich",
        "embed_scale": float(typed.whole(config, "hidden_size")) ** 0.5,
        "attention_scale": typed.number(config, "query_pre_attn_scalar", 256) ** -0.5,
        "qkv_bias": bias,
        "out_bias": bias,
    }


def sources(spec: DenseSpec) -> dict[str, Source]:
    return common.llama_sources(
        spec,
        {
            "attn_out_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "ffn_out_norm": "post_feedforward_layernorm",
        },
    )
