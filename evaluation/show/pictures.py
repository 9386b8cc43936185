"""Pictures for a page, as plain HTML and SVG: curves, intervals, heat maps. No script, nothing fetched.

The SVG holds marks alone and stretches with the page; every word beside it is HTML, so text keeps its size on a phone.
Colours are classes: page.css says what they are in light and in dark. s0, s1, ... are series (Okabe-Ito's, told apart
by all eyes, and by their dashes); h0 ... h8 go from far below 1 over 1 to far above; q0 ... q8 from none to most.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

SERIES = 12  # classes of series in page.css: six colours, and again with other dashes
BINS = 9  # classes of colour in a heat map
START = 0.1  # share of a curve's x whose values may be cut off
HYPHEN = re.compile(r"(?<![\w.])-(?=[\d.])")  # a hyphen that stands for a minus
POINTS = 400  # a curve has no more; a screen shows no more
Format = Callable[[float], str]


@dataclass(frozen=True)
class Curve:
    name: str
    series: int
    x: Sequence[float]
    y: Sequence[float]
    faint: Sequence[float] = ()  # y before it was smoothed
    dots: bool = False
    low: Sequence[float] = ()  # of a band around y
    high: Sequence[float] = ()


@dataclass(frozen=True)
class Mark:
    """A value with its interval on one line of a forest."""

    series: int
    value: float
    low: float
    high: float
    text: str
    faded: bool = False
    name: str = ""  # whose value it is, which else the colour alone says


@dataclass(frozen=True)
class ForestRow:
    label: str
    about: str  # small, under the label
    marks: Sequence[Mark]
    note: str = ""  # after the marks' texts
    chance: float | None = None


# ---- scales


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers inside [low, high]: steps of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [(first + i) * step for i in range(math.floor(high / step + 1e-9) - first + 1)]


def span(values: Sequence[float], pad: float = 0.06, least: float = 0.0) -> tuple[float, float]:
    """The values' range with a margin, so that no mark touches the frame."""
    low, high = min(values), max(values)
    width = max(high - low, least, abs(high) * 1e-6, 1e-12)
    middle = (low + high) / 2
    return middle - width * (0.5 + pad), middle + width * (0.5 + pad)


