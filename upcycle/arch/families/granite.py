"""Granite 3.x (dense): Llama with four multipliers. Its attention scale is stated, never 1/sqrt(head_dim)."""

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
        "granite",
        context=2048,
        qkv_bias=typed.flag(config, "attention_bias"),
        out_bias=typed.flag(config, "attention_bias"),
        ffn_bias=typed.flag(config, "mlp_bias"),
        **multipliers(config),
        bos=1,
        eos=2,
    )


def sources(spec: DenseSpec) -> dict[str, Source]:
    return common.llama_sources(spec)


def multipliers(config: Config) -> dict[str, Any]:
    """The multipliers of a Granite config, dense or MoE, as fields of a DenseSpec."""
    return {
        "attention_scale": typed.number(config, "attention_multiplier", 1.0),
        "embed_scale": typed.number(config, "embedding_multiplier", 1.0),
        "residual_scale": typed.number(config, "residual_multiplier", 1.0),
        "logit_scale": 1.0 / typed.number(config, "logits_scaling", 1.0),
    }
