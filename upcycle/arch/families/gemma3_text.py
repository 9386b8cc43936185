"""Gemma 3, text models (270M, 1B): Gemma 2 with norms on q and k instead of caps on attention scores.

Five of six layers have a window, and these layers have another rope.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from upcycle.arch.families import gemma2
from upcycle.arch.families.common import Config, cap, layers_by_type
from upcycle.io import typed


def own(config: Config) -> dict[str, Any]:
    if config.get("attn_logit_softcapping") is not None:
        raise typed.wrong(config, "attn_logit_softcapping", "null, because transformers ignores it here")
    every = typed.whole(config, "sliding_window_pattern", 6)
    thetas = typed.number(config, "rope_theta", 1e6), typed.number(config, "rope_local_base_freq", 1e4)
    return {
        **gemma2.sandwich(config),
        "logit_cap": cap(config, "final_logit_softcapping", None),
        **layers_by_type(config, every=every, thetas=thetas, context=FAMILY.context),
    }


FAMILY = replace(
    gemma2.FAMILY,
    name="gemma3_text",
    context=131072,
    fixed={**gemma2.FAMILY.fixed, "qk_norm": "head"},
    own=own,
)
