"""Measure the numbers that a plan needs from the dense model on text, in one streamed pass over its layers.

layers.L.rows    router rows of text clusters, or directions for rows: domain means, gate rows of representative neurons
layers.L.order   the order of the neurons: first the shared expert's, then those of each expert
layers.L.left    method part: shares of general tokens and of the part's that leave the anchor, of held-back text
layers.L.mass    the mean, over tokens, of the sum of the chosen weights
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from upcycle.arch import registry
from upcycle.converting.make import Maker, router_rows
from upcycle.io.checkpoint import Checkpoint, load_checked
from upcycle.planning import request, routers
from upcycle.planning.plan import UpcyclePlan
from upcycle.text import clusters, observe, parts
from upcycle.text import tokens as text

Text = tuple[Tensor, Tensor]  # ids [sequence, token], and the domain of every token
TOP = 10  # the most active neurons that mark a token, as in CMoE


def measure(
    plan: UpcyclePlan,
    checkpoints: Sequence[Checkpoint],
    *,
    quiet: bool = False,
    text: Text | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Return the measurements of a plan on `text`, or on the config's texts."""
    moe, init = plan.moe, plan.config.router.init
    ids, domain = text or tokens(plan, checkpoints)
    measured: dict[str, Tensor] = {}
    for view in observe.walk(plan.dense, reader(plan, checkpoints), ids, quiet=quiet, device=device):
        if view.layer not in moe.layers:
            continue
        prefix, rows = f"layers.{view.layer}", None
        if init.name == "clusters":
            rows = clusters.rows(view.router_input, moe.copies, plan.config.seed, view.layer).cpu()
        x_TD = view.router_input.cpu()
        if plan.method.needs.order:
            marks_TF = observe.neuron_activity(view.ffn, x_TD, plan.dense.activation, TOP)
            order, representatives = observe.cluster_neurons(marks_TF, moe.cut_shared, moe.cut_widths, plan.config.seed)
            measured[f"{prefix}.order"] = order
            if init.name == "neurons":
                rows = view.ffn["gate" if plan.dense.gated else "up"][representatives].float()
        if init.name == "hidden":
            rows = observe.domain_means(x_TD, domain)
        if init.name == "parts":
            row_D, left = parts.row(x_TD[domain == 0], x_TD[domain == 1], getattr(torch, moe.dtype))
            rows = torch.stack([torch.zeros_like(row_D), *[row_D] * (moe.copies - 1)])
            measured[f"{prefix}.left"] = torch.tensor(left, dtype=torch.float64)
        if rows is not None:
            measured[f"{prefix}.rows"] = rows.contiguous()
        if plan.scale == "calibrated":
            distinct = router_rows(plan, view.layer, rows)
            mass = observe.router_mass(x_TD, routers.repeated(distinct, moe.experts), moe)
            measured[f"{prefix}.mass"] = torch.tensor(mass, dtype=torch.float64)
    if init.name == "parts" and not any(float(measured[f"layers.{layer}.left"][1]) for layer in moe.layers):
        raise ValueError(
            f"no layer tells {init.texts[1]} from {init.texts[0]}, so the part would get no token; give more text "
            "(calibration.tokens), or general text of other kinds"
        )
    return measured


def read(path: Path, plan: UpcyclePlan) -> dict[str, Tensor]:
    """Read the measurements of a plan; raise a ValueError if they do not fit it."""
    found, moe = load_checked(path), plan.moe
    fits: dict[str, Callable[[Tensor], bool]] = {}
    if plan.method.needs.order:
        every = torch.arange(plan.dense.ffn)
        fits["order"] = lambda order: order.shape == every.shape and torch.equal(order.sort().values, every)
    if plan.config.router.init.name in routers.MEASURED:
        sizes = [(rows, plan.dense.hidden) for rows in (moe.copies, moe.experts)]
        fits["rows"] = lambda rows: tuple(rows.shape) in sizes and bool(rows.isfinite().all())
    if plan.scale == "calibrated":
        fits["mass"] = lambda mass: not mass.shape and 0 < float(mass) < math.inf
    for name in (f"layers.{layer}.{kind}" for layer in moe.layers for kind in fits):
        if name not in found or not fits[name.rpartition(".")[2]](found[name]):
            raise ValueError(f"{path} has no {name} that fits this plan; remove it and start again")
    return found


def tokens(plan: UpcyclePlan, checkpoints: Sequence[Checkpoint], given: Callable[[], Tensor] | None = None) -> Text:
    """Return the config's text, with one domain for each of the router's texts; if the config names no text, return the
    ids of `given`."""
    calibration, init = plan.config.calibration, plan.config.router.init
    texts = request.measured_texts(plan.config)
    if init.name == "parts":
        request.check_two(texts)
    if given is not None and not texts:
        ids = given()
        return ids, torch.zeros(ids.numel(), dtype=torch.int64)
    groups = [(path,) for path in texts] if init.name in routers.BY_TEXT else [texts]
    share, length = max(1, calibration.tokens // len(groups)), min(calibration.sequence, plan.dense.longest)
    batches = [text.token_batches(checkpoints[0].folder, group, share, length, plan.dense.vocab) for group in groups]
    domain = torch.cat([torch.full((batch.numel(),), i) for i, batch in enumerate(batches)])
    return torch.cat(batches), domain


def reader(plan: UpcyclePlan, checkpoints: Sequence[Checkpoint]) -> observe.Read:
    """Return a function role -> tensor of the base, or the donors' mean if the method averages the rest."""
    maker = Maker(plan, checkpoints)
    sources = registry.family(plan.dense.family).sources(plan.dense)
    donors = range(1, len(checkpoints)) if plan.method.needs.rest == "mean" else [0]

    def read(role: str) -> Tensor:
        source = sources[role]
        tensors = [maker.read(type(source)(source.name, source.rows, donor)) for donor in donors]
        return tensors[0] if len(tensors) == 1 else Maker.mean(tensors)

    return read
