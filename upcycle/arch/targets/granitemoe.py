"""GraniteMoE: top-k, then softmax; every layer MoE; multipliers for embeddings, attention, residuals and logits.

Its multipliers let it hold Granite and, with embed_scale, Gemma 1. Two tensors hold all experts of a layer:
input_linear (N, 2f, D) holds gate and up of each expert, and output_linear (N, D, f) holds down.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from upcycle.arch.abilities import EITHER, Abilities
from upcycle.arch.families.common import ATTENTION, Family
from upcycle.arch.families.granite import multipliers
from upcycle.arch.slots import Slot, one, stack
from upcycle.arch.spec import MoESpec
from upcycle.arch.targets.common import Target, attention_bias


def keys(moe: MoESpec) -> dict[str, Any]:
    d = moe.dense
    return {
        "intermediate_size": moe.width,
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "attention_bias": attention_bias(moe),
        "attention_multiplier": d.attention_scale,
        "embedding_multiplier": d.embed_scale,
        "residual_multiplier": d.residual_scale,
        "logits_scaling": 1.0 / d.logit_scale,
        "router_aux_loss_coef": 0.001,
        "output_router_logits": False,
    }


def fused_slots(moe: MoESpec, prefix: str, layer: int) -> Iterator[Slot]:
    """Yield the slots of one MoE block; the names of its layer begin with `prefix`."""
    role, d, width = f"layers.{layer}", moe.dense.hidden, moe.width
    experts = [f"{role}.experts.{i}" for i in range(moe.experts)]
    inputs = [f"{expert}.{part}.weight" for expert in experts for part in ("gate", "up")]
    outputs = [f"{expert}.down.weight" for expert in experts]
    yield one(moe, f"{prefix}.block_sparse_moe.router.layer.weight", f"{role}.router.weight")
    yield stack(moe, f"{prefix}.block_sparse_moe.input_linear.weight", inputs, (moe.experts, 2 * width, d))
    yield stack(moe, f"{prefix}.block_sparse_moe.output_linear.weight", outputs, (moe.experts, d, width))
    if moe.shared:
        shared = [f"{role}.shared.gate.weight", f"{role}.shared.up.weight"]
        yield stack(moe, f"{prefix}.shared_mlp.input_linear.weight", shared, (2 * moe.shared, d))
        yield one(moe, f"{prefix}.shared_mlp.output_linear.weight", f"{role}.shared.down.weight")


def warns(moe: MoESpec) -> dict[str, bool]:
    d = moe.dense
    no_bias = "vLLM has no attention biases for this architecture and drops those of the dense model; use transformers"
    head_dim = "vLLM takes head_dim = hidden/heads for this architecture; use transformers"
    return {no_bias: d.qkv_bias, head_dim: d.head_dim * d.heads != d.hidden}


TARGET = Target(
    Family("granitemoe", context=2048, flags=ATTENTION, own=multipliers, bos=1, eos=2),
    Abilities(qkv_bias=EITHER, out_bias=EITHER, multipliers=True),
    # the weights of a softmax over the chosen experts already add up to 1
    moe=lambda config, dense: {"order": "topk-then-softmax", "normalize": False},
    block=lambda moe, layer: fused_slots(moe, f"model.layers.{layer}", layer),
    width="intermediate_size",
    architecture="GraniteMoeForCausalLM",
    keys=keys,
    warns=warns,
)
