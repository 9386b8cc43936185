"""Choose the target architecture of a plan, and whether the scale is stored in the weights or as an output scale."""

from __future__ import annotations

from dataclasses import replace

from upcycle import plugin
from upcycle.arch import siblings
from upcycle.arch.abilities import refusals
from upcycle.arch.registry import TARGETS, AnyTarget, target
from upcycle.arch.spec import MoESpec
from upcycle.config.schema import UpcycleConfig
from upcycle.planning import scale
from upcycle.planning.notes import stays_whole

# `target: auto` takes the first of these that can hold the model, simplest first; our own target only if none can. The
# last three always compute a shared expert as wide as a routed one, of zeros if the model has none
PREFERENCE = (
    "mixtral",
    "qwen3_moe",
    "qwen2_moe",
    "flex_olmo",
    "granitemoe",
    "granitemoeshared",
    "glm4_moe",
    "dots1",
    "solar_open",
)


def place_scale(config: UpcycleConfig, moe: MoESpec, kind: str | float, chosen: AnyTarget) -> MoESpec:
    """Return `moe` with the scale as output_scale if the target has one; otherwise plan.factors scales the weights."""
    if config.scale_in not in ("auto", "weights", "output"):
        raise ValueError(f"scale_in is {config.scale_in!r}; write auto, weights or output")
    fits = chosen.can.output_scale and kind not in ("published", "calibrated")
    if config.scale_in == "output" and not fits:
        raise ValueError(
            "scale_in=output needs a target with an output scale and one number for all layers, got "
            f"{chosen.name} with scale={kind}"
        )
    c = scale.gain(moe, kind, None)
    return replace(moe, output_scale=c) if fits and config.scale_in != "weights" and c is not None else moe


def rank(name: str) -> tuple[int, str]:
    """Return a sort key: the target's position in PREFERENCE; unlisted targets come last, by name."""
    return (PREFERENCE.index(name) if name in PREFERENCE else len(PREFERENCE), name)


def stock_targets(config: UpcycleConfig, moe: MoESpec) -> dict[str, list[str]]:
    """Return, for each stock target that the config allows, why it cannot hold `moe`; an empty list if it can."""
    if moe.dense.carried is not None:
        pair = siblings.DENSE[moe.dense.family]
        return {pair.moe: refusals(pair.can, moe)}
    names = plugin.names(TARGETS) if config.target == "auto" else [config.target]
    return {name: refusals(target(name).can, moe) for name in names if target(name).can.stock}


def scored(config: UpcycleConfig, moe: MoESpec) -> tuple[MoESpec, str]:
    """Return `moe`, with sigmoid scores if router.score=auto and only they keep it stock and exact, and the reason."""
    if config.router.score != "auto":
        return moe, ""
    sigmoid, soft = replace(moe, score="sigmoid"), stock_targets(config, moe)
    if [] in soft.values() or [] not in stock_targets(config, sigmoid).values() or not sigmoid.weights_sum_to_one:
        return moe, "; router.score=auto is softmax"
    nearest = min(soft, key=lambda name: (len(soft[name]), rank(name)))
    return sigmoid, (
        f"; router.score=auto is sigmoid, which alone keeps it stock and exact (with softmax, {nearest} cannot hold "
        f"{' or '.join(soft[nearest])})"
    )


def choose_target(config: UpcycleConfig, moe: MoESpec) -> tuple[str, str]:
    """Return (target, reason); raise a ValueError if the config names a target that cannot hold the model."""
    if moe.dense.carried is not None:
        return siblings.target_of(moe, config.target)
    reasons = {name: refusals(target(name).can, moe) for name in plugin.names(TARGETS)}
    holding = sorted((n for n in reasons if not reasons[n]), key=rank)
    if config.target != "auto":
        target(config.target)  # raises for an unknown name
        if reasons[config.target]:
            instead = "".join(f". Or: {line}" for line in stays_whole(moe))
            raise ValueError(
                f"target {config.target} cannot hold {' or '.join(reasons[config.target])}; targets that can: "
                f"{', '.join(holding)}{instead}"
            )
        return config.target, "asked for"
    stock = [n for n in holding if target(n).can.stock]
    if stock:
        best, *rest = stock
        # ties in a bf16 router split virtual groups; all stock targets with the same score route in the same precision
        half = moe.dtype in ("bfloat16", "float16")
        fp32 = " and routes in float32" if half and moe.granularity > 1 and target(best).can.router_fp32 else ""
        others = f"; {', '.join(rest)} would too" if rest else ""
        adds_one = half and moe.dense.norm == "rms1p" and "rms1p" not in target(best).can.norms
        held = f"except that it rounds norm weights + 1 to {moe.dtype}" if adds_one else "exactly"
        return best, f"stock transformers, holds this model {held}{fp32}{others}"
    close = sorted((n for n in reasons if target(n).can.stock), key=lambda n: (len(reasons[n]), rank(n)))[:2]
    return holding[0], "no stock architecture holds it: " + "; ".join(
        f"{n} cannot hold {' or '.join(reasons[n])}" for n in close
    )
