"""Solar Open: sigmoid scores, float32 router, output scale, shared experts; every layer MoE; Llama or Qwen2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from upcycle.arch.families.common import Config, dense
from upcycle.arch.spec import MoESpec
from upcycle.arch.targets import common
from upcycle.arch.targets.common import EITHER, Abilities, Slot
from upcycle.io import typed

# No partial rotary: the class reads the factor, but its forward pass cannot rotate a part of a head.
ABILITIES = Abilities(
    qkv_bias=EITHER,
    scores=frozenset({"sigmoid"}),
    normalize=EITHER,
    shared="multiple",
    output_scale=True,
    router_fp32=True,
)


def config(moe: MoESpec) -> dict[str, Any]:
    return common.base_config(moe, "solar_open", "SolarOpenForCausalLM", ABILITIES) | common.sigmoid_config(moe) | {
        "first_k_dense_replace": 0,
        "attention_bias": moe.dense.qkv_bias,
        "partial_rotary_factor": 1.0,  # MLX refuses a config.json without the key
        "tie_word_embeddings": False,  # vLLM never ties the related architectures
    }  # fmt: skip


def read(config: Config) -> MoESpec:
    # no layer is dense, so a config may leave out intermediate_size
    stated = {"rope_theta": 1e6, "intermediate_size": config.get("moe_intermediate_size"), **config}
    d = dense(
        stated,
        "solar_open",
        context=131072,
        kv_heads=8,
        head_dim=128,
        eps=("rms_norm_eps", 1e-5),
        qkv_bias=typed.flag(config, "attention_bias"),
    )
    return common.sigmoid_view(config, ABILITIES, d, normalize=True, shared=1, layers=range(d.layers))


def slots(moe: MoESpec) -> Iterator[Slot]:
    return common.llama_slots(moe, lambda layer: common.sigmoid_slots(moe, layer), untie=True)


def notes(moe: MoESpec) -> list[str]:
    return common.notes(moe, ABILITIES, common.untied_note(moe) | common.empty_shared_note(moe, moe.width))
