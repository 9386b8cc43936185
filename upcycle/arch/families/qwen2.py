"""Qwen 2, 2.5 and models that use its class: biases only on q, k and v; a window only if switched on."""

from __future__ import annotations

from upcycle.arch.families.common import Family, windows_by_layer

FAMILY = Family("qwen2", context=32768, kv_heads=32, fixed={"qkv_bias": True}, own=windows_by_layer)
