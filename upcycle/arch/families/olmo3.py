"""OLMo 3: OLMo 2 with windows in three of four layers; a stretched rope applies only to layers without a window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from upcycle.arch.families import olmo2
from upcycle.arch.families.common import Config, layers_by_type
from upcycle.io import typed

THETA = 500000.0


def own(config: Config) -> Mapping[str, Any]:
    if config.get("rope_parameters") is None and typed.number(config, "rope_theta", THETA) != THETA:
        raise ValueError(
            f"config.json has rope_theta={config['rope_theta']}, which transformers 4 uses for all layers and 5 only "
            "for layers without a window; state rope_parameters with full_attention and sliding_attention"
        )
    return layers_by_type(config, every=4, thetas=(THETA, THETA), context=FAMILY.context)


FAMILY = replace(olmo2.FAMILY, name="olmo3", own=own)
