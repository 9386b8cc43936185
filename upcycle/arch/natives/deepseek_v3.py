"""DeepSeek-V3: latent attention; sigmoid scores with a correction bias, of which only the best groups of experts count.

Traps: the latents' norms have an epsilon of 1e-6, whatever rms_norm_eps is; a stretched rope's mscale_all_dim scales
the logits, twice; and published weights are in FP8. The layers for multi-token prediction are not read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from upcycle.arch.families.common import Config, context_length, dense, rope
from upcycle.arch.spec import Latent, MoESpec
from upcycle.arch.targets import common
from upcycle.arch.targets.common import Abilities, Slot
from upcycle.io import typed

ABILITIES = Abilities(
    scores=frozenset({"sigmoid"}),
    normalize=common.EITHER,
    multipliers=True,  # of the logits of attention alone
    shared="multiple",
    mixed="first-dense",
    output_scale=True,
    router_fp32=True,
)
NAMES = common.LLAMA | {
    "q_a": "self_attn.q_a_proj", "q_a_norm": "self_attn.q_a_layernorm", "q_b": "self_attn.q_b_proj",
    "kv_a": "self_attn.kv_a_proj_with_mqa", "kv_a_norm": "self_attn.kv_a_layernorm", "kv_b": "self_attn.kv_b_proj",
}  # fmt: skip


def read(config: Config) -> MoESpec:
    if config.get("quantization_config"):
        raise ValueError(
            f"config.json of this {typed.model_type(config)} model has 'quantization_config', and training needs the "
            "weights themselves; cast them to bfloat16 first (inference/fp8_cast_bf16.py of the DeepSeek-V3 "
            "repository) and give that folder, without the key"
        )
    common.only(config, attention_bias=False, topk_method="noaux_tc")
    context = context_length(config, 4096)
    own, turned = typed.whole(config, "qk_nope_head_dim", 128), typed.whole(config, "qk_rope_head_dim", 64)
    if turned % 2:
        raise typed.wrong(config, "qk_rope_head_dim", "even, because dimensions turn in pairs")
    stretched = rope(config, context=context)
    direct = "q_lora_rank" in config and config["q_lora_rank"] is None
    d = dense(
        {key: value for key, value in config.items() if key != "head_dim"},  # transformers writes the turned part there
        "deepseek_v3",
        context=context,
        kv_heads=128,
        head_dim=own + turned,
        rope=stretched,
        attention_scale=(own + turned) ** -0.5 * mscale(stretched) ** 2,
        latent=Latent(
            q_rank=0 if direct else typed.whole(config, "q_lora_rank", 1536),
            kv_rank=typed.whole(config, "kv_lora_rank", 512),
            rope=turned,
            value=typed.whole(config, "v_head_dim", 128),
            pairs=typed.flag(config, "rope_interleave", True),
        ),
        bos=0,
        eos=1,
    )
    common.only({**config, "num_key_value_heads": d.kv_heads}, num_key_value_heads=d.heads)
    first = min(typed.whole(config, "first_k_dense_replace", 3, low=0), d.layers)
    return common.sigmoid_view(
        config,
        ABILITIES,
        d,
        normalize=True,
        shared=1,
        layers=range(first, d.layers),
        scale=2.5,
        groups=typed.whole(config, "n_group", 8),
        group_top_k=typed.whole(config, "topk_group", 4),
    )


def mscale(rope: Config) -> float:
    """What a stretched rope multiplies queries and keys with."""
    weight = rope.get("mscale_all_dim") if rope["rope_type"] != "default" else None
    return 0.1 * weight * math.log(rope["factor"]) + 1.0 if weight and rope["factor"] > 1 else 1.0


def slots(moe: MoESpec) -> Iterator[Slot]:
    latent = moe.dense.latent
    assert latent is not None
    names = NAMES if latent.q_rank else NAMES | {"q_b": "self_attn.q_proj"}
    return common.llama_slots(moe, lambda layer: common.sigmoid_slots(moe, layer), names=names)
