"""Compare runs of a suite item by item: the difference in each task's metric over seeds, and which items flipped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from evaluation.judge import intervals, logged, results
from evaluation.judge import metrics as measures
from evaluation.judge.metrics import Measure
from evaluation.judge.results import Evaluation, Item
from evaluation.judge.seeds import Paired, paired, together
from evaluation.judge.words import interval, signed

PREFERRED = (
    "acc_norm",
    "exact_match",
    "acc",
    "bits_per_byte",
)  # one metric judges a task: the first of these that it has
Name = Path | str
Pairs = Sequence[tuple[Item, Item]]  # the answers of A and B


@dataclass(frozen=True)
class Difference:
    name: str  # the name of a task or a group
    title: str
    metric: str
    higher_is_better: bool
    headline: bool  # true if it is not part of another group
    items: int
    a: float  # mean over seeds, like b and the difference
    b: float
    difference: float
    low: float = math.nan  # 95 % interval over seeds; nan with fewer than three
    high: float = math.nan
    p: float = math.nan  # over seeds, like the interval
    only_a: int | None = None  # items that only A has right, with one run each, if items are right or wrong
    only_b: int | None = None
    p_holm: float = math.nan
    seeds: int = 1
    clusters: int = 0  # the number of clusters of items
    # 95 % interval over clusters of items, for these same models; nan with too few clusters
    items_low: float = math.nan
    items_high: float = math.nan

    @property
    def paired(self) -> Paired:
        """Return the difference in the form that seeds.py judges."""
        low, high, p, p_holm = (None if math.isnan(x) else x for x in (self.low, self.high, self.p, self.p_holm))
        return Paired(self.seeds, self.difference, low, high, p, p_holm)

    @property
    def verdict(self) -> str:
        return self.paired.verdict(self.higher_is_better)

    @property
    def shown(self) -> tuple[float, float]:
        """Return the interval to draw: over seeds, or else over items, or else only the difference."""
        ends = ((self.low, self.high), (self.items_low, self.items_high))
        return next((pair for pair in ends if not math.isnan(pair[0])), (self.difference, self.difference))

    @property
    def over_items(self) -> str:
        if math.isnan(self.items_low):
            return f"too few ({self.clusters})"
        return f"{signed(self.items_low, self.metric)} to {signed(self.items_high, self.metric)}"

    @property
    def interval(self) -> str:
        """Return the 95 % interval in words: over seeds, or else over items, which is only a diagnostic."""
        form = partial(signed, metric=self.metric)
        return interval(self.paired, form) or f"over items, for these models only: {self.over_items}"


@dataclass(frozen=True)
class Flip:
    task: str
    doc: int
    gained: bool  # A was wrong and B is right
    target: str
    a: str
    b: str
    swing: float  # change in nats of the right choice's log-probability minus the best wrong one's


@dataclass(frozen=True)
class Comparison:
    a: results.Model
    b: results.Model
    differences: tuple[Difference, ...]
    flips: tuple[Flip, ...]
    suite: str
    notes: tuple[str, ...] = ()


def compare_suites(groups: Sequence[Sequence[Name]], cluster: str = "") -> list[Comparison]:
    """Compare every other group of runs with the first, seed by seed."""
    check_groups(groups)
    runs = [[logged.load(folder) for folder in group] for group in groups]
    first = groups[0][0]
    known = sorted({name for item in runs[0][0].items for name in item.clusters})
    if cluster and cluster not in known:
        raise ValueError(
            f"cluster={cluster}: no document of {first} has that key (its keys are: {', '.join(known) or 'none'}); "
            "name "
            "one of these or leave cluster out"
        )
    for group, group_runs in zip(groups, runs, strict=True):
        for folder, run in zip(group, group_runs, strict=True):
            check_same(first, folder, runs[0][0], run)
        check_other({folder: run.model.fingerprint for folder, run in zip(group, group_runs, strict=True)})
    return compared(runs, cluster)


def compared(runs: Sequence[Sequence[Evaluation]], cluster: str = "") -> list[Comparison]:
    """Compare every other group with the first; the runs are read and checked already."""
    return corrected([one(runs[0], group, cluster) for group in runs[1:]])


def corrected(found: Sequence[Comparison]) -> list[Comparison]:
    """Fill in p_holm; all headlines of all groups are one family, and their parts another."""
    rows = [list(comparison.differences) for comparison in found]
    for headline in (True, False):
        places = [(i, j) for i, row in enumerate(rows) for j, d in enumerate(row) if d.headline == headline]
        judged = together([replace(rows[i][j], p_holm=math.nan).paired for i, j in places])
        for (i, j), each in zip(places, judged, strict=True):
            rows[i][j] = replace(rows[i][j], p_holm=math.nan if each.p_holm is None else each.p_holm)
    return [replace(c, differences=tuple(row)) for c, row in zip(found, rows, strict=True)]


# ---- checks


def check_groups(groups: Sequence[Sequence[Name]]) -> None:
    """Raise a ValueError unless all groups have the same number of folders, and no folder twice."""
    for group in groups[1:]:
        if len(group) != len(groups[0]):
            raise ValueError(
                f"{' '.join(map(str, groups[0]))} are {len(groups[0])} and {' '.join(map(str, group))} are "
                f"{len(group)}; give as many runs of each, in the same order of seeds"
            )
    for group in groups:
        places = [Path(folder).resolve() for folder in group]
        if twice := [folder for folder, place in zip(group, places, strict=True) if places.count(place) > 1]:
            raise ValueError(f"{twice[0]} is there twice in one group; give a different training for each seed")


def check_other(fingerprints: Mapping[Name, str]) -> None:
    """Raise a ValueError if two runs of a group have the same weights, because seeds would seem to have no spread."""
    seen: dict[str, Name] = {}
    for folder, mark in fingerprints.items():
        if mark in seen:
            raise ValueError(f"{seen[mark]} and {folder} have the same weights; give trainings with different seeds")
        seen[mark] = folder


def check_same(a: Name, b: Name, run_a: Evaluation, run_b: Evaluation) -> None:
    """Raise a ValueError about the first task, item or prompt that differs between the two runs."""
    for task in sorted(run_a.tasks.keys() ^ run_b.tasks.keys()):
        has, lacks = (a, b) if task in run_a.tasks else (b, a)
        raise ValueError(f"{has} has the task {task} and {lacks} does not; run the same suite with the same options")
    for task in run_a.tasks:
        shots = run_a.tasks[task].fewshot, run_b.tasks[task].fewshot
        if shots[0] != shots[1]:
            raise ValueError(f"{task} has {shots[0]} examples in the prompts of {a} and {shots[1]} in those of {b}")
    items_a, items_b = keyed(run_a), keyed(run_b)
    if only := items_a.keys() ^ items_b.keys():
        task, _, doc = min(only, key=lambda key: (key[0], key[2]))
        raise ValueError(
            f"{a} and {b} have different items: {len(only)} are in only one of them, the first is {doc} of {task}; "
            "use the same data and the same limit"
        )
    for key, item in items_a.items():
        if (item.prompt_hash, item.target) != (items_b[key].prompt_hash, items_b[key].target):
            what = "target" if item.prompt_hash == items_b[key].prompt_hash else "prompt"
            raise ValueError(
                f"item {item.doc} of {item.task} has another {what} in {b} than in {a}, so the two had "
                "different prompts; run both with the same suite and version"
            )


# ---- two groups of runs


@dataclass(frozen=True)
class Part:
    """Hold a task or a group of a run, and the metric that judges it."""

    part: results.Task | results.Group
    tasks: tuple[str, ...]
    headline: bool
    metric: str
    measure: Measure
    higher_is_better: bool


def parts(run: Evaluation, answers: Mapping[str, Sequence[Item]]) -> list[Part]:
    """List the groups and then the tasks that can be judged; `answers` holds every item that counts, by task."""
    every: list[tuple[results.Task | results.Group, tuple[str, ...], bool]] = [
        *((group, group.tasks, not is_inner(group, run)) for group in run.groups.values()),
        *((task, (task.name,), not task.groups) for task in run.tasks.values()),
    ]
    found = []
    for part, tasks, headline in every:
        if judged := judged_by(part, run, [item for task in tasks for item in answers.get(task, ())]):
            higher = run.tasks[tasks[0]].higher_is_better.get(judged[0], True)
            found.append(Part(part, tasks, headline, *judged, higher))
    return found


def is_inner(group: results.Group, run: Evaluation) -> bool:
    """Return whether another group has all tasks of the group, and more."""
    return any(set(group.tasks) < set(other.tasks) for other in run.groups.values())


def judged_by(part: results.Task | results.Group, run: Evaluation, items: Sequence[Item]) -> tuple[str, Measure] | None:
    """Choose a metric that every item has: the first of PREFERRED, or else the part's first."""
    shared = {
        name: measure
        for name in part.metrics
        if all(name in item.scores for item in items) and (measure := measures.of(part, name, run.tasks))
    }
    return next(((name, shared[name]) for name in (*PREFERRED, *shared) if name in shared), None) if items else None


