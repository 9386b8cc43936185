"""GraniteMoE with a shared expert of any width beside the routed ones (granitemoe.py has the rest)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from upcycle.arch.families.common import Config
from upcycle.arch.spec import MoESpec
from upcycle.arch.targets import granitemoe
from upcycle.arch.targets.common import Slot
from upcycle.io import typed

ABILITIES = replace(granitemoe.ABILITIES, shared="any")


def config(moe: MoESpec) -> dict[str, Any]:
    keys = granitemoe.granite_config(moe, "granitemoeshared", "GraniteMoeSharedForCausalLM", ABILITIES)
    return keys | {"shared_intermediate_size": moe.shared}  # 0 means no shared expert


def read(config: Config) -> MoESpec:
    shared = typed.whole(config, "shared_intermediate_size", 0, low=0)
    return granitemoe.granite_view(config, "granitemoeshared", ABILITIES, shared)


def slots(moe: MoESpec) -> Iterator[Slot]:
    return granitemoe.granite_slots(moe)


def notes(moe: MoESpec) -> list[str]:
    return granitemoe.granite_notes(moe, ABILITIES)
