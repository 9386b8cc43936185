"""Seed-OSS: Llama with biases on q, k and v; head_dim is 128 unless stated."""

from __future__ import annotations

from upcycle.arch.families.common import Family

FAMILY = Family(
    "seed_oss",
    context=524288,
    kv_heads=8,
    head_dim=128,
    flags={
        "qkv_bias": ("attention_bias", True),
        "out_bias": ("attention_out_bias", False),
        "ffn_bias": ("mlp_bias", False),
    },
    bos=0,
    eos=2,
    pad=1,
)
