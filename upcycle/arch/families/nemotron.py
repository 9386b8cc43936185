"""Nemotron-4 and Minitron: squared ReLU without a gate, LayerNorm stored minus one, half of each head rotated."""

from __future__ import annotations

from upcycle.arch.families import common
from upcycle.arch.families.common import Config, Source
from upcycle.arch.spec import DenseSpec
from upcycle.io import typed

IGNORED = common.ROTARY_BUFFERS


def read(config: Config) -> DenseSpec:
    context = common.context_length(config, 4096)
    return common.dense(
        config,
        "nemotron",
        context=4096,
        eps=("norm_eps", 1e-5),
        act="relu2",
        gated=False,
        norm="layernorm1p",
        rope=common.rope(config, context=context, partial=0.5),
        qkv_bias=typed.flag(config, "attention_bias"),
        out_bias=typed.flag(config, "attention_bias"),
        ffn_bias=typed.flag(config, "mlp_bias"),
        init_std=0.0134,
        bos=2,
        eos=3,
    )


def sources(spec: DenseSpec) -> dict[str, Source]:
    return common.llama_sources(spec)
