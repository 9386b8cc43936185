"""Gather the facts of a report from the given folders."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from evaluation.judge import intervals, logged, results, suites
from evaluation.judge.experts.routing import read_routing
from evaluation.judge.losses import Losses, compare_losses
from evaluation.judge.results import Evaluation, Item
from evaluation.judge.runs import (
    Arms,
    Band,
    Run,
    Spent,
    average,
    by_layer,
    difference_bands,
    loss_bands,
    mean,
    overall,
    read_runs,
)  # fmt: skip
from evaluation.judge.suites import Comparison, Part, compare_suites
from evaluation.show.commands import command, config_of, differing, settings
from training.checkpoint import standalone
from training.observe.metrics import FILE as METRICS
from upcycle.config.reading import build
from upcycle.config.schema import UpcycleConfig, renamed
from upcycle.converting import card
from upcycle.io.checkpoint import Checkpoint
from upcycle.io.publish import MANIFEST
from upcycle.planning import plan
from upcycle.verifying.inspect import read_manifest

MEAN = "mean of sets"  # sets of validation
SEED = re.compile(r"(seed|run)?[\W_]*\d+")  # the name of a folder that is only a seed
Rows = list[tuple[str, str]]
Bands = dict[str, tuple[Band, ...]]  # by MEAN or a set


@dataclass(frozen=True)
class Score:
    name: str
    title: str
    metric: str
    higher_is_better: bool
    headline: bool
    items: int
    value: float  # mean over seeds
    low: float  # 95 % interval over items; with several seeds the lowest and the highest seed
    high: float
    chance: float | None  # the score of guessing
    suite: str = ""
    seeds: int = 1


@dataclass(frozen=True)
class Arm:
    """Hold a group of trainings, one run for each seed."""

    runs: tuple[str, ...]
    spent: Spent  # mean over seeds, to the end
    compared: Spent  # the same, up to where losses are compared
    memory_gb: float  # the most
    commands: tuple[str, ...]


@dataclass(frozen=True)
class Facts:
    """Hold everything that the page shows."""

    title: str
    made: str
    models: tuple[Evaluation, ...] = ()
    scores: dict[str, list[Score]] = field(default_factory=dict)  # by model, from all of its suites
    comparisons: tuple[Comparison, ...] = ()
    arms: dict[str, Arm] = field(default_factory=dict)  # the runs, by the arm that they are a seed of
    settings: dict[str, Rows] = field(default_factory=dict)  # of arms
    keys: list[tuple[str, ...]] = field(default_factory=list)  # keys that differ, with each arm's value
    curves: Bands = field(default_factory=dict)  # of validation
    differences: Bands = field(default_factory=dict)  # differences to the first arm
    losses: Losses | None = None
    routing: dict[str, dict[str, Any]] = field(default_factory=dict)  # by checkpoint
    plans: dict[str, Rows] = field(default_factory=dict)
    trained: dict[str, list[Run]] = field(default_factory=dict)  # the logs of each arm's runs
    layers: dict[str, dict[str, dict[int, float]]] = field(default_factory=dict)  # by measure, by arm
    overall: Bands = field(default_factory=dict)  # by what

    def of_suite(self, suite: str) -> str:
        """Return the suite in words, if there are several."""
        return f" ({suite})" if len({run.suite for run in self.models}) > 1 else ""


def gather(groups: Sequence[str | Sequence[str]], title: str) -> Facts:
    """Gather the facts of each group's folders; folders of one kind are the seeds of one model."""
    sides = [sorted_out([group] if isinstance(group, str) else group) for group in groups]
    trained = read_arms([side.trained for side in sides if side.trained])
    own = iter(trained)
    asked = labelled([(next(own) if side.trained else "", side.evaluated) for side in sides])
    scored: dict[str, list[Score]] = {}
    for group in asked:
        scored.setdefault(group.name, []).extend(over_seeds([scores(folder) for folder in group.folders]))
    losses, folders = losses_of(trained), {name: [Path(run.folder) for run in runs] for name, runs in trained.items()}
    drawn, beside = curves_of(trained)
    return Facts(
        title=title,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        models=tuple(run for group in asked for run in group.runs),
        scores=scored,
        comparisons=tuple(comparisons(asked)),
        arms={name: arm(runs, losses) for name, runs in trained.items()},
        settings={name: settings(mine[0]) for name, mine in folders.items()},
        keys=differing([[config_of(folder) for folder in mine] for mine in folders.values()]),
        curves=drawn,
        differences=beside,
        losses=losses,
        routing=named([file for side in sides for file in side.routed]),
        plans=plans([side.made for side in sides]),
        trained=trained,
        layers=by_layer(trained),
        overall=overall(trained),
    )


@dataclass(frozen=True)
class Side:
    """Hold the paths of a group, by their kind."""

    evaluated: list[Path] = field(default_factory=list)
    trained: list[Path] = field(default_factory=list)
    made: list[Path] = field(default_factory=list)
    routed: list[Path] = field(default_factory=list)


