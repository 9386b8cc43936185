"""Show a run from its files, also while it trains: the content of `upcycle watch`'s page."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from evaluation.show.commands import config_of
from evaluation.show.facts import plan_rows
from evaluation.show.page import Grid, Page, Pairs, Palette, Section, Tile, contents
from evaluation.show.pictures import RATIOS, Curve, Curves, Heat, Scale, curves, diverging, short
from training.observe import metrics, plots
from upcycle.io.publish import MANIFEST

DEPTH = 4  # levels of folders that are searched for runs
COLUMNS = 64  # of the heat map, whose last column is the latest row
TILES: tuple[tuple[str, str, Callable[[float], str], str], ...] = (  # metric, title, how its number is written, unit
    ("loss", "Loss", lambda v: f"{v:.4f}", "nats a token"),
    ("tokens_per_s", "Throughput", short, "tokens a second"),
    (metrics.LOAD, "Fullest expert", lambda v: f"{v:.2f}", "its load / the mean, worst layer"),
    ("eta_s", "Time left", metrics.duration, "h:mm:ss"),
)
SPEEDS = (  # metric, title, unit
    ("tokens_per_s", "Throughput", "tokens a second"),
    ("lr", "Learning rate", ""),
    ("grad_norm", "Norm of the gradient", ""),
)


def shown_in(folder: Path) -> dict[str, Path]:
    """Return the runs and models in a folder, by their path in it, with the run that was written last first."""
    found: dict[Path, float] = {}
    for path, inner, files in os.walk(folder):
        here = Path(path)
        if kept := [name for name in (metrics.FILE, MANIFEST) if name in files]:
            with suppress(OSError):  # it is being removed
                found[here] = (here / kept[0]).stat().st_mtime
        if here in found or len(here.relative_to(folder).parts) >= DEPTH:
            inner.clear()
    ordered = sorted(found, key=lambda here: (not (here / metrics.FILE).is_file(), -found[here]))
    return {here.relative_to(folder).as_posix() if here != folder else folder.resolve().name: here for here in ordered}


def page_of(name: str, folder: Path) -> str:
    """Return the content of the page of a run or a model, as HTML."""
    rows = rows_of(folder)
    run, color = plots.Curves(name, "", rows), Palette()
    sections = [
        Section("Loss", "Dots are validations. A pale line is the mean of each interval.", list(losses(run, color))),
        Section(
            "Load by layer",
            "Rows are layers; a column is an interval of the training, the latest on the right.",
            list(loads(run)),
        ),
        Section("Speed", "Measured without validation and checkpoints.", list(grid(drawn(run, SPEEDS)))),
        Section("The plan", "How the dense model became a mixture of experts.", plan(folder)),
    ]
    return contents(Page(name, said(folder, rows), list(tiles(rows)), (), sections))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's log, one for each step; read the file only if it has changed."""
    path = folder / metrics.FILE
    if not path.is_file():
        return []
    status = path.stat()
    return parsed(path, status.st_mtime_ns, status.st_size)


@lru_cache(8)
def parsed(path: Path, *state: int) -> list[dict[str, Any]]:
    """Return the rows of a file in this state; a line that is being written is left out."""
    return metrics.joined(metrics.intact(path)[0])


def said(folder: Path, rows: list[dict[str, Any]]) -> str:
    """Say how far the run is, and when it last wrote."""
    if not rows:
        return "a model without a log of its training"
    steps = config_of(folder).get("steps")
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime((folder / metrics.FILE).stat().st_mtime))
    return f"step {rows[-1]['step']:,}{f' of {steps:,}' if isinstance(steps, int) else ''}, written at {at}"


def tiles(rows: list[dict[str, Any]]) -> Iterator[Tile]:
    """Yield a tile for the latest value of each main number."""
    latest: dict[str, Any] = {}
    for row in rows:
        latest |= {key: value for key, value in row.items() if value is not None}
    for key, title, write, unit in TILES:
        if key in latest:
            yield Tile(title, write(latest[key]), unit)
    for name, key in {key[6:-5]: key for key in latest if plots.VALID.fullmatch(key)}.items():
        yield Tile(f"Validation, {name}", f"{latest[key]:.4f}", "nats a token")


def losses(run: plots.Curves, color: Palette) -> Iterator[Any]:
    tokens, values = run.points("loss")
    training = Curve("training", color["training"], tokens, plots.smoothed(values), values) if values else None
    found = {name: run.points(key) for name, key in run.keys(plots.VALID).items()}
    checked = [Curve(name, color[name], *points, dots=True) for name, points in found.items() if points[1]]
    yield from grid([
        curves("Training", "nats a token", "tokens", [training] if training else []),
        curves("Validation", "nats a token", "tokens", checked),
    ])  # fmt: skip
    yield color.legend([each.name for each in checked]) if len(checked) > 1 else None


def loads(run: plots.Curves) -> Iterator[Any]:
    """Yield a heat map of the fullest expert's load in each layer over time, and the choices that are whole FFNs."""
    keys = sorted(run.keys(plots.LAYER).items(), key=lambda item: int(item[0]))
    rows = [row for row in run.rows if any(row.get(key) is not None for _, key in keys)]
    if rows:
        every = -(-len(rows) // COLUMNS)
        rows = rows[(len(rows) - 1) % every :: every]
        names = [short(row["tokens"]) if "tokens" in row else f"step {row['step']}" for row in rows]
        numbers = [[row.get(key) for row in rows] for _, key in keys]
        yield Scale("h", RATIOS, "load of the layer's fullest expert / mean load")
        yield Heat(
            "Fullest expert", "its load / the mean", numbers, [layer for layer, _ in keys], diverging, "h",
            columns=names, x_unit="tokens",
        )  # fmt: skip
    yield from grid(drawn(run, [(plots.WHOLE, "Whole FFNs", "share of tokens")]))


def drawn(run: plots.Curves, wanted: Iterable[tuple[str, str, str]]) -> Iterator[Curves | None]:
    """Yield a curve from zero for each metric that was logged."""
    for key, title, unit in wanted:
        tokens, values = run.points(key)
        yield curves(title, unit, "tokens", [Curve(title, 0, tokens, values)] if values else [], y_zero=True)


def grid(pictures: Iterable[Curves | None]) -> Iterator[Any]:
    found = [picture for picture in pictures if picture]
    if found:
        yield Grid(found)


def plan(folder: Path) -> list[Any]:
    rows = plan_rows(folder)
    return [Pairs(rows)] if rows else []
