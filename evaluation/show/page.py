"""The page itself (`page`): sections of facts.Facts as HTML, drawn by draw.py, dressed by page.css."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from evaluation.judge import compare
from evaluation.judge.compare import Losses, is_share, number, signed
from evaluation.judge.curves import Band, mean
from evaluation.judge.seeds import LEAST
from evaluation.show import pictures as draw
from evaluation.show.facts import HEADLINES, Facts, Rows, Score, equal, opening, provenance, routed, verdicts
from evaluation.show.pictures import Curve, ForestRow, Mark
from evaluation.show.trainings import MEAN
from training.observe import plots
from training.observe.metrics import duration

EXAMPLES = 12  # flipped items shown
SHOWN_PAIRS = 3  # layers whose pairs of experts are drawn
RATIOS = {0: "≤ ¼", 2: "½", 4: "1", 6: "2", 8: "≥ 4"}  # what the colours of draw.diverging mean
AXES = (("tokens", "tokens"), ("flops", "FLOPs of continued training"), ("seconds", "seconds of training"))
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


class Palette(dict[str, int]):
    """Series by name, the same in every picture; a new name gets the next one."""

    def __missing__(self, name: str) -> int:
        self[name] = len(self)
        return self[name]


def page(facts: Facts) -> str:
    color = Palette()
    names = list(dict.fromkeys([*facts.scores, *facts.arms]))
    for name in names:
        color[name]
    parts = [
        scores_section(facts, color),
        differences_section(facts, color),
        flips_section(facts),
        loss_section(facts, color),
        trained_section(facts, color),
        islands_section(facts, color),
        routing_section(facts, color),
        cost_section(facts),
        keys_section(facts),
        plan_section(facts),
        provenance_section(facts),
    ]
    by = "; ".join([", ".join(names or facts.routing), facts.made])
    return document(facts.title, by, "".join(tiles(facts)), verdicts(facts), parts, opening(facts))


def document(title: str, by: str, tiles: str, said: Iterable[str], parts: Iterable[str], lead: str = "") -> str:
    style = Path(__file__).with_name("page.css").read_text()
    sentences = "".join(f"<li>{escape(minus(sentence))}</li>" for sentence in said)
    opened = f'<p class="lead">{escape(minus(lead))}</p>' if lead else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{escape(title)}</title><style>\n{style}</style></head><body>"
        f'<header><h1>{escape(title)}</h1><p class="by">{escape(by)}</p>'
        f'{opened}<div class="tiles">{tiles}</div><ul class="verdict">{sentences}</ul></header>'
        f"<main>{''.join(parts)}</main></body></html>\n"
    )


def minus(text: str) -> str:
    """The text with minus signs, where a hyphen before a digit is too short for one."""
    return draw.HYPHEN.sub("−", text)


def tiles(facts: Facts) -> Iterator[str]:
    for found in facts.comparisons:
        headlines = [d for d in found.differences if d.headline]
        for d in headlines[:2]:  # the suite's first: chosen by their p, they would be those that chance made large
            unit = "points" if is_share(d.metric) else d.metric.replace("_", " ")
            values = f"{found.a.name} {number(d.a, d.metric)}, {found.b.name} {number(d.b, d.metric)}"
            about = f"{d.title}{of_suite(facts, found.suite)}, {found.b.name} − {found.a.name}"
            kind = {"better": "good", "worse": "bad"}.get(d.verdict, "")
            yield draw.tile(about, minus(signed(d.difference, d.metric)), f"{unit}, {d.verdict}; {values}", kind)
    if facts.losses:
        for title, by_run in (("tokens", facts.losses.at_equal_tokens), ("FLOPs", facts.losses.at_equal_flops)):
            for name, rows in list(by_run.items())[:HEADLINES]:
                change = mean(row.difference for row in rows)
                lower = f"nats a token; lower on {sum(r.difference < 0 for r in rows)} of {len(rows)} sets"
                verdict = facts.losses.over_sets()[title, name].verdict()
                lower += f"; {verdict}"
                kind = {"better": "good", "worse": "bad"}.get(verdict, "")  # of one run each neither
                about = f"Loss at {equal(facts, title, name)}, {name} − {facts.losses.runs[0]}"
                yield draw.tile(about, minus(f"{change:+.4f}"), lower, kind)
    for name, measured in list(facts.routing.items())[-1:]:
        layers = measured["layers"]
        fullest, unused = max(row["max_over_mean"] for row in layers), sum(row["unused"] for row in layers)
        about = f"the mean load, in the worst layer; {unused} of {measured['experts'] * len(layers)} experts unused"
        yield draw.tile(f"Fullest expert, {name}", f"{fullest:.2f}×", about)


# ---- scores


def panels(found: Iterable[Any]) -> dict[tuple[str, bool], list[Any]]:
    """Scores or differences by (unit, headline): those that can share an axis, headlines apart from their parts."""
    out: dict[tuple[str, bool], list[Any]] = {}
    for row in found:
        unit = "per cent" if is_share(row.metric) else row.metric.replace("_", " ")
        out.setdefault((unit, row.headline), []).append(row)
    return out


def panel(headline: bool, count: int, title: str, picture: str) -> str:
    """A picture of headlines, which is open, or of their parts, which is folded."""
    open_ = f'<p class="unit">{escape(title)}</p>{picture}'
    return open_ if headline else draw.folded(f"{count} parts; {title}", picture)


def of_suite(facts: Facts, suite: str) -> str:
    """The suite in words, where the page has several."""
    return f" ({suite})" if len({run.suite for run in facts.models}) > 1 else ""


def scores_section(facts: Facts, color: Palette) -> str:
    if not facts.scores:
        return ""
    models, body = list(facts.scores), ""
    by_name = {model: {(s.suite, s.name, s.metric): s for s in mine} for model, mine in facts.scores.items()}
    every = {key: score for mine in by_name.values() for key, score in mine.items()}
    for suite in dict.fromkeys(s.suite for s in every.values()):
        body += f"<h3>{escape(suite)}</h3>" if of_suite(facts, suite) else ""
        for (unit, headline), group in panels(s for s in every.values() if s.suite == suite).items():
            rows = []
            for s in group:
                found = [(model, by_name[model].get((s.suite, s.name, s.metric))) for model in models]
                marks = [Mark(color[m], t.value, t.low, t.high, scored(t), name=m) for m, t in found if t]
                about = f"{s.metric.replace('_', ' ')}, {s.items:,} items"
                rows.append(ForestRow(s.title, about, marks, chance=s.chance))
            title = f"{unit}, {better(group[0].higher_is_better)}"
            body += panel(headline, len(rows), title, draw.forest(rows, axis_text(group[0].metric)))
    seeds = any(s.seeds > 1 for s in every.values())
    return draw.section(
        "Scores",
        "Each model on its own: a dot is the score, its bar the 95 % interval over items (bootstrap). "
        + "Of several seeds a dot is their mean, and its bar goes from the lowest to the highest. " * seeds
        + "A dotted line is what guessing gives. Bars that overlap may still hide a difference; the next section looks "
        "at pairs.",
        draw.legend({model: color[model] for model in models}) + body,
    )


def scored(s: Score) -> str:
    seeds = f", {s.seeds} seeds" if s.seeds > 1 else ""
    return minus(f"{number(s.value, s.metric)} ({number(s.low, s.metric)} to {number(s.high, s.metric)}{seeds})")


def differences_section(facts: Facts, color: Palette) -> str:
    body = ""
    for found in facts.comparisons:
        body += f"<h3>{escape(f'{found.b.name} − {found.a.name}{of_suite(facts, found.suite)}')}</h3>"
        for (unit, headline), group in panels(found.differences).items():
            rows = []
            for d in group:
                text = minus(f"{signed(d.difference, d.metric)}; {d.interval}")
                faded = d.verdict not in ("better", "worse")
                won = "" if d.only_a is None else f", {d.only_b:,} won, {d.only_a:,} lost"
                mark = Mark(color[found.b.name], d.difference, d.shown[0], d.shown[1], text, faded)
                note = d.verdict if d.seeds < LEAST else f"p {compare.p_text(d.p_holm)}; {d.verdict}"
                rows.append(ForestRow(d.title, f"{d.items:,} items{won}", [mark], note))
            title = f"{'points' if unit == 'per cent' else unit}, {better(group[0].higher_is_better)}"
            body += panel(headline, len(rows), title, draw.forest(rows, axis_text(group[0].metric), zero=True))
    counts = [sum(d.headline == h for c in facts.comparisons for d in c.differences) for h in (True, False)]
    return draw.section(
        "Differences",
        "All answered the same items. Bars are 95 % intervals over seeds, paired, and a verdict is by p over seeds, "
        f"corrected by Holm for {counts[0]} headline and {counts[1]} part comparisons. Of one run each there is no "
        "verdict: bars are then over items, clustered by the file, passage or document that they are of, for these "
        "very models. Pale is what chance could be.",
        body,
    )


def better(higher: bool) -> str:
    return "higher is better" if higher else "lower is better"


def axis_text(metric: str) -> draw.Format:
    return (lambda v: minus(f"{100 * v:.3g}")) if is_share(metric) else (lambda v: minus(f"{v:.4g}"))


def flips_section(facts: Facts) -> str:
    body = ""
    for found in facts.comparisons:
        if not found.flips:
            continue
        rows, gained = [], sum(f.gained for f in found.flips)
        for f in found.flips[:EXAMPLES]:
            item, texts = f"{f.task.replace('_', ' ')} {f.doc}", compare.apart((f.target, f.a if f.gained else f.b))
            rows.append(("won" if f.gained else "lost", item, *texts, minus(f"{f.swing:+.2f}")))
        title = f"{found.b.name}{of_suite(facts, found.suite)}: {gained:,} won, {len(found.flips) - gained:,} lost"
        head = ("", "item", "right", "wrong answer", "swing")
        body += f"<h3>{escape(title)}</h3>{draw.table(head, rows)}"
    return draw.section(
        "What flipped",
        "Items that one model has right and the other wrong, those first where the right choice moved most against the "
        "best wrong one (swing, in nats of log-probability).",
        body,
    )


# ---- loss


def loss_section(facts: Facts, color: Palette) -> str:
    if not facts.runs:
        return ""
    by_name = {run.name: run for run in facts.runs}
    training = []
    for arm, found in facts.arms.items():
        for run in (by_name[name] for name in found.runs):
            x, y = run.points("loss")
            training.append(Curve(run.name, color[arm], x, plots.smoothed(y), faint=y))
    control, *_ = facts.arms
    parts = {
        name: loss_pictures(name, made, facts.differences.get(name, ()), control, color)
        for name, made in facts.curves.items()
    }
    pictures = [draw.curves("Training loss", "nats a token", "tokens", training), parts.pop(MEAN, "")]
    body = draw.legend({arm: color[arm] for arm in facts.arms}) + charts(pictures)
    if any(parts.values()):
        body += draw.folded(f"Each validation set by itself: {', '.join(parts)}", charts(parts.values()))
    return draw.section(
        "Loss",
        "A pale line is each logged interval, the strong one over it is smoothed. Dots are validations, of several "
        "seeds their mean, with a band from the lowest seed to the highest; of a difference the band is the 95 % "
        f"interval over seeds (none with fewer than {LEAST}). ↑: the first steps lie above the frame.",
        body + (loss_tables(facts, facts.losses) if facts.losses else ""),
    )


def loss_pictures(name: str, made: Sequence[Band], differences: Sequence[Band], control: str, color: Palette) -> str:
    """Validation loss by tokens, FLOPs and seconds, and by tokens what lies between it and the control's."""
    drawn = [draw.curves(f"Loss, {name}", "nats a token", unit, lines(made, axis, color)) for axis, unit in AXES]
    if differences:
        unit = f"{control} is 0, nats a token"
        drawn.append(draw.curves(f"Difference, {name}", unit, "tokens", lines(differences, "tokens", color)))
    return "".join(drawn)


