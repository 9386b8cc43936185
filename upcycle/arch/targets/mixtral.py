"""Mixtral: softmax, top-k, always normalised; every layer MoE; no shared expert; attention of Llama or Mistral."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from upcycle.arch.abilities import Abilities
from upcycle.arch.families.common import Family, windows
from upcycle.arch.slots import Slot, ffn_slots, one
from upcycle.arch.spec import MoESpec
from upcycle.arch.targets.common import Target, window_of_all


def keys(moe: MoESpec) -> dict[str, Any]:
    return {
        "intermediate_size": moe.width,
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "sliding_window": window_of_all(moe),
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "output_router_logits": False,
    }


def block(moe: MoESpec, layer: int) -> Iterator[Slot]:
    prefix, role = f"model.layers.{layer}.block_sparse_moe", f"layers.{layer}"
    yield one(moe, f"{prefix}.gate.weight", f"{role}.router.weight")
    for i in range(moe.experts):
        yield from ffn_slots(moe, f"{prefix}.experts.{i}", f"{role}.experts.{i}", ("w1", "w3", "w2"))


TARGET = Target(
    Family(
        "mixtral",
        context=131072,
        kv_heads=8,
        eps=("rms_norm_eps", 1e-5),
        own=partial(windows, default=None),
        adapt=lambda config: {"rope_theta": 1e6, **config},
        bos=1,
        eos=2,
    ),
    Abilities(windows="all"),
    block=block,
    width="intermediate_size",
    architecture="MixtralForCausalLM",
    keys=keys,
)
