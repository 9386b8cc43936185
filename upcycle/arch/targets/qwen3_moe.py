"""Qwen3-MoE: softmax, top-k, renormalised or not; no shared expert; any layers; q/k norm per head is mandatory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from upcycle.arch.families.common import Config, dense, windows
from upcycle.arch.spec import MoESpec
from upcycle.arch.targets import common
from upcycle.arch.targets.common import EITHER, Abilities, Slot
from upcycle.io import typed

ABILITIES = Abilities(
    qk_norms=frozenset({"head"}), qkv_bias=EITHER, out_bias=EITHER, normalize=EITHER, mixed="any", windows="all"
)


def config(moe: MoESpec) -> dict[str, Any]:
    d, window = moe.dense, common.window_of_all(moe)
    return common.base_config(moe, "qwen3_moe", "Qwen3MoeForCausalLM", ABILITIES) | {
        "intermediate_size": d.ffn,
        "moe_intermediate_size": moe.width,
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "norm_topk_prob": moe.weights_sum_to_one,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer in range(d.layers) if layer not in moe.layers],
        "attention_bias": d.qkv_bias or d.out_bias,
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": 0 if window else d.layers,
        "router_aux_loss_coef": 0.001,
        "output_router_logits": False,
    }


def read(config: Config) -> MoESpec:
    bias, windowed = typed.flag(config, "attention_bias"), typed.flag(config, "use_sliding_window")
    d = dense(
        config,
        "qwen3_moe",
        context=32768,
        kv_heads=4,
        qk_norm="head",
        qkv_bias=bias,
        out_bias=bias,
        # all layers or none, whatever max_window_layers says
        **(windows(config, default=4096) if windowed else {}),
    )
    return common.view(
        config,
        ABILITIES,
        d,
        layers=common.stepped_layers(config, d.layers),
        normalize=typed.flag(config, "norm_topk_prob"),
    )


def slots(moe: MoESpec) -> Iterator[Slot]:
    bias = moe.dense.qkv_bias or moe.dense.out_bias  # one switch for all four
    return common.llama_slots(
        moe, lambda layer: common.expert_slots(moe, layer), zero_qkv_bias=bias, zero_out_bias=bias, gate=True
    )


def notes(moe: MoESpec) -> list[str]:
    return common.notes(moe, ABILITIES)
