"""OLMo 2: a norm after each block instead of before it, and q and k normalised over all heads at once."""

from __future__ import annotations

from upcycle.arch.families.common import ATTENTION, Family

NAMES = {"attn_norm": "post_attention_layernorm", "ffn_norm": "post_feedforward_layernorm"}
FAMILY = Family(
    "olmo2",
    context=2048,
    eps=("rms_norm_eps", 1e-5),
    flags=ATTENTION,
    fixed={"block": "post", "qk_norm": "full"},
    eos=50279,
    pad=1,
    names=NAMES,
)
