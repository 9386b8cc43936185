"""What a report knows (`gather`): all that lies in the given folders, and the sentences that follow from it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import numpy as np

from evaluation.judge import compare, intervals, logged, results
from evaluation.judge.compare import Comparison, Difference, Losses, is_share, number, signed
from evaluation.judge.curves import mean
from evaluation.judge.metrics import Measure
from evaluation.judge.results import Evaluation, Item
from evaluation.judge.seeds import LEAST
from evaluation.show.trainings import Arm, Bands, arm, bands, config_of, differing, losses_of, read_arms, shared
from training.checkpoint import standalone
from training.observe import plots
from training.observe.metrics import FILE as METRICS
from training.observe.metrics import duration
from upcycle.arch.spec import MAX_EXPERTS
from upcycle.config.reading import build
from upcycle.config.schema import UpcycleConfig, renamed
from upcycle.converting import card
from upcycle.io import strict
from upcycle.io.checkpoint import Checkpoint
from upcycle.io.publish import MANIFEST
from upcycle.io.strict import Count, Range
from upcycle.planning import plan
from upcycle.verifying.inspect import read_manifest

HEADLINES = 3  # up to so many have a sentence each; more share one that counts their verdicts
SAYS = {"better": "is better than", "worse": "is worse than", "no difference shown": "is not shown to differ from"}
SEED = re.compile(r"(seed|run)?[\W_]*\d+")  # a folder that is called after its seed alone
GONE = "mesh"  # a key of older manifests, about memory in training, which upcycle estimate is for now
Rows = list[tuple[str, str]]
Table = list[list[float | None]]


class RoutedLayer(TypedDict):
    layer: Count
    max_over_mean: float
    entropy: float
    unused: Count
    specialisation: float | None
    spread: list[float]
    pairs: list[tuple[Count, Count, float]]
    whole_groups: NotRequired[float | None]
    whole: NotRequired[float | None]
    missing: NotRequired[float | None]
    doubled: NotRequired[float | None]
    moved: NotRequired[list[float]]
    router_moved: NotRequired[float]


class Routed(TypedDict):
    """A file of `upcycle routing`."""

    experts: Annotated[int, Range(1, MAX_EXPERTS)]
    top_k: Annotated[int, Range(1, MAX_EXPERTS)]
    granularity: Annotated[int, Range(1, MAX_EXPERTS)]
    chance_of_whole_groups: float
    layers: list[RoutedLayer]
    load: Mapping[str, Table]
    together: list[Table | None]
    tokens: Mapping[str, Count]
    checkpoint: str
    start: str


@dataclass(frozen=True)
class Score:
    name: str
    title: str
    metric: str
    higher_is_better: bool
    headline: bool
    items: int
    value: float  # mean over seeds
    low: float  # 95 % interval over items; of several seeds the lowest of them, and the highest
    high: float
    chance: float | None  # of guessing among the choices
    suite: str = ""
    seeds: int = 1


@dataclass(frozen=True)
class Facts:
    """All that the page shows."""

    title: str
    made: str
    models: tuple[Evaluation, ...] = ()
    scores: dict[str, list[Score]] = field(default_factory=dict)  # by model, of all suites that it was asked
    comparisons: tuple[Comparison, ...] = ()
    runs: tuple[plots.Curves, ...] = ()
    arms: dict[str, Arm] = field(default_factory=dict)  # the runs by what they are a seed of
    settings: dict[str, Rows] = field(default_factory=dict)  # of arms
    keys: list[tuple[str, ...]] = field(default_factory=list)  # that differ: the key, and what each arm has
    curves: Bands = field(default_factory=dict)  # of validation
    differences: Bands = field(default_factory=dict)  # to the first arm
    losses: Losses | None = None
    routing: dict[str, dict[str, Any]] = field(default_factory=dict)  # by checkpoint
    plans: dict[str, Rows] = field(default_factory=dict)


# ---- what there is


def gather(groups: Sequence[str | Sequence[str]], title: str) -> Facts:
    """All that lies in the folders of each group; those of one kind are the seeds of one model."""
    sides = [sorted_out([group] if isinstance(group, str) else group) for group in groups]
    arms = read_arms([trained for _, trained, _, _ in sides if trained])
    own = iter(arms)
    asked = labelled([(next(own) if trained else "", evaluated) for evaluated, trained, _, _ in sides])
    scored: dict[str, list[Score]] = {}
    for group in asked:
        scored.setdefault(group.name, []).extend(over_seeds([scores(folder) for folder in group.folders]))
    folders, runs = ({name: found[0] for name, found in arms.items()}, {n: found[1] for n, found in arms.items()})
    losses = losses_of(arms)
    drawn, beside = bands(runs)
    return Facts(
        title=title,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        models=tuple(run for group in asked for run in group.runs),
        scores=scored,
        comparisons=tuple(comparisons(asked)),
        runs=tuple(run for found in runs.values() for run in found),
        arms={name: arm(*found, losses) for name, found in arms.items()},
        settings={name: settings(found[0]) for name, found in folders.items()},
        keys=differing([[config_of(folder) for folder in found] for found in folders.values()]),
        curves=drawn,
        differences=beside,
        losses=losses,
        routing=named([file for *_, files in sides for file in files]),
        plans=plans([made for _, _, made, _ in sides]),
    )


@dataclass(frozen=True)
class Asked:
    """Runs of one suite that are the seeds of one model."""

    name: str
    suite: str
    folders: tuple[Path, ...]
    runs: tuple[Evaluation, ...]


def labelled(sides: Sequence[tuple[str, Sequence[Path]]]) -> list[Asked]:
    """The runs of each side by suite, under the side's name if it has one, else under their model's: with the folder
    where another model has that name, or the same one in another group of the suite."""
    found = []
    for given, folders in sides:
        by_suite: dict[str, list[tuple[Path, Evaluation]]] = {}
        for folder in folders:
            run = logged.load(folder)
            by_suite.setdefault(run.suite, []).append((folder, run))
        for suite, pairs in by_suite.items():
            name = given or shared([place_of(run) for _, run in pairs])
            found.append((given, Asked(name, suite, *map(tuple, zip(*pairs, strict=True)))))
    used: dict[str, list[tuple[Any, str]]] = {}
    for _, group in found:
        used.setdefault(group.name, []).append((tuple(as_computed(run.model) for run in group.runs), group.suite))
    one = {name for name, rows in used.items() if len({row[0] for row in rows}) == 1 and len({*rows}) == len(rows)}
    return [
        group
        if given or group.name in one
        else replace(group, name=f"{group.name} ({shared([str(folder) for folder in group.folders])})")
        for given, group in found
    ]


def as_computed(model: results.Model) -> tuple[str, ...]:
    """What tells models apart: the same weights under another config.json are another model."""
    return (model.identity,) if model.identity else (model.fingerprint, model.dtype)


def place_of(run: Evaluation) -> str:
    """A model's name; of a training run that is called after its seed alone, with the folder around it."""
    parts = Path(run.model.source).parts
    return "/".join(parts[-2:]) if len(parts) > 1 and SEED.fullmatch(run.model.name) else run.model.name


