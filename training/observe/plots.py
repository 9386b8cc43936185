"""Plot runs: training and validation loss by tokens, learning rate, whole choices, and load by layer.

The only input is metrics.jsonl. Panels without data are left out. A dotted line marks the end of a stage. The command
is upcycle report RUN.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from training.observe import metrics
from upcycle.cli.frame import install, printable
from upcycle.io import disk

LAYER = re.compile(r"balance/(\d+)/max_over_mean")
WHOLE = "balance/whole"
ISLANDS = (  # metrics of an island's exchanges, and its speed: key, title, unit
    ("islands/bytes_up", "Islands: sent", "bytes, since the process began"),
    ("islands/bytes_down", "Islands: received", "bytes, since the process began"),
    ("islands/stale", "Islands: staleness", "pushes of others since the last answer"),
    ("islands/unsent", "Islands: waiting to be sent", "norm / norm of the weights"),
    ("tokens_per_s", "Islands: speed", "tokens a second"),
)
VALID = re.compile(r"valid/(.+)/loss")
# Okabe-Ito colours, which colour-blind readers can distinguish
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
STYLES = ("-", "--", ":", "-.")  # a style for each validation set; a colour for each run
MARK = rb"[Mm]atplotlib"  # a picture contains the name of the library that drew it
Points = tuple[list[float], list[float]]


@dataclass(frozen=True)
class Curves:
    name: str
    color: str
    rows: list[dict[str, Any]]

    def points(self, key: str) -> Points:
        """Return tokens and value of each row with a value. Interpolate the tokens of a row that has no count."""
        counted = [row for row in self.rows if row.get("tokens")]
        at = [0.0, *(float(row["step"]) for row in counted)]
        tokens = [0.0, *(float(row["tokens"]) for row in counted)]
        found = [row for row in self.rows if row.get(key) is not None]
        places = np.interp([float(row["step"]) for row in found], at, tokens)
        return places.tolist(), [row[key] for row in found]

    def by_layer(self, name: str) -> Points:
        """Return the MoE layers, and the latest balance/<layer>/`name` of each."""
        keys = self.keys(re.compile(rf"balance/(\d+)/{name}"))
        latest = sorted((float(layer), self.points(key)[1][-1]) for layer, key in keys.items() if self.points(key)[1])
        return [layer for layer, _ in latest], [value for _, value in latest]

    def keys(self, pattern: re.Pattern[str]) -> dict[str, str]:
        """Return each key that matches the pattern, by the text of the pattern's group."""
        matches = (pattern.fullmatch(key) for row in self.rows for key in row if row[key] is not None)
        return {printable(found[1]): found[0] for found in matches if found}

    def boundaries(self) -> list[float]:
        """Return the token counts at which stages end."""
        counted = [row for row in self.rows if row.get("tokens") and row.get("stage")]
        return [a["tokens"] for a, b in itertools.pairwise(counted) if a["stage"] != b["stage"]]


def read_runs(folders: Sequence[Path]) -> list[Curves]:
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = ["/".join(folder.resolve().parts[-2:]) for folder in folders]
    runs = [
        Curves(printable(name), COLORS[number % len(COLORS)], metrics.read(folder))
        for number, (name, folder) in enumerate(zip(names, folders, strict=True))
    ]
    for run, folder in zip(runs, folders, strict=True):
        if not any("loss" in row or any(VALID.fullmatch(key) for key in row) for row in run.rows):
            raise ValueError(f"{folder}/{metrics.FILE} has no loss yet; plot the run after its first logged step")
    return runs


def plot(folders: Sequence[Path], output: Path) -> None:
    """Write one picture, of the type that the file's name ends with (png, pdf, svg)."""
    runs = read_runs(folders)
    try:
        figure_module = import_module("matplotlib.figure")
    except ImportError:
        raise ValueError(f"plots need matplotlib, which is not installed; {install('matplotlib')}") from None
    panels: list[tuple[str, Callable[[Any], None]]] = [("Training loss", lambda axes: draw_loss(axes, runs))]
    if any(run.keys(VALID) for run in runs):
        panels.append(("Validation loss", lambda axes: draw_validation(axes, runs)))
    if any(run.points("lr")[1] for run in runs):
        panels.append(("Learning rate", lambda axes: draw_curves(axes, runs, "lr", "learning rate")))
    if any(run.points(WHOLE)[1] for run in runs):
        grouped = [run for run in runs if run.points(WHOLE)[1]]
        panels.append(
            ("Choices that are whole FFNs", lambda axes: draw_curves(axes, grouped, WHOLE, "share of tokens"))
        )
    islands = [run for run in runs if run.points(ISLANDS[0][0])[1]]
    for key, title, unit in ISLANDS if islands else ():
        panels.append((title, partial(draw_curves, runs=islands, key=key, label=unit)))
    for run in runs:
        if run.keys(LAYER):
            title = "Load of the fullest expert" + (f" - {run.name}" if len(runs) > 1 else "")
            panels.append((title, lambda axes, run=run: draw_load(axes, run)))  # type: ignore[misc]
    with import_module("matplotlib").rc_context({"text.parse_math": False}):  # a $ in a name starts no formula
        draw_panels(figure_module, panels, runs, output)


