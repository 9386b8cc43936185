"""Measure the numbers that a plan needs from the dense model on text, in one streamed pass over its layers.

layers.L.rows    router rows of text clusters, or directions for rows: domain means, gate rows of representative neurons
layers.L.order   the order of the neurons: first the shared expert's, then those of each expert
layers.L.left    method part: shares of general tokens and of the part's that leave the anchor, of held-back text
layers.L.mass    the mean, over tokens, of the sum of the chosen weights
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from upcycle.text.layer import Read

Text = tuple[Tensor, Tensor]  # ids [sequence, token], and the domain of every token
TOGETHER = 1 << 30  # bytes of router inputs that a device divides into clusters together; a CPU's caches hold one layer
FIRST = -2  # is added to the domain of each sequence's first token
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
    if init.name == "parts":
        domain = domain.view_as(ids).clone()
        domain[:, 0] += FIRST
        domain = domain.flatten()
    measured: dict[str, Tensor] = {}
    views = observe.walk(plan.dense, reader(plan, checkpoints), ids, quiet=quiet, device=device)
    together = TOGETHER if init.name == "clusters" and torch.device(device).type != "cpu" else 0
    for group in grouped((view for view in views if view.layer in moe.layers), together):
        found: dict[int, Tensor] = {}
        if init.name == "clusters":
            found = clusters.rows({view.layer: view.router_input for view in group}, moe.copies, plan.config.seed)
        for view in group:
            measured |= measure_layer(plan, view, domain, found.get(view.layer))
    if init.name == "parts" and not any(float(measured[f"layers.{layer}.left"][1]) for layer in moe.layers):
        raise ValueError(
            f"no layer tells {init.texts[1]} from {init.texts[0]}, so the part would get no token; give more text "
            "(calibration.tokens), or general text of other kinds"
        )
    return measured


def grouped(views: Iterable[observe.LayerView], together: int) -> Iterator[list[observe.LayerView]]:
    """Yield the views in lists whose router inputs have at most `together` bytes, or of one view."""
    group: list[observe.LayerView] = []
    for view in views:
        if group and (len(group) + 1) * view.router_input.nbytes > together:
            yield group
            group = []
        group.append(view)
    if group:
        yield group


def measure_layer(plan: UpcyclePlan, view: observe.LayerView, domain: Tensor, rows: Tensor | None) -> dict[str, Tensor]:
    """Return the measurements of a layer; `rows` are its clusters' router rows."""
    moe, init, prefix, x_TD = plan.moe, plan.config.router.init, f"layers.{view.layer}", view.router_input
    measured: dict[str, Tensor] = {}
    if plan.method.needs.order:
        marks_TF = observe.neuron_activity(view.ffn, x_TD.cpu(), plan.dense.activation, TOP)
        order, representatives = observe.cluster_neurons(marks_TF, moe.cut_shared, moe.cut_widths, plan.config.seed)
        measured[f"{prefix}.order"] = order
        if init.name == "neurons":
            rows = view.ffn["gate" if plan.dense.gated else "up"][representatives].float()
    if init.name == "hidden":
        rows = observe.domain_means(x_TD.cpu(), domain)
    if init.name == "parts":
        general_TD, own_TD, first_FD = (x_TD[(domain == kind).to(x_TD.device)] for kind in (0, 1, FIRST))
        row_D, left = parts.row(general_TD, own_TD, first_FD, getattr(torch, moe.dtype))
        rows = torch.stack([torch.zeros_like(row_D), *[row_D] * (moe.copies - 1)])
        measured[f"{prefix}.left"] = torch.tensor(left, dtype=torch.float64)
    if rows is not None:
        measured[f"{prefix}.rows"] = rows = rows.cpu().contiguous()
    if plan.scale == "calibrated":
        distinct = router_rows(plan, view.layer, rows)
        mass = observe.router_mass(x_TD.cpu(), routers.repeated(distinct, moe.experts), moe)
        measured[f"{prefix}.mass"] = torch.tensor(mass, dtype=torch.float64)
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


def reader(plan: UpcyclePlan, checkpoints: Sequence[Checkpoint]) -> Read:
    """Return a function role -> tensor of the base, or the donors' mean if the method averages the rest."""
    maker = Maker(plan, checkpoints)
    sources = registry.family(plan.dense.family).sources(plan.dense)
    donors = range(1, len(checkpoints)) if plan.method.needs.rest == "mean" else [0]

    def read(role: str) -> Tensor:
        source = sources[role]
        tensors = [maker.read(type(source)(source.name, source.rows, donor)) for donor in donors]
        return tensors[0] if len(tensors) == 1 else Maker.mean(tensors)

    return read