def comparisons(asked: Sequence[Asked]) -> list[Comparison]:
    """Every group beside the first of its suite. All suites are one family of what is compared."""
    out = []
    for suite in dict.fromkeys(group.suite for group in asked):
        first, *others = [group for group in asked if group.suite == suite]
        found = compare.compare([group.folders for group in (first, *others)]) if others else []
        out += [called(one, first.name, group.name) for one, group in zip(found, others, strict=True)]
    return compare.corrected(out)


def called(found: Comparison, a: str, b: str) -> Comparison:
    return replace(found, a=replace(found.a, name=a), b=replace(found.b, name=b))


def over_seeds(each: Sequence[list[Score]]) -> list[Score]:
    """The scores of a group of runs: the mean, from the lowest to the highest."""
    if len(each) == 1:
        return each[0]
    by_seed = [{(s.name, s.metric): s for s in mine} for mine in each]
    out = []
    for key in (key for key in by_seed[0] if all(key in mine for mine in by_seed)):
        values = [mine[key].value for mine in by_seed]
        ends = min(values), max(values)
        out.append(replace(by_seed[0][key], value=mean(values), low=ends[0], high=ends[1], seeds=len(values)))
    return out


def apart(folders: Sequence[Path]) -> dict[str, Path]:
    """The folders by name, by path where two have one name."""
    names = [folder.name for folder in folders]
    return {folder.name if names.count(folder.name) == 1 else str(folder): folder for folder in folders}


