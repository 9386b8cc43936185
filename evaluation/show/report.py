"""Show results on one page: scores, differences, losses, use of experts, the plan, and the source of each number.

A path is a folder of `upcycle eval`, of `upcycle train` (metrics.jsonl), of `upcycle convert` (upcycle.json), or a file
of `upcycle routing`; a folder may be two of these. The others are compared with the first of each kind. Groups work as
in `compare`. With one run each the page gives no verdict.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from evaluation.judge.compare import loss_table, plain, table
from evaluation.judge.experts import routing
from evaluation.judge.words import is_share, number
from evaluation.show.facts import Facts, gather, sources
from evaluation.show.page import MARK, rendered, shown
from evaluation.show.sections import page
from evaluation.show.sentences import opening, verdicts
from training.observe import plots
from upcycle.converting.card import inert
from upcycle.io import publish
from upcycle.io.disk import check_own, sweep, write_atomic

# the content of a report's files, by suffix
MARKS = {".html": MARK, ".md": rb"\A# .*\n\n\d{4}-\d\d-\d\d \d\d:\d\d UTC\n", ".json": rb'\A\{"opening": '}
PICTURES = (".png", ".pdf", ".svg")  # for trainings only


def report(
    groups: Sequence[str | Sequence[str]], output: str | Path = "report.html", title: str = "Upcycling report"
) -> list[str]:
    """Write a page about these folders, or a picture of trainings; return the facts of the page.

    `output` ends in .html, whose .md and .json come with it; or in .png, .pdf or .svg for plots of trainings.
    """
    output = Path(output)
    if output.suffix in PICTURES:
        check_own(output, plots.MARK, "upcycle report")
        plots.plot([Path(p) for group in groups for p in ([group] if isinstance(group, str) else group)], output)
        return []
    if output.suffix != ".html":
        raise ValueError(f"output={output} must end in .html, or in {', '.join(PICTURES)} for a picture of trainings")
    for path, mark in MARKS.items():
        check_own(output.with_suffix(path), mark, "upcycle report")
    facts = gather(groups, title)
    write(output, facts)
    return [opening(facts), *verdicts(facts)]


def write(output: Path, facts: Facts) -> None:
    """Write the page, its .md and last its .json, which says what the other two are."""
    texts = {output: rendered(page(facts)).encode(), output.with_suffix(".md"): markdown(facts).encode()}
    sums = {path.name: {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()} for path, text in texts.items()}
    with publish.alone(output.with_name(f".{output.name}.lock"), output):
        sweep(output.parent, {*sums, output.with_suffix(".json").name})
        for path, text in texts.items():
            write_atomic(path, text)
        found = as_json(facts) | {"files": sums}
        write_atomic(output.with_suffix(".json"), (json.dumps(found, allow_nan=False) + "\n").encode())


def as_json(facts: Facts) -> dict[str, Any]:
    """Return the facts as strict JSON, with null for nan and infinity, and each run as its name and log."""
    said = {"opening": opening(facts), "verdicts": verdicts(facts)}
    runs = [{"name": run.name, "rows": run.rows} for mine in facts.trained.values() for run in mine]
    models = tuple(replace(model, items=()) for model in facts.models)
    found: dict[str, Any] = plain(said | asdict(replace(facts, trained={}, models=models)) | {"runs": runs})
    del found["trained"]
    return found


def markdown(facts: Facts) -> str:
    return shown("\n".join(markdown_lines(facts)))


def markdown_lines(facts: Facts) -> Iterator[str]:
    yield from (f"# {inert(facts.title)}", "", facts.made, "", inert(opening(facts)), "")
    yield from (f"- {inert(sentence)}" for sentence in verdicts(facts))
    for name, mine in facts.scores.items():
        rows = []
        for s in mine:
            value, low, high = (number(v, s.metric) for v in (s.value, s.low, s.high))
            of_seeds = f", lowest and highest of {s.seeds} seeds" if s.seeds > 1 else ""
            title, metric = f"{s.title}{facts.of_suite(s.suite)}", f"{s.metric}{' %' * is_share(s.metric)}"
            rows.append((title, metric, f"{s.items:,}", value, f"{low} to {high}{of_seeds}"))
        yield from titled(f"Scores of {name}", rows, ("", "metric", "items", "score", "95 % interval"))
    for found in facts.comparisons:
        yield from ("", inert(f"## {found.b.name} next to {found.a.name}: {found.suite}"), "", table(found))
    if facts.losses:
        yield from ("", "## Loss", "", loss_table(facts.losses))
    if facts.keys:
        yield from titled("How they were trained", facts.keys, ("key", *facts.arms))
    for name, measured in facts.routing.items():
        yield from ("", f"## Experts of {inert(name)}", "", "```", routing.table(measured), "```")
    for title, pairs in ((f"Plan of {name}", pairs) for name, pairs in facts.plans.items()):
        yield from titled(title, pairs)
    for title, pairs in sources(facts):
        yield from titled(title, pairs)
    yield ""


def titled(title: str, rows: Sequence[Sequence[str]], head: Sequence[str] = ("", "")) -> Iterator[str]:
    """Yield a Markdown table under its title."""
    yield from ("", f"## {inert(title)}", "", cells(head), "|---" * len(head) + "|", *map(cells, rows))


def cells(row: Sequence[str]) -> str:
    return f"| {' | '.join(map(inert, row))} |"
