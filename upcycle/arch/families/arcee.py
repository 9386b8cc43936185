"""Arcee AFM: Llama with squared ReLU and no gate."""

from __future__ import annotations

from upcycle.arch.families.common import ALL_BIASES, Family

FAMILY = Family(
    "arcee",
    context=4096,
    eps=("rms_norm_eps", 1e-5),
    act="relu2",
    flags=ALL_BIASES,
    fixed={"gated": False},
    bos=128000,
    eos=128001,
)
