"""Llama 1 to 3.x and the models that reuse its class (Yi, SmolLM, TinyLlama, ...)."""

from __future__ import annotations

from upcycle.arch.families import common
from upcycle.arch.families.common import Config, Source
from upcycle.arch.spec import DenseSpec
from upcycle.io import typed

IGNORED = common.ROTARY_BUFFERS


def read(config: Config) -> DenseSpec:
    return common.dense(
        config,
        "llama",
        context=2048,
        qkv_bias=typed.flag(config, "attention_bias"),
        out_bias=typed.flag(config, "attention_bias"),
        ffn_bias=typed.flag(config, "mlp_bias"),
        bos=1,
        eos=2,
    )


def sources(spec: DenseSpec) -> dict[str, Source]:
    return common.llama_sources(spec)
