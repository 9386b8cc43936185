"""Llama 1 to 3.x and the models that reuse its class (Yi, SmolLM, TinyLlama, ...)."""

from __future__ import annotations

from upcycle.families import common
from upcycle.families.common import Config, Source
from upcycle.spec import DenseSpec

IGNORED = common.ROTARY_BUFFERS


def read(config: Config) -> DenseSpec:
    hidden, heads = common.need(config, "hidden_size"), common.need(config, "num_attention_heads")
    spec = DenseSpec(
        family="llama",
        layers=common.need(config, "num_hidden_layers"),
        hidden=hidden,
        ffn=common.need(config, "intermediate_size"),
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        vocab=common.need(config, "vocab_size"),
        context=config.get("max_position_embeddings") or 2048,
        activation=common.activation(config),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        qkv_bias=bool(config.get("attention_bias")),
        out_bias=bool(config.get("attention_bias")),
        ffn_bias=bool(config.get("mlp_bias")),
        rope=common.rope(config),
        tied=bool(config.get("tie_word_embeddings", False)),
        dtype=common.dtype(config),
        tokens=common.tokens(config),
        init_std=config.get("initializer_range", 0.02),
    )
    spec.check()
    return spec


def sources(spec: DenseSpec) -> dict[str, Source]:
    return common.llama_sources(spec)
