"""One page that shows what came of it: scores, differences, losses, how experts are used, the plan, where it is from.

usage: python -m evaluation report PATH ... [-- PATH ...] [key=value ...]

  python -m evaluation report runs/eval/dense runs/eval/moe runs/dense runs/moe ./moe output=report.html
  python -m evaluation report runs/dense-{0,1,2} runs/eval/dense-{0,1,2} -- runs/moe-{0,1,2} runs/eval/moe-{0,1,2}

Each path is what it is found to be: a folder of `evaluation run` (run.json), of `training` (metrics.jsonl), of `upcycle
convert` (upcycle.json), or a file of `evaluation routing`; a folder may be two of these. The first of a kind is what
the others are compared with; suites and models may be any number. Groups are as `compare` has them: A1,A2,A3 or what
lies between two `--` are seeds of one model, in the order of the other groups' seeds, and the page shows their mean and
the interval over them. Of one run each it calls nothing better. Beside report.html come report.md and report.json with
the same numbers.

The page stands alone: no script, no font, no picture is fetched, and a policy in its head forbids it.

keys, with defaults and meaning: docs/config.md
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evaluation.judge import compare
from evaluation.judge.compare import is_share, number
from evaluation.show import routing
from evaluation.show.facts import Facts, gather, opening, verdicts
from evaluation.show.page import of_suite, page, sources
from upcycle.cli import frame as cli
from upcycle.config.reading import read
from upcycle.converting.card import inert
from upcycle.io import publish
from upcycle.io.disk import sweep, write_atomic


@dataclass(frozen=True)
class ReportConfig:
    output: str = "report.html"  # the page to write; .md and .json come beside it
    title: str = "Upcycling report"  # title of the page


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


def main(words: Sequence[str]) -> int:
    paths, keys = cli.names_and_words(words)
    config = read(ReportConfig, "", keys)
    if not paths:
        raise ValueError("report needs something to show: report RESULTS ... RUN ... routing.json [output=report.html]")
    output = Path(config.output)
    if output.suffix != ".html":
        raise ValueError(f"output={config.output} must end in .html; its .md and .json come beside it")
    facts = gather(compare.group_words(paths), config.title)
    write(output, facts)
    print("\n".join([*map(cli.printable, [opening(facts), *verdicts(facts)]), str(output)]))
    return 0
