"""Granite 3.x (dense): Llama with four multipliers; config.json always states the attention scale."""

from __future__ import annotations

from typing import Any

from upcycle.arch.families.common import ALL_BIASES, Config, Family
from upcycle.io import typed


def multipliers(config: Config) -> dict[str, Any]:
    """Return the multipliers of a Granite config, dense or MoE, as fields of a DenseSpec."""
    return {
        "attention_scale": typed.number(config, "attention_multiplier", 1.0),
        "embed_scale": typed.number(config, "embedding_multiplier", 1.0),
        "residual_scale": typed.number(config, "residual_multiplier", 1.0),
        "logit_scale": 1.0 / typed.number(config, "logits_scaling", 1.0),
    }


FAMILY = Family("granite", context=2048, flags=ALL_BIASES, own=multipliers, bos=1, eos=2)
