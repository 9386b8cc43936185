"""The notes and warnings that a plan prints: measurements of similar models, and advice for training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from upcycle.arch.spec import MoESpec
from upcycle.config.schema import UpcycleConfig
from upcycle.planning.methods import Method


def of(config: UpcycleConfig, moe: MoESpec) -> tuple[str, ...]:
    """Return the notes on a plan with a dense source; they do not depend on the target."""
    asked = apart(moe) if config.router.choice == "any" else ()
    return (*asked, *stays_whole(moe), *drawn(config, moe), *padded(moe))


def warnings(config: UpcycleConfig, moe: MoESpec, method: Method) -> Iterator[str]:
    """Yield warnings from measurements of similar models; docs/science.md describes the runs."""
    if config.router.choice != "any":  # a config that sets choice=any gets a note instead
        yield from apart(moe)
    if moe.slices > 1 and not moe.weights_sum_to_one:
        yield (
            "gate weights that are not divided by their sum are not exact, and training ended worse: by 0.025 nats on "
            "SmolLM2-135M after 13 M tokens, for both seeds, with a calibrated scale; use router.normalize=true"
        )
    if method.evidence:
        yield method.evidence


def apart(moe: MoESpec) -> Iterator[str]:
    """Yield how training breaks up virtual groups, if the router may choose any expert."""
    whole = moe.copies_of_slices and not moe.disjoint and moe.top_k % moe.granularity == 0
    if whole and moe.slices == 1 and moe.top_k < moe.experts:
        yield (
            "a trained router breaks up virtual groups; measured on a real checkpoint (SmolLM2-135M): the chosen "
            "experts no longer form whole FFNs, 0.26 nats worse than the dense control after 26 M tokens; "
        ) + (
            "use target=upcycled, whose router chooses in each slice (no stock target can hold that; in another study, "
            "on clean text, it was 0.010 nats better than its control), or keep a stock target and freeze the router: "
            "optim.router_lr=0 in training"
            if moe.dense.carried is None
            else "freeze the router in training"
        )


def stays_whole(moe: MoESpec) -> Iterator[str]:
    if moe.slices > 1:
        yield (
            "no stock target (mixtral, qwen3_moe, ...) can hold router.choice=each-slice; to keep a stock target and "
            "whole FFNs, use router.choice=any and freeze the router: optim.router_lr=0 in training"
        )


def drawn(config: UpcycleConfig, moe: MoESpec) -> Iterator[str]:
    if moe.slices > 1 and config.router.init.name == "normal":
        yield (
            "router rows start random; set calibration.texts and leave out router.init.name, and the routers divide "
            "that text evenly from the first step, which gained 0.004 nats on a real model (docs/science.md)"
        )


def padded(moe: MoESpec) -> Iterator[str]:
    if moe.padding:
        yield (
            f"grouped kernels, also those of transformers, need rows whose size is a multiple of 16 bytes, and "
            f"{moe.cut_widths[0]} neurons in {moe.dtype} are not: each expert is padded with {moe.padding} zero "
            "neurons, which change nothing and do not learn"
        )


def waiting(observed: Mapping[str, Tensor]) -> Iterator[str]:
    waits = [float(tensor) for name, tensor in observed.items() if name.endswith(".wait")]
    if waits:
        yield (
            "only the first copy of each expert is used at the start: the others have a selection bias "
            f"{min(waits):.3g} to {max(waits):.3g} lower, so no token takes them until balance.bias_rate has raised "
            "it, after about 1 / rate steps"
        )


def grown(method: str, view: MoESpec, moe: MoESpec, copies: int) -> str:
    if method == "copy":
        return f"{copies} copies of each of its {view.experts} experts, top-{moe.top_k} instead of top-{view.top_k}"
    what = "keeps the most salient" if method == "prune" else "copies the most used"
    return f"{what} of its {view.experts} experts in each layer, now {moe.experts}, still top-{moe.top_k}"