def sorted_out(paths: Sequence[str]) -> tuple[list[Path], list[Path], list[Path], list[Path]]:
    """(evaluated, trained, upcycled, routed) of the paths. ValueError for a path that is none of these."""
    evaluated: list[Path] = []
    trained: list[Path] = []
    made: list[Path] = []
    routed: list[Path] = []
    for path in map(Path, paths):
        if path.is_file() and path.suffix == ".json":
            (evaluated if logged.is_run(path) else routed).append(path)
            continue
        kinds = {METRICS: trained, MANIFEST: made}
        there = [name for name in kinds if (path / name).is_file()]
        if (not there or any(path.glob("results_*.json"))) and logged.is_run(path):
            evaluated.append(path)
        elif not there:
            raise ValueError(
                f"{path} is nothing that a report shows; give folders with {', '.join(kinds)}, lm-eval's results with "
                "their samples, or the file of `upcycle routing`"
            )
        for name in there:
            kinds[name].append(path)
        if METRICS in there:
            made.append(path)  # a training run may have upcycled as it loaded
    return evaluated, trained, made, routed


def plans(sides: Sequence[Sequence[Path]]) -> dict[str, Rows]:
    """The plan of each folder, once where the seeds of a group have one."""
    names = {folder: name for name, folder in apart([folder for folders in sides for folder in folders]).items()}
    out: dict[str, Rows] = {}
    for folders in sides:
        mine: list[Rows] = []
        for folder in folders:
            rows = plan_rows(folder)
            if rows and rows not in mine:
                mine.append(rows)
                out[names[folder]] = rows
    return out


