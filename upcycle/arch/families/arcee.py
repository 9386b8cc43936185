"""Arcee AFM: Llama with squared ReLU and no gate."""

from __future__ import annotations

from upcycle.arch.families import common
from upcycle.arch.families.common import Config, Source
from upcycle.arch.spec import DenseSpec
from upcycle.io import typed

IGNORED = common.ROTARY_BUFFERS


def read(config: Config) -> DenseSpec:
    return common.dense(
        config,
        "arcee",
        context=4096,
        eps=("rms_norm_eps", 1e-5),
        act="relu2",
        gated=False,
        qkv_bias=typed.flag(config, "attention_bias"),
        out_bias=typed.flag(config, "attention_bias"),
        ffn_bias=typed.flag(config, "mlp_bias"),
        bos=128000,
        eos=128001,
    )


def sources(spec: DenseSpec) -> dict[str, Source]:
    return common.llama_sources(spec)
