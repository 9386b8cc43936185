"""Mistral 7B, Nemo, Small: Llama with a sliding window. `sliding_window: null` means none; an absent key means 4096."""

from __future__ import annotations

from upcycle.arch.families import common
from upcycle.arch.families.common import Config, Source
from upcycle.arch.spec import DenseSpec

IGNORED = common.ROTARY_BUFFERS


def read(config: Config) -> DenseSpec:
    return common.dense(
        config,
        "mistral",
        context=131072,
        kv_heads=8,
        **common.windows(config, default=4096),
        bos=1,
        eos=2,
    )


def sources(spec: DenseSpec) -> dict[str, Source]:
    return common.llama_sources(spec)