def one(runs_a: Sequence[Evaluation], runs_b: Sequence[Evaluation], cluster: str) -> Comparison:
    """Compare two groups of runs; pair their runs in order."""
    run, by_task = runs_a[0], dict[str, list[tuple[str, str, int]]]()
    for item in run.items:  # in one order, so that an item has the same place in all seeds
        by_task.setdefault(item.task, []).append(item.key)
    sides = [(keyed(a), keyed(b)) for a, b in zip(runs_a, runs_b, strict=True)]
    answers = {task: [side[key] for key in keys for side in sides[0]] for task, keys in by_task.items()}
    differences, flips = [], []
    for part in parts(run, answers):
        keys = [key for task in part.tasks for key in by_task.get(task, ())]
        each = [[(a[key], b[key]) for key in keys] for a, b in sides]
        differences.append(differ(part, each, cluster))
        if len(each) == 1 and isinstance(part.part, results.Task):
            flips += [found for a, b in each[0] if (found := flip(a, b, part.metric))]
    flips.sort(key=lambda found: -abs(found.swing))
    notes = tuple(dict.fromkeys(note for each_run in (*runs_a, *runs_b) for note in each_run.notes))
    a, b = (called([each_run.model for each_run in group]) for group in (runs_a, runs_b))
    return Comparison(a, b, tuple(differences), tuple(flips), run.suite, notes)


