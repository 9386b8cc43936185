"""Judge whether B is better than A over seeds: differences, intervals, corrected p-values, and what flipped."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluation.judge import intervals, logged, results
from evaluation.judge import metrics as measures
from evaluation.judge.metrics import Measure
from evaluation.judge.results import Evaluation, Item
from evaluation.judge.seeds import LEAST, Paired, holm, paired, together
from training.observe import plots
from upcycle.converting.card import inert
from upcycle.io import strict

DRAWS = 10_000
WIDTH = 60  # characters of an answer that are shown
CHUNK = 1 << 22  # numbers drawn at a time
PREFERRED = ("acc_norm", "exact_match", "acc", "bits_per_byte")  # a task is judged by one metric: the first it has
Array = NDArray[np.float64]


# ---- statistics: arrays in, numbers out


def bootstrap(a_N: Array, b_N: Array, unit_N: Array, value: Callable[[Array], Array], key: str) -> tuple[float, float]:
    """95 % interval of value(sum b / sum units) - value(sum a / sum units), items drawn anew with replacement."""
    table_N3 = np.stack([a_N, b_N, unit_N], 1)
    rng, found = generator("bootstrap", key), []
    for sums in resampled(table_N3, rng):
        a, b, unit = sums.T
        found.append(value(b / unit) - value(a / unit))
    low, high = np.percentile(np.concatenate(found), (2.5, 97.5))
    return float(low), float(high)


def resampled(table_NC: Array, rng: np.random.Generator) -> Iterator[Array]:
    """Sums over items drawn with replacement, as many as there are: [draws, C], some draws at a time."""
    rows, count = np.unique(table_NC, axis=0, return_counts=True)
    items = len(table_NC)
    if len(rows) < items / 8:  # few kinds, as right and wrong: their counts are multinomial, much quicker to draw
        yield rng.multinomial(items, count / items, DRAWS) @ rows
        return
    for draws in chunks(items):
        yield table_NC[rng.integers(0, items, (draws, items))].sum(1)


def generator(*key: str) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "big"))


def chunks(width: int) -> Iterable[int]:
    size = max(1, CHUNK // max(width, 1))
    return [min(size, DRAWS - start) for start in range(0, DRAWS, size)]


# ---- two runs of a suite


@dataclass(frozen=True)
class Difference:
    name: str  # of a task or a group
    title: str
    metric: str
    higher_is_better: bool
    headline: bool  # not part of another group
    items: int
    a: float  # mean over seeds, as are b and the difference
    b: float
    difference: float
    low: float = math.nan  # 95 % interval over seeds; fewer than three have none
    high: float = math.nan
    p: float = math.nan  # over seeds, as the interval
    only_a: int | None = None  # items that only A has right, where an item is right or wrong, of one run each
    only_b: int | None = None
    p_holm: float = math.nan
    seeds: int = 1
    clusters: int = 0  # that the items are of
    items_low: float = math.nan  # 95 % interval over clusters of items, of these very models; none of too few clusters
    items_high: float = math.nan

    @property
    def verdict(self) -> str:
        if self.seeds < LEAST:
            return f"{'one run' if self.seeds == 1 else f'{self.seeds} runs'} each: no verdict"
        if self.p_holm > 0.05:
            return "no difference shown"
        return "better" if (self.difference > 0) == self.higher_is_better else "worse"

    @property
    def shown(self) -> tuple[float, float]:
        """The interval to draw: over seeds, else over items, else the difference alone."""
        pairs = ((self.low, self.high), (self.items_low, self.items_high))
        return next((pair for pair in pairs if not math.isnan(pair[0])), (self.difference, self.difference))

    @property
    def over_items(self) -> str:
        if math.isnan(self.items_low):
            return f"too few ({self.clusters})"
        return f"{signed(self.items_low, self.metric)} to {signed(self.items_high, self.metric)}"

    @property
    def interval(self) -> str:
        """The 95 % interval in words: over seeds, else over items, which is no more than a diagnostic."""
        if not math.isnan(self.low):
            low, high = signed(self.low, self.metric), signed(self.high, self.metric)
            return f"95 % interval over {self.seeds} seeds {low} to {high}"
        return f"over items, for these models alone: {self.over_items}"


@dataclass(frozen=True)
class Flip:
    task: str
    doc: int
    gained: bool  # A was wrong and B is right
    target: str
    a: str
    b: str
    swing: float  # change of the right choice's log-probability against the best wrong one's, in nats


@dataclass(frozen=True)
class Comparison:
    a: results.Model
    b: results.Model
    differences: tuple[Difference, ...]
    flips: tuple[Flip, ...]
    suite: str
    notes: tuple[str, ...] = ()


Name = Path | str
Items = Mapping[tuple[str, str, int], Item]


def compare(groups: Sequence[Name | Sequence[Name]], cluster: str = "") -> list[Comparison]:
    """Compares every other group of runs with the first; a folder is a group of one."""
    folders = as_groups(groups)
    runs = [[logged.load(folder) for folder in group] for group in folders]
    items = [[keyed(folder) for folder in group] for group in folders]
    first, mine = folders[0][0], items[0][0]
    known = sorted({name for item in mine.values() for name in item.clusters})
    if cluster and cluster not in known:
        raise ValueError(
            f"cluster={cluster}: no document of {first} has that key (kept are: {', '.join(known) or 'none'}); name "
            "one of those or leave cluster out"
        )
    for group, group_runs, group_items in zip(folders, runs, items, strict=True):
        for folder, run, others in zip(group, group_runs, group_items, strict=True):
            check_same(first, folder, runs[0][0], run, mine, others)
        check_other({folder: run.model.fingerprint for folder, run in zip(group, group_runs, strict=True)})
    return compared(runs, items, cluster)


def compared(runs: Sequence[Sequence[Evaluation]], items: Sequence[Sequence[Items]], cluster: str) -> list[Comparison]:
    sides = zip(runs[1:], items[1:], strict=True)
    return corrected([one(runs[0], group, items[0], mine, cluster) for group, mine in sides])


def as_groups(groups: Sequence[Name | Sequence[Name]]) -> list[list[Name]]:
    """The folders of each group. ValueError unless all groups have as many, each folder once."""
    found = [[group] if isinstance(group, Path | str) else list(group) for group in groups]
    for group in found[1:]:
        if len(group) != len(found[0]):
            raise ValueError(
                f"{' '.join(map(str, found[0]))} are {len(found[0])} and {' '.join(map(str, group))} are {len(group)}; "
                "give as many runs of each, in the same order of seeds"
            )
    for group in found:
        places = [Path(folder).resolve() for folder in group]
        if twice := [folder for folder, place in zip(group, places, strict=True) if places.count(place) > 1]:
            raise ValueError(f"{twice[0]} is there twice in one group; a seed is a training of its own")
    return found


def check_other(fingerprints: Mapping[Name, str]) -> None:
    """Raises ValueError if two runs of a group are one model: it would seem to have no spread over seeds."""
    seen: dict[str, Name] = {}
    for folder, mark in fingerprints.items():
        if mark in seen:
            raise ValueError(
                f"{seen[mark]} and {folder} are one model, the same weights; give trainings of other seeds"
            )
        seen[mark] = folder


def keyed(folder: Name) -> Items:
    return {item.key: item for item in logged.load(folder).items}


def check_same(
    a: Path | str, b: Path | str, run_a: Evaluation, run_b: Evaluation, items_a: Mapping[Any, Item], items_b: Any
) -> None:
    """Raises ValueError about the first task, item or prompt that the two runs do not share."""
    for task in sorted(run_a.tasks.keys() ^ run_b.tasks.keys()):
        has, lacks = (a, b) if task in run_a.tasks else (b, a)
        raise ValueError(f"{has} has the task {task} and {lacks} has not; run the same suite with the same options")
    for task in run_a.tasks:
        shots = run_a.tasks[task].fewshot, run_b.tasks[task].fewshot
        if shots[0] != shots[1]:
            raise ValueError(f"{task} has {shots[0]} examples in the prompts of {a} and {shots[1]} in those of {b}")
    if only := items_a.keys() ^ items_b.keys():
        task, _, doc = min(only, key=lambda key: (key[0], key[2]))
        raise ValueError(
            f"{a} and {b} do not have the same items: {len(only)} are in one alone, the first is {doc} of {task}; "
            "use the same data and the same limit"
        )
    for key, item in items_a.items():
        if (item.prompt_hash, item.target) != (items_b[key].prompt_hash, items_b[key].target):
            what = "target" if item.prompt_hash == items_b[key].prompt_hash else "prompt"
            raise ValueError(
                f"item {item.doc} of {item.task} has another {what} in {b} than in {a}, so the two were asked "
                "different things; run both with the same suite and version"
            )


def one(
    runs_a: Sequence[Evaluation], runs_b: Sequence[Evaluation], items_a: Sequence[Items], items_b: Sequence[Items],
    cluster: str,
) -> Comparison:  # fmt: skip
    """Compares two groups of runs, the first of one with the first of the other and so on."""
    run = runs_a[0]
    each: list[dict[str, list[tuple[Item, Item]]]] = []  # by seed, by task
    for of_a, of_b in zip(items_a, items_b, strict=True):
        pairs: dict[str, list[tuple[Item, Item]]] = {name: [] for name in run.tasks}
        for key in items_a[0]:  # in one order, so that an item has one place in all seeds
            pairs[of_a[key].task].append((of_a[key], of_b[key]))
        each.append(pairs)
    differences, flips = [], []
    for group in run.groups.values():
        joined = [[pair for task in group.tasks for pair in pairs[task]] for pairs in each]
        if judged := judged_by(group, run, joined[0]):
            higher, headline = run.tasks[group.tasks[0]].higher_is_better.get(judged[0], True), not is_inner(group, run)
            differences.append(differ(group.name, group.title, *judged, higher, headline, joined, cluster))
    for task in run.tasks.values():
        mine = [pairs[task.name] for pairs in each]
        if judged := judged_by(task, run, mine[0]):
            higher = task.higher_is_better.get(judged[0], True)
            differences.append(differ(task.name, task.title, *judged, higher, not task.groups, mine, cluster))
            if len(each) == 1:
                flips += [found for a, b in mine[0] if (found := flip(a, b, judged[0]))]
    flips.sort(key=lambda found: -abs(found.swing))
    notes = tuple(dict.fromkeys(note for each_run in (*runs_a, *runs_b) for note in each_run.notes))
    a, b = (called([each_run.model for each_run in group]) for group in (runs_a, runs_b))
    return Comparison(a, b, tuple(differences), tuple(flips), run.suite, notes)


def called(models: Sequence[results.Model]) -> results.Model:
    """The first model, with the names of all."""
    return replace(models[0], name=", ".join(dict.fromkeys(model.name for model in models)))


def is_inner(group: results.Group, run: Evaluation) -> bool:
    """Whether another group has all its tasks, and more."""
    return any(set(group.tasks) < set(other.tasks) for other in run.groups.values())


def judged_by(
    part: results.Task | results.Group, run: Evaluation, pairs: Sequence[tuple[Item, Item]]
) -> tuple[str, Measure] | None:
    """The metric to judge by, of those that every item has: the first of PREFERRED, else the part's first."""
    shared = {
        name: measure
        for name in part.metrics
        if all(name in a.scores and name in b.scores for a, b in pairs)
        and (measure := measures.of(part, name, run.tasks))
    }
    return next(((name, shared[name]) for name in (*PREFERRED, *shared) if name in shared), None) if pairs else None