def named(files: Sequence[Path]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for file in files:
        try:
            value = strict.read_json(file)
        except ValueError as error:
            raise ValueError(f"{file} is not whole JSON ({error}); make it again with `upcycle routing`") from None
        if not isinstance(value, dict) or value.get("kind") != "routing":
            raise ValueError(f"{file} is not a file of `upcycle routing`; make it with that")
        try:
            value = strict.held(value, Routed, str(file))
            check_sizes(value, str(file))
        except ValueError as error:
            raise ValueError(f"{error}; make it again with `upcycle routing`") from None
        name = Path(value["checkpoint"]).name
        found[name if name not in found else f"{name} ({file.stem})"] = value
    return found


def check_sizes(found: Mapping[str, Any], where: str) -> None:
    """Raise a ValueError unless the tables have a row a layer and a cell an expert."""
    experts, layers = found["experts"], found["layers"]
    if not layers or not found["load"] or found["load"].keys() != found["tokens"].keys():
        raise ValueError(f"{where} has {len(layers)} layers and other domains in load than in tokens")
    of_layers = [*found["load"].values(), found["together"]]
    rows = [row for table in found["load"].values() for row in table]
    square = [table for table in found["together"] if table is not None]
    rows += [row for table in square for row in table] + [row["spread"] for row in layers]
    rows += [row["moved"] for row in layers if "moved" in row]
    if any(len(table) != len(layers) for table in of_layers) or any(len(table) != experts for table in square):
        raise ValueError(f"{where} has tables of other sizes than its {len(layers)} layers and {experts} experts")
    if any(len(row) != experts for row in rows):
        raise ValueError(f"{where} has rows that are not of its {experts} experts")


def scores(folder: Path) -> list[Score]:
    run, by_task = logged.load(folder), dict[str, list[Item]]()
    for item in run.items:
        by_task.setdefault(item.task, []).append(item)
    found = []
    parts: list[tuple[results.Group | results.Task, tuple[str, ...], bool]] = [
        *((group, group.tasks, not compare.is_inner(group, run)) for group in run.groups.values()),
        *((task, (task.name,), not task.groups) for task in run.tasks.values()),
    ]
    for part, tasks, headline in parts:
        pairs = [(item, item) for task in tasks for item in by_task.get(task, [])]
        if judged := compare.judged_by(part, run, pairs):
            higher = run.tasks[tasks[0]].higher_is_better.get(judged[0], True)
            mine = score(part.name, part.title, *judged, higher, headline, [item for item, _ in pairs])
            found.append(replace(mine, suite=run.suite))
    return found


def score(
    name: str, title: str, metric: str, measure: Measure, higher: bool, headline: bool, items: Sequence[Item]
) -> Score:
    key, scored = f"{name} {metric}", [(item.task, item.scores[metric]) for item in items]
    value = measure.ratio([task for task, _ in scored])
    if value is None:
        each = [f"{item.task} {number}" for number, item in enumerate(items)]
        found = measure.interval([scored], [], each, compare.generator("bootstrap", key))
        low, high = found or (math.nan, math.nan)
    else:
        sum_N, unit_N = measure.sums(scored).T
        at_zero = float(value(np.zeros(1))[0])  # bootstrap() is of a difference: A's sums are 0, and this is added back
        low, high = (at_zero + end for end in compare.bootstrap(np.zeros_like(sum_N), sum_N, unit_N, value, key))
        if (unit_N == 1).all() and intervals.is_right(sum_N):
            low, high = intervals.wilson(float(sum_N.sum()), len(sum_N))
    guess = [1 / len(item.choices) for item in items if len(item.choices) > 1]
    chance = sum(guess) / len(guess) if metric.startswith("acc") and len(guess) == len(items) else None
    return Score(
        name, title, metric, higher, headline, len(items), measure.value(scored), low, high, chance
    )  # fmt: skip


def plan_rows(folder: Path) -> Rows:
    """The table that `upcycle plan` prints, or what is left of it where the dense model is not at hand."""
    if rows := standalone.plan_rows(folder):
        return rows
    manifest = read_manifest(folder)
    if manifest is None:
        return []
    gone = manifest["config"].get(GONE)
    config = build(UpcycleConfig, {key: value for key, value in renamed(manifest["config"]).items() if key != GONE})
    old = [("note", f"{MANIFEST} has {GONE}={gone}, a key of older versions that is of no use now")] if gone else []
    try:
        with ExitStack() as stack:
            sources = [config.source or config.donors[0], *config.donors]
            upcycle_plan = plan.build(config, [stack.enter_context(at_hand(name)) for name in sources], {})
            return [*card.rows(upcycle_plan), *old]
    except (ValueError, OSError) as error:
        stated = [(name, str(value)) for name, value in asdict(config).items() if name != "output"]
        return [*stated, *old, ("note", f"sizes are left out: {' '.join(str(error).split())}")]


def at_hand(name: str) -> Checkpoint:
    """The folder of a dense model, never the hub's: a manifest may name any repository, and a report fetches none."""
    if not name or not Path(name).is_dir():
        raise ValueError(f"{name!r} is no folder here, and a report fetches no model")
    return Checkpoint(Path(name))


class TrainedModel(TypedDict):
    source: str
    dtype: str
    expert_backend: str


class TrainedData(TypedDict):
    sequence: Count


class TrainedSchedule(TypedDict):
    peak: float
    final: float
    warmup: Count


class Trained(TypedDict):
    """What is shown of a training run's config.json."""

    model: TrainedModel
    data: TrainedData
    schedule: TrainedSchedule
    steps: Count
    batch: Count
    seed: int


def settings(folder: Path) -> Rows:
    """The settings of a training run, in a few rows."""
    path = folder / "config.json"
    if not path.is_file():
        return []
    config = strict.held(strict.read_json(path), Trained, str(path))
    model, data, schedule = config["model"], config["data"], config["schedule"]
    upcycled = standalone.upcycled(folder)
    return [
        ("model", f"upcycled as it was loaded from {upcycled.source}" if upcycled else model["source"]),
        ("steps", f"{config['steps']:,} of {config['batch']} sequences of {data['sequence']} tokens"),
        ("learning rate", f"{schedule['peak']:g} to {schedule['final']:g}, {schedule['warmup']} steps of warm-up"),
        ("compute", f"{model['dtype']}, experts {model['expert_backend']}, seed {config['seed']}"),
    ]


# ---- what it says


def opening(facts: Facts) -> str:
    """One sentence: the effect, its interval over seeds, and at what cost."""
    every = list(effects(facts))
    if not every:
        return "Nothing is compared here: that needs two models asked the same suite, or two trainings."
    clauses = [f"{b} {SAYS.get(kind, 'beside')} {a}: {said}, {cost(facts, b, a)}" for b, a, _, kind, said in every]
    more, seeds = len(clauses) - HEADLINES, every[0][2]
    clauses = [*clauses[:HEADLINES], *([f"{more} more below"] if more > 0 else [])]
    if seeds < LEAST:
        clauses.append(f"{'one run' if seeds == 1 else f'{seeds} runs'} a side cannot call anything better")
    return "; ".join(clauses) + "."


def effects(facts: Facts) -> Iterator[tuple[str, str, int, str, str]]:
    """(model, the first, seeds, verdict, difference in words): of losses, else of the first suite's first headline."""
    if losses := facts.losses:
        for (what, name), d in losses.over_sets().items():
            if what != "tokens":
                continue
            over = "" if d.low is None else f", 95 % interval over {d.seeds} seeds {d.low:+.4f} to {d.high:+.4f}"
            said = f"validation loss {d.mean:+.4f} nats a token at {equal(facts, 'tokens', name)}{over}"
            yield name, losses.runs[0], d.seeds, d.verdict(), said
        return
    for found in facts.comparisons:
        head = next((d for d in found.differences if d.headline), None)
        if head and found.suite == facts.comparisons[0].suite:
            unit = "points" if is_share(head.metric) else head.metric.replace("_", " ")
            said = f"{head.title} {signed(head.difference, head.metric)} {unit}, {head.interval}"
            yield found.b.name, found.a.name, head.seeds, head.verdict, said


def cost(facts: Facts, b: str, a: str) -> str:
    """What the training of b took beside that of a, up to where their losses are compared."""
    if not {a, b} <= facts.arms.keys():
        return "at a cost that is not known here (give the folders of the trainings too)"
    ours, theirs = facts.arms[b], facts.arms[a]
    spent = (
        ("FLOPs", ours.compared.flops, theirs.compared.flops, lambda v: f"{v:.3g}"),
        ("seconds", ours.compared.seconds, theirs.compared.seconds, duration),
        ("memory", ours.memory_gb, theirs.memory_gb, lambda v: f"{v:.2f} GB"),
    )
    times = [
        f"{x / y:.2f} times the {what} ({form(x)})" if x and y else f"{what} not logged" for what, x, y, form in spent
    ]
    return f"for {times[0]}, {times[1]} and {times[2]}"


def verdicts(facts: Facts) -> list[str]:
    several = len({found.suite for found in facts.comparisons}) > 1
    said = [f"{found.suite}: " * several + words for found in facts.comparisons for words in verdict(found)]
    return said + (list(loss_sentences(facts, facts.losses)) if facts.losses else [])


def verdict(found: Comparison) -> Iterator[str]:
    headlines, (a, b) = [d for d in found.differences if d.headline], (found.a.name, found.b.name)
    if len(headlines) <= HEADLINES:
        yield from (sentence(found, d) for d in headlines)
    else:
        kinds = {"better": "better on", "worse": "worse on", "no difference shown": "not shown to differ on"}
        kinds |= {d.verdict: f"without a verdict ({d.verdict}) on" for d in headlines if d.verdict not in kinds}
        titles = {words: [d.title for d in headlines if d.verdict == kind] for kind, words in kinds.items()}
        said = (f"{words} {len(names)} ({', '.join(names)})" for words, names in titles.items() if names)
        yield f"Of {len(headlines)} headlines, {b} beside {a} is {'; '.join(said)}."
    if found.flips:
        gained = sum(f.gained for f in found.flips)
        yield f"{gained:,} items that {a} had wrong are right, {len(found.flips) - gained:,} the other way round."
    elif any(d.only_a is not None for d in found.differences):
        yield f"No item flipped between {a} and {b}."


def sentence(found: Comparison, d: Difference) -> str:
    unit = " %" if is_share(d.metric) else f" {d.metric.replace('_', ' ')}"
    values = (
        f"{number(d.a, d.metric)} to {number(d.b, d.metric)}{unit} ({signed(d.difference, d.metric)}, {d.interval})"
    )
    if d.verdict not in SAYS:
        return f"{found.b.name} beside {found.a.name} on {d.title}: {values}; {d.verdict}."
    return f"{found.b.name} {SAYS[d.verdict]} {found.a.name} on {d.title}: {values}, p {compare.p_text(d.p_holm)}."


def equal(facts: Facts, what: str, name: str) -> str:
    """Says what is equal of the first arm and this one, tokens or FLOPs, and whether a loss is interpolated for it."""
    assert facts.losses is not None
    runs = {run for arm in (facts.losses.runs[0], name) for run in facts.arms[arm].runs}
    return f"equal {what}" + ", interpolated" * bool(runs & {*facts.losses.midway.get(what, ())})


def loss_sentences(facts: Facts, losses: Losses) -> Iterator[str]:
    for title, by_run in (("tokens", losses.at_equal_tokens), ("FLOPs", losses.at_equal_flops)):
        for name, rows in by_run.items():
            lower = sum(row.difference < 0 for row in rows)
            means = f"{mean(r.a for r in rows):.4f} to {mean(r.b for r in rows):.4f}"
            yield (
                f"At {equal(facts, title, name)}, the validation loss of {name} is lower than that of {losses.runs[0]} "
                f"on {lower} of {len(rows)} sets; mean {means} nats a token; difference {losses.verdict(title, name)}."
            )


# ---- provenance


def provenance(run: Evaluation) -> Rows:
    m = run.model
    rows = [
        ("model", f"{m.source}{'' if m.step is None else f', step {m.step}'}: {m.kind}, {m.dtype}"),
        ("parameters", f"{card.human(m.parameters)}, {card.human(m.active)} active"),
        ("weights", m.fingerprint),
        ("command", run.command),
        ("options", ", ".join(f"{k}={v}" for k, v in run.options.items())),
        ("versions", ", ".join(f"{k} {v}" for k, v in run.versions.items())),
        ("started", f"{run.started}, took {run.seconds:,.1f} s"),
        ("work", ", ".join(f"{k.replace('_', ' ')} {v:,.6g}" for k, v in run.work.items())),
        *(("note", note) for note in run.notes),
    ]
    return [(name, value) for name, value in rows if value]


def routed(found: dict[str, Any]) -> Rows:
    tokens = ", ".join(f"{name} {count:,}" for name, count in found["tokens"].items())
    start = [("compared with", found["start"])] if found.get("start") else []
    return [("model", found["checkpoint"]), ("tokens", tokens), *start]
