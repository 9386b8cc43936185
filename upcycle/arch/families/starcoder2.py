"""StarCoder 2: LayerNorm, tanh GELU without a gate, biases on everything, embeddings tied."""

from __future__ import annotations

from upcycle.arch.families import common
from upcycle.arch.families.common import Config, Source
from upcycle.arch.spec import DenseSpec
from upcycle.io import typed

IGNORED = common.ROTARY_BUFFERS


def read(config: Config) -> DenseSpec:
    bias = typed.flag(config, "use_bias", True)
    return common.dense(
        config,
        "starcoder2",
        context=4096,
        kv_heads=2,
        tied=True,
        eps=("norm_epsilon", 1e-5),
        act="gelu_pytorch_tanh",
        gated=False,
        norm="layernorm",
        qkv_bias=bias,
        out_bias=bias,
        ffn_bias=bias,
        **common.windows(config, default=None),
        init_std=0.018042,
        bos=50256,
        eos=50256,
    )


def sources(spec: DenseSpec) -> dict[str, Source]:
    return common.llama_sources(spec, {"up": "mlp.c_fc", "down": "mlp.c_proj"})
