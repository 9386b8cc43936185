"""OLMo 2: no norm before a block but one after it, and q and k normalised over all heads at once."""

from __future__ import annotations

from upcycle.arch.families import common
from upcycle.arch.families.common import Config, Source
from upcycle.arch.spec import DenseSpec
from upcycle.io import typed

IGNORED = common.ROTARY_BUFFERS


def read(config: Config) -> DenseSpec:
    return common.dense(
        config,
        "olmo2",
        context=2048,
        eps=("rms_norm_eps", 1e-5),
        block="post",
        qk_norm="full",
        qkv_bias=typed.flag(config, "attention_bias"),
        out_bias=typed.flag(config, "attention_bias"),
        eos=50279,
        pad=1,
    )


def sources(spec: DenseSpec) -> dict[str, Source]:
    return common.llama_sources(
        spec, {"attn_norm": "post_attention_layernorm", "ffn_norm": "post_feedforward_layernorm"}
    )
