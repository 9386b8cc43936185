"""Solar Open: sigmoid scores, float32 router, output scale, shared experts; every layer MoE; Llama or Qwen2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from upcycle.spec import MoESpec
from upcycle.targets import common
from upcycle.targets.common import EITHER, Abilities, Slot

# No partial rotary, although the class reads the factor: it then cannot rotate a part of the head.
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
        "tie_word_embeddings": False,  # as in its relatives, which vLLM never ties
    }  # fmt: skip


def slots(moe: MoESpec) -> Iterator[Slot]:
    return common.llama_slots(moe, lambda layer: common.sigmoid_slots(moe, layer), untie=True)


def notes(moe: MoESpec) -> list[str]:
    return common.notes(moe, ABILITIES, common.untied_note(moe) | common.empty_shared_note(moe, moe.width))
