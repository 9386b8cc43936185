"""OLMo 3: OLMo 2 with windows in three layers of four. A stretched rope is that of the layers without a window only."""

from __future__ import annotations

from upcycle.arch.families import common, olmo2
from upcycle.arch.families.common import Config
from upcycle.arch.spec import DenseSpec
from upcycle.io import typed

IGNORED, sources = olmo2.IGNORED, olmo2.sources
THETA = 500000.0


def read(config: Config) -> DenseSpec:
    if config.get("rope_parameters") is None and typed.number(config, "rope_theta", THETA) != THETA:
        raise ValueError(
            f"config.json has rope_theta={config['rope_theta']}, which transformers 4 takes for all layers and 5 for "
            "those without a window only; state rope_parameters with full_attention and sliding_attention"
        )
    return common.dense(
        config,
        "olmo3",
        context=2048,
        eps=("rms_norm_eps", 1e-5),
        block="post",
        qk_norm="full",
        qkv_bias=typed.flag(config, "attention_bias"),
        out_bias=typed.flag(config, "attention_bias"),
        **common.layers_by_type(config, every=4, thetas=(THETA, THETA), context=2048),
        eos=50279,
        pad=1,
    )