def lines(bands: Sequence[Band], axis: str, color: Palette) -> list[Curve]:
    """The bands over an axis; none where it was not logged."""
    return [
        Curve(b.arm, color[b.arm], [getattr(at, axis) for at in b.spent], b.mean, (), True, b.low, b.high)
        for b in bands
        if len(b.spent) == 1 or any(getattr(at, axis) for at in b.spent)
    ]


def charts(pictures: Iterable[str]) -> str:
    return f'<div class="charts">{"".join(pictures)}</div>'


def loss_tables(facts: Facts, losses: Losses) -> str:
    """The tables at equal tokens and at equal FLOPs, side by side."""
    tables = ""
    for what, by_run, at in (
        ("tokens", losses.at_equal_tokens, f"{draw.short(losses.tokens)} tokens each"),
        ("FLOPs", losses.at_equal_flops, f"{draw.short(losses.flops or 0)} FLOPs each"),
    ):
        for name, rows in by_run.items():
            cells = [(r.domain, f"{r.a:.4f}", f"{r.b:.4f}", minus(f"{r.difference:+.4f}")) for r in rows]
            tables += draw.figure(
                f"At {equal(facts, what, name)}", at, draw.table(["set", losses.runs[0], name, "difference"], cells)
            )
    midway = tuple(dict.fromkeys(name for names in losses.midway.values() for name in names))
    note = (
        "Means over seeds. A verdict is of the mean of all sets, by p over seeds, corrected by Holm for all such "
        "means; of one run each there is none: another seed would give other digits. Between two validations the loss "
        "is taken on the straight line. FLOPs are those of continued training alone."
    ) + (f" {escape(compare.midway_text(midway))}" if midway else "")
    return f'<div class="tables">{tables}</div><p class="note">{note}</p>'


