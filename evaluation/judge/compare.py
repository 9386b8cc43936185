"""Compare groups of runs, one run for each seed: answers to a suite, or validation losses of trainings.

A metric has a difference, B - A, which is the mean over seeds; a 95 % interval over seeds, with three runs each or
more; and a verdict by p over seeds. Holm's correction counts whole suites and groups as one family, their parts as
another, and losses (means of all sets) as a third. The interval over items is a diagnostic about these same models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from evaluation.judge import logged, noise, words
from evaluation.judge.losses import Losses, compare_losses
from evaluation.judge.runs import read_runs
from evaluation.judge.seeds import LEAST, Paired, check_margin, paired
from evaluation.judge.suites import Comparison, Name, check_groups, compare_suites
from evaluation.judge.words import is_share, number, p_text, signed
from training.observe import plots
from training.observe.metrics import FILE as METRICS
from upcycle.converting.card import inert


@dataclass(frozen=True)
class Report:
    """Hold a comparison; str() returns its text for a terminal."""

    comparisons: tuple[Comparison, ...] = ()  # comparisons of suites, each of another group with the first
    losses: Losses | None = None  # of trainings
    equivalent: Mapping[str, float] = field(default_factory=dict)  # margins of equivalence, named before comparing

    def __str__(self) -> str:
        texts = ["\n\n".join(map(table, self.comparisons))] if self.comparisons else []
        texts += [loss_table(self.losses)] if self.losses else []
        alike = [f"{inert(what)}, {inert(name)}: {said}" for what, name, said in self.equivalences()]
        return "\n".join(texts + (["\nEquivalence\n", *alike] if alike else []))

    def equivalences(self) -> Iterator[tuple[str, str, str]]:
        """Yield (what is compared, group, verdict) for each margin."""
        for what, margin in self.equivalent.items():
            for name, found, form in self.named(what):
                yield what, name, f"{form(found.mean)}, {words.equivalence(found, margin)}"

    def named(self, what: str) -> Iterator[tuple[str, Paired, words.Form]]:
        """Yield (group, difference, format) of a suite's task or group, or of a validation set at equal tokens."""
        for comparison in self.comparisons:
            for d in comparison.differences:
                if what in (d.name, d.title):
                    yield comparison.b.name, d.paired, partial(signed, metric=d.metric)
        for name, rows in (self.losses.at_equal_tokens if self.losses else {}).items():
            yield from ((name, paired(row.by_seed), signed) for row in rows if row.domain == what)

    def json(self) -> dict[str, Any]:
        """Return the figures as strict JSON, with null for nan and infinity."""
        figures: dict[str, Any] = {"comparisons": [*map(asdict, self.comparisons)]} if self.comparisons else {}
        figures |= {"losses": asdict(self.losses)} if self.losses else {}
        figures |= {"equivalences": [*self.equivalences()]} if self.equivalent else {}
        found: dict[str, Any] = plain(figures)
        return found


def trained_run(folder: Name) -> bool:
    """Return whether a folder belongs to a training run."""
    return (Path(folder) / METRICS).is_file()


def compare(
    groups: Sequence[Name | Sequence[Name]], cluster: str = "", equivalent: Mapping[str, float] | None = None
) -> Report:
    """Compare every other group of runs with the first; pair their runs in order.

    A folder is a group with one run. `cluster` names a key of documents whose items count as one. `equivalent` holds
    margins by the title of a task or group, or by validation set.
    """
    named = as_groups(groups)
    folders = [folder for group in named for folder in group]
    if missing := [str(folder) for folder in folders if not Path(folder).exists()]:
        raise ValueError(
            f"{', '.join(missing)}: there is no such folder; give folders of `upcycle eval`, of lm-eval, "
            "or of training runs"
        )
    answered = all(logged.is_run(folder) for folder in folders)
    trained = all(map(trained_run, folders))
    if not answered and not trained:
        kinds = [
            f"{folder} ({'results' if logged.is_run(folder) else 'a run' if trained_run(folder) else 'neither'})"
            for folder in folders
        ]
        raise ValueError(
            f"{', '.join(kinds)} are not all of one kind; give folders of `upcycle eval`, of "
            "lm-eval, or of training runs"
        )
    comparisons = tuple(compare_suites(named, cluster)) if answered else ()
    report = Report(comparisons, compare_losses(read_runs(named)) if trained else None, equivalent or {})
    for what, margin in report.equivalent.items():
        check_margin(f"equivalent.{what}", margin)
        if not any(True for _ in report.named(what)):
            raise ValueError(f"equivalent names {what!r}, and nothing of that name is compared; write a row's name")
    return report


def as_groups(groups: Sequence[Name | Sequence[Name]]) -> list[list[Name]]:
    """List the folders of each group. Raise a ValueError unless there is something to compare."""
    found = [[group] if isinstance(group, Path | str) else list(group) for group in groups]
    if len(found) < 2:
        raise ValueError(
            "compare needs two runs or more, and compares the others with the first: compare A B, or "
            "compare A1,A2,A3 -- B1,B2,B3"
        )
    check_groups(found)
    return found