def differ(
    name: str, title: str, metric: str, measure: Measure, higher: bool, headline: bool,
    each: Sequence[Sequence[tuple[Item, Item]]], cluster: str,
) -> Difference:  # fmt: skip
    """The difference in a metric; `each` has the pairs of items of each seed."""
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
    else:  # no sums give it: all items are needed for every draw
        over_items = measure.interval(b_SN, a_SN, cluster_N, generator("bootstrap", f"{name} {metric}"))
    seeds = paired([b - a for a, b in zip(a_S, b_S, strict=True)], grain=1 / items if right else 0.0)
    a, b = (math.fsum(side) / len(each) for side in (a_S, b_S))
    low, high, p = (math.nan if found is None else found for found in (seeds.low, seeds.high, seeds.p))
    items_low, items_high = over_items or (math.nan, math.nan)
    return Difference(
        name, title, metric, higher, headline, items, a, b, seeds.mean, low, high, p, only_a, only_b,
        seeds=len(each), clusters=len(set(cluster_N)), items_low=items_low, items_high=items_high,
    )  # fmt: skip


def clusters(pairs: Sequence[tuple[Item, Item]], key: str) -> list[str]:
    """What each item shares with others: what the document has under `key`, by default under the first key that is kept
    of it (results.Item.clusters), else the document itself."""
    out = []
    for item, _ in pairs:
        name = key or next(iter(item.clusters), "")
        out.append(f"{item.task} {name} {item.clusters.get(name, item.doc_hash)}")
    return out


