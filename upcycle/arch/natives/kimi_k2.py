"""Kimi-K2: DeepSeek-V3 under another name; transformers reads the folder when model_type says deepseek_v3."""

from __future__ import annotations

from upcycle.arch.natives.deepseek_v3 import read, slots

__all__ = ["read", "slots"]
