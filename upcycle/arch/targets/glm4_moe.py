"""GLM-4-MoE: sigmoid scores, float32 router, output scale, shared experts; q/k norms and q, k, v biases are optional.

Always state partial_rotary_factor: transformers and vLLM assume 0.5 without a warning.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from upcycle.arch.abilities import EITHER, Abilities
from upcycle.arch.families.common import Config, Family
from upcycle.arch.slots import sigmoid_slots
from upcycle.arch.spec import MoESpec
from upcycle.arch.targets.common import ONE_GROUP, SIGMOID, Target, sigmoid_keys, sigmoid_moe
from upcycle.io import typed


def keys(moe: MoESpec) -> dict[str, Any]:
    d = moe.dense
    rotary = {"partial_rotary_factor": d.partial_rotary}
    scaling = {key: value for key, value in d.rope.items() if key != "rope_theta"} | rotary
    return {
        "rope_scaling": scaling if d.rope["rope_type"] != "default" else None,  # MLX refuses a config.json without it
        **rotary,
        **sigmoid_keys(moe),
        "rope_parameters": {**d.rope, **rotary},
        "first_k_dense_replace": moe.first_dense,
        "use_qk_norm": d.qk_norm == "head",
        "attention_bias": d.qkv_bias,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,  # vLLM never ties this architecture
    }


def own(config: Config) -> dict[str, Any]:
    return {"qk_norm": "head" if typed.flag(config, "use_qk_norm") else "none"}


TARGET = Target(  # we do not read the layers for multi-token prediction (num_nextn_predict_layers)
    Family(
        "glm4_moe",
        context=131072,
        kv_heads=8,
        eps=("rms_norm_eps", 1e-5),
        flags={"qkv_bias": ("attention_bias", False)},
        rope={"partial": 0.5},
        own=own,
    ),
    Abilities(
        qk_norms=frozenset({"none", "head"}),
        qkv_bias=EITHER,
        partial_rotary=True,
        scores=frozenset({"sigmoid"}),
        normalize=EITHER,
        shared="multiple",
        mixed="first-dense",
        output_scale=True,
        router_fp32=True,
    ),
    moe=partial(sigmoid_moe, normalize=True, shared=1, first_dense=1),
    block=sigmoid_slots,
    only=SIGMOID | ONE_GROUP,
    unties=True,
    architecture="Glm4MoeForCausalLM",
    keys=keys,
    least=lambda moe: moe.width,
)