def short(value: float) -> str:
    """12000 -> 12k; few digits."""
    for size, unit in ((1e15, "e15"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def place(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low)


# ---- pieces


def legend(series: Mapping[str, int]) -> str:
    """Names with the line of their series; nothing for a single name."""
    if len(series) < 2:
        return ""
    keys = (f'<path class="line s{i % SERIES}" d="M1 5H27"/></svg>{escape(name)}</li>' for name, i in series.items())
    picture = '<li><svg viewBox="0 0 28 10" aria-hidden="true">'
    return '<ul class="legend">' + "".join(picture + key for key in keys) + "</ul>"


def figure(title: str, unit: str, body: str, *, wide: bool = False) -> str:
    caption = f'<figcaption><b>{escape(title)}</b> <span class="unit">{escape(unit)}</span></figcaption>'
    return f'<figure class="{"wide" if wide else "chart"}">{caption}{body}</figure>'


def axis(marks: Sequence[tuple[float, str]]) -> str:
    """Texts along the bottom, each at its position from 0 to 1."""
    return (
        '<div class="xs">'
        + "".join(f'<span style="left:{100 * at:.2f}%">{escape(text)}</span>' for at, text in marks)
        + "</div>"
    )


# ---- curves


def curves(
    title: str, unit: str, x_unit: str, found: Sequence[Curve], *, y_zero: bool = False, start: bool = True
) -> str:
    """Lines over a common x; an empty text without any. A start far above the rest is cut off, with ↑, where x has a
    `start`: a first layer is as good as any other."""
    found = [thinned(curve) for curve in found if len(curve.x)]
    if not found:
        return ""
    left, right = min(min(c.x) for c in found), max(max(c.x) for c in found)
    right = right if right > left else left + 1
    low, high = span([*(v for c in found for v in (*c.y, *c.low, *c.high)), *([0.0] if y_zero else [])], least=1e-3)
    later = [
        v
        for c in found
        for line in (c.y, c.low, c.high)
        for x, v in zip(c.x, line, strict=False)
        if place(x, left, right) >= START
    ]
    if start and later and not y_zero and max(max(c.y) for c in found) > 2 * max(later) - min(later):
        low, high = span(later, least=1e-3)
        unit += " ↑"
    low = max(low, 0.0) if y_zero else low
    y_ticks = ticks(low, high, 4)
    x_ticks = ticks(left, right, 5)

    def at(x: float, y: float) -> str:
        return f"{1000 * place(x, left, right):.0f} {1000 * (1 - place(y, low, high)):.0f}"

    def path(xs: Sequence[float], ys: Sequence[float]) -> str:
        return "M" + "L".join(at(x, y) for x, y in zip(xs, ys, strict=True))

    grid = "".join(f'<path class="grid" d="M0 {1000 * (1 - place(t, low, high)):.0f}H1000"/>' for t in y_ticks)
    drawn = []
    for curve in found:
        kind = f"s{curve.series % SERIES}"
        if curve.low:
            around = [*zip(curve.x, curve.high, strict=True), *reversed([*zip(curve.x, curve.low, strict=True)])]
            drawn.append(f'<path class="band {kind}" d="M{"L".join(at(x, y) for x, y in around)}z"/>')
        if curve.faint:
            drawn.append(f'<path class="faint {kind}" d="{path(curve.x, curve.faint)}"/>')
        drawn.append(
            f'<path class="line {kind}" d="{path(curve.x, curve.y)}"><title>{escape(curve.name)}</title></path>'
        )
        if curve.dots:  # a line of no length with round ends is a dot, however the picture is stretched
            dots = "".join(f"M{at(x, y)}h0" for x, y in zip(curve.x, curve.y, strict=True))
            drawn.append(f'<path class="dot {kind}" d="{dots}"/>')
    ends = f"{title}: " + "; ".join(f"{c.name} from {c.y[0]:.4g} to {c.y[-1]:.4g}" for c in found)
    y_labels = "".join(
        f'<span style="bottom:{100 * place(t, low, high):.2f}%">{escape(short(t))}</span>' for t in y_ticks
    )
    body = (
        f'<div class="plot"><div class="ys">{y_labels}</div><div class="area">'
        f'<svg class="curves" viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(ends)}">'
        f"{grid}{''.join(drawn)}</svg>{axis([(place(t, left, right), short(t)) for t in x_ticks])}</div></div>"
        f'<p class="xlabel">{escape(x_unit)}</p>'
    )
    return figure(title, unit, body)


def thinned(curve: Curve) -> Curve:
    every = -(-len(curve.x) // POINTS)
    keep = sorted({*range(0, len(curve.x), every), len(curve.x) - 1})
    x, y, faint, low, high = (
        [line[i] for i in keep] if line else () for line in (curve.x, curve.y, curve.faint, curve.low, curve.high)
    )
    return replace(curve, x=x, y=y, faint=faint, low=low, high=high)


# ---- intervals


def forest(rows: Sequence[ForestRow], text: Format, *, zero: bool = False) -> str:
    """A line a row: label, dots with their intervals on a common scale, numbers. `zero`: a line at no difference."""
    values = [v for row in rows for m in row.marks for v in (m.low, m.high)]
    values += [row.chance for row in rows if row.chance is not None] + ([0.0] if zero else [])
    low, high = span(values, least=1e-9 if max(values) > min(values) else 1.0)  # where nothing differs, a calm axis
    marks = [(place(t, low, high), text(t)) for t in ticks(low, high, 5)]
    lines = []
    for row in rows:
        tall = 12 * len(row.marks)
        drawn = "".join(f'<path class="grid" d="M{1000 * at:.0f} 0V{tall}"/>' for at, _ in marks)
        if zero:
            drawn += f'<path class="zero" d="M{1000 * place(0, low, high):.0f} 0V{tall}"/>'
        if row.chance is not None:
            drawn += f'<path class="chance" d="M{1000 * place(row.chance, low, high):.0f} 0V{tall}"/>'
        for i, m in enumerate(row.marks):
            a, v, b = (1000 * place(x, low, high) for x in (m.low, m.value, m.high))
            kind, y = f"s{m.series % SERIES}{' faded' if m.faded else ''}", 12 * i + 6
            drawn += (
                f'<path class="bar {kind}" d="M{a:.1f} {y}H{b:.1f}"/><path class="spot {kind}" d="M{v:.1f} {y}h0"/>'
            )
        said = "".join(
            f'<span class="t{m.series % SERIES}" title="{escape(m.name)}">{escape(m.text)}</span>' for m in row.marks
        )
        lines.append(
            f'<div class="frow"><div class="flabel">{escape(row.label)}<small>{escape(row.about)}</small></div>'
            f'<div class="ftrack"><svg style="height:{max(tall, 16) * 1.35:.0f}px" viewBox="0 0 1000 {tall}" '
            f'preserveAspectRatio="none" aria-hidden="true">{drawn}</svg></div>'
            f'<div class="fvalue">{said}{f"<small>{escape(row.note)}</small>" if row.note else ""}</div></div>'
        )
    lines.append(
        f'<div class="frow faxis"><div class="flabel"></div><div class="ftrack">{axis(marks)}</div>'
        '<div class="fvalue"></div></div>'
    )
    return f'<div class="forest">{"".join(lines)}</div>'


# ---- heat maps


def diverging(value: float) -> int:
    """A ratio -> 0 ... 8: 4 is 1, a step is the root of 2, the ends are a quarter (or less) and 4 (or more)."""
    return 0 if value <= 0 else min(max(round(2 * math.log2(value)) + 4, 0), BINS - 1)


def sequential(highest: float) -> Callable[[float], int]:
    return lambda value: min(int(BINS * value / highest), BINS - 1) if highest > 0 else 0


def heat(
    title: str,
    unit: str,
    numbers: Sequence[Sequence[float | None]],
    rows: Sequence[str],
    bin_of: Callable[[float], int],
    palette: str,
    every: int = 0,
) -> str:
    """A column an expert, a cell a number, and below the picture a table of the numbers. `every`: a hair line after so
    many columns, which belong together."""
    height, width = len(numbers), len(numbers[0])
    cells: dict[int, list[str]] = {}
    for y, line in enumerate(numbers):
        for x, value in enumerate(line):
            if value is not None:
                cells.setdefault(bin_of(value), []).append(f"M{x} {y}h1v1h-1z")
    drawn = "".join(f'<path class="{palette}{level}" d="{"".join(found)}"/>' for level, found in sorted(cells.items()))
    if 1 < every < width:
        drawn += f'<path class="hair" d="{"".join(f"M{x} 0V{height}" for x in range(every, width, every))}"/>'
    step = -(-height // 8)
    y_labels = "".join(
        f'<span style="bottom:{100 * (1 - (i + 0.5) / height):.2f}%">{escape(rows[i])}</span>'
        for i in range(0, height, step)
    )
    shown = sorted({*range(0, width, -(-width // 8))})
    tall = min(max(height * 18, 72), 260)
    body = (
        f'<div class="plot" style="--h:{tall}px"><div class="ys">{y_labels}</div><div class="area">'
        f'<svg class="heat" viewBox="0 0 {width} {height}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(f"{title}, {unit}: by expert{extremes(numbers, rows)}")}">{drawn}</svg>'
        f'{axis([((i + 0.5) / width, str(i)) for i in shown])}</div></div><p class="xlabel">expert</p>'
    )
    cells_of = [(rows[y], *("" if v is None else f"{v:.3g}" for v in line)) for y, line in enumerate(numbers)]
    body += folded("values", table(("", *map(str, range(width))), cells_of))
    return figure(title, unit, body)


def extremes(numbers: Sequence[Sequence[float | None]], rows: Sequence[str]) -> str:
    """The lowest and the highest number and where they are, for who cannot see the colours."""
    found = [(v, y, x) for y, line in enumerate(numbers) for x, v in enumerate(line) if v is not None]
    if not found:
        return ""
    ends = (("lowest", min(found)), ("highest", max(found)))
    return "; " + ", ".join(f"{name} {v:.3g} in row {rows[y]}, expert {x}" for name, (v, y, x) in ends)


def scale(palette: str, labels: dict[int, str], about: str) -> str:
    """The colours of a heat map, and what some of them mean."""
    boxes = "".join(f'<path class="{palette}{i}" d="M{i} 0h1v1h-1z"/>' for i in range(BINS))
    words = axis([((i + 0.5) / BINS, label) for i, label in labels.items()])
    return (
        f'<div class="scale"><span class="unit">{escape(about)}</span><div><svg viewBox="0 0 {BINS} 1" '
        f'preserveAspectRatio="none" aria-hidden="true">{boxes}</svg>{words}</div></div>'
    )


# ---- words


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column names a row; columns of numbers are aligned right."""
    kinds = ["n" if all(re.match(r"[+−-]?[\d.]|$", row[i]) for row in rows) else "w" for i in range(len(head))]
    top = "".join(f'<th scope="col" class="{kind}">{escape(cell)}</th>' for kind, cell in zip(kinds, head, strict=True))
    body = ""
    for row in rows:
        cells = [f'<td class="{kind}">{escape(cell)}</td>' for kind, cell in zip(kinds, row, strict=True)]
        cells[0] = f'<th scope="row">{escape(row[0])}</th>'
        body += f"<tr>{''.join(cells)}</tr>"
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def pairs(rows: Sequence[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in rows) + "</dl>"


def tile(about: str, value: str, detail: str, kind: str = "") -> str:
    words = f"<p>{escape(about)}</p><strong>{escape(value)}</strong><small>{escape(detail)}</small>"
    return f'<div class="tile {kind}">{words}</div>'


def folded(title: str, body: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def section(title: str, about: str, body: str) -> str:
    return f'<section><h2>{escape(title)}</h2><p class="about">{escape(about)}</p>{body}</section>' if body else ""
