"""Seed-OSS: Llama with biases on q, k and v, and heads of 128 unless stated."""

from __future__ import annotations

from upcycle.arch.families import common
from upcycle.arch.families.common import Config, Source
from upcycle.arch.spec import DenseSpec
from upcycle.io import typed

IGNORED = common.ROTARY_BUFFERS


def read(config: Config) -> DenseSpec:
    return common.dense(
        config,
        "seed_oss",
        context=524288,
        kv_heads=8,
        head_dim=128,
        qkv_bias=typed.flag(config, "attention_bias", True),
        out_bias=typed.flag(config, "attention_out_bias"),
        ffn_bias=typed.flag(config, "mlp_bias"),
        bos=0,
        eos=2,
        pad=1,
    )


def sources(spec: DenseSpec) -> dict[str, Source]:
    return common.llama_sources(spec)
