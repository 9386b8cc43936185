"""Nemotron-4 and Minitron: squared ReLU without a gate, LayerNorm stored minus one, half of each head rotates."""

from __future__ import annotations

from upcycle.arch.families.common import ALL_BIASES, Family

FAMILY = Family(
    "nemotron",
    context=4096,
    eps=("norm_eps", 1e-5),
    act="relu2",
    flags=ALL_BIASES,
    rope={"partial": 0.5},
    fixed={"gated": False, "norm": "layernorm1p"},
    init_std=0.0134,
    bos=2,
    eos=3,
)
