"""Gemma 1: embeddings times sqrt(hidden), norms stored minus one, and tanh GELU under any name in old files."""

from __future__ import annotations

from typing import Any

from upcycle.arch.families.common import ATTENTION, Config, Family, activation
from upcycle.io import typed


def only_causal(config: Config) -> None:
    if typed.flag(config, "use_bidirectional_attention"):
        raise ValueError("config.json has use_bidirectional_attention; only causal models can be upcycled")


def own(config: Config) -> dict[str, Any]:
    # The official files say "gelu" and mean the tanh approximation; transformers reads them so.
    act = activation(config, default="gelu_pytorch_tanh")
    act = "gelu_tanh" if act == "gelu" else act
    # transformers 4 also had hidden_activation; null meant the tanh approximation.
    if config.get("hidden_activation") is not None and activation(config, "hidden_activation") != act:
        raise ValueError(
            f"config.json has hidden_activation={config['hidden_activation']!r} and a hidden_act that means {act!r}; "
            "transformers 4 and 5 disagree on which one counts, so make them equal"
        )
    only_causal(config)
    return {"activation": act, "embed_scale": float(typed.whole(config, "hidden_size")) ** 0.5}


FAMILY = Family(
    "gemma",
    context=8192,
    kv_heads=16,
    head_dim=256,
    tied=True,
    flags=ATTENTION,
    fixed={"norm": "rms1p"},
    own=own,
    bos=2,
    eos=1,
    pad=0,
)