# ---- experts

Measure = Callable[[dict[str, Any]], float | None]
MEASURES: tuple[tuple[str, str, Measure, bool], ...] = (  # title, unit, value of a layer, axis from zero
    ("Fullest expert", "its load / the mean", lambda row: row["max_over_mean"], False),
    ("Entropy of the load", "1: balance", lambda row: row["entropy"], False),
    ("Domain specialisation", "0: none, 1: whole", lambda row: row["specialisation"], True),
    ("Whole virtual groups", "share of tokens", lambda row: row.get("whole_groups"), True),
    ("Whole FFNs", "share of tokens", lambda row: row.get("whole"), True),
    ("Slices missing", "a token, of whole FFNs", lambda row: row.get("missing"), True),
    ("Slices doubled", "a token", lambda row: row.get("doubled"), True),
    ("Copies apart", "|expert − mean| / |mean|", lambda row: mean(row["spread"]), True),
    ("Experts moved", "|now − start| / |start|", lambda row: mean(row["moved"]) if "moved" in row else None, True),
)


LOGGED = (  # NAME of balance/<layer>/NAME in metrics.jsonl, title, unit, axis from zero
    ("max_over_mean", "Fullest expert", "its load / the mean", False),
    ("whole", "Whole FFNs", "share of tokens", True),
    ("missing", "Slices missing", "a token, of whole FFNs", True),
    ("doubled", "Slices doubled", "a token", True),
)


