"""Sentences that a plan prints: what was measured of such a model, and what to know before training it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from upcycle.arch.spec import MoESpec
from upcycle.config.schema import UpcycleConfig
from upcycle.planning.methods import Method


def of(config: UpcycleConfig, moe: MoESpec) -> tuple[str, ...]:
    """Return the notes on a plan whose source is dense, whatever the target."""
    asked = apart(moe) if config.router.choice == "any" else ()
    return (*asked, *stays_whole(moe), *drawn(config, moe), *padded(moe))


def warnings(config: UpcycleConfig, moe: MoESpec, method: Method) -> Iterator[str]:
    """Yield sentences on what was measured of such a model and speaks against it; docs/study.md has the runs."""
    if config.router.choice != "any":  # a config that names this choice knows it, and gets a note
        yield from apart(moe)
    if moe.slices > 1 and not moe.weights_sum_to_one:
        yield (
            "weights that are not divided by their sum are not exact and ended behind: on SmolLM2-135M by 0.025 nats "
            "after 13 M tokens, two seeds of two, with a calibrated scale; use router.normalize=true"
        )
    if method.evidence:
        yield method.evidence


def apart(moe: MoESpec) -> Iterator[str]:
    """Yield what a free choice does to virtual groups, if the router has one."""
    whole = moe.copies_of_slices and not moe.disjoint and moe.top_k % moe.granularity == 0
    if whole and moe.slices == 1 and moe.top_k < moe.experts:
        yield (
            "a router that learns takes virtual groups apart; measured on a real checkpoint (SmolLM2-135M): choices "
            "stop being whole FFNs, 0.26 nats behind the dense control after 26 M tokens; "
        ) + (
            "use target=upcycled, whose router chooses in each slice (no stock target holds that; it was ahead of the "
            "control by 0.019), or stay stock with a frozen router: optim.router_lr=0 in training"
            if moe.dense.carried is None
            else "freeze the router where you train it"
        )


def stays_whole(moe: MoESpec) -> Iterator[str]:
    if moe.slices > 1:
        yield (
            "no stock target, mixtral and qwen3_moe among them, holds router.choice=each-slice; what stays stock and "
            "whole is router.choice=any with a frozen router: optim.router_lr=0 in training"
        )


def drawn(config: UpcycleConfig, moe: MoESpec) -> Iterator[str]:
    if moe.slices > 1 and config.router.init.name == "normal":
        yield (
            "routers begin with rows drawn at random; name calibration.texts and leave router.init.name out, and they "
            "divide that text evenly from the first step, which was worth 0.004 nats on a real model (docs/study.md)"
        )


def padded(moe: MoESpec) -> Iterator[str]:
    if moe.padding:
        yield (
            f"grouped kernels, transformers' among them, want rows of whole 16 bytes, which {moe.cut_widths[0]} "
            f"neurons in {moe.dtype} are not: each expert is filled up with {moe.padding} zero neurons, which change "
            "nothing and do not learn"
        )


def waiting(observed: Mapping[str, Tensor]) -> Iterator[str]:
    waits = [float(tensor) for name, tensor in observed.items() if name.endswith(".wait")]
    if waits:
        yield (
            f"all copies of an expert but the first wait: their selection bias is {min(waits):.3g} to {max(waits):.3g} "
            "lower, so no token takes them until balance.bias_rate has raised it, within some 1 / rate steps"
        )


def grown(method: str, view: MoESpec, moe: MoESpec, copies: int) -> str:
    if method == "copy":
        return f"each of its {view.experts} experts {copies} times, top-{view.top_k} made top-{moe.top_k}"
    what = "the most salient" if method == "prune" else "in copies by their use, all"
    return f"{what} of its {view.experts} experts in each layer, {moe.experts} now, top-{moe.top_k} as it was"
