"""dots.llm1: sigmoid scores, float32 router, output scale, shared experts; q/k norm per head is mandatory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from upcycle.arch.families.common import Config, dense
from upcycle.arch.spec import MoESpec
from upcycle.arch.targets import common
from upcycle.arch.targets.common import EITHER, Abilities, Slot
from upcycle.io import typed

ABILITIES = Abilities(
    qk_norms=frozenset({"head"}),
    qkv_bias=EITHER,
    out_bias=EITHER,
    windows="any",
    scores=frozenset({"sigmoid"}),
    normalize=EITHER,
    shared="multiple",
    mixed="first-dense",
    output_scale=True,
    router_fp32=True,
)


def config(moe: MoESpec) -> dict[str, Any]:
    d = moe.dense
    return common.base_config(moe, "dots1", "Dots1ForCausalLM", ABILITIES) | common.sigmoid_config(moe) | {
        "first_k_dense_replace": moe.first_dense,
        "moe_layer_freq": 1,
        "attention_bias": d.qkv_bias or d.out_bias,
        "sliding_window": d.window if d.window_layers else None,
        "max_window_layers": d.layers,
        "layer_types": [
            "sliding_attention" if layer in d.window_layers else "full_attention" for layer in range(d.layers)
        ],
        "tie_word_embeddings": False,  # vLLM never ties this architecture
    }  # fmt: skip


def read(config: Config) -> MoESpec:
    bias = typed.flag(config, "attention_bias")
    d = dense(
        config,
        "dots1",
        context=2048,
        kv_heads=32,
        qk_norm="head",
        qkv_bias=bias,
        out_bias=bias,
        **common.some_windows({"max_window_layers": 62, **config}),
    )
    layers = range(typed.whole(config, "first_k_dense_replace", 0, low=0), d.layers)
    return common.sigmoid_view(config, ABILITIES, d, normalize=False, shared=None, layers=layers)


def slots(moe: MoESpec) -> Iterator[Slot]:
    bias = moe.dense.qkv_bias or moe.dense.out_bias  # one switch for all four
    return common.llama_slots(
        moe,
        lambda layer: common.sigmoid_slots(moe, layer),
        untie=True,
        zero_qkv_bias=bias,
        zero_out_bias=bias,
        gate=True,
    )


def notes(moe: MoESpec) -> list[str]:
    d = moe.dense
    windows = "vLLM gives all layers of this architecture the same attention window; use transformers"
    return common.notes(
        moe,
        ABILITIES,
        {windows: bool(d.window_layers) and common.window_of_all(moe) is None}
        | common.untied_note(moe)
        | common.empty_shared_note(moe, moe.width),
    )
