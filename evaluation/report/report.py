"""One page that shows what came of it: scores, differences, losses, how experts are used, the plan, where it is from.

usage: python -m evaluation report PATH ... [key=value ...]

  python -m evaluation report runs/eval/dense runs/eval/moe runs/dense runs/moe ./moe output=report.html

Each path is what it is found to be: a folder of `evaluation run` (run.json), of `training` (metrics.jsonl), of `upcycle
convert` (upcycle.json), or a file of `evaluation routing`; a folder may be two of these. The first of a kind is what
the others are compared with. Beside report.html come report.md and report.json with the same numbers.

The page stands alone: no script, no font, no picture is fetched, and a policy in its head forbids it.

keys, with defaults and meaning: docs/config.md
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evaluation import compare, routing
from evaluation.compare import is_share, number
from evaluation.report.facts import Facts, gather, verdicts
from evaluation.report.page import page, sources
from upcycle import cli
from upcycle.card import inert
from upcycle.config import read
from upcycle.disk import write_atomic


@dataclass(frozen=True)
class ReportConfig:
    output: str = "report.html"  # the page to write; .md and .json come beside it
    title: str = "Upcycling report"  # title of the page


# ---- the same as Markdown and JSON


def markdown(facts: Facts) -> str:
    lines = [f"# {inert(facts.title)}", "", facts.made, "", *(f"- {inert(said)}" for said in verdicts(facts)), ""]
    for name, mine in facts.scores.items():
        lines += [f"## Scores of {inert(name)}", ""]
        lines += ["| | metric | items | score | 95 % interval |", "|---|---|---|---|---|"]
        lines += [
            f"| {inert(s.title)} | {inert(s.metric)}{' %' * is_share(s.metric)} | {s.items:,} | "
            f"{number(s.value, s.metric)} | {number(s.low, s.metric)} to {number(s.high, s.metric)} |"
            for s in mine
        ] + [""]
    for found in facts.comparisons:
        lines += [f"## {inert(found.b.name)} beside {inert(found.a.name)}", "", compare.table(found), ""]
    if facts.losses:
        lines += ["## Loss", "", compare.loss_table(facts.losses), ""]
    for name, measured in facts.routing.items():
        lines += [f"## Experts of {inert(name)}", "", "```", routing.table(measured), "```", ""]
    sections = {f"Plan of {name}": rows for name, rows in facts.plans.items()}
    for title, rows in (sections | sources(facts)).items():
        cells = (f"| {inert(name)} | {inert(value)} |" for name, value in rows)
        lines += [f"## {inert(title)}", "", "| | |", "|---|---|", *cells, ""]
    return "\n".join(lines)


def as_json(facts: Facts) -> dict[str, Any]:
    """The facts as strict JSON: nan and infinity are null."""
    found: dict[str, Any] = compare.plain({"verdicts": verdicts(facts), **asdict(facts)})
    return found


def main(words: Sequence[str]) -> int:
    paths, keys = cli.names_and_words(words)
    config = read(ReportConfig, "", keys)
    if not paths:
        raise ValueError("report needs something to show: report RESULTS ... RUN ... routing.json [output=report.html]")
    output = Path(config.output)
    if output.suffix != ".html":
        raise ValueError(f"output={config.output} must end in .html; its .md and .json come beside it")
    facts = gather(paths, config.title)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(output.with_suffix(".json"), (json.dumps(as_json(facts), allow_nan=False) + "\n").encode())
    write_atomic(output.with_suffix(".md"), markdown(facts).encode())
    write_atomic(output, page(facts).encode())
    print("\n".join([*map(cli.printable, verdicts(facts)), str(output)]))
    return 0
