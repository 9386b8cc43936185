"""Gemma 3, the text models (270M, 1B): Gemma 2 with q and k normalised in place of the caps, a window in five layers of
six, and a rope of their own for those."""

from __future__ import annotations

from upcycle.arch.families import common, gemma2
from upcycle.arch.families.common import Config, Source
from upcycle.arch.spec import DenseSpec
from upcycle.io import typed

IGNORED = common.ROTARY_BUFFERS


def read(config: Config) -> DenseSpec:
    if config.get("attn_logit_softcapping") is not None:
        raise typed.wrong(config, "attn_logit_softcapping", "null, because transformers ignores it here")
    every = typed.whole(config, "sliding_window_pattern", 6)
    thetas = typed.number(config, "rope_theta", 1e6), typed.number(config, "rope_local_base_freq", 1e4)
    return common.dense(
        config,
        "gemma3_text",
        context=131072,
        kv_heads=4,
        head_dim=256,
        tied=True,
        **gemma2.sandwich(config),
        qk_norm="head",
        logit_cap=common.cap(config, "final_logit_softcapping", None),
        **common.layers_by_type(config, every=every, thetas=thetas, context=131072),
        bos=2,
        eos=1,
        pad=0,
    )


def sources(spec: DenseSpec) -> dict[str, Source]:
    return gemma2.sources(spec)