def flip(a: Item, b: Item, metric: str) -> Flip | None:
    before, after = a.scores[metric], b.scores[metric]
    if before == after or not all(score in (0.0, 1.0) for score in (before, after)):
        return None
    swing = margin(b) - margin(a) if len(a.choices) > 1 else 0.0
    return Flip(a.task, a.doc, after > before, right(a), answer(a, metric), answer(b, metric), swing)


def right(item: Item) -> str:
    """The right answer's text. A target is a choice or its number."""
    if item.choices and item.target not in item.choices and item.target.isdecimal():
        return dict(enumerate(item.choices)).get(int(item.target), item.target)
    return item.target


def answer(item: Item, metric: str) -> str:
    if len(item.choices) < 2:
        return item.text or ("as the target" if all(item.greedy) else "not the target")
    lengths = [max(len(choice), 1) if metric == "acc_norm" else 1 for choice in item.choices]
    return item.choices[int(np.argmax(np.array(item.logprobs) / lengths))]


def margin(item: Item) -> float:
    target = right(item)
    at = item.choices.index(target) if target in item.choices else 0
    return item.logprobs[at] - max(lp for i, lp in enumerate(item.logprobs) if i != at)


def corrected(found: Sequence[Comparison]) -> list[Comparison]:
    """Fills in p_holm. A family is all comparisons of every group that was given, headlines and parts apart."""
    rows = [list(comparison.differences) for comparison in found]
    for headline in (True, False):
        every = [(i, j) for i, row in enumerate(rows) for j, d in enumerate(row) if d.headline == headline]
        places = [(i, j) for i, j in every if not math.isnan(rows[i][j].p)]
        for (i, j), p in zip(places, holm([rows[i][j].p for i, j in places]), strict=True):
            rows[i][j] = replace(rows[i][j], p_holm=p)
    return [replace(c, differences=tuple(row)) for c, row in zip(found, rows, strict=True)]