def trained_section(facts: Facts, color: Palette) -> str:
    """What the runs logged of their own routing: by layer in the last line, and whole FFNs all along."""
    arm_of = {name: arm for arm, found in facts.arms.items() for name in found.runs}
    runs = [run for run in facts.runs if run.keys(plots.LAYER)]
    if not runs:
        return ""
    series = {arm_of[run.name]: color[arm_of[run.name]] for run in runs}
    pictures = []
    for name, title, unit, zero in LOGGED:
        found = [Curve(run.name, series[arm_of[run.name]], *run.by_layer(name), dots=True) for run in runs]
        pictures.append(draw.curves(title, unit, "MoE layer", found, y_zero=zero, start=False))
    along = [Curve(run.name, series[arm_of[run.name]], *run.points(plots.WHOLE)) for run in runs]
    pictures.append(draw.curves("Whole FFNs, mean of layers", "share of tokens", "tokens", along, y_zero=True))
    about = "By layer as of each run's last logged line. " + (
        "A choice is whole if it has every slice of a dense FFN equally often, of whatever copies; another is no FFN "
        "that was ever trained."
    ) * any(curve.x for curve in along)
    return draw.section(
        "Experts in training",
        about,
        draw.legend(series) + charts(pictures),
    )


def islands_section(facts: Facts, color: Palette) -> str:
    """What islands have told each other, how old it was, what still waits, and how fast each is."""
    arm_of = {name: arm for arm, found in facts.arms.items() for name in found.runs}
    runs = [run for run in facts.runs if run.points(plots.ISLANDS[0][0])[1]]
    if not runs:
        return ""
    pictures = []
    for key, title, unit in plots.ISLANDS:
        found = [Curve(run.name, color[arm_of[run.name]], *run.points(key)) for run in runs]
        pictures.append(draw.curves(title.removeprefix("Islands: ").capitalize(), unit, "tokens", found, y_zero=True))
    series = {arm_of[run.name]: color[arm_of[run.name]] for run in runs}
    return draw.section("Islands", "At each exchange with their server.", draw.legend(series) + charts(pictures))


def routing_section(facts: Facts, color: Palette) -> str:
    if not facts.routing:
        return ""
    pictures = []
    for title, unit, get, zero in MEASURES:
        by_layer = []
        for name, found in facts.routing.items():
            values = [value for row in found["layers"] if (value := get(row)) is not None]
            if len(values) == len(found["layers"]):
                by_layer.append(Curve(name, color[name], [row["layer"] for row in found["layers"]], values, dots=True))
        pictures.append(draw.curves(title, unit, "layer", by_layer, y_zero=zero, start=False))
    body = draw.legend({name: color[name] for name in facts.routing}) + charts(pictures)
    if any(found["granularity"] > 1 for found in facts.routing.values()):
        chances = ", ".join(f"{f['chance_of_whole_groups']:.2g} in {name}" for name, f in facts.routing.items())
        body += f'<p class="note">Experts drawn at random are whole groups this often: {escape(chances)}.</p>'
    return draw.section(
        "Experts",
        "How the routers use the experts on text of each domain, and how far the experts have come from the dense FFN "
        "that they are copies of. Nothing is dropped and nothing is padded here.",
        body + "".join(expert_maps(name, found) for name, found in facts.routing.items()),
    )


