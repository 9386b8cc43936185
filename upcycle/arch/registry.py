"""Find an architecture by its `model_type`: a dense family, a target, or a native MoE."""

from __future__ import annotations

from typing import Any, TypeAlias

from upcycle import plugin
from upcycle.arch import siblings
from upcycle.arch.families.common import Family
from upcycle.arch.targets.common import Native, Target
from upcycle.io.strict import short

FAMILIES, TARGETS, NATIVES = (f"upcycle.arch.{kind}" for kind in ("families", "targets", "natives"))

AnyDense: TypeAlias = Family | siblings.Dense
AnyTarget: TypeAlias = Target | siblings.MoE


def family(model_type: Any) -> AnyDense:
    """Return the dense architecture of this name; raise a ValueError that lists all if there is none."""
    if isinstance(model_type, str) and model_type in siblings.DENSE:
        return siblings.Dense(siblings.DENSE[model_type])
    known = sorted([*plugin.names(FAMILIES), *siblings.DENSE])
    if model_type in [*plugin.names(TARGETS), *plugin.names(NATIVES), *siblings.MOE]:
        raise ValueError(
            f"config.json has model_type {model_type!r}, which is a mixture of experts already; give a dense model of "
            f"one of the families {', '.join(known)}"
        )
    if model_type not in known:  # programs write this key, so a similar name would be no help
        raise ValueError(f"config.json has model_type {short(model_type)}; dense families known: {', '.join(known)}")
    found: Family = plugin.load(FAMILIES, model_type).FAMILY
    return found


def target(name: str) -> AnyTarget:
    """Return the MoE architecture of this name that a dense model can become."""
    if name in siblings.MOE:
        return siblings.MoE(siblings.MOE[name])
    return readable(name)


def readable(name: str) -> Target:
    """Return the target of this name; only targets whose config.json can be read as an MoESpec are searched."""
    found: Target = plugin.load(TARGETS, name).TARGET
    return found


def any_of(model_type: Any) -> Family | Native:
    """Return the architecture of this name, dense or MoE, that can read its config.json as a spec."""
    package = next((p for p in (FAMILIES, NATIVES) if model_type in plugin.names(p)), TARGETS)
    module = plugin.load(package, model_type)
    found: Family | Native = getattr(module, {FAMILIES: "FAMILY", NATIVES: "NATIVE", TARGETS: "TARGET"}[package])
    return found


def native(name: str) -> Native:
    """Return the MoE architecture of this name that can be trained but not converted to."""
    found: Native = plugin.load(NATIVES, name).NATIVE
    return found
