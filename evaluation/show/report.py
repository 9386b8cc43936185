"""Write the report: a page that stands alone, and the same numbers as Markdown and JSON."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evaluation.judge import compare
from evaluation.judge.compare import is_share, number
from evaluation.show import routing
from evaluation.show.facts import Facts, opening, verdicts
from evaluation.show.page import of_suite, page, sources
from upcycle.converting.card import inert
from upcycle.io import publish
from upcycle.io.disk import sweep, write_atomic

# ---- the same as Markdown and JSON


def markdown(facts: Facts) -> str:
    said = (f"- {inert(sentence)}" for sentence in verdicts(facts))
    lines = [f"# {inert(facts.title)}", "", facts.made, "", inert(opening(facts)), "", *said, ""]
    for name, mine in facts.scores.items():
        lines += [f"## Scores of {inert(name)}", ""]
        lines += ["| | metric | items | score | 95 % interval |", "|---|---|---|---|---|"]
        for s in mine:
            title, metric = inert(f"{s.title}{of_suite(facts, s.suite)}"), inert(s.metric)
            what = f"{title} | {metric}{' %' * is_share(s.metric)} | {s.items:,}"
            value, low, high = (number(v, s.metric) for v in (s.value, s.low, s.high))
            of_seeds = f", lowest and highest of {s.seeds} seeds" if s.seeds > 1 else ""
            lines.append(f"| {what} | {value} | {low} to {high}{of_seeds} |")
        lines.append("")
    for found in facts.comparisons:
        title = inert(f"{found.b.name} beside {found.a.name}: {found.suite}")
        lines += [f"## {title}", "", compare.table(found), ""]
    if facts.losses:
        lines += ["## Loss", "", compare.loss_table(facts.losses), ""]
    if facts.keys:
        head = f"| key | {' | '.join(map(inert, facts.arms))} |"
        lines += ["## How they were trained", "", head, "|---" * (1 + len(facts.arms)) + "|"]
        lines += [f"| {' | '.join(map(inert, row))} |" for row in facts.keys] + [""]
    for name, measured in facts.routing.items():
        lines += [f"## Experts of {inert(name)}", "", "```", routing.table(measured), "```", ""]
    sections = {f"Plan of {name}": rows for name, rows in facts.plans.items()}
    for title, rows in (sections | sources(facts)).items():
        cells = (f"| {inert(name)} | {inert(value)} |" for name, value in rows)
        lines += [f"## {inert(title)}", "", "| | |", "|---|---|", *cells, ""]
    return "\n".join(lines)


def as_json(facts: Facts) -> dict[str, Any]:
    """The facts as strict JSON: nan and infinity are null."""
    found: dict[str, Any] = compare.plain({"opening": opening(facts), "verdicts": verdicts(facts), **asdict(facts)})
    return found


def write(output: Path, facts: Facts) -> None:
    """Writes the page, its .md and last its .json, which says what the other two are."""
    texts = {output: page(facts).encode(), output.with_suffix(".md"): markdown(facts).encode()}
    sums = {path.name: {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()} for path, text in texts.items()}
    with publish.alone(output.with_name(f".{output.name}.lock"), output):
        sweep(output.parent, {*sums, output.with_suffix(".json").name})
        for path, text in texts.items():
            write_atomic(path, text)
        found = as_json(facts) | {"files": sums}
        write_atomic(output.with_suffix(".json"), (json.dumps(found, allow_nan=False) + "\n").encode())
