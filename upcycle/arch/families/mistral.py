"""Mistral 7B, Nemo, Small: Llama with a sliding window; `sliding_window: null` means none, an absent key 4096."""

from __future__ import annotations

from functools import partial

from upcycle.arch.families.common import Family, windows

FAMILY = Family("mistral", context=131072, kv_heads=8, own=partial(windows, default=4096), bos=1, eos=2)