def sorted_out(paths: Sequence[str]) -> Side:
    """Sort the paths by their kind; raise a ValueError for a path that a report cannot use."""
    side = Side()
    kinds = {METRICS: side.trained, MANIFEST: side.made}
    for path in map(Path, paths):
        there = [name for name in kinds if (path / name).is_file()]
        if path.is_file() and path.suffix == ".json" and not logged.is_run(path):
            side.routed.append(path)
        elif (not there or any(path.glob("results_*.json"))) and logged.is_run(path):
            side.evaluated.append(path)
        elif not there:
            raise ValueError(
                f"{path} is not something that a report shows; give folders with {' or '.join(kinds)}, lm-eval's "
                "results "
                "with their samples, or the file of `upcycle routing`"
            )
        for name in there:
            kinds[name].append(path)
        if METRICS in there:
            side.made.append(path)  # a training run may have upcycled its model as it loaded
    return side


# ---- answers to suites


@dataclass(frozen=True)
class Asked:
    """Hold runs of one suite that are the seeds of one model."""

    name: str
    suite: str
    folders: tuple[Path, ...]
    runs: tuple[Evaluation, ...]


def labelled(sides: Sequence[tuple[str, Sequence[Path]]]) -> list[Asked]:
    """Return the runs of each side by suite, under the side's name or else the model's name, with the folder if another
    model or group has the same name."""
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
    """Return the identity of a model: the same weights under another config.json are another model."""
    return (model.identity,) if model.identity else (model.fingerprint, model.dtype)


def place_of(run: Evaluation) -> str:
    """Return a model's name, with the parent folder if the name is only a seed."""
    parts = Path(run.model.source).parts
    return "/".join(parts[-2:]) if len(parts) > 1 and SEED.fullmatch(run.model.name) else run.model.name


def shared(names: Sequence[str]) -> str:
    """Return the common part of the names of seeds (copies, for copies/seed-0 and copies/seed-1), or all names if there
    is none."""
    if len(set(names)) == 1:
        return names[0]
    same = [len(set(letters)) == 1 for letters in zip(*names, strict=False)]
    start = names[0][: [*same, False].index(False)]
    start = re.sub(r"\d+$", "", start) if any(name[len(start) :][:1].isdecimal() for name in names) else start
    return re.sub(r"(^|[\W_]+)((seed|run)[\W_]*)?$", "", start) or ", ".join(names)


def comparisons(asked: Sequence[Asked]) -> list[Comparison]:
    """Compare every group with the first of its suite; all suites are one family for Holm's correction."""
    out = []
    for suite in dict.fromkeys(group.suite for group in asked):
        first, *others = [group for group in asked if group.suite == suite]
        found = compare_suites([group.folders for group in (first, *others)]) if others else []
        for each, group in zip(found, others, strict=True):
            a, b = replace(each.a, name=first.name), replace(each.b, name=group.name)
            out.append(replace(each, a=a, b=b))
    return suites.corrected(out)


def over_seeds(each: Sequence[list[Score]]) -> list[Score]:
    """Return the scores of a group of runs: the mean, from the lowest to the highest."""
    if len(each) == 1:
        return each[0]
    by_seed = [{(s.name, s.metric): s for s in mine} for mine in each]
    out = []
    for key in (key for key in by_seed[0] if all(key in mine for mine in by_seed)):
        values = [mine[key].value for mine in by_seed]
        ends = min(values), max(values)
        out.append(replace(by_seed[0][key], value=mean(values), low=ends[0], high=ends[1], seeds=len(values)))
    return out


def scores(folder: Path) -> list[Score]:
    """Return the scores of a run, each with its interval over items."""
    run, by_task = logged.load(folder), dict[str, list[Item]]()
    for item in run.items:
        by_task.setdefault(item.task, []).append(item)
    return [
        score(part, [item for task in part.tasks for item in by_task.get(task, ())], run.suite)
        for part in suites.parts(run, by_task)
    ]


def score(part: Part, items: Sequence[Item], suite: str = "") -> Score:
    metric, measure, name = part.metric, part.measure, part.part.name
    key, scored = f"{name} {metric}", [(item.task, item.scores[metric]) for item in items]
    value = measure.ratio([task for task, _ in scored])
    if value is None:
        each = [f"{item.task} {number}" for number, item in enumerate(items)]
        found = measure.interval([scored], [], each, intervals.generator("bootstrap", key))
        low, high = found or (math.nan, math.nan)
    else:
        sum_N, unit_N = measure.sums(scored).T
        if (unit_N == 1).all() and intervals.is_right(sum_N):
            low, high = intervals.wilson(float(sum_N.sum()), len(sum_N))
        else:
            low, high = intervals.bootstrap(sum_N, unit_N, value, key)
    guess = [1 / len(item.choices) for item in items if len(item.choices) > 1]
    chance = sum(guess) / len(guess) if guess and metric.startswith("acc") and len(guess) == len(items) else None
    return Score(
        name, part.part.title, metric, part.higher_is_better, part.headline, len(items), measure.value(scored),
        low, high, chance, suite,
    )  # fmt: skip


