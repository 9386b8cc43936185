"""GLM-4-MoE: sigmoid scores, float32 router, output scale, shared experts; q/k norm and q, k, v biases on or off.

A trap: partial_rotary_factor defaults to 0.5, in transformers and in vLLM, without a warning.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from upcycle.arch.families.common import Config, context_length, dense, rope
from upcycle.arch.spec import MoESpec
from upcycle.arch.targets import common
from upcycle.arch.targets.common import EITHER, Abilities, Slot
from upcycle.io import typed

ABILITIES = Abilities(
    qk_norms=frozenset({"none", "head"}),
    qkv_bias=EITHER,
    partial_rotary=True,
    scores=frozenset({"sigmoid"}),
    normalize=EITHER,
    shared="multiple",
    mixed="first-dense",
    output_scale=True,
    router_fp32=True,
)


def config(moe: MoESpec) -> dict[str, Any]:
    d = moe.dense
    base = common.base_config(moe, "glm4_moe", "Glm4MoeForCausalLM", ABILITIES)
    rotary = {"partial_rotary_factor": d.partial_rotary}
    # MLX refuses a config.json without the key
    scaling = {"rope_scaling": base["rope_scaling"] | rotary if "rope_scaling" in base else None}
    return base | scaling | rotary | common.sigmoid_config(moe) | {
        "rope_parameters": base["rope_parameters"] | rotary,
        "first_k_dense_replace": moe.first_dense,
        "use_qk_norm": d.qk_norm == "head",
        "attention_bias": d.qkv_bias,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,  # vLLM never ties this architecture
    }  # fmt: skip


def read(config: Config) -> MoESpec:
    """The view of `config`, without the layers for multi-token prediction (num_nextn_predict_layers)."""
    context = context_length(config, 131072)
    d = dense(
        config,
        "glm4_moe",
        context=context,
        kv_heads=8,
        eps=("rms_norm_eps", 1e-5),
        rope=rope(config, context=context, partial=0.5),
        qk_norm="head" if typed.flag(config, "use_qk_norm") else "none",
        qkv_bias=typed.flag(config, "attention_bias"),
    )
    layers = range(typed.whole(config, "first_k_dense_replace", 1, low=0), d.layers)
    return common.sigmoid_view(config, ABILITIES, d, normalize=True, shared=1, layers=layers)


def slots(moe: MoESpec) -> Iterator[Slot]:
    return common.llama_slots(moe, lambda layer: common.sigmoid_slots(moe, layer), untie=True, gate=True)


def notes(moe: MoESpec) -> list[str]:
    return common.notes(moe, ABILITIES, common.untied_note(moe) | common.empty_shared_note(moe, moe.width))
