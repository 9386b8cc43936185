"""Write README.md's table of results and its picture from benchmarks/results/headline.yaml: python -m tests.docs.headline"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "benchmarks" / "results" / "headline.yaml"
README = ROOT / "README.md"
PICTURE = ROOT / "docs" / "images" / "results.svg"
TABLE = re.compile(r"(?<=<!-- results: written by tests/docs/headline.py -->\n).*?(?=<!-- end -->)", re.DOTALL)
LEFT, WIDTH, ROW, TOP = (
    300,
    460,
    46,
    62,
)  # pixels: width of the labels and of the axis, height of a row, top of the first
LOW, HIGH = -0.11, 0.02  # nats at the ends of the axis


def rows() -> list[dict[str, Any]]:
    """Return the results in the order of the file."""
    found: list[dict[str, Any]] = yaml.safe_load(ROWS.read_text())
    return found


def written(interval: list[float], digits: int = 3) -> str:
    """Return the text of a mean with its interval: -0.028 (-0.033 to -0.023)."""
    mean, low, high = (f"{value:+.{digits}f}" for value in interval)
    return f"{mean} ({low} to {high})"


def table() -> str:
    """Return README's table."""
    lines = [
        "| MoE | compared with | text it trained on | law, never trained on | conditions |",
        "|---|---|---|---|---|",
    ]
    for row in rows():
        cells = [row["arm"], row["against"], f"**{written(row['trained'])}**", written(row["law"]), row["model"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def x(value: float) -> float:
    """Return the horizontal pixel of a loss difference."""
    return LEFT + WIDTH * (value - LOW) / (HIGH - LOW)


def text(at: float, y: float, words: str, style: str = "", anchor: str = "start") -> str:
    """Return the SVG element of a text."""
    return f'<text x="{at:.1f}" y="{y:.1f}" text-anchor="{anchor}" {style}>{html.escape(words)}</text>'


def picture() -> str:
    """Return README's picture: it shows the mean and the interval of each result, on trained text and on law."""
    bottom = TOP + ROW * len(rows())
    parts = [
        text(8, 18, "Loss of the MoE minus loss of the dense model, in nats a token. Left of 0, the MoE is better.")
    ]
    for tick in (-0.10, -0.08, -0.06, -0.04, -0.02, 0.0, 0.02):
        stroke = "#444" if tick == 0 else "#ddd"
        parts.append(f'<path d="M{x(tick):.1f} {TOP - 16}V{bottom}" stroke="{stroke}"/>')
        parts.append(text(x(tick), TOP - 20, f"{tick:+.2f}" if tick else "0", anchor="middle"))
    for number, row in enumerate(rows()):
        y = TOP + ROW * number + ROW / 2
        parts.append(text(8, y - 3, row["arm"], 'font-weight="bold"'))
        parts.append(text(8, y + 12, f"against {row['against']}" + (", 51 M model" if "51 M" in row["model"] else "")))
        for colour, key, shift in (("#0072b2", "trained", -6), ("#d55e00", "law", 8)):
            mean, low, high = row[key]
            parts.append(f'<path d="M{x(low):.1f} {y + shift}H{x(high):.1f}" stroke="{colour}" stroke-width="3"/>')
            parts.append(f'<circle cx="{x(mean):.1f}" cy="{y + shift}" r="5" fill="{colour}"/>')
    for colour, words, at in (
        ("#0072b2", "text it trained on", LEFT),
        ("#d55e00", "law, never trained on", LEFT + 170),
    ):
        parts.append(f'<circle cx="{at + 6}" cy="{bottom + 18}" r="5" fill="{colour}"/>')
        parts.append(text(at + 18, bottom + 22, words))
    size = f'width="{LEFT + WIDTH + 20}" height="{bottom + 34}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>", ""])


def page() -> str:
    """Return README.md with the table in its place."""
    return TABLE.sub(lambda _: table(), README.read_text())


if __name__ == "__main__":
    README.write_text(page())
    PICTURE.write_text(picture())
