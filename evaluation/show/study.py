"""Show a study: the sections of its page, and its conclusions as sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from evaluation.judge import words
from evaluation.judge.runs import Run, mean
from evaluation.judge.words import number, signed
from evaluation.show.page import Folded, Page, Pairs, Palette, Section, Table, Text, Tile, better, tone
from evaluation.show.pictures import Forest, ForestRow, Mark
from evaluation.show.sentences import SAYS
from evaluation.show.trained import cost_section, experts_section, loss_section
from evaluation.studies.judging import LOSS, Contrast, Judged
from evaluation.studies.plan import QUESTIONS

UNEQUAL = 0.02  # the quantity that a question holds equal may differ by this share without a warning


def page(
    title: str, made: str, judged: Judged, commands: Mapping[str, str], versions: Mapping[str, str],
    missed: Sequence[str],
) -> Page:  # fmt: skip
    """Return the page of a study; `missed` has a sentence for each run that failed."""
    arms, color = judged.arms, Palette(judged.arms)
    finished = sum(run.finished for run in judged.outcomes)
    sets = "; ".join(f"{name} is the mean of {', '.join(inside)}" for name, inside in judged.means.items())
    sections = [
        differences_section(judged, color),
        loss_section(arms, judged.curves, judged.differences, judged.means, judged.control, color, about=f"{sets}."),
        suites_section(judged, color),
        experts_section(judged.layers, judged.overall, color),
        cost_section(arms),
        runs_section(judged),
        Section(
            "Where the numbers come from",
            "Enough to make them again.",
            [Pairs(list(versions.items())), *(Folded(name, [Text(text, "code")]) for name, text in commands.items())],
        ),
    ]
    by = f"{', '.join(arms)}; seeds {', '.join(map(str, judged.seeds))}; {finished} runs finished; {made}"
    return Page(title, by, tiles(judged), [*sentences(judged), *missed], sections)


# ---- sentences


def headlines(judged: Judged) -> list[Contrast]:
    return [contrast for contrast in judged.contrasts if contrast.headline]


def tiles(judged: Judged) -> list[Tile]:
    return [
        Tile(
            f"{c.what} at {QUESTIONS[c.question]}, {c.arm} − {c.against}",
            signed(c.difference.mean),
            f"{LOSS}; {judgement(c)}",
            tone(c.verdict),
        )
        for c in headlines(judged)
    ]


def judgement(c: Contrast) -> str:
    """Write the interval over seeds and the verdict, and warn if the quantity that should be equal is not."""
    alike = "" if c.margin is None else f"; {words.equivalence(c.difference, c.margin)}"
    return words.judgement(c.difference, partial(signed, metric=c.unit), c.higher_is_better) + alike + uneven(c)


def uneven(c: Contrast) -> str:
    return f", not equal: {c.ratio:.3f} : 1" if abs(c.ratio - 1) > UNEQUAL else ""


def sentences(judged: Judged) -> Iterator[str]:
    for c in headlines(judged):
        yield (
            f"At {QUESTIONS[c.question]}, {c.arm} {SAYS.get(c.verdict, 'next to')} {c.against} on {c.what}: "
            f"{number(c.value, c.unit)} next to {number(c.other, c.unit)} {LOSS} ({signed(c.difference.mean, c.unit)}; "
            f"{judgement(c)})."
        )
    yield from families(headlines(judged))
    if not headlines(judged):
        yield "No two arms have finished the same seed, so nothing is compared yet."


def families(found: Sequence[Contrast]) -> Iterator[str]:
    """Say how many comparisons Holm's correction counts."""
    if (count := max((c.difference.family for c in found), default=1)) > 1:
        yield f"p is corrected by Holm for {count} comparisons."


