"""StarCoder 2: LayerNorm, tanh GELU without a gate, biases everywhere, tied embeddings."""

from __future__ import annotations

from functools import partial

from upcycle.arch.families.common import ALL_BIASES, Family, windows

FAMILY = Family(
    "starcoder2",
    context=4096,
    kv_heads=2,
    tied=True,
    eps=("norm_epsilon", 1e-5),
    act="gelu_pytorch_tanh",
    flags=dict.fromkeys(ALL_BIASES, ("use_bias", True)),
    fixed={"gated": False, "norm": "layernorm"},
    own=partial(windows, default=None),
    init_std=0.018042,
    bos=50256,
    eos=50256,
    names={"up": "mlp.c_fc", "down": "mlp.c_proj"},
)
