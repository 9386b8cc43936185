"""Qwen 2, 2.5 and the models that reuse its class: biases on q, k, v alone; a window only if switched on."""

from __future__ import annotations

from upcycle.arch.families import common
from upcycle.arch.families.common import Config, Source
from upcycle.arch.spec import DenseSpec

IGNORED = common.ROTARY_BUFFERS


def read(config: Config) -> DenseSpec:
    return common.dense(config, "qwen2", context=32768, kv_heads=32, qkv_bias=True, **common.windows_by_layer(config))


def sources(spec: DenseSpec) -> dict[str, Source]:
    return common.llama_sources(spec)
