"""GPT-OSS: attention sinks, windows in every other layer, biases everywhere (also on the router), a clamped SwiGLU.

Two tensors hold all experts of a layer, transposed, with gate and up in alternate columns: gate_up_proj is (N, D, 2F),
and down_proj is (N, F, D).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from upcycle.arch.abilities import EITHER, YES, Abilities
from upcycle.arch.families.common import Config, Family, windows_by_type
from upcycle.arch.ffn import ALPHA, CLAMPED, LIMIT
from upcycle.arch.slots import LLAMA, Slot, one, stack
from upcycle.arch.spec import MoESpec
from upcycle.arch.targets.common import Native, refuse_quantised

BIAS = ("attention_bias", True)
YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


class GptOss(Native):
    def slots(self, moe: MoESpec) -> Iterator[Slot]:
        for slot in super().slots(moe):
            yield slot._replace(name=slot.name.removesuffix(".weight")) if slot.name.endswith("sinks.weight") else slot


def adapt(config: Config) -> Config:
    refuse_quantised(
        config,
        "load it in transformers with quantization_config=Mxfp4Config(dequantize=True) and dtype bfloat16, write it "
        "with save_pretrained, and give that folder",
    )
    plain = config.get("rope_scaling") is None and config.get("rope_parameters") is None
    return {"rope_theta": 150000.0, "sliding_window": 128, **config, **({"rope_parameters": YARN} if plain else {})}


def own(config: Config) -> dict[str, Any]:
    return windows_by_type(config, every=2)


def block(moe: MoESpec, layer: int) -> Iterator[Slot]:
    """Yield the slots of one MoE block."""
    prefix, role, n, f, d = f"model.layers.{layer}.mlp", f"layers.{layer}", moe.experts, moe.width, moe.dense.hidden

    def each(kind: str, *parts: str) -> list[str]:
        return [f"{role}.experts.{i}.{part}.{kind}" for i in range(n) for part in parts]

    yield one(moe, f"{prefix}.router.weight", f"{role}.router.weight")
    yield one(moe, f"{prefix}.router.bias", f"{role}.router.offset")
    fused = stack(moe, f"{prefix}.experts.gate_up_proj", each("weight", "gate", "up"), (n, d, 2 * f))
    yield fused._replace(view=(n, 2, f, d), order=(0, 3, 2, 1))
    fused = stack(moe, f"{prefix}.experts.gate_up_proj_bias", each("bias", "gate", "up"), (n, 2 * f))
    yield fused._replace(view=(n, 2, f), order=(0, 2, 1))
    fused = stack(moe, f"{prefix}.experts.down_proj", each("weight", "down"), (n, f, d))
    yield fused._replace(view=(n, d, f), order=(0, 2, 1))
    yield stack(moe, f"{prefix}.experts.down_proj_bias", each("bias", "down"), (n, d))


NATIVE = GptOss(
    Family(
        "gpt_oss",
        context=131072,
        kv_heads=8,
        head_dim=64,
        eps=("rms_norm_eps", 1e-5),
        flags={"qkv_bias": BIAS, "out_bias": BIAS},
        fixed={"activation": CLAMPED, "ffn_bias": True, "sinks": True},
        own=own,
        adapt=adapt,
    ),
    Abilities(qkv_bias=EITHER, out_bias=EITHER, ffn_bias=YES, activations=frozenset({CLAMPED}), windows="any"),
    # the weights of a softmax over the chosen experts already add up to 1
    moe=lambda config, dense: {"order": "topk-then-softmax", "normalize": False, "router_offset": True},
    block=block,
    width="intermediate_size",
    only={"swiglu_alpha": ALPHA, "swiglu_limit": LIMIT, "hidden_act": "silu", "tie_word_embeddings": False},
    names={**LLAMA, "sinks": "self_attn.sinks"},
)