# ---- training runs


SAME = 0.01  # share of a run's tokens by which it may be read before its end and still be read there


@dataclass(frozen=True)
class Loss:
    """One validation set of two groups of runs, at a point that all reached; means over seeds."""

    domain: str
    a: float
    b: float
    difference: float
    by_seed: tuple[float, ...]  # differences


@dataclass(frozen=True)
class Losses:
    runs: tuple[str, ...]  # names of groups
    flops_per_token: tuple[float | None, ...]
    tokens: float  # where they are compared
    flops: float | None
    at_equal_tokens: Mapping[str, tuple[Loss, ...]] = field(default_factory=dict)  # by group, the first left out
    at_equal_flops: Mapping[str, tuple[Loss, ...]] = field(default_factory=dict)
    midway: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # tokens | FLOPs -> runs read before their end

    def equal(self, what: str) -> str:
        """Says what is equal, tokens or FLOPs, and whether a loss is interpolated for that."""
        return f"equal {what}, interpolated" if self.midway.get(what) else f"equal {what}"

    def over_sets(self) -> dict[tuple[str, str], Paired]:
        """The difference of the mean over sets, over seeds, corrected by Holm: by (tokens | FLOPs, group)."""
        return {key: found for key, (found, _) in self._judged.items()}

    def verdict(self, what: str, name: str) -> str:
        """Says how far a group is from the first at equal tokens or FLOPs, on the mean of the sets."""
        seeds, judged = self._judged[what, name]
        if seeds.low is None or seeds.high is None or seeds.p_holm is None:
            return f"{seeds.mean:+.4f}, {'one run' if seeds.seeds == 1 else f'{seeds.seeds} runs'} each: no verdict"
        interval = f"95 % interval over {seeds.seeds} seeds {seeds.low:+.4f} to {seeds.high:+.4f}"
        p = f"p {p_text(seeds.p_holm)}" + f", corrected by Holm for {judged} comparisons" * (judged > 1)
        return f"{seeds.mean:+.4f}, {interval}, {p}: {seeds.verdict()}"

    @cached_property
    def _judged(self) -> dict[tuple[str, str], tuple[Paired, int]]:
        """(the difference, with how many it is judged). Where a token costs as much, equal FLOPs are equal tokens: one
        comparison, not two."""
        sides = (("tokens", self.at_equal_tokens), ("FLOPs", self.at_equal_flops))
        rows = {(what, name): over_sets(found) for what, by_run in sides for name, found in by_run.items()}
        marks = {key: tuple(round(difference, 9) for difference in found) for key, found in rows.items()}
        distinct = list(dict.fromkeys(marks.values()))
        first = [next(rows[key] for key, mark in marks.items() if mark == each) for each in distinct]
        corrected = dict(zip(distinct, together([paired(each) for each in first]), strict=True))
        return {key: (corrected[mark], len(distinct)) for key, mark in marks.items()}