def suite_lines(judged: Judged) -> Iterator[str]:
    """Write the scores of the suites before training and after it as Markdown, a column for each arm."""
    if judged.kept:
        yield f"| | before | {' | '.join(judged.arms)} |"
        yield "|---" * (2 + len(judged.arms)) + "|"
    for task in judged.kept:
        before = [number(value, task.metric) for value in dict.fromkeys(task.before.values())]
        after = [number(mean(task.after[arm]), task.metric) if task.after.get(arm) else "" for arm in judged.arms]
        yield f"| {task.task} ({task.suite}) | {', '.join(before)} | {' | '.join(after)} |"


# ---- sections


def differences_section(judged: Judged, color: Palette) -> Section:
    blocks = forests(headlines(judged), color)
    parts = [contrast for contrast in judged.contrasts if not contrast.headline and contrast.unit == LOSS]
    if parts:
        blocks.append(Folded(f"Each validation set by itself: {len(parts)} differences", forests(parts, color)))
    return Section(
        "Differences",
        "Final validation losses in nats a token; lower is better. Two runs of a seed read the same samples in the "
        "same order; a dot is the mean of their differences, and its bar is Student's 95 % interval over seeds. A "
        "verdict is "
        "by p over seeds; Holm corrects the means together, and the single sets together. At equal FLOPs and equal "
        "seconds the other arm is a run of its own with its own whole schedule.",
        blocks,
    )


def forests(contrasts: Sequence[Contrast], color: Palette) -> list[Any]:
    """Return a forest for each question."""
    blocks: list[Any] = []
    for question, title in QUESTIONS.items():
        rows = []
        for c in (c for c in contrasts if c.question == question):
            d = c.difference
            low, high = (d.mean if end is None else end for end in (d.low, d.high))
            faded = c.verdict not in ("better", "worse")
            mark = Mark(color[c.arm], d.mean, low, high, signed(d.mean, c.unit), faded)
            values = f"{number(c.value, c.unit)} next to {number(c.other, c.unit)}; {question} {c.ratio:.3f} : 1"
            values += f"; over items, these models alone: {c.over_items}" if c.over_items else ""
            rows.append(ForestRow(f"{c.what}: {c.arm} − {c.against}", values, [mark], judgement(c)))
        if rows:
            blocks += [Text(f"At {title}"), Forest(rows, zero=True)]
    return blocks


def suites_section(judged: Judged, color: Palette) -> Section:
    rows = []
    for task in judged.kept:
        for arm, after in task.after.items():
            if not after:
                continue
            before, change, form = task.before.get(arm), task.change.get(arm), partial(signed, metric=task.metric)
            rows.append((
                f"{task.task} ({task.suite})", task.metric.replace("_", " "), arm,
                "" if before is None else number(before, task.metric), number(mean(after), task.metric),
                "" if change is None else form(change.mean),
                "" if change is None else words.judgement(change, form, task.higher_is_better),
            ))  # fmt: skip
    blocks: list[Any] = [Table(("task", "metric", "arm", "before", "after", "change", ""), rows)] if rows else []
    chosen = [c for c in judged.contrasts if c.unit != LOSS]
    for unit in dict.fromkeys(c.unit for c in chosen):
        mine = [c for c in chosen if c.unit == unit]
        blocks += [
            Text(f"{unit.replace('_', ' ')}, {better(mine[0].higher_is_better)}", "unit"),
            *forests(mine, color),
        ]
    return Section(
        "Suites",
        "Before: the model that an arm began with; for an upcycled model the dense one, which is the same function. "
        "After: mean over seeds. Intervals are over seeds, paired by seed where two arms are compared; Holm corrects "
        "all changes together, and all comparisons of arms together.",
        blocks,
    )


def runs_section(judged: Judged) -> Section:
    names = list(judged.means)
    rows = [
        (f"{run.arm}, seed {run.seed}", state(run), *(nats(run.last(judged.means[name])) for name in names), run.folder)
        for run in judged.outcomes
    ]
    return Section("Runs", "Loss at the end.", [Table(("", "", *names, "folder"), rows)] if rows else [])


def state(run: Run) -> str:
    return "finished" if run.finished else f"step {run.spent.step:,} of {run.steps:,}"


def nats(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
