"""GraniteMoE: top-k, then softmax; every layer MoE; multipliers for embeddings, attention, residuals and logits.

The multipliers let it hold Granite and, with embed_scale, Gemma 1. Experts are fused on disk: input_linear
(N, 2f, D) holds gate and up of each expert, output_linear (N, D, f) the downs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from upcycle.arch.families.common import Config, dense
from upcycle.arch.families.granite import multipliers
from upcycle.arch.spec import MoESpec
from upcycle.arch.targets import common
from upcycle.arch.targets.common import EITHER, Abilities, Slot
from upcycle.io import typed

ABILITIES = Abilities(qkv_bias=EITHER, out_bias=EITHER, multipliers=True)


def config(moe: MoESpec) -> dict[str, Any]:
    return granite_config(moe, "granitemoe", "GraniteMoeForCausalLM", ABILITIES)


def read(config: Config) -> MoESpec:
    return granite_view(config, "granitemoe", ABILITIES)


def slots(moe: MoESpec) -> Iterator[Slot]:
    return granite_slots(moe)


def notes(moe: MoESpec) -> list[str]:
    return granite_notes(moe, ABILITIES)


def granite_config(moe: MoESpec, model_type: str, architecture: str, can: Abilities) -> dict[str, Any]:
    d = moe.dense
    return common.base_config(moe, model_type, architecture, can) | {
        "intermediate_size": moe.width,
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "attention_bias": d.qkv_bias or d.out_bias,
        "attention_multiplier": d.attention_scale,
        "embedding_multiplier": d.embed_scale,
        "residual_multiplier": d.residual_scale,
        "logits_scaling": 1.0 / d.logit_scale,
        "router_aux_loss_coef": 0.001,
        "output_router_logits": False,
    }


def granite_view(config: Config, model_type: str, can: Abilities, shared: int = 0) -> MoESpec:
    bias = typed.flag(config, "attention_bias")
    d = dense(
        config,
        model_type,
        context=2048,
        qkv_bias=bias,
        out_bias=bias,
        **multipliers(config),
        bos=1,
        eos=2,
    )
    return common.view(
        config,
        can,
        d,
        width="intermediate_size",
        order="topk-then-softmax",
        normalize=False,  # a softmax over the chosen adds up to 1 already
        shared=shared,
    )


def granite_block(moe: MoESpec, layer: int, prefix: str) -> Iterator[Slot]:
    """Slots of one MoE block; `prefix` is that of its layer."""
    role, d, width = f"layers.{layer}", moe.dense.hidden, moe.width
    experts = [f"{role}.experts.{i}" for i in range(moe.experts)]
    inputs = [f"{expert}.{part}.weight" for expert in experts for part in ("gate", "up")]
    yield common.one(moe, f"{prefix}.block_sparse_moe.router.layer.weight", f"{role}.router.weight")
    outputs = [f"{expert}.down.weight" for expert in experts]
    yield common.stack(moe, f"{prefix}.block_sparse_moe.input_linear.weight", inputs, (moe.experts, 2 * width, d))
    yield common.stack(moe, f"{prefix}.block_sparse_moe.output_linear.weight", outputs, (moe.experts, d, width))
    if moe.shared:
        shared = [f"{role}.shared.gate.weight", f"{role}.shared.up.weight"]
        yield common.stack(moe, f"{prefix}.shared_mlp.input_linear.weight", shared, (2 * moe.shared, d))
        yield common.one(moe, f"{prefix}.shared_mlp.output_linear.weight", f"{role}.shared.down.weight")


def granite_slots(moe: MoESpec) -> Iterator[Slot]:
    bias = moe.dense.qkv_bias or moe.dense.out_bias  # one switch for all four
    return common.llama_slots(
        moe,
        lambda layer: granite_block(moe, layer, f"model.layers.{layer}"),
        zero_qkv_bias=bias,
        zero_out_bias=bias,
    )


def granite_notes(moe: MoESpec, can: Abilities) -> list[str]:
    d = moe.dense
    no_bias = "vLLM has no attention biases for this architecture and drops the donor's; use transformers"
    head_dim = "vLLM takes head_dim = hidden/heads for this architecture; use transformers"
    return common.notes(moe, can, {no_bias: d.qkv_bias, head_dim: d.head_dim * d.heads != d.hidden})