def expert_maps(name: str, found: dict[str, Any]) -> str:
    layers, parts = [str(row["layer"]) for row in found["layers"]], found["granularity"]
    title = f"{name}: {found['experts']} experts, top-{found['top_k']}"
    body = f"<h3>{escape(title)}</h3>"
    body += draw.scale("h", RATIOS, "load of an expert / mean load") + '<div class="charts">'
    for domain, table in found["load"].items():
        unit = f"{found['tokens'][domain]:,} tokens; rows are layers"
        body += draw.heat(domain, unit, table, layers, draw.diverging, "h", parts)
    body += "</div>"
    if drawn := [i for i, table in enumerate(found["together"]) if table]:
        experts = [str(i) for i in range(found["experts"])]
        body += draw.scale("h", RATIOS, "chosen together / if choices were independent") + '<div class="charts">'
        for i in sorted({drawn[round(n * (len(drawn) - 1) / (SHOWN_PAIRS - 1))] for n in range(SHOWN_PAIRS)}):
            title = f"Pairs in layer {layers[i]}"
            body += draw.heat(title, "expert by expert", found["together"][i], experts, draw.diverging, "h", parts)
        body += "</div>"
    else:  # too many experts to draw each pair: the strongest one of each layer
        pairs = [(row["layer"], *row["pairs"][0]) for row in found["layers"] if row["pairs"]]
        rows = [(f"layer {layer}", f"{i} and {j}", f"{lift:.1f} times") for layer, i, j, lift in pairs]
        body += draw.table(("", "most often together", "as often as if independent"), rows) if rows else ""
    moved = [row["moved"] for row in found["layers"] if "moved" in row]
    if (highest := max((value for row in moved for value in row), default=0.0)) > 0:
        body += draw.scale("q", {0: "0", 8: f"{highest:.2g}"}, "|expert − what it was| / |what it was|")
        picture = draw.heat(
            "How far each moved", "rows are layers", moved, layers, draw.sequential(highest), "q", parts
        )
        body += f'<div class="charts">{picture}</div>'
    return body


# ---- what it took, and how it was made


def cost_section(facts: Facts) -> str:
    rows = [
        (
            name, str(len(arm.runs)), *(draw.short(v) if v else "" for v in (arm.spent.tokens, arm.spent.flops)),
            duration(arm.spent.seconds) if arm.spent.seconds else "", f"{arm.memory_gb:.2f}" if arm.memory_gb else "",
        )
        for name, arm in facts.arms.items()
    ]  # fmt: skip
    head = ("", "runs", "tokens", "FLOPs", "time", "memory, GB")
    return draw.section(
        "What it took",
        "Continued training to the end, mean over runs; memory the most. FLOPs are forward and backward of matrices "
        "and causal attention. Time is that of training steps; runs that share a device slow each other.",
        draw.table(head, rows) if rows else "",
    )


def keys_section(facts: Facts) -> str:
    body = draw.table(("key", *facts.arms), facts.keys) if facts.keys else ""
    for arm, found in facts.arms.items():
        if text := "\n".join(filter(None, found.commands)):
            body += draw.folded(f"{arm}: commands", f'<div class="scroll"><pre>{escape(text)}</pre></div>')
    return draw.section(
        "How they were trained",
        "Every key of the configs that differs between two of the runs, seed by seed where it does so within a group; "
        "and the command that trains each, with all that is not a default.",
        body,
    )


# ---- plan and provenance


def plan_section(facts: Facts) -> str:
    body = "".join(f"<h3>{escape(name)}</h3>{draw.pairs(rows)}" for name, rows in facts.plans.items())
    return draw.section("The plan", "How the dense model became a mixture of experts.", body)


def provenance_section(facts: Facts) -> str:
    body = "".join(f"<h3>{escape(title)}</h3>{draw.pairs(rows)}" for title, rows in sources(facts).items())
    return draw.section("Where the numbers come from", "Enough to make them again.", body)


def sources(facts: Facts) -> dict[str, Rows]:
    found: dict[str, Rows] = {}
    for run in facts.models:  # seeds may have one name
        title = f"{run.model.name}, {run.suite}"
        found[title if title not in found else f"{title} ({run.model.source})"] = provenance(run)
    found |= {f"{name}, training": rows for name, rows in facts.settings.items() if rows}
    return found | {f"{name}, routing": routed(measured) for name, measured in facts.routing.items()}
