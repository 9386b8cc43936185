"""Qwen2-MoE: softmax, top-k, renormalised or not; a sigmoid-gated shared expert; any layers; Llama or Qwen2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from upcycle.arch.families.common import Config, dense
from upcycle.arch.spec import MoESpec
from upcycle.arch.targets import common
from upcycle.arch.targets.common import EITHER, Abilities, Slot
from upcycle.io import typed

# No sliding windows: the class masks by layer_types but does not pass the window to flash attention.
ABILITIES = Abilities(qkv_bias=EITHER, normalize=EITHER, shared="any", mixed="any")
LEAST_SHARED = 64  # neurons of zeros if the model has no shared expert; tensor parallel sizes divide it


def config(moe: MoESpec) -> dict[str, Any]:
    d = moe.dense
    return common.base_config(moe, "qwen2_moe", "Qwen2MoeForCausalLM", ABILITIES) | {
        "intermediate_size": d.ffn,
        "moe_intermediate_size": moe.width,
        "shared_expert_intermediate_size": common.shared_width(moe, LEAST_SHARED),
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "norm_topk_prob": moe.weights_sum_to_one,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer in range(d.layers) if layer not in moe.layers],
        "qkv_bias": True,  # vLLM always has these biases; zeros where the donor has none
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": d.layers,
        "layer_types": ["full_attention"] * d.layers,
        "router_aux_loss_coef": 0.001,
        "output_router_logits": False,
    }


def read(config: Config) -> MoESpec:
    # slots() always has the biases; for windows see ABILITIES
    common.only(config, qkv_bias=True, use_sliding_window=False)
    d = dense(config, "qwen2_moe", context=32768, kv_heads=16, qkv_bias=True)
    return common.view(
        config,
        ABILITIES,
        d,
        layers=common.stepped_layers(config, d.layers),
        shared=typed.whole(config, "shared_expert_intermediate_size"),
        shared_gate=True,
        normalize=typed.flag(config, "norm_topk_prob"),
    )


def slots(moe: MoESpec) -> Iterator[Slot]:
    def moe_layer(layer: int) -> Iterator[Slot]:
        yield from common.expert_slots(moe, layer)
        yield from common.shared_slots(moe, layer, "shared_expert", LEAST_SHARED)
        name = f"model.layers.{layer}.mlp.shared_expert_gate.weight"
        yield common.one(moe, name, f"layers.{layer}.shared_gate.weight")

    return common.llama_slots(moe, moe_layer, zero_qkv_bias=True, gate=True)


def notes(moe: MoESpec) -> list[str]:
    d = moe.dense
    return common.notes(
        moe,
        ABILITIES,
        {"vLLM takes head_dim = hidden/heads for this architecture; use transformers": d.head_dim * d.heads != d.hidden}
        | common.empty_shared_note(moe, LEAST_SHARED),
    )
