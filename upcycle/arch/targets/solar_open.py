"""Solar Open: sigmoid scores, float32 router, output scale, shared experts; every layer MoE; Llama or Qwen2."""

from __future__ import annotations

from functools import partial
from typing import Any

from upcycle.arch.abilities import EITHER, Abilities
from upcycle.arch.families.common import Config, Family
from upcycle.arch.slots import sigmoid_slots
from upcycle.arch.spec import MoESpec
from upcycle.arch.targets.common import ONE_GROUP, SIGMOID, Target, sigmoid_keys, sigmoid_moe


def keys(moe: MoESpec) -> dict[str, Any]:
    return {
        **sigmoid_keys(moe),
        "first_k_dense_replace": 0,
        "attention_bias": moe.dense.qkv_bias,
        "partial_rotary_factor": 1.0,  # MLX refuses a config.json without the key
        "tie_word_embeddings": False,  # vLLM never ties the related architectures
    }


def adapt(config: Config) -> Config:
    """Return the config with intermediate_size, which may be absent because no layer is dense."""
    return {"rope_theta": 1e6, "intermediate_size": config.get("moe_intermediate_size"), **config}


TARGET = Target(
    Family(
        "solar_open",
        context=131072,
        kv_heads=8,
        head_dim=128,
        eps=("rms_norm_eps", 1e-5),
        flags={"qkv_bias": ("attention_bias", False)},
        adapt=adapt,
    ),
    # No partial rotary: the class reads the factor, but its forward pass cannot rotate only a part of a head.
    Abilities(
        qkv_bias=EITHER,
        scores=frozenset({"sigmoid"}),
        normalize=EITHER,
        shared="multiple",
        output_scale=True,
        router_fp32=True,
    ),
    moe=partial(sigmoid_moe, normalize=True, shared=1),
    block=sigmoid_slots,
    only=SIGMOID | ONE_GROUP,
    unties=True,
    architecture="SolarOpenForCausalLM",
    keys=keys,
    least=lambda moe: moe.width,
)