def compare_losses(groups: Sequence[Name | Sequence[Name]]) -> Losses:
    folders = as_groups(groups)
    read_runs = iter(plots.read_runs([Path(folder) for group in folders for folder in group]))
    by_group = [[next(read_runs) for _ in group] for group in folders]
    runs = [run for group in by_group for run in group]
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        raise ValueError(f"two of the runs are called {max(names, key=names.count)}; rename the folder of one")
    sets = [set(run.keys(plots.VALID)) for run in runs]
    domains = sorted(set.intersection(*sets))
    if not domains:
        raise ValueError(
            f"{' and '.join(run.name for run in runs)} have no validation set in common ("
            f"{'; '.join(', '.join(sorted(names)) or 'none' for names in sets)}); name the same under data.valid"
        )
    reached = {run.name: max(run.points(f"valid/{domain}/loss")[0][-1] for domain in domains) for run in runs}
    ends = {
        run.name: reached[run.name] if is_whole(Path(folder), run) else math.inf
        for run, folder in zip(runs, (folder for group in folders for folder in group), strict=True)
    }
    rates = {run.name: flops_per_token(run) for run in runs}
    flops, by_flops = None, dict[str, tuple[Loss, ...]]()
    at = {"tokens": dict.fromkeys(reached, min(reached.values()))}
    if all(rates.values()):
        flops = min((rates[name] or 0) * last for name, last in reached.items())
        at["FLOPs"] = {name: flops / (rate or 1) for name, rate in rates.items()}
        by_flops = losses_at(by_group, domains, at["FLOPs"])
    midway = {
        what: tuple(name for name, tokens in places.items() if tokens < (1 - SAME) * ends[name])
        for what, places in at.items()
    }
    means = [mean_rate([rates[run.name] for run in group]) for group in by_group]
    by_tokens = losses_at(by_group, domains, at["tokens"])
    called_by = tuple(map(group_name, by_group))
    return Losses(called_by, tuple(means), min(reached.values()), flops, by_tokens, by_flops, midway)


def is_whole(folder: Path, run: plots.Curves) -> bool:
    """Whether the run's last line is the end of its schedule; without a config nobody knows."""
    config = folder / "config.json"
    if not config.is_file():
        return False
    steps: int = strict.held(strict.read_object(config).get("steps"), strict.Count, f"{config}.steps")
    return bool(run.rows[-1]["step"] >= steps)


def group_name(runs: Sequence[plots.Curves]) -> str:
    return ", ".join(run.name for run in runs)


def mean_rate(rates: Sequence[float | None]) -> float | None:
    known = [rate for rate in rates if rate]
    return math.fsum(known) / len(known) if known and len(known) == len(rates) else None


def flops_per_token(run: plots.Curves) -> float | None:
    row = next((row for row in reversed(run.rows) if row.get("flops") and row.get("tokens")), None)
    return None if row is None else row["flops"] / row["tokens"]


def losses_at(
    groups: Sequence[Sequence[plots.Curves]], domains: Sequence[str], tokens: Mapping[str, float]
) -> dict[str, tuple[Loss, ...]]:
    """Losses at each run's `tokens` beside the first group's; between two validations on the straight line."""

    def losses(group: Sequence[plots.Curves], domain: str) -> list[float]:
        return [float(np.interp(tokens[run.name], *run.points(f"valid/{domain}/loss"))) for run in group]

    found = {}
    for group in groups[1:]:
        rows = []
        for domain in domains:
            a, b = losses(groups[0], domain), losses(group, domain)
            apart = tuple(y - x for x, y in zip(a, b, strict=True))
            means = [math.fsum(each) / len(a) for each in (a, b, apart)]
            rows.append(Loss(domain, means[0], means[1], means[2], apart))
        found[group_name(group)] = tuple(rows)
    return found


