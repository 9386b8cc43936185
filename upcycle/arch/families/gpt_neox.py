"""GPT-NeoX and Pythia: attention and FFN in parallel; q, k and v share one matrix, interleaved head by head."""

from __future__ import annotations

from typing import Any

from upcycle.arch.families.common import ROTARY_BUFFERS, Config, Family, Source
from upcycle.arch.spec import DenseSpec
from upcycle.io import typed

BIAS = ("attention_bias", True)


def adapt(config: Config) -> Config:
    """Return the config without two keys that the architecture ignores."""
    hidden, heads = typed.whole(config, "hidden_size"), typed.whole(config, "num_attention_heads")
    if hidden % heads:
        raise ValueError(
            f"config.json has hidden_size={hidden} and num_attention_heads={heads}; in a gpt_neox model the second "
            "must divide the first"
        )
    head_dim = typed.whole(config, "head_dim", hidden // heads)
    if head_dim != hidden // heads:  # transformers rotates by head_dim, and computes attention by the quotient
        raise ValueError(
            f"config.json has head_dim={head_dim}; in a gpt_neox model it must be hidden_size / num_attention_heads = "
            f"{hidden // heads}, or left out"
        )
    return {key: value for key, value in config.items() if key not in ("num_key_value_heads", "head_dim")}


def own(config: Config) -> dict[str, Any]:
    return {"block": "parallel" if typed.flag(config, "use_parallel_residual", True) else "pre"}


def parts(spec: DenseSpec) -> dict[str, Source]:
    out, d = {}, spec.head_dim
    for layer in range(spec.layers):
        for i, part in enumerate("qkv"):
            rows = tuple((first + i * d, first + (i + 1) * d) for first in range(0, 3 * d * spec.heads, 3 * d))
            for kind in ("weight", "bias") if spec.qkv_bias else ("weight",):
                name = f"gpt_neox.layers.{layer}.attention.query_key_value.{kind}"
                out[f"layers.{layer}.{part}.{kind}"] = Source(name, rows)
    return out


FAMILY = Family(
    "gpt_neox",
    context=2048,
    eps=("layer_norm_eps", 1e-5),
    act="gelu",
    flags={"qkv_bias": BIAS, "out_bias": BIAS},
    rope={"theta_key": "rotary_emb_base", "partial_key": "rotary_pct", "partial": 0.25},
    fixed={"gated": False, "norm": "layernorm", "ffn_bias": True},
    own=own,
    adapt=adapt,
    bos=0,
    eos=2,
    model="gpt_neox",
    names={
        "embed": "gpt_neox.embed_in", "final_norm": "gpt_neox.final_layer_norm", "head": "embed_out",
        "o": "attention.dense", "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h",
    },
    parts=parts,
    # Old files also hold two buffers, the causal mask and its fill value.
    ignored=(*ROTARY_BUFFERS, r".*\.attention\.(bias|masked_bias)"),
)  # fmt: skip
