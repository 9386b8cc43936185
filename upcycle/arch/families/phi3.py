"""Phi-3, 3.5 and 4: one matrix holds q, k and v, another gate and up; some have LongRoPE, some partial rotary."""

from __future__ import annotations

from typing import Any

from upcycle.arch.families import common
from upcycle.arch.families.common import Config, Family, Source
from upcycle.arch.spec import DenseSpec


def adapt(config: Config) -> Config:
    """Return the config with LongRoPE under its own name; early Phi-3 files call it "su" or "yarn"."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    stated = common.stated_rope(config)
    if stated.get("rope_type", stated.get("type")) not in ("su", "yarn"):
        return config
    return {**config, key: stated | {"rope_type": "longrope"}}


def own(config: Config) -> dict[str, Any]:
    context = common.context_length(config, FAMILY.context)
    rope = common.rope(config, context=context, partial=1.0, original=4096)
    if rope["rope_type"] not in ("default", "longrope"):
        raise ValueError(f"config.json has rope_type={rope['rope_type']!r}; a phi3 model has 'default' or 'longrope'")
    return {"rope": rope, **common.windows(config, default=None)}


def parts(spec: DenseSpec) -> dict[str, Source]:
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    rows = {
        "q": ("self_attn.qkv_proj", 0, q),
        "k": ("self_attn.qkv_proj", q, q + kv),
        "v": ("self_attn.qkv_proj", q + kv, q + 2 * kv),
        "gate": ("mlp.gate_up_proj", 0, spec.ffn),
        "up": ("mlp.gate_up_proj", spec.ffn, 2 * spec.ffn),
    }
    return {
        f"layers.{layer}.{part}.weight": Source(f"model.layers.{layer}.{name}.weight", rows=((first, last),))
        for layer in range(spec.layers)
        for part, (name, first, last) in rows.items()
    }


FAMILY = Family(
    "phi3",
    context=4096,
    eps=("rms_norm_eps", 1e-5),
    own=own,
    adapt=adapt,
    bos=1,
    eos=32000,
    pad=32000,
    parts=parts,
)
