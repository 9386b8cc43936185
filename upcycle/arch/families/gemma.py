"""Gemma 1: embeddings times sqrt(hidden), norms stored minus one, tanh GELU whatever the old files call it."""

from __future__ import annotations

from upcycle.arch.families import common
from upcycle.arch.families.common import Config, Source
from upcycle.arch.spec import DenseSpec
from upcycle.io import typed

IGNORED = common.ROTARY_BUFFERS


def read(config: Config) -> DenseSpec:
    # The official files say "gelu" and mean the tanh approximation; transformers reads them so.
    act = common.activation(config, default="gelu_pytorch_tanh")
    act = "gelu_tanh" if act == "gelu" else act
    # transformers 4 had hidden_activation as well; null meant the tanh approximation.
    if config.get("hidden_activation") is not None and common.activation(config, "hidden_activation") != act:
        raise ValueError(
            f"config.json has hidden_activation={config['hidden_activation']!r} and a hidden_act that means {act!r}; "
            "transformers 4 and 5 disagree on which counts, so make them equal"
        )
    if typed.flag(config, "use_bidirectional_attention"):
        raise ValueError("config.json has use_bidirectional_attention; only causal models can be upcycled")
    return common.dense(
        config,
        "gemma",
        context=8192,
        kv_heads=16,
        head_dim=256,
        tied=True,
        activation=act,
        norm="rms1p",
        embed_scale=float(typed.whole(config, "hidden_size")) ** 0.5,
        qkv_bias=typed.flag(config, "attention_bias"),
        out_bias=typed.flag(config, "attention_bias"),
        bos=2,
        eos=1,
        pad=0,
    )


def sources(spec: DenseSpec) -> dict[str, Source]:
    return common.llama_sources(spec)