# ---- trainings


def read_arms(groups: Sequence[Sequence[Path]]) -> dict[str, list[Run]]:
    """Read the runs of each group, by the common part of their names, or by all of them."""
    by_all = read_runs(groups)
    short = [shared([run.name for run in runs]) for runs in by_all.values()]
    names = [name if short.count(name) == 1 else long for name, long in zip(short, by_all, strict=True)]
    return {name: [replace(run, arm=name) for run in runs] for name, runs in zip(names, by_all.values(), strict=True)}


def arm(runs: Sequence[Run], losses: Losses | None) -> Arm:
    ends = [run.spent.tokens for run in runs]
    return Arm(
        tuple(run.name for run in runs),
        average([run.at(end) for run, end in zip(runs, ends, strict=True)]),
        average([run.at(losses.tokens if losses else end) for run, end in zip(runs, ends, strict=True)]),
        max(run.memory_gb for run in runs),
        tuple(command(Path(run.folder)) for run in runs),
    )


def losses_of(arms: Arms) -> Losses | None:
    """Compare the losses of all arms with the first; return None unless all share a validation set."""
    sets = [set(run.losses) for runs in arms.values() for run in runs]
    if len(arms) < 2 or not set.intersection(*sets):
        return None
    suites.check_groups([[run.folder for run in runs] for runs in arms.values()])
    return compare_losses(arms)


def curves_of(arms: Arms) -> tuple[Bands, Bands]:
    """Return (curves of validation, differences to the first arm), over seeds."""
    every = [run.losses for runs in arms.values() for run in runs]
    sets = list(dict.fromkeys(name for found in every for name in found))
    both = [name for name in sets if all(name in found for found in every)]
    groups = {MEAN: both, **({name: [name] for name in sets} if len(sets) > 1 else {})}
    control = next(iter(arms), "")
    alike = {name: runs for name, runs in arms.items() if len(runs) == len(arms[control])}
    drawn = {what: loss_bands(arms, inside) for what, inside in groups.items() if inside}
    return drawn, {what: difference_bands(alike, control, groups[what]) for what in drawn}


# ---- how experts are used, and plans


def named(files: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Read files of `upcycle routing`, by the name of their checkpoint."""
    found: dict[str, dict[str, Any]] = {}
    for file in files:
        value = read_routing(file)
        name = Path(value["checkpoint"]).name
        found[name if name not in found else f"{name} ({file.stem})"] = value
    return found


def plans(sides: Sequence[Sequence[Path]]) -> dict[str, Rows]:
    """Return the plan of each folder, once if the seeds of a group share it."""
    every = [folder for folders in sides for folder in folders]
    names = [folder.name for folder in every]
    out: dict[str, Rows] = {}
    for folders in sides:
        mine: list[Rows] = []
        for folder in folders:
            rows = plan_rows(folder)
            if rows and rows not in mine:
                mine.append(rows)
                out[folder.name if names.count(folder.name) == 1 else str(folder)] = rows
    return out


def plan_rows(folder: Path) -> Rows:
    """Return the table of `upcycle plan`, without sizes if the dense model is not here."""
    if rows := standalone.plan_rows(folder):
        return rows
    manifest = read_manifest(folder)
    if manifest is None or "config" not in manifest:
        return []
    try:
        with ExitStack() as stack:
            config = build(UpcycleConfig, renamed(manifest["config"]))
            sources = [config.source or config.donors[0], *config.donors]
            checkpoints = [stack.enter_context(at_hand(name)) for name in sources]
            return list(card.rows(plan.build(config, checkpoints, {})))
    except (ValueError, OSError) as error:
        stated = [(name, str(value)) for name, value in manifest["config"].items() if name != "output"]
        return [*stated, ("note", f"sizes are left out: {' '.join(str(error).split())}")]


def at_hand(name: str) -> Checkpoint:
    """Open the folder of a dense model, and never the hub, because a manifest may name any repository."""
    if not name or not Path(name).is_dir():
        raise ValueError(f"{name!r} is not a folder here, and a report does not fetch models")
    return Checkpoint(Path(name))


# ---- sources of the numbers


def sources(facts: Facts) -> Iterator[tuple[str, Rows]]:
    """Yield the settings of each evaluation and each training, and the model of each routing file."""
    found = set[str]()
    for run in facts.models:  # seeds may share a name
        title = f"{run.model.name}, {run.suite}"
        title = title if title not in found else f"{title} ({run.model.source})"
        found.add(title)
        yield title, provenance(run)
    yield from ((f"{name}, training", rows) for name, rows in facts.settings.items() if rows)
    for name, measured in facts.routing.items():
        tokens = ", ".join(f"{domain} {count:,}" for domain, count in measured["tokens"].items())
        start = [("compared with", measured["start"])] if measured.get("start") else []
        yield f"{name}, routing", [("model", measured["checkpoint"]), ("tokens", tokens), *start]


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
