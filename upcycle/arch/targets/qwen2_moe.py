"""Qwen2-MoE: softmax, top-k, normalised or not; a shared expert with a sigmoid gate; any layers; Llama or Qwen2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from upcycle.arch.abilities import EITHER, Abilities
from upcycle.arch.families.common import Config, Family
from upcycle.arch.slots import Slot, expert_slots, one, shared_slots
from upcycle.arch.spec import DenseSpec, MoESpec
from upcycle.arch.targets.common import Target, stepped_keys, stepped_moe
from upcycle.io import typed

LEAST_SHARED = 64  # common sizes of tensor parallelism divide it


def keys(moe: MoESpec) -> dict[str, Any]:
    d = moe.dense
    return {
        "intermediate_size": d.ffn,
        "moe_intermediate_size": moe.width,
        "shared_expert_intermediate_size": moe.shared or LEAST_SHARED,
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        **stepped_keys(moe),
        "qkv_bias": True,  # vLLM always has these biases; they are zeros if the dense model has none
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": d.layers,
        "layer_types": ["full_attention"] * d.layers,
        "router_aux_loss_coef": 0.001,
        "output_router_logits": False,
    }


def moe(config: Config, dense: DenseSpec) -> dict[str, Any]:
    shared = typed.whole(config, "shared_expert_intermediate_size")
    return {**stepped_moe(config, dense), "shared": shared, "shared_gate": True}


def block(moe: MoESpec, layer: int) -> Iterator[Slot]:
    prefix = f"model.layers.{layer}.mlp"
    yield from expert_slots(moe, layer)
    yield from shared_slots(moe, f"{prefix}.shared_expert", layer, LEAST_SHARED)
    yield one(moe, f"{prefix}.shared_expert_gate.weight", f"layers.{layer}.shared_gate.weight")


def warns(moe: MoESpec) -> dict[str, bool]:
    d = moe.dense
    return {
        "vLLM takes head_dim = hidden/heads for this architecture; use transformers": d.head_dim * d.heads != d.hidden
    }


TARGET = Target(
    Family("qwen2_moe", context=32768, kv_heads=16, fixed={"qkv_bias": True}),
    # No sliding windows: the class masks by layer_types but does not pass the window to flash attention.
    Abilities(qkv_bias=EITHER, normalize=EITHER, shared="any", mixed="any"),
    moe=moe,
    block=block,
    only={"qkv_bias": True, "use_sliding_window": False},
    architecture="Qwen2MoeForCausalLM",
    keys=keys,
    warns=warns,
    least=lambda moe: LEAST_SHARED,
)
