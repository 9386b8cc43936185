"""Kimi-K2: DeepSeek-V3 under another name; transformers reads the folder if model_type is deepseek_v3."""

from upcycle.arch.natives.deepseek_v3 import NATIVE

__all__ = ["NATIVE"]