def keyed(run: Evaluation) -> dict[tuple[str, str, int], Item]:
    return {item.key: item for item in run.items}


def called(models: Sequence[results.Model]) -> results.Model:
    """Return the first model, named after all of them."""
    return replace(models[0], name=", ".join(dict.fromkeys(model.name for model in models)))


def differ(part: Part, each: Sequence[Pairs], cluster: str) -> Difference:
    """Judge the difference of a part's metric; `each` holds the pairs of items of each seed."""
    measure, metric = part.measure, part.metric
    a_SN, b_SN = ([[(pair[s].task, pair[s].scores[metric]) for pair in pairs] for pairs in each] for s in (0, 1))
    a_S, b_S = ([measure.value(scored) for scored in side] for side in (a_SN, b_SN))
    items, cluster_N = len(each[0]), clusters(each[0], cluster)
    over_items: tuple[float, float] | None
    right, only_a, only_b = False, None, None
    if value := measure.ratio([task for task, _ in a_SN[0]]):
        (a_N, unit_N), (b_N, _) = (np.mean([measure.sums(scored) for scored in side], 0).T for side in (a_SN, b_SN))
        right = bool((unit_N == 1).all()) and all(
            score in (0.0, 1.0) for side in (a_SN, b_SN) for scored in side for _, score in scored
        )
        over_items = intervals.difference(a_N, b_N, unit_N, cluster_N, value)
        if right and len(each) == 1:
            only_a, only_b = int((a_N > b_N).sum()), int((b_N > a_N).sum())
    else:  # not a function of sums: every draw needs all items
        rng = intervals.generator("bootstrap", f"{part.part.name} {metric}")
        over_items = measure.interval(b_SN, a_SN, cluster_N, rng)
    seeds = paired([b - a for a, b in zip(a_S, b_S, strict=True)], grain=1 / items if right else 0.0)
    a, b = (math.fsum(side) / len(each) for side in (a_S, b_S))
    low, high, p = (math.nan if found is None else found for found in (seeds.low, seeds.high, seeds.p))
    items_low, items_high = over_items or (math.nan, math.nan)
    return Difference(
        part.part.name, part.part.title, metric, part.higher_is_better, part.headline, items, a, b, seeds.mean,
        low, high, p, only_a, only_b, seeds=len(each), clusters=len(set(cluster_N)),
        items_low=items_low, items_high=items_high,
    )  # fmt: skip


def clusters(pairs: Pairs, key: str) -> list[str]:
    """Return each item's cluster: the value of `key` in its document, by default of the first key in the samples
    (results.Item.clusters), or else the document itself."""
    out = []
    for item, _ in pairs:
        name = key or next(iter(item.clusters), "")
        out.append(f"{item.task} {name} {item.clusters.get(name, item.doc_hash)}")
    return out


# ---- items that flipped


def flip(a: Item, b: Item, metric: str) -> Flip | None:
    """Describe an item that only one of two models has right; return None for any other item."""
    before, after = a.scores[metric], b.scores[metric]
    if before == after or not all(score in (0.0, 1.0) for score in (before, after)):
        return None
    swing = margin(b) - margin(a) if len(a.choices) > 1 else 0.0
    return Flip(a.task, a.doc, after > before, right(a), answer(a, metric), answer(b, metric), swing)


def right(item: Item) -> str:
    """Return the text of the right answer; the target is a choice or its number."""
    if item.choices and item.target not in item.choices and item.target.isdecimal():
        return dict(enumerate(item.choices)).get(int(item.target), item.target)
    return item.target


def answer(item: Item, metric: str) -> str:
    """Return the text that the model chose or wrote."""
    if len(item.choices) < 2:
        return item.text or ("as the target" if all(item.greedy) else "not the target")
    lengths = [max(len(choice), 1) if metric == "acc_norm" else 1 for choice in item.choices]
    return item.choices[int(np.argmax(np.array(item.logprobs) / lengths))]


def margin(item: Item) -> float:
    """Return the log-probability of the right choice minus that of the best wrong one."""
    target = right(item)
    at = item.choices.index(target) if target in item.choices else 0
    return item.logprobs[at] - max(lp for i, lp in enumerate(item.logprobs) if i != at)
