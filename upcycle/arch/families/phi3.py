"""Phi-3, 3.5 and 4: q, k, v stacked in one matrix, gate and up in another; some have LongRoPE, some partial rotary."""

from __future__ import annotations

from upcycle.arch.families import common
from upcycle.arch.families.common import Config, Source
from upcycle.arch.spec import DenseSpec

IGNORED = common.ROTARY_BUFFERS


def read(config: Config) -> DenseSpec:
    context = common.context_length(config, 4096)
    rope = common.rope(_longrope_by_its_name(config), context=context, partial=1.0, original=4096)
    if rope["rope_type"] not in ("default", "longrope"):
        raise ValueError(f"config.json has rope_type={rope['rope_type']!r}; a phi3 model has 'default' or 'longrope'")
    return common.dense(
        config,
        "phi3",
        context=4096,
        eps=("rms_norm_eps", 1e-5),
        rope=rope,
        **common.windows(config, default=None),
        bos=1,
        eos=32000,
        pad=32000,
    )


def _longrope_by_its_name(config: Config) -> Config:
    """`config` with LongRoPE under its own name: early Phi-3 files call it "su", or even "yarn"."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    stated = common.stated_rope(config)
    if stated.get("rope_type", stated.get("type")) not in ("su", "yarn"):
        return config
    return {**config, key: stated | {"rope_type": "longrope"}}


def sources(spec: DenseSpec) -> dict[str, Source]:
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    parts = {
        "q": ("self_attn.qkv_proj", 0, q),
        "k": ("self_attn.qkv_proj", q, q + kv),
        "v": ("self_attn.qkv_proj", q + kv, q + 2 * kv),
        "gate": ("mlp.gate_up_proj", 0, spec.ffn),
        "up": ("mlp.gate_up_proj", spec.ffn, 2 * spec.ffn),
    }
    out = common.llama_sources(spec)
    for layer in range(spec.layers):
        for part, (name, first, last) in parts.items():
            source = Source(f"model.layers.{layer}.{name}.weight", rows=((first, last),))
            out[f"layers.{layer}.{part}.weight"] = source
    return out
