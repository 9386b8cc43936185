"""The study on one page, and the short table for a terminal: intervals over seeds first, then everything else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from evaluation.judge.compare import number, signed
from evaluation.judge.curves import mean
from evaluation.judge.seeds import LEAST, Paired
from evaluation.show import pictures as draw
from evaluation.show.page import Palette, better, charts, document, lines, loss_pictures, minus
from evaluation.show.pictures import Curve, ForestRow, Mark
from evaluation.studies.judging import QUESTIONS, Contrast, Judged
from evaluation.studies.outcome import Outcome
from training.observe.metrics import duration

OF_LAYERS = {  # what is measured of a layer -> title, unit, whether from zero
    "max_over_mean": ("Fullest expert", "its load / the mean", False),
    "entropy": ("Entropy of the load", "1: balance", False),
    "whole": ("Whole choices", "share of tokens whose choice is a whole FFN", True),
    "missing": ("Slices missing", "of a token's choice", True),
    "doubled": ("Slices doubled", "of a token's choice", True),
    "dropped": ("Tokens dropped", "share", True),
}
FEW = f"no interval: fewer than {LEAST} seeds"
UNEQUAL = 0.02  # share by which what a question holds equal may differ without a word
Rows = Sequence[tuple[str, str]]


def page(
    title: str, made: str, judged: Judged, commands: Mapping[str, str], versions: Rows, missed: Sequence[str]
) -> str:
    color = Palette()
    for arm in judged.arms:
        color[arm]
    finished = sum(run.finished for run in judged.outcomes)
    by = f"{', '.join(judged.arms)}; seeds {', '.join(map(str, judged.seeds))}; {finished} runs finished; {made}"
    parts = [
        differences_section(judged, color),
        loss_section(judged, color),
        suites_section(judged, color),
        routing_section(judged, color),
        cost_section(judged),
        runs_section(judged),
        commands_section(commands, versions),
    ]
    return document(title, by, "".join(tiles(judged)), [*sentences(judged), *missed], parts)


# ---- in words


def headlines(judged: Judged) -> list[Contrast]:
    return [contrast for contrast in judged.contrasts if contrast.headline]


def tiles(judged: Judged) -> Iterator[str]:
    for c in headlines(judged):
        kind = {"better": "good", "worse": "bad"}.get(c.verdict, "")
        about = f"{c.what} at {QUESTIONS[c.question]}, {c.arm} − {c.against}"
        yield draw.tile(about, minus(f"{c.difference.mean:+.4f}"), minus(f"nats a token; {interval(c)}"), kind)


def interval(one: Contrast) -> str:
    """The interval over seeds and the verdict, in short."""
    d = one.difference
    if d.low is None or d.high is None:
        return f"{d.seeds} seed{'s' * (d.seeds > 1)}, {FEW}{uneven(one)}"
    low, high = (shown(value, one) for value in (d.low, d.high))
    return f"{low} to {high} over {d.seeds} seeds, {one.verdict}{uneven(one)}"


def uneven(one: Contrast) -> str:
    """A warning where what a question holds equal came out unequal: seconds, if something else ran beside."""
    return f", not equal: {one.ratio:.3f} : 1" if abs(one.ratio - 1) > UNEQUAL else ""


def shown(value: float, one: Contrast) -> str:
    return f"{value:+.4f}" if one.unit == "nats a token" else signed(value, one.unit)


def plain(value: float, one: Contrast) -> str:
    return f"{value:.4f}" if one.unit == "nats a token" else number(value, one.unit)


def sentences(judged: Judged) -> Iterator[str]:
    for c in headlines(judged):
        judgement = {"better": "better than", "worse": "worse than"}.get(c.verdict, "not shown to differ from")
        yield (
            f"At {QUESTIONS[c.question]}, {c.arm} is {judgement} {c.against} on {c.what}: "
            f"{plain(c.value, c)} beside {plain(c.other, c)} nats a token ({shown(c.difference.mean, c)}; "
            f"{interval(c)})."
        )
    if not headlines(judged):
        yield "No two arms have finished a seed that they share, so nothing is compared yet."


def table(judged: Judged) -> str:
    """The headlines as a table for a terminal."""
    head = ("", "on", "arm", "loss", "beside", "loss", "difference", "95 % interval", "seeds", "")
    rows = [
        (
            QUESTIONS[one.question], one.what, one.arm, plain(one.value, one), one.against, plain(one.other, one),
            shown(one.difference.mean, one), between(one.difference, one), str(one.difference.seeds),
            one.verdict + uneven(one),
        )
        for one in headlines(judged)
    ]  # fmt: skip
    if not rows:
        return next(sentences(judged))
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = ["  ".join(f"{c:{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)]
    return "\n".join([*lines, *by_chance([one.difference for one in headlines(judged)])])


def by_chance(found: Sequence[Paired]) -> Iterator[str]:
    """Says how many of several intervals are wrong, as none is corrected for the others."""
    if (count := sum(each.low is not None for each in found)) > 1:
        yield f"Of {count} such intervals {count / 20:.2g} miss the truth by chance."


def between(paired: Paired, one: Contrast) -> str:
    return (
        "none"
        if paired.low is None or paired.high is None
        else f"{shown(paired.low, one)} to {shown(paired.high, one)}"
    )


# ---- differences


def differences_section(judged: Judged, color: Palette) -> str:
    body = forests([contrast for contrast in judged.contrasts if contrast.headline], color, "")
    parts = [contrast for contrast in judged.contrasts if not contrast.headline and contrast.unit == "nats a token"]
    if parts:
        body += draw.folded(f"Each validation set by itself: {len(parts)} differences", forests(parts, color, ""))
    if not body:
        return ""
    losses = [one.difference for one in judged.contrasts if one.unit == "nats a token"]
    return draw.section(
        "Differences",
        "Of final validation losses, in nats a token; lower is better. Two runs of a seed read the same samples in the "
        "same order; a dot is the mean of their differences, its bar Student's 95 % interval over seeds. A difference "
        "is called better or worse where that leaves out 0. At equal FLOPs and at equal seconds the other arm is a run "
        f"of its own with its own whole schedule. {' '.join(by_chance(losses))}",
        body,
    )


def forests(contrasts: Sequence[Contrast], color: Palette, about: str) -> str:
    """A forest for each question."""
    body = about
    for question, title in QUESTIONS.items():
        chosen = [c for c in contrasts if c.question == question]
        rows = []
        for c in chosen:
            d, ends = c.difference, (c.difference.low, c.difference.high)
            low, high = (d.mean if end is None else end for end in ends)
            mark = Mark(color[c.arm], d.mean, low, high, minus(shown(d.mean, c)), c.verdict[:2] == "no")
            detail = f"{plain(c.value, c)} beside {plain(c.other, c)}; {question} {c.ratio:.3f} : 1"
            rows.append(ForestRow(f"{c.what}: {c.arm} − {c.against}", detail, [mark], minus(interval(c))))
        if rows:
            body += f"<h3>At {title}</h3>" + draw.forest(rows, lambda value: minus(f"{value:.4g}"), zero=True)
    return body


# ---- curves


def loss_section(judged: Judged, color: Palette) -> str:
    pictures: list[str] = []
    folded: list[str] = []
    for name, bands in judged.curves.items():
        made = loss_pictures(name, bands, judged.differences.get(name, ()), judged.control, color)
        (pictures if name in judged.means else folded).append(made)
    if not any(pictures):
        return ""
    body = draw.legend({arm: color[arm] for arm in judged.arms}) + charts(pictures)
    if any(folded):
        body += draw.folded(
            f"Each validation set by itself: {', '.join(n for n in judged.curves if n not in judged.means)}",
            charts(folded),
        )
    sets = "; ".join(f"{name} is the mean of {', '.join(inside)}" for name, inside in judged.means.items())
    return draw.section(
        "Loss",
        f"Validation, mean over seeds; {sets}. A band goes from the lowest seed to the highest; of a difference it is "
        f"the 95 % interval over seeds (none with fewer than {LEAST}). Seconds are those of training steps, without "
        "validation.",
        body,
    )


# ---- suites


def suites_section(judged: Judged, color: Palette) -> str:
    rows = []
    for task in judged.kept:
        for arm, after in task.after.items():
            if not after:
                continue
            before, change = task.before.get(arm), task.change.get(arm)
            rows.append((
                f"{task.task} ({task.suite})", task.metric.replace("_", " "), arm,
                "" if before is None else number(before, task.metric), number(mean(after), task.metric),
                "" if change is None else minus(signed(change.mean, task.metric)),
                "" if change is None or change.low is None or change.high is None
                else minus(f"{signed(change.low, task.metric)} to {signed(change.high, task.metric)}"),
                "" if change is None else change.verdict(task.higher_is_better).replace("no difference", "no change"),
            ))  # fmt: skip
    if not rows:
        return ""
    every = [change for task in judged.kept for arm, change in task.change.items() if task.after.get(arm)]
    every += [one.difference for one in judged.contrasts if one.unit != "nats a token"]
    head = ("task", "metric", "arm", "before", "after", "change", "95 % interval", "")
    body = draw.table(head, rows)
    for unit in dict.fromkeys(c.unit for c in judged.contrasts if c.unit != "nats a token"):
        chosen = [c for c in judged.contrasts if c.unit == unit]
        about = f'<p class="unit">{escape(unit.replace("_", " "))}, {better(chosen[0].higher_is_better)}</p>'
        body += forests(chosen, color, about)
    return draw.section(
        "Suites",
        "Before: the model that an arm began with; of an upcycled one the dense model, which is the same function. "
        "After: mean over seeds. Intervals are over seeds, paired by seed where two arms are compared. "
        f"{' '.join(by_chance(every))}",
        body,
    )


# ---- experts


def routing_section(judged: Judged, color: Palette) -> str:
    pictures = []
    for what, by_arm in judged.layers.items():
        title, unit, zero = OF_LAYERS.get(what, (what.replace("_", " "), "", False))
        found = [
            Curve(arm, color[arm], [float(layer) for layer in layers], list(layers.values()), dots=True)
            for arm, layers in by_arm.items()
        ]
        pictures.append(draw.curves(title, unit, "layer", found, y_zero=zero, start=False))
    for what, bands in judged.overall.items():
        title, unit, zero = OF_LAYERS.get(what, (what.replace("_", " "), "", False))
        worst = ", worst layer" if what == "max_over_mean" else ", all layers"
        pictures.append(draw.curves(title + worst, unit, "tokens", lines(bands, "tokens", color), y_zero=zero))
    if not any(pictures):
        return ""
    arms = {arm: color[arm] for by_arm in judged.layers.values() for arm in by_arm}
    return draw.section(
        "Experts",
        "As training logs them, mean over seeds: by layer at the last logged step, and as training goes on.",
        draw.legend(arms) + charts(pictures),
    )


# ---- what it took


def cost_section(judged: Judged) -> str:
    rows = []
    for arm in judged.arms:
        runs = judged.of(arm)
        rows.append((
            arm, f"{runs[0].steps:,}", draw.short(runs[0].whole_tokens), draw.short(runs[0].flops_per_token),
            draw.short(mean(run.spent.flops for run in runs)), duration(mean(run.spent.seconds for run in runs)),
            f"{mean(run.tokens_per_s for run in runs):,.0f}", f"{max(run.memory_gb for run in runs):.2f}",
        ))  # fmt: skip
    if not rows:
        return ""
    head = ("arm", "steps", "tokens", "FLOPs a token", "FLOPs so far", "time so far", "tokens/s", "memory, GB")
    return draw.section(
        "What it took",
        "Mean over seeds, memory the most. A token's FLOPs are forward and backward of matrices and causal attention; "
        "of what is frozen, without gradients of its own. Time is that of training steps; runs that share a device or "
        "a processor slow each other.",
        draw.table(head, rows),
    )


def runs_section(judged: Judged) -> str:
    names = list(judged.means)
    rows = [
        (f"{run.arm}, seed {run.seed}", state(run), *(nats(run.last(judged.means[name])) for name in names), run.folder)
        for run in judged.outcomes
    ]
    return draw.section("Runs", "Loss at the end.", draw.table(("", "", *names, "folder"), rows) if rows else "")


def state(one: Outcome) -> str:
    return "finished" if one.finished else f"step {one.spent.step:,} of {one.steps:,}"


def nats(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def commands_section(commands: Mapping[str, str], versions: Rows) -> str:
    body = draw.pairs(versions)
    for title, text in commands.items():
        body += draw.folded(title, f'<div class="scroll"><pre>{escape(text)}</pre></div>')
    return draw.section("Where the numbers come from", "Enough to make them again.", body)