def over_sets(rows: Sequence[Loss]) -> list[float]:
    """The difference of the mean over validation sets, of each seed."""
    return [math.fsum(apart) / len(rows) for apart in zip(*(row.by_seed for row in rows), strict=True)]


# ---- as text


def number(value: float, metric: str) -> str:
    return f"{100 * value:.2f}" if is_share(metric) else f"{value:.4f}"


def is_share(metric: str) -> bool:
    """Whether a metric is a share, which is shown in per cent."""
    return bool(re.match(r"acc|exact_match|f1", metric))


def p_text(p: float) -> str:
    return "" if math.isnan(p) else "< 0.001" if p < 1e-3 else f"{p:.3f}"


def table(found: Comparison) -> str:
    """A comparison as Markdown."""
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
    if seeds == 1:
        gained = sum(f.gained for f in found.flips)
        lines += ["", f"{len(found.flips)} items flipped: {gained} gained, {len(found.flips) - gained} lost"]
    for f in found.flips[:10]:
        target, a, b = (inert(repr(text)) for text in apart((f.target, f.a, f.b)))
        task = inert(f"{f.task} {f.doc}")
        lines.append(f"- {'gained' if f.gained else 'lost'}: {task}: right is {target}; A {a}, B {b}")
    return "\n".join([*lines, *(f"\nNote: {inert(note)}" for note in found.notes)])


def signed(value: float, metric: str) -> str:
    return f"{round(100 * value, 2) + 0.0:+.2f}" if is_share(metric) else f"{round(value, 4) + 0.0:+.4f}"


def apart(texts: Sequence[str]) -> list[str]:
    """Each text cut to WIDTH characters, from about where they begin to differ."""
    shared = next((i for i, letters in enumerate(zip(*texts, strict=False)) if len(set(letters)) > 1), 0)
    start = max(shared - WIDTH // 3, 0) if max(map(len, texts)) > WIDTH else 0
    start = texts[0].find(" ", start, shared) + 1 if start else 0  # at a word
    cut = ("…" * (start > 0) + text[start:] for text in texts)
    return [text if len(text) <= WIDTH else text[: WIDTH - 1] + "…" for text in cut]


def loss_table(found: Losses) -> str:
    lines = []
    for what, by_run, at in (
        ("tokens", found.at_equal_tokens, f"{plots.count(found.tokens)} tokens"),
        ("FLOPs", found.at_equal_flops, f"{found.flops or 0:.3g} FLOPs of continued training"),
    ):
        for name, rows in by_run.items():
            lines += [
                f"Validation loss at {found.equal(what)} ({at}), nats a token; A = {inert(found.runs[0])}, "
                f"B = {inert(name)}", "",
                "| | A | B | B - A |", "|---|---|---|---|",
                *(f"| {inert(r.domain)} | {r.a:.4f} | {r.b:.4f} | {r.difference:+.4f} |" for r in rows), "",
                f"Mean of sets: {found.verdict(what, name)}", "",
            ]  # fmt: skip
        if names := found.midway.get(what):
            lines += [inert(midway_text(names)), ""]
    if found.flops is None:
        lines.append("No comparison at equal FLOPs: a log has no FLOPs (written by an older version).")
    return "\n".join(lines).rstrip()


def midway_text(names: Sequence[str]) -> str:
    return (
        f"Interpolated: {', '.join(names)} is read before the end of its schedule, where its learning rate is high; "
        "a run with a schedule that ends there would be lower (evaluation study, match: flops)."
    )


def group_words(words: Sequence[str]) -> list[list[str]]:
    """The folders of each group: groups are parted by `--`, or are a word each; commas part the folders of a word."""
    parts = [[word] for word in words]
    if "--" in words:
        parts = [[]]
        for word in words:
            if word == "--":
                parts.append([])
            else:
                parts[-1].append(word)
    found = [
        [name for word in part for name in ([word] if Path(word).exists() else word.split(",")) if name]
        for part in parts
    ]
    return [part for part in found if part]


def plain(value: Any) -> Any:
    """The value as strict JSON has it: nan and infinity are null."""
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
