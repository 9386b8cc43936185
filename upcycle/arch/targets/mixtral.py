"""Mixtral: softmax, top-k, always renormalised; every layer MoE; no shared expert; Llama or Mistral attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from upcycle.arch.families.common import Config, dense, windows
from upcycle.arch.spec import MoESpec
from upcycle.arch.targets import common
from upcycle.arch.targets.common import Abilities, Slot

ABILITIES = Abilities(windows="all")


def config(moe: MoESpec) -> dict[str, Any]:
    return common.base_config(moe, "mixtral", "MixtralForCausalLM", ABILITIES) | {
        "intermediate_size": moe.width,
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "sliding_window": common.window_of_all(moe),
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "output_router_logits": False,
    }


def read(config: Config) -> MoESpec:
    d = dense(
        {"rope_theta": 1e6} | dict(config),
        "mixtral",
        context=131072,
        kv_heads=8,
        eps=("rms_norm_eps", 1e-5),
        **windows(config, default=None),
        bos=1,
        eos=2,
    )
    return common.view(config, ABILITIES, d, width="intermediate_size")


def slots(moe: MoESpec) -> Iterator[Slot]:
    def moe_layer(layer: int) -> Iterator[Slot]:
        prefix, role = f"model.layers.{layer}.block_sparse_moe", f"layers.{layer}"
        yield common.one(moe, f"{prefix}.gate.weight", f"{role}.router.weight")
        for i in range(moe.experts):
            expert = f"experts.{i}"
            yield from common.ffn_slots(moe, f"{prefix}.{expert}", f"{role}.{expert}", ("w1", "w3", "w2"), gate=True)

    return common.llama_slots(moe, moe_layer)


def notes(moe: MoESpec) -> list[str]:
    return common.notes(moe, ABILITIES)
