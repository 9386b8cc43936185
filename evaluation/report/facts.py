"""What a report knows (`gather`): all that lies in the given folders, and the sentences that follow from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import numpy as np

from evaluation import compare, intervals, results
from evaluation.compare import Comparison, Difference, Losses, is_share, number, signed
from evaluation.measures import Measure
from evaluation.results import Evaluation, Item
from training.checkpoint import standalone
from training.observe import plots
from training.observe.metrics import FILE as METRICS
from upcycle import card, plan, strict
from upcycle.checkpoint import Checkpoint
from upcycle.config import UpcycleConfig, build
from upcycle.convert import MANIFEST
from upcycle.inspect import read_manifest
from upcycle.spec import MAX_EXPERTS
from upcycle.strict import Count, Range

HEADLINES = 3  # up to so many have a sentence each; more share one that counts their verdicts
GONE = "mesh"  # a key of older manifests, about memory in training, which training.plan is for now
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
    """A file of `evaluation routing`."""

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
    value: float
    low: float  # 95 % bootstrap interval over items
    high: float
    chance: float | None  # of guessing among the choices


@dataclass(frozen=True)
class Facts:
    """All that the page shows."""

    title: str
    made: str
    models: tuple[Evaluation, ...] = ()
    scores: dict[str, list[Score]] = field(default_factory=dict)  # by model, of all suites that it was asked
    comparisons: tuple[Comparison, ...] = ()
    runs: tuple[plots.Curves, ...] = ()
    settings: dict[str, Rows] = field(default_factory=dict)  # of training runs
    losses: Losses | None = None
    routing: dict[str, dict[str, Any]] = field(default_factory=dict)  # by checkpoint
    plans: dict[str, Rows] = field(default_factory=dict)


# ---- what there is


def gather(paths: Sequence[str], title: str) -> Facts:
    evaluated, trained, made, routed = sorted_out(paths)
    done = [results.load(folder) for folder in evaluated]
    scored: dict[str, list[Score]] = {}
    for label, folder in zip(labels(evaluated, done), evaluated, strict=True):
        scored.setdefault(label, []).extend(scores(folder))
    by_suite = [
        [f for f, run in zip(evaluated, done, strict=True) if run.suite == s] for s in {r.suite: 0 for r in done}
    ]
    runs = plots.read_runs(trained) if trained else []
    in_common = len(runs) > 1 and set.intersection(*(set(run.keys(plots.VALID)) for run in runs))
    return Facts(
        title=title,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        models=tuple(done),
        scores=scored,
        comparisons=tuple(found for suite in by_suite if len(suite) > 1 for found in compare.compare(suite)),
        runs=tuple(runs),
        settings={run.name: settings(folder) for run, folder in zip(runs, trained, strict=True)},
        losses=compare.compare_losses(trained) if in_common else None,
        routing=named(routed),
        plans={name: rows for name, folder in apart(made).items() if (rows := plan_rows(folder))},
    )


def labels(folders: Sequence[Path], runs: Sequence[Evaluation]) -> list[str]:
    """A name for each run's model: its own, with the folder where another model, dtype or the same suite has it too."""
    used: dict[str, list[tuple[str, str, str]]] = {}
    for run in runs:
        used.setdefault(run.model.name, []).append((run.model.fingerprint, run.model.dtype, run.suite))
    one = {name for name, rows in used.items() if len({row[:2] for row in rows}) == 1 and len({*rows}) == len(rows)}
    names = [run.model.name for run in runs]
    return [n if n in one else f"{n} ({f})" for n, f in zip(names, folders, strict=True)]


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
            routed.append(path)
            continue
        kinds = {"run.json": evaluated, METRICS: trained, MANIFEST: made}
        there = [name for name in kinds if (path / name).is_file()]
        if not there:
            raise ValueError(
                f"{path} is nothing that a report shows; give folders with {', '.join(kinds)}, or the file of "
                "`python -m evaluation routing`"
            )
        for name in there:
            kinds[name].append(path)
        if METRICS in there:
            made.append(path)  # a training run may have upcycled as it loaded
    return evaluated, trained, made, routed


def named(files: Sequence[Path]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for file in files:
        try:
            value = strict.read_json(file)
        except ValueError as error:
            raise ValueError(f"{file} is not whole JSON ({error}); make it again with `evaluation routing`") from None
        if not isinstance(value, dict) or value.get("kind") != "routing":
            raise ValueError(f"{file} is not a file of `python -m evaluation routing`; make it with that")
        try:
            value = strict.held(value, Routed, str(file))
            check_sizes(value, str(file))
        except ValueError as error:
            raise ValueError(f"{error}; make it again with `evaluation routing`") from None
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
    run, by_task = results.load(folder), dict[str, list[Item]]()
    for item in results.items(folder):
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
            found.append(score(part.name, part.title, *judged, higher, headline, [item for item, _ in pairs]))
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
    config = build(UpcycleConfig, {key: value for key, value in manifest["config"].items() if key != GONE})
    old = [("note", f"{MANIFEST} has {GONE}={gone}, a key of older versions that is of no use now")] if gone else []
    try:
        with ExitStack() as stack:
            sources = [config.source or config.donors[0], *config.donors]
            upcycle_plan = plan.build(config, [stack.enter_context(Checkpoint.open(name)) for name in sources])
            return [*card.rows(upcycle_plan), *old]
    except (ValueError, OSError) as error:
        stated = [(name, str(value)) for name, value in asdict(config).items() if name != "output"]
        return [*stated, *old, ("note", f"sizes are left out: {' '.join(str(error).split())}")]


class TrainedModel(TypedDict):
    source: str
    compute: str
    experts: str


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
        ("compute", f"{model['compute']}, experts {model['experts']}, seed {config['seed']}"),
    ]


# ---- what it says


def verdicts(facts: Facts) -> list[str]:
    said = [sentence for found in facts.comparisons for sentence in verdict(found)]
    return said + (list(loss_sentences(facts.losses)) if facts.losses else [])


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
    words = {"better": "better than", "worse": "worse than", "no difference shown": "not shown to differ from"}
    if d.verdict not in words:
        return f"{found.b.name} beside {found.a.name} on {d.title}: {values}; {d.verdict}."
    return f"{found.b.name} is {words[d.verdict]} {found.a.name} on {d.title}: {values}, p {compare.p_text(d.p_holm)}."


def loss_sentences(losses: Losses) -> Iterator[str]:
    for title, by_run in (("tokens", losses.at_equal_tokens), ("FLOPs", losses.at_equal_flops)):
        for name, rows in by_run.items():
            lower = sum(row.difference < 0 for row in rows)
            means = f"{mean(r.a for r in rows):.4f} to {mean(r.b for r in rows):.4f}"
            yield (
                f"At {losses.equal(title)}, the validation loss of {name} is lower than that of {losses.runs[0]} on "
                f"{lower} of {len(rows)} sets; mean {means} nats a token; difference {compare.loss_verdict(rows)}."
            )


def mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


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
