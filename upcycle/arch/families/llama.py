"""Llama 1 to 3.x and models that use its class (Yi, SmolLM, TinyLlama and others)."""

from __future__ import annotations

from upcycle.arch.families.common import ALL_BIASES, Family

FAMILY = Family("llama", context=2048, flags=ALL_BIASES, bos=1, eos=2)
