"""GPT-NeoX and Pythia: attention and FFN side by side, q, k, v interleaved head by head in one matrix."""

from __future__ import annotations

from upcycle.arch.families import common
from upcycle.arch.families.common import Config, Source
from upcycle.arch.spec import DenseSpec
from upcycle.io import typed

# Old files also hold two buffers: the causal mask and its fill value.
IGNORED = (*common.ROTARY_BUFFERS, r".*\.attention\.(bias|masked_bias)")


def read(config: Config) -> DenseSpec:
    hidden, heads = typed.whole(config, "hidden_size"), typed.whole(config, "num_attention_heads")
    if hidden % heads:
        raise ValueError(
            f"config.json has hidden_size={hidden} and num_attention_heads={heads}; in a gpt_neox model the second "
            "must divide the first"
        )
    context = common.context_length(config, 2048)
    return common.dense(
        # The architecture ignores these keys, so dense() must not see them.
        {k: v for k, v in config.items() if k not in ("num_key_value_heads", "head_dim")},
        "gpt_neox",
        context=2048,
        eps=("layer_norm_eps", 1e-5),
        act="gelu",
        gated=False,
        norm="layernorm",
        block="parallel" if typed.flag(config, "use_parallel_residual", True) else "pre",
        rope=common.rope(config, context=context, theta_key="rotary_emb_base", partial_key="rotary_pct", partial=0.25),
        qkv_bias=typed.flag(config, "attention_bias", True),
        out_bias=typed.flag(config, "attention_bias", True),
        ffn_bias=True,
        bos=0,
        eos=2,
    )


def sources(spec: DenseSpec) -> dict[str, Source]:
    names = {
        "embed": "gpt_neox.embed_in", "final_norm": "gpt_neox.final_layer_norm", "head": "embed_out",
        "o": "attention.dense", "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h",
    }  # fmt: skip
    out = common.llama_sources(spec, names, model="gpt_neox")
    d = spec.head_dim
    for layer in range(spec.layers):
        for i, part in enumerate("qkv"):
            rows = tuple((first + i * d, first + (i + 1) * d) for first in range(0, 3 * d * spec.heads, 3 * d))
            for kind in ("weight", "bias") if spec.qkv_bias else ("weight",):
                name = f"gpt_neox.layers.{layer}.attention.query_key_value.{kind}"
                out[f"layers.{layer}.{part}.{kind}"] = Source(name, rows)
    return out
