"""Lay out the page of a report: the sections of facts.Facts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from evaluation.judge import words
from evaluation.judge.experts.routing import MEASURES
from evaluation.judge.losses import Losses
from evaluation.judge.runs import Run, mean
from evaluation.judge.seeds import LEAST
from evaluation.judge.words import is_share, number, p_text, signed
from evaluation.show.facts import MEAN, Facts, Score, sources
from evaluation.show.page import (
    Captioned,
    Folded,
    Grid,
    Page,
    Pairs,
    Palette,
    Section,
    Table,
    Text,
    Tile,
    Tokens,
    better,
    tone,
)  # fmt: skip
from evaluation.show.pictures import (
    RATIOS,
    Curve,
    Forest,
    ForestRow,
    Heat,
    Mark,
    Scale,
    curves,
    diverging,
    sequential,
    short,
)  # fmt: skip
from evaluation.show.sentences import HEADLINES, equal, opening, verdicts
from evaluation.show.trained import cost_section, experts_section, loss_section
from training.observe import plots

EXAMPLES = 12  # flipped items shown
SHOWN_PAIRS = 3  # layers whose expert pairs are drawn


def page(facts: Facts) -> Page:
    """Return the page of a report."""
    names = list(dict.fromkeys([*facts.scores, *facts.arms]))
    color = Palette(names)
    sections = [
        scores_section(facts, color),
        differences_section(facts, color),
        flips_section(facts),
        losses_section(facts, color),
        experts_section(facts.layers, facts.overall, color),
        islands_section(facts, color),
        routing_section(facts, color),
        cost_section(facts.trained),
        keys_section(facts),
        Section(
            "The plan",
            "How the dense model became a mixture of experts.",
            [block for name, rows in facts.plans.items() for block in (Text(name), Pairs(rows))],
        ),
        Section(
            "Where the numbers come from",
            "Enough to make them again.",
            [block for title, rows in sources(facts) for block in (Text(title), Pairs(rows))],
        ),
    ]
    by = "; ".join([", ".join(names or facts.routing), facts.made])
    return Page(facts.title, by, list(tiles(facts)), verdicts(facts), sections, opening(facts))


def tiles(facts: Facts) -> Iterator[Tile]:
    for found in facts.comparisons:
        headlines = [d for d in found.differences if d.headline]
        for d in headlines[:2]:  # the suite's first ones: a choice by p would show those that chance made large
            values = f"{found.a.name} {number(d.a, d.metric)}, {found.b.name} {number(d.b, d.metric)}"
            about = f"{d.title}{facts.of_suite(found.suite)}, {found.b.name} − {found.a.name}"
            detail = f"{words.unit(d.metric)}, {d.verdict}; {values}"
            yield Tile(about, signed(d.difference, d.metric), detail, tone(d.verdict))
    for what, by_run in facts.losses.sides.items() if facts.losses else ():
        for name, rows in list(by_run.items())[:HEADLINES]:
            assert facts.losses is not None
            found_over = facts.losses.over_sets[what, name]
            lower = f"lower on {sum(r.difference < 0 for r in rows)} of {len(rows)} sets"
            about = f"Loss at {equal(facts, what, name)}, {name} − {facts.losses.runs[0]}"
            change, verdict = signed(mean(row.difference for row in rows)), found_over.verdict()
            yield Tile(about, change, f"nats a token; {lower}; {verdict}", tone(verdict))
    for name, measured in list(facts.routing.items())[-1:]:
        layers = measured["layers"]
        fullest, unused = max(row["max_over_mean"] for row in layers), sum(row["unused"] for row in layers)
        about = f"the mean load, in the worst layer; {unused} of {measured['experts'] * len(layers)} experts unused"
        yield Tile(f"Fullest expert, {name}", f"{fullest:.2f}×", about)


# ---- scores


def panels(found: Iterable[Any]) -> dict[tuple[str, bool], list[Any]]:
    """Return scores or differences by (unit, headline), so that each panel has one axis, and headlines stand apart."""
    out: dict[tuple[str, bool], list[Any]] = {}
    for row in found:
        unit = "per cent" if is_share(row.metric) else row.metric.replace("_", " ")
        out.setdefault((unit, row.headline), []).append(row)
    return out


def panel(unit: str, group: list[Any], rows: list[ForestRow], *, zero: bool = False) -> list[Any]:
    """Return an open picture of headlines, or a folded one of their parts."""
    title, share = f"{unit}, {better(group[0].higher_is_better)}", is_share(group[0].metric)
    picture = Forest(rows, 100.0 if share else 1.0, 3 if share else 4, zero)
    return [Text(title, "unit"), picture] if group[0].headline else [Folded(f"{len(rows)} parts; {title}", [picture])]


def scores_section(facts: Facts, color: Palette) -> Section:
    by_name = {model: {(s.suite, s.name, s.metric): s for s in mine} for model, mine in facts.scores.items()}
    every = {key: score for mine in by_name.values() for key, score in mine.items()}
    blocks: list[Any] = [color.legend(facts.scores)] if every else []
    for suite in dict.fromkeys(s.suite for s in every.values()):
        blocks += [Text(suite)] if facts.of_suite(suite) else []
        for (unit, _), group in panels(s for s in every.values() if s.suite == suite).items():
            rows = []
            for s in group:
                found = [(model, mine.get((s.suite, s.name, s.metric))) for model, mine in by_name.items()]
                marks = [Mark(color[m], t.value, t.low, t.high, scored(t), name=m) for m, t in found if t]
                about = f"{s.metric.replace('_', ' ')}, {s.items:,} items"
                rows.append(ForestRow(s.title, about, marks, chance=s.chance))
            blocks += panel(unit, group, rows)
    seeds = any(s.seeds > 1 for s in every.values())
    return Section(
        "Scores",
        "Each model on its own: a dot is the score, its bar the 95 % interval over items (bootstrap). "
        + "Of several seeds a dot is their mean, and its bar goes from the lowest to the highest. " * seeds
        + "A dotted line is the score of guessing. Bars that overlap may still hide a difference; the next section "
        "looks "
        "at pairs.",
        blocks,
    )


def scored(s: Score) -> str:
    seeds = f", {s.seeds} seeds" if s.seeds > 1 else ""
    return f"{number(s.value, s.metric)} ({number(s.low, s.metric)} to {number(s.high, s.metric)}{seeds})"


def differences_section(facts: Facts, color: Palette) -> Section:
    blocks: list[Any] = []
    for found in facts.comparisons:
        blocks.append(Text(f"{found.b.name} − {found.a.name}{facts.of_suite(found.suite)}"))
        for (unit, _), group in panels(found.differences).items():
            rows = []
            for d in group:
                text = f"{signed(d.difference, d.metric)}; {d.interval}"
                faded = d.verdict not in ("better", "worse")
                won = "" if d.only_a is None else f", {d.only_b:,} won, {d.only_a:,} lost"
                mark = Mark(color[found.b.name], d.difference, d.shown[0], d.shown[1], text, faded)
                note = d.verdict if d.seeds < LEAST else f"p {p_text(d.p_holm)}; {d.verdict}"
                rows.append(ForestRow(d.title, f"{d.items:,} items{won}", [mark], note))
            blocks += panel("points" if unit == "per cent" else unit, group, rows, zero=True)
    counts = [sum(d.headline == h for c in facts.comparisons for d in c.differences) for h in (True, False)]
    return Section(
        "Differences",
        "All models answered the same items. Bars are paired 95 % intervals over seeds, and a verdict follows from "
        "p over seeds, "
        f"corrected by Holm for {counts[0]} headline and {counts[1]} part comparisons. One run each gives no "
        "verdict: then the bars are over items, clustered by their file, passage or document, for these same "
        "models. Pale means that chance could explain it.",
        blocks,
    )


def flips_section(facts: Facts) -> Section:
    blocks: list[Any] = []
    for found in facts.comparisons:
        if not found.flips:
            continue
        rows, gained = [], sum(f.gained for f in found.flips)
        for f in found.flips[:EXAMPLES]:
            item, texts = f"{f.task.replace('_', ' ')} {f.doc}", words.apart((f.target, f.a if f.gained else f.b))
            rows.append(("won" if f.gained else "lost", item, *texts, f"{f.swing:+.2f}"))
        lost = len(found.flips) - gained
        blocks.append(Text(f"{found.b.name}{facts.of_suite(found.suite)}: {gained:,} won, {lost:,} lost"))
        blocks.append(Table(("", "item", "right", "wrong answer", "swing"), rows))
    return Section(
        "What flipped",
        "Items that only one model has right, sorted by how far the right choice moved against the "
        "best wrong one (swing, in nats of log-probability).",
        blocks,
    )


# ---- trainings


def every(facts: Facts) -> list[Run]:
    return [run for runs in facts.trained.values() for run in runs]


def losses_section(facts: Facts, color: Palette) -> Section:
    training = []
    for run in every(facts):
        x, y = run.points("loss")
        training.append(Curve(run.name, color[run.arm], x, plots.smoothed(y), faint=y))
    return loss_section(
        facts.arms, facts.curves, facts.differences, [MEAN], next(iter(facts.arms), ""), color,
        about="The pale line has each logged interval; the strong line is smoothed. ↑: the first steps are above "
        "the frame.",
        first=[curves("Training loss", "nats a token", "tokens", training)],
        last=loss_tables(facts, facts.losses) if facts.losses else [],
    )  # fmt: skip


def loss_tables(facts: Facts, losses: Losses) -> list[Any]:
    """Return the tables of losses at equal tokens and at equal FLOPs."""
    at = {"tokens": f"{short(losses.tokens)} tokens each", "FLOPs": f"{short(losses.flops or 0)} FLOPs each"}
    tables = []
    for what, by_run in losses.sides.items():
        for name, rows in by_run.items():
            cells = [(r.domain, f"{r.a:.4f}", f"{r.b:.4f}", f"{r.difference:+.4f}") for r in rows]
            table = Table(["set", losses.runs[0], name, "difference"], cells)
            tables.append(Captioned(f"At {equal(facts, what, name)}", at[what], table))
    midway = tuple(dict.fromkeys(name for names in losses.midway.values() for name in names))
    note = (
        "Means over seeds. A verdict is about the mean of all sets, by p over seeds, corrected by Holm for all such "
        "means; one run each gives none, because another seed would give other digits. Between two validations the "
        "loss "
        "is interpolated. FLOPs count only the continued training."
    )
    return [Grid(tables, "tables"), Text(f"{note} {words.midway(midway)}" if midway else note, "note")]


def islands_section(facts: Facts, color: Palette) -> Section:
    """Show what islands exchanged, how old it was, what still waits, and the speed of each."""
    runs = [run for run in every(facts) if run.points(plots.ISLANDS[0][0])[1]]
    pictures = []
    for key, title, unit in plots.ISLANDS:
        found = [Curve(run.name, color[run.arm], *run.points(key)) for run in runs]
        pictures.append(curves(title.removeprefix("Islands: ").capitalize(), unit, "tokens", found, y_zero=True))
    legend = color.legend(dict.fromkeys(run.arm for run in runs))
    return Section("Islands", "At each exchange with their server.", [legend, Grid(pictures)] if runs else [])


def keys_section(facts: Facts) -> Section:
    blocks: list[Any] = [Table(("key", *facts.arms), facts.keys)] if facts.keys else []
    for arm, found in facts.arms.items():
        if text := "\n".join(filter(None, found.commands)):
            blocks.append(Folded(f"{arm}: commands", [Text(text, "code")]))
    return Section(
        "How they were trained",
        "Every config key that differs between two runs, seed by seed if it differs within a group; "
        "and the command that trains each run, with all keys that are not defaults.",
        blocks,
    )


# ---- experts


def routing_section(facts: Facts, color: Palette) -> Section:
    pictures = []
    for title, unit, get, zero in MEASURES:
        by_layer = []
        for name, found in facts.routing.items():
            values = [value for row in found["layers"] if (value := get(row)) is not None]
            if len(values) == len(found["layers"]):
                by_layer.append(Curve(name, color[name], [row["layer"] for row in found["layers"]], values, dots=True))
        pictures.append(curves(title, unit, "layer", by_layer, y_zero=zero, start=False))
    blocks: list[Any] = [color.legend(facts.routing), Grid(pictures)] if facts.routing else []
    if any(found["granularity"] > 1 for found in facts.routing.values()):
        chances = ", ".join(f"{f['chance_of_whole_groups']:.2g} in {name}" for name, f in facts.routing.items())
        blocks.append(Text(f"Random experts are whole groups with this probability: {chances}.", "note"))
    return Section(
        "Experts",
        "How routers use the experts on each domain's text, and how far the experts have moved from the dense FFN "
        "that they copy. Nothing is dropped or padded here.",
        [
            *(block for name, found in facts.routing.items() for block in part_texts(name, found)),
            *blocks,
            *(block for name, found in facts.routing.items() for block in expert_maps(name, found)),
        ],
    )


def part_texts(name: str, found: dict[str, Any]) -> Iterator[Any]:
    """Yield the share of each text that each part takes, and the first tokens of the texts in the parts' colours."""
    if not (shares := found.get("parts")):
        return
    names = list(dict.fromkeys(each for row in shares.values() for each in row))
    rows = [(domain, *(f"{row.get(each, 0):.1%}" for each in names)) for domain, row in shares.items()]
    yield Text(f"{name}: which part takes which text")
    yield Table(("share of choices", *names), rows)
    colour = Palette(names[1:])
    yield colour.legend(names[1:])
    for domain, tokens in found.get("shown", {}).items():
        pieces = [
            (text, f"{part} {share:.0%}", colour[part], max(0, min(100, round(80 * share))))
            for text, part, share in tokens
        ]
        yield Text(f"{domain}: a token's colour is the part that takes it most, and its strength the share", "unit")
        yield Tokens(pieces)


