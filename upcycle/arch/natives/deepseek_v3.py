"""DeepSeek-V3: latent attention; sigmoid scores with a correction bias; a choice among the best groups of experts.

Three things are easy to miss. The norms of the latents have an epsilon of 1e-6 for any rms_norm_eps. The factor from
mscale_all_dim of a stretched rope scales attention's logits twice. Published weights are in FP8. We do not read the
layers for multi-token prediction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from upcycle.arch.abilities import EITHER, Abilities
from upcycle.arch.families.common import Config, Family, context_length, rope
from upcycle.arch.slots import LLAMA, Slot, sigmoid_slots
from upcycle.arch.spec import DenseSpec, Latent, MoESpec
from upcycle.arch.targets.common import SIGMOID, Native, only, refuse_quantised, sigmoid_moe
from upcycle.io import typed

NAMES = {
    **LLAMA,
    "q_a": "self_attn.q_a_proj", "q_a_norm": "self_attn.q_a_layernorm", "q_b": "self_attn.q_b_proj",
    "kv_a": "self_attn.kv_a_proj_with_mqa", "kv_a_norm": "self_attn.kv_a_layernorm", "kv_b": "self_attn.kv_b_proj",
}  # fmt: skip


class DeepSeek(Native):
    def slots(self, moe: MoESpec) -> Iterator[Slot]:
        assert moe.dense.latent is not None
        direct = {} if moe.dense.latent.q_rank else {"q_b": "self_attn.q_proj"}
        return Native.slots(replace(self, names={**NAMES, **direct}), moe)


def adapt(config: Config) -> Config:
    """Return the config without head_dim, because transformers writes the size of the rotated part there."""
    refuse_quantised(
        config,
        "cast them to bfloat16 first (inference/fp8_cast_bf16.py of the DeepSeek-V3 repository) and give that folder, "
        "without the key",
    )
    return {key: value for key, value in config.items() if key != "head_dim"}


def own(config: Config) -> dict[str, Any]:
    own, turned = typed.whole(config, "qk_nope_head_dim", 128), typed.whole(config, "qk_rope_head_dim", 64)
    if turned % 2:
        raise typed.wrong(config, "qk_rope_head_dim", "even, because dimensions rotate in pairs")
    stretched = rope(config, context=context_length(config, 4096))
    direct = "q_lora_rank" in config and config["q_lora_rank"] is None
    latent = Latent(
        q_rank=0 if direct else typed.whole(config, "q_lora_rank", 1536),
        kv_rank=typed.whole(config, "kv_lora_rank", 512),
        rope=turned,
        value=typed.whole(config, "v_head_dim", 128),
        pairs=typed.flag(config, "rope_interleave", True),
    )
    scale = (own + turned) ** -0.5 * mscale(stretched) ** 2
    return {"head_dim": own + turned, "rope": stretched, "attention_scale": scale, "latent": latent}


def mscale(rope: Config) -> float:
    """Return the factor by which a stretched rope multiplies queries and keys."""
    weight = rope.get("mscale_all_dim") if rope["rope_type"] != "default" else None
    return 0.1 * weight * math.log(rope["factor"]) + 1.0 if weight and rope["factor"] > 1 else 1.0


def moe(config: Config, dense: DenseSpec) -> dict[str, Any]:
    only({**config, "num_key_value_heads": dense.kv_heads}, {"num_key_value_heads": dense.heads})
    return {
        **sigmoid_moe(config, dense, normalize=True, shared=1, first_dense=3, scale=2.5),
        "groups": typed.whole(config, "n_group", 8),
        "group_top_k": typed.whole(config, "topk_group", 4),
    }


NATIVE = DeepSeek(
    Family("deepseek_v3", context=4096, kv_heads=128, own=own, adapt=adapt, bos=0, eos=1),
    Abilities(
        scores=frozenset({"sigmoid"}),
        normalize=EITHER,
        multipliers=True,  # only the multiplier of attention's logits
        shared="multiple",
        mixed="first-dense",
        output_scale=True,
        router_fp32=True,
    ),
    moe=moe,
    block=sigmoid_slots,
    only={"attention_bias": False, "topk_method": "noaux_tc", **SIGMOID},
    names=NAMES,
)