def draw_panels(
    figure_module: Any, panels: Sequence[tuple[str, Callable[[Any], None]]], runs: Sequence[Curves], output: Path
) -> None:
    """Draw all panels on one page and write it."""
    columns, lines = min(2, len(panels)), -(-len(panels) // 2)
    figure = figure_module.Figure(figsize=(6.5 * columns, 4 * lines), layout="constrained")
    for number, (title, draw) in enumerate(panels, 1):
        axes = figure.add_subplot(lines, columns, number)
        axes.set_title(title, loc="left")
        axes.set_xlabel("tokens")
        draw(axes)
        for run in runs:
            for tokens in run.boundaries():
                axes.axvline(tokens, color=run.color, linestyle=":", linewidth=0.8)
        axes.xaxis.set_major_formatter(lambda tokens, _: count(tokens))
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110, format=output.suffix[1:])
    output.parent.mkdir(parents=True, exist_ok=True)
    disk.write_atomic(output, picture.getvalue())  # takes the place of a link, and leaves the file behind it alone


def draw_loss(axes: Any, runs: Sequence[Curves]) -> None:
    """Draw each interval's mean as a pale line, and the smoothed curve over it."""
    for run in runs:
        tokens, losses = run.points("loss")
        axes.plot(tokens, losses, color=run.color, alpha=0.3, linewidth=0.8)
        axes.plot(tokens, smoothed(losses), color=run.color, label=run.name)
    finish(axes, "nats a token")


def smoothed(values: Sequence[float]) -> list[float]:
    """Return means over about a twentieth of the curve, centred on each point, because an exponential mean lags behind
    a falling loss and would draw it too high."""
    reach, last = len(values) // 40, len(values) - 1
    spans = [min(reach, at, last - at) for at in range(len(values))]
    return [float(np.mean(values[at - span : at + span + 1])) for at, span in enumerate(spans)]


def draw_validation(axes: Any, runs: Sequence[Curves]) -> None:
    sets = sorted({name for run in runs for name in run.keys(VALID)})
    for run in runs:
        for name, key in run.keys(VALID).items():
            label = f"{run.name}: {name}" if len(runs) > 1 else name
            style = STYLES[sets.index(name) % len(STYLES)]
            axes.plot(*run.points(key), style, color=run.color, marker="o", markersize=3, label=label)
    finish(axes, "nats a token")


def draw_curves(axes: Any, runs: Sequence[Curves], key: str, label: str) -> None:
    for number, run in enumerate(runs):  # a style for each, because curves often overlap
        axes.plot(*run.points(key), STYLES[number % len(STYLES)], color=run.color, label=run.name)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    axes.set_ylim(bottom=0)
    finish(axes, label)


def draw_load(axes: Any, run: Curves) -> None:
    """Draw one row per layer, in which 1 is perfect balance and 2 is an expert with twice its share."""
    layers = sorted(run.keys(LAYER).items(), key=lambda item: int(item[0]))
    tokens = sorted({t for _, key in layers for t in run.points(key)[0]})
    table = np.full((len(layers), len(tokens)), np.nan)
    for line, (_, key) in enumerate(layers):
        for at, value in zip(*run.points(key), strict=True):
            table[line, tokens.index(at)] = value
    edges = [*np.subtract(tokens, np.diff(tokens, prepend=0)), tokens[-1]]  # a column ends where its line was written
    top = max(1.1, float(np.nanpercentile(table, 99)))  # so that one bad interval does not make all others one colour
    mesh = axes.pcolormesh(edges, np.arange(len(layers) + 1) - 0.5, table, cmap="viridis", vmin=1, vmax=top)
    axes.set_ylabel("MoE layer")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.figure.colorbar(mesh, ax=axes, label="fullest expert / mean", extend="max")


def finish(axes: Any, label: str) -> None:
    axes.set_ylabel(label)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(left=0)
    axes.legend(frameon=False, fontsize="small")


def count(number: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:g}{unit}"
    return f"{number:g}"
