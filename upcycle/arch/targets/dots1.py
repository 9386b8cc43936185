"""dots.llm1: sigmoid scores, float32 router, output scale, shared experts; each head must have q/k norms."""

from __future__ import annotations

from functools import partial
from typing import Any

from upcycle.arch.abilities import EITHER, Abilities
from upcycle.arch.families.common import ATTENTION, Config, Family
from upcycle.arch.slots import sigmoid_slots
from upcycle.arch.spec import MoESpec
from upcycle.arch.targets import common
from upcycle.arch.targets.common import ONE_GROUP, SIGMOID, Target, sigmoid_keys, sigmoid_moe


def keys(moe: MoESpec) -> dict[str, Any]:
    d = moe.dense
    return {
        **sigmoid_keys(moe),
        "first_k_dense_replace": moe.first_dense,
        "moe_layer_freq": 1,
        "attention_bias": common.attention_bias(moe),
        "sliding_window": d.window if d.window_layers else None,
        "max_window_layers": d.layers,
        "layer_types": common.layer_types(moe),
        "tie_word_embeddings": False,  # vLLM never ties this architecture
    }


def own(config: Config) -> dict[str, Any]:
    return common.some_windows({"max_window_layers": 62, **config})


def warns(moe: MoESpec) -> dict[str, bool]:
    some = bool(moe.dense.window_layers) and common.window_of_all(moe) is None
    return {"vLLM gives all layers of this architecture the same attention window; use transformers": some}


TARGET = Target(
    Family("dots1", context=2048, kv_heads=32, flags=ATTENTION, fixed={"qk_norm": "head"}, own=own),
    Abilities(
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
    ),
    moe=partial(sigmoid_moe, normalize=False, shared=None, first_dense=0),
    block=sigmoid_slots,
    only=SIGMOID | ONE_GROUP,
    unties=True,
    architecture="Dots1ForCausalLM",
    keys=keys,
    warns=warns,
    least=lambda moe: moe.width,
)
