"""Qwen 3 (dense): each head's q and k are normalised; head_dim is 128 unless stated, whatever hidden / heads is."""

from __future__ import annotations

from upcycle.arch.families import common
from upcycle.arch.families.common import Config, Source
from upcycle.arch.spec import DenseSpec
from upcycle.io import typed

IGNORED = common.ROTARY_BUFFERS


def read(config: Config) -> DenseSpec:
    return common.dense(
        config,
        "qwen3",
        context=32768,
        kv_heads=32,
        head_dim=128,
        qk_norm="head",
        qkv_bias=typed.flag(config, "attention_bias"),
        out_bias=typed.flag(config, "attention_bias"),
        **common.windows_by_layer(config),
    )


def sources(spec: DenseSpec) -> dict[str, Source]:
    return common.llama_sources(spec)
