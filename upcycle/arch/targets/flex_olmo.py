"""FlexOlmo: OLMo 2 with experts (norms after blocks, q/k norms over all heads); softmax, top-k; every layer MoE.

The norm after the FFN removes any scale of the FFN's output, so neither c nor norm_topk_prob changes the model. vLLM
never normalises the routing weights of this architecture, which is harmless for the same reason.
"""

from __future__ import annotations

from typing import Any

from upcycle.arch.abilities import EITHER, Abilities
from upcycle.arch.families import olmo2
from upcycle.arch.families.common import ATTENTION, Family
from upcycle.arch.slots import LLAMA
from upcycle.arch.spec import MoESpec
from upcycle.arch.targets.common import Target, attention_bias
from upcycle.io import typed


def keys(moe: MoESpec) -> dict[str, Any]:
    return {
        "intermediate_size": moe.width,
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "norm_topk_prob": moe.weights_sum_to_one,
        "attention_bias": attention_bias(moe),
        "router_aux_loss_coef": 0.01,
        "output_router_logits": False,
    }


TARGET = Target(
    Family(
        "flex_olmo",
        context=4096,
        flags=ATTENTION,
        fixed={"block": "post", "qk_norm": "full"},
        adapt=lambda config: {"rope_theta": 5e5, **config},
        eos=100257,
        pad=100277,
    ),
    Abilities(
        blocks=frozenset({"post"}), qk_norms=frozenset({"full"}), qkv_bias=EITHER, out_bias=EITHER, normalize=EITHER
    ),
    moe=lambda config, dense: {"normalize": typed.flag(config, "norm_topk_prob")},
    width="intermediate_size",
    names={**LLAMA, **olmo2.NAMES},
    architecture="FlexOlmoForCausalLM",
    keys=keys,
)