def group_words(names: Sequence[str]) -> list[list[str]]:
    """Divide typed names into groups at each `--`, or one group for each name; commas divide the folders of a name."""
    parts: list[list[str]] = [[]]
    for name in names:
        if name == "--" or "--" not in names:
            parts.append([])
        if name != "--":
            parts[-1].append(name)
    found = [
        [name for word in part for name in ([word] if Path(word).exists() else word.split(",")) if name]
        for part in parts
    ]
    return [part for part in found if part]


def plain(value: Any) -> Any:
    """Return the value as strict JSON, with null for nan and infinity."""
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- Markdown


def table(found: Comparison) -> str:
    """Write a comparison of a suite as Markdown."""
    families = [sum(d.headline == headline for d in found.differences) for headline in (True, False)]
    seeds = max((d.seeds for d in found.differences), default=1)
    runs = "one run each: no verdict" if seeds == 1 else f"{seeds} runs each, paired in this order"
    lines = [
        f"A = {inert(found.a.name)}, B = {inert(found.b.name)}; suite {inert(found.suite)}; {runs}; "
        f"{families[0]} headline and {families[1]} part comparisons, p over seeds corrected by Holm in each family",
        "",
        "| | metric | A | B | B - A | 95 % over seeds | Holm | B is | items | clusters | over items, these models "
        "alone | only A / only B |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for d in found.differences:
        low, high = signed(d.low, d.metric), signed(d.high, d.metric)
        lines.append(
            f"| {inert(d.title)} | {inert(d.metric)}{' %' * is_share(d.metric)} | {number(d.a, d.metric)} | "
            f"{number(d.b, d.metric)} | {signed(d.difference, d.metric)} | "
            f"{'' if math.isnan(d.low) else f'{low} to {high}'} | {p_text(d.p_holm)} | {d.verdict} | {d.items:,} | "
            f"{d.clusters:,} | {d.over_items} | {'' if d.only_a is None else f'{d.only_a} / {d.only_b}'} |"
        )
    if seeds < LEAST:
        lines += ["", "\n\n".join(beside_noise(found))]
    if seeds == 1:
        gained = sum(f.gained for f in found.flips)
        lines += ["", f"{len(found.flips)} items flipped: {gained} gained, {len(found.flips) - gained} lost"]
    for f in found.flips[:10]:
        target, a, b = (inert(repr(text)) for text in words.apart((f.target, f.a, f.b)))
        task = inert(f"{f.task} {f.doc}")
        lines.append(f"- {'gained' if f.gained else 'lost'}: {task}: right is {target}; A {a}, B {b}")
    return "\n".join([*lines, *(f"\nNote: {inert(note)}" for note in found.notes)])


def beside_noise(found: Comparison) -> Iterator[str]:
    """Say how large each headline difference is next to the measured noise of its metric."""
    headlines = [d for d in found.differences if d.headline]
    measured = [d for d in headlines if d.metric in noise.ACCURACIES]
    for d in measured:
        beside = noise.beside(d.difference, noise.of_items(d.items), d.metric)
        yield f"{inert(d.title)}: {signed(d.difference, d.metric)} is {beside}"
    yield noise.ABOUT_ACCURACY if measured else "Noise between runs was measured only for accuracies and losses."


def loss_table(found: Losses) -> str:
    """Write the losses of trainings as Markdown."""
    return "\n".join(loss_lines(found)).rstrip()


def loss_lines(found: Losses) -> Iterator[str]:
    at = {
        "tokens": f"{plots.count(found.tokens)} tokens",
        "FLOPs": f"{found.flops or 0:.3g} FLOPs of continued training",
    }
    for what, by_run in found.sides.items():
        for name, rows in by_run.items():
            yield (
                f"Validation loss at {found.equal(what)} ({at[what]}), nats a token; A = {inert(found.runs[0])}, "
                f"B = {inert(name)}\n\n| | A | B | B - A |\n|---|---|---|---|"
            )
            yield from (f"| {inert(r.domain)} | {r.a:.4f} | {r.b:.4f} | {r.difference:+.4f} |" for r in rows)
            judged = found.over_sets[what, name]
            aside = f"; that is {noise.beside(judged.mean, noise.LOSS[1])}" if judged.seeds < LEAST else ""
            yield f"\nMean of sets: {found.verdict(what, name)}{aside}\n"
        if names := found.midway.get(what):
            yield f"{inert(words.midway(names))}\n"
    if any(judged.seeds < LEAST for judged in found.over_sets.values()):
        yield f"{noise.ABOUT_LOSS}\n"
    if found.flops is None:
        yield "No comparison at equal FLOPs: a log has no FLOPs (written by an older version)."
