"""GraniteMoE with a shared expert of any width; see granitemoe.py for the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from upcycle.arch.families.common import Config
from upcycle.arch.spec import DenseSpec, MoESpec
from upcycle.arch.targets import granitemoe
from upcycle.io import typed

ROUTED = granitemoe.TARGET


def keys(moe: MoESpec) -> dict[str, Any]:
    return {**ROUTED.keys(moe), "shared_intermediate_size": moe.shared}  # 0 means no shared expert


def moe(config: Config, dense: DenseSpec) -> dict[str, Any]:
    return {**ROUTED.moe(config, dense), "shared": typed.whole(config, "shared_intermediate_size", 0, low=0)}


TARGET = replace(
    ROUTED,
    dense=replace(ROUTED.dense, name="granitemoeshared"),
    can=replace(ROUTED.can, shared="any"),
    moe=moe,
    architecture="GraniteMoeSharedForCausalLM",
    keys=keys,
)
