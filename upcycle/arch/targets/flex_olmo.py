"""FlexOlmo: OLMo 2's post-norm blocks and full-width q/k norm with experts; softmax, top-k; every layer MoE.

The norm after the FFN undoes any scale of its output, so neither c nor norm_topk_prob changes the model (vLLM never
normalises this architecture's routing weights, which is harmless for the same reason).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from upcycle.arch.families.common import Config, dense
from upcycle.arch.spec import MoESpec
from upcycle.arch.targets import common
from upcycle.arch.targets.common import EITHER, LLAMA, Abilities, Slot
from upcycle.io import typed

ABILITIES = Abilities(
    blocks=frozenset({"post"}), qk_norms=frozenset({"full"}), qkv_bias=EITHER, out_bias=EITHER, normalize=EITHER
)
NAMES = {**LLAMA, "attn_norm": "post_attention_layernorm", "ffn_norm": "post_feedforward_layernorm"}


def config(moe: MoESpec) -> dict[str, Any]:
    return common.base_config(moe, "flex_olmo", "FlexOlmoForCausalLM", ABILITIES) | {
        "intermediate_size": moe.width,
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "norm_topk_prob": moe.weights_sum_to_one,
        "attention_bias": moe.dense.qkv_bias or moe.dense.out_bias,
        "router_aux_loss_coef": 0.01,
        "output_router_logits": False,
    }


def read(config: Config) -> MoESpec:
    bias = typed.flag(config, "attention_bias")
    d = dense(
        {"rope_theta": 5e5} | dict(config),
        "flex_olmo",
        context=4096,
        block="post",
        qk_norm="full",
        qkv_bias=bias,
        out_bias=bias,
        eos=100257,
        pad=100277,
    )
    normalize = typed.flag(config, "norm_topk_prob")
    return common.view(config, ABILITIES, d, width="intermediate_size", normalize=normalize)


def slots(moe: MoESpec) -> Iterator[Slot]:
    bias = moe.dense.qkv_bias or moe.dense.out_bias  # one switch for all four
    return common.llama_slots(
        moe, lambda layer: common.expert_slots(moe, layer), zero_qkv_bias=bias, zero_out_bias=bias, names=NAMES
    )


def notes(moe: MoESpec) -> list[str]:
    return common.notes(moe, ABILITIES)
