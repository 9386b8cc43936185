"""GPT-OSS: sinks beside the keys of each head, windows in every other layer, biases everywhere (the router's logits
have one too), and a gated product of clamped halves.

Experts are fused on disk, transposed and gate and up by turns: gate_up_proj is (N, D, 2F), down_proj (N, F, D).
"""

from __future__ import annotations

from collections.abc import Iterator

from upcycle.arch.families.common import Config, context_length, dense, rope, windows_by_type
from upcycle.arch.ffn import ALPHA, CLAMPED, LIMIT
from upcycle.arch.spec import MoESpec
from upcycle.arch.targets import common
from upcycle.arch.targets.common import EITHER, YES, Abilities, Slot
from upcycle.io import typed

ABILITIES = Abilities(qkv_bias=EITHER, out_bias=EITHER, ffn_bias=YES, activations=frozenset({CLAMPED}), windows="any")
YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def read(config: Config) -> MoESpec:
    if config.get("quantization_config"):
        raise ValueError(
            f"config.json of this {typed.model_type(config)} model has 'quantization_config', and training needs the "
            "weights themselves; load it in transformers with quantization_config=Mxfp4Config(dequantize=True) and "
            "dtype bfloat16, write it with save_pretrained, and give that folder"
        )
    common.only(config, swiglu_alpha=ALPHA, swiglu_limit=LIMIT, hidden_act="silu", tie_word_embeddings=False)
    plain = config.get("rope_scaling") is None and config.get("rope_parameters") is None
    config = {"rope_theta": 150000.0, "sliding_window": 128, **config} | ({"rope_parameters": YARN} if plain else {})
    context, bias = context_length(config, 131072), typed.flag(config, "attention_bias", True)
    d = dense(
        config,
        "gpt_oss",
        context=context,
        kv_heads=8,
        head_dim=64,
        eps=("rms_norm_eps", 1e-5),
        rope=rope(config, context=context),
        activation=CLAMPED,
        qkv_bias=bias,
        out_bias=bias,
        ffn_bias=True,
        sinks=True,
        **windows_by_type(config, every=2),
    )
    return common.view(
        config,
        ABILITIES,
        d,
        width="intermediate_size",
        order="topk-then-softmax",
        normalize=False,  # a softmax over the chosen adds up to 1 already
        router_offset=True,
    )


def slots(moe: MoESpec) -> Iterator[Slot]:
    for slot in common.llama_slots(
        moe, lambda layer: block(moe, layer), names=common.LLAMA | {"sinks": "self_attn.sinks"}
    ):
        yield slot._replace(name=slot.name.removesuffix(".weight")) if slot.name.endswith("sinks.weight") else slot


def block(moe: MoESpec, layer: int) -> Iterator[Slot]:
    """Slots of one MoE block."""
    prefix, role, n, f, d = f"model.layers.{layer}.mlp", f"layers.{layer}", moe.experts, moe.width, moe.dense.hidden

    def each(kind: str, *parts: str) -> list[str]:
        return [f"{role}.experts.{i}.{part}.{kind}" for i in range(n) for part in parts]

    yield common.one(moe, f"{prefix}.router.weight", f"{role}.router.weight")
    yield common.one(moe, f"{prefix}.router.bias", f"{role}.router.offset")
    fused = common.stack(moe, f"{prefix}.experts.gate_up_proj", each("weight", "gate", "up"), (n, d, 2 * f))
    yield fused._replace(view=(n, 2, f, d), order=(0, 3, 2, 1))
    fused = common.stack(moe, f"{prefix}.experts.gate_up_proj_bias", each("bias", "gate", "up"), (n, 2 * f))
    yield fused._replace(view=(n, 2, f), order=(0, 2, 1))
    fused = common.stack(moe, f"{prefix}.experts.down_proj", each("weight", "down"), (n, f, d))
    yield fused._replace(view=(n, d, f), order=(0, 2, 1))
    yield common.stack(moe, f"{prefix}.experts.down_proj_bias", each("bias", "down"), (n, d))
