"""Prepare pictures that page.html draws as SVG without scripts: curves, intervals, heat maps.

The SVG holds only marks and stretches with the page; words are HTML next to it, so text keeps its size on a phone.
Colours are classes, which page.css defines for light and dark. s0, s1, ... are series (Okabe and Ito's colours, safe
for colour-blind readers, and dashes); h0 ... h8 go from far below 1 through 1 to far above; q0 ... q8 from none to
most. We do not use matplotlib here, because its SVG neither stretches nor follows the reader's light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from evaluation.show.page import Folded, Table, minus

SERIES = 12  # classes of series in page.css: six colours, then the same with other dashes
BINS = 9  # classes of colour in a heat map
RATIOS = {0: "≤ ¼", 2: "½", 4: "1", 6: "2", 8: "≥ 4"}  # the meaning of diverging()'s colours
START = 0.1  # share of a curve's start whose values may be cut off
POINTS = 400  # points of a curve, as many as a screen shows
Marks = list[tuple[float, str]]  # places from 0 to 1 along an axis, and their labels


# ---- scales


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round numbers inside [low, high]: steps of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [(first + i) * step for i in range(math.floor(high / step + 1e-9) - first + 1)]


def span(values: Sequence[float], pad: float = 0.06, least: float = 0.0) -> tuple[float, float]:
    """Return the range of the values with a margin, so that no mark touches the frame."""
    low, high = min(values), max(values)
    width = max(high - low, least, abs(high) * 1e-6, 1e-12)
    middle = (low + high) / 2
    return middle - width * (0.5 + pad), middle + width * (0.5 + pad)


def short(value: float) -> str:
    """Write a number in few digits: 12000 is 12k."""
    for size, unit in ((1e15, "e15"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def place(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low)


# ---- curves


@dataclass(frozen=True)
class Curve:
    name: str
    series: int
    x: Sequence[float]
    y: Sequence[float]
    faint: Sequence[float] = ()  # y before smoothing
    dots: bool = False
    low: Sequence[float] = ()  # of a band around y
    high: Sequence[float] = ()

    @property
    def lines(self) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
        return self.y, self.low, self.high


@dataclass(frozen=True)
class Curves:
    """Hold lines over a common x."""

    title: str
    unit: str
    x_unit: str
    curves: Sequence[Curve]
    x_ends: tuple[float, float]
    y_ends: tuple[float, float]

    @property
    def about(self) -> str:
        ends = "; ".join(f"{c.name} from {c.y[0]:.4g} to {c.y[-1]:.4g}" for c in self.curves)
        return f"{self.title}: {ends}"

    @property
    def x_marks(self) -> Marks:
        return [(place(t, *self.x_ends), short(t)) for t in ticks(*self.x_ends, 5)]

    @property
    def y_marks(self) -> Marks:
        return [(place(t, *self.y_ends), short(t)) for t in ticks(*self.y_ends, 4)]

    def points(self, xs: Sequence[float], ys: Sequence[float]) -> list[str]:
        """Return each point in thousandths of the picture, with y from the top."""
        places = ((place(x, *self.x_ends), 1 - place(y, *self.y_ends)) for x, y in zip(xs, ys, strict=True))
        return [f"{1000 * x:.0f} {1000 * y:.0f}" for x, y in places]

    def path(self, xs: Sequence[float], ys: Sequence[float]) -> str:
        return "M" + "L".join(self.points(xs, ys))

    def around(self, curve: Curve) -> str:
        return self.path([*curve.x, *reversed(curve.x)], [*curve.high, *reversed(curve.low)]) + "z"

    def dots(self, curve: Curve) -> str:
        """Return dots as lines of no length with round ends, which stay round when the picture stretches."""
        return "".join(f"M{point}h0" for point in self.points(curve.x, curve.y))


def curves(
    title: str, unit: str, x_unit: str, found: Sequence[Curve], *, y_zero: bool = False, start: bool = True
) -> Curves | None:
    """Return a picture of the curves, or None if there are none. Cut off a start far above the rest, with ↑, if x has a
    `start`; layers have none."""
    found = [thinned(curve) for curve in found if len(curve.x)]
    if not found:
        return None
    left, right = min(min(c.x) for c in found), max(max(c.x) for c in found)
    right = right if right > left else left + 1
    every = [(x, v) for c in found for line in c.lines for x, v in zip(c.x, line, strict=False)]
    low, high = span([*(v for _, v in every), *([0.0] if y_zero else [])], least=1e-3)
    later = [v for x, v in every if place(x, left, right) >= START]
    if start and later and not y_zero and max(max(c.y) for c in found) > 2 * max(later) - min(later):
        low, high = span(later, least=1e-3)
        unit += " ↑"
    return Curves(title, unit, x_unit, found, (left, right), (max(low, 0.0) if y_zero else low, high))


def thinned(curve: Curve) -> Curve:
    """Return the curve with no more points than a screen shows."""
    keep = sorted({*range(0, len(curve.x), -(-len(curve.x) // POINTS)), len(curve.x) - 1})
    x, y, faint, low, high = (
        [line[i] for i in keep] if line else () for line in (curve.x, curve.y, curve.faint, curve.low, curve.high)
    )
    return replace(curve, x=x, y=y, faint=faint, low=low, high=high)


# ---- intervals


@dataclass(frozen=True)
class Mark:
    """Hold a value and its interval on a line of a forest."""

    series: int
    value: float
    low: float
    high: float
    text: str
    faded: bool = False
    name: str = ""  # the name of the value's owner, next to its colour


@dataclass(frozen=True)
class ForestRow:
    label: str
    about: str  # small, under the label
    marks: Sequence[Mark]
    note: str = ""  # after the marks' texts
    chance: float | None = None


@dataclass(frozen=True)
class Forest:
    """Draw one line for each row: label, dots with their intervals on a common scale, numbers."""

    rows: Sequence[ForestRow]
    factor: float = 1.0  # of the axis: 100 for per cent
    digits: int = 4
    zero: bool = False  # a line at no difference

    @cached_property
    def ends(self) -> tuple[float, float]:
        values = [v for row in self.rows for m in row.marks for v in (m.low, m.high)]
        values += [row.chance for row in self.rows if row.chance is not None] + ([0.0] if self.zero else [])
        return span(values, least=1e-9 if max(values) > min(values) else 1.0)  # a plain axis if nothing differs

    @property
    def marks(self) -> Marks:
        return [(self.at(t), minus(f"{self.factor * t:.{self.digits}g}")) for t in ticks(*self.ends, 5)]

    def at(self, value: float) -> float:
        return place(value, *self.ends)


# ---- heat maps


def diverging(value: float) -> int:
    """Return the colour of a ratio, 0 ... 8: 4 is 1, a step is the root of 2, the ends are a quarter and 4."""
    return 0 if value <= 0 else min(max(round(2 * math.log2(value)) + 4, 0), BINS - 1)


def sequential(highest: float) -> Callable[[float], int]:
    return lambda value: min(int(BINS * value / highest), BINS - 1) if highest > 0 else 0


@dataclass(frozen=True)
class Heat:
    """Draw one column for each expert or other name, one cell for each number, and a table of the numbers below."""

    title: str
    unit: str
    numbers: Sequence[Sequence[float | None]]
    rows: Sequence[str]
    bin_of: Callable[[float], int]
    palette: str
    every: int = 0  # a thin line after this many columns, which belong together
    x_unit: str = "expert"
    columns: Sequence[str] = ()  # names; none: experts by number

    @property
    def width(self) -> int:
        return len(self.numbers[0])

    @property
    def tall(self) -> int:
        return min(max(len(self.numbers) * 18, 72), 260)

    @property
    def cells(self) -> list[tuple[int, str]]:
        """Return one path for each colour, with all its cells."""
        found: dict[int, list[str]] = {}
        for value, y, x in self.known:
            found.setdefault(self.bin_of(value), []).append(f"M{x} {y}h1v1h-1z")
        return [(level, "".join(paths)) for level, paths in sorted(found.items())]

    @property
    def known(self) -> list[tuple[float, int, int]]:
        return [(v, y, x) for y, line in enumerate(self.numbers) for x, v in enumerate(line) if v is not None]

    @property
    def hairs(self) -> str:
        columns = range(self.every, self.width, self.every) if 1 < self.every < self.width else ()
        return "".join(f"M{x} 0V{len(self.numbers)}" for x in columns)

    @property
    def x_marks(self) -> Marks:
        return [((i + 0.5) / self.width, self.head[i]) for i in range(0, self.width, -(-self.width // 8))]

    @property
    def head(self) -> Sequence[str]:
        return self.columns or [str(i) for i in range(self.width)]

    @property
    def y_marks(self) -> Marks:
        height = len(self.numbers)
        return [(1 - (i + 0.5) / height, self.rows[i]) for i in range(0, height, -(-height // 8))]

    @property
    def about(self) -> str:
        return f"{self.title}, {self.unit}: by {self.x_unit}; the numbers are in the table below"

    @property
    def values(self) -> Folded:
        lines = zip(self.rows, self.numbers, strict=False)
        cells = [(name, *("" if v is None else f"{v:.3g}" for v in line)) for name, line in lines]
        return Folded("values", [Table(("", *self.head), cells)])


@dataclass(frozen=True)
class Scale:
    """Explain the colours of a heat map."""

    palette: str
    labels: Mapping[int, str]
    about: str

    @property
    def marks(self) -> Marks:
        return [((i + 0.5) / BINS, label) for i, label in self.labels.items()]