def expert_maps(name: str, found: dict[str, Any]) -> Iterator[Any]:
    """Yield heat maps of the load, of expert pairs, and of the distance that each expert moved."""
    layers, parts = [str(row["layer"]) for row in found["layers"]], found["granularity"]
    yield Text(f"{name}: {found['experts']} experts, top-{found['top_k']}")
    yield Scale("h", RATIOS, "load of an expert / mean load")
    units = {domain: f"{count:,} tokens; rows are layers" for domain, count in found["tokens"].items()}
    yield Grid([Heat(d, units[d], table, layers, diverging, "h", parts) for d, table in found["load"].items()])
    if drawn := [i for i, table in enumerate(found["together"]) if table]:
        experts, unit = [str(i) for i in range(found["experts"])], "expert by expert"
        chosen = sorted({drawn[round(n * (len(drawn) - 1) / (SHOWN_PAIRS - 1))] for n in range(SHOWN_PAIRS)})
        maps = ((f"Pairs in layer {layers[i]}", found["together"][i]) for i in chosen)
        yield Scale("h", RATIOS, "chosen together / if choices were independent")
        yield Grid([Heat(title, unit, table, experts, diverging, "h", parts) for title, table in maps])
    else:  # too many experts to draw each pair, so draw the strongest pair of each layer
        pairs = [(row["layer"], *row["pairs"][0]) for row in found["layers"] if row["pairs"]]
        rows = [(f"layer {layer}", f"{i} and {j}", f"{lift:.1f} times") for layer, i, j, lift in pairs]
        yield Table(("", "most often together", "as often as if independent"), rows) if rows else None
    moved = [row["moved"] for row in found["layers"] if "moved" in row]
    if (highest := max((value for row in moved for value in row), default=0.0)) > 0:
        yield Scale("q", {0: "0", 8: f"{highest:.2g}"}, "|expert − its start| / |its start|")
        yield Grid([Heat("How far each moved", "rows are layers", moved, layers, sequential(highest), "q", parts)])
