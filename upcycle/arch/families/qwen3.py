"""Qwen 3 (dense): q and k of each head are normalised; head_dim is 128 unless stated, for any hidden / heads."""

from __future__ import annotations

from upcycle.arch.families.common import ATTENTION, Family, windows_by_layer

FAMILY = Family(
    "qwen3",
    context=32768,
    kv_heads=32,
    head_dim=128,
    flags=ATTENTION,
    fixed={"qk_norm": "head"},
    own=windows_by_layer,
)
