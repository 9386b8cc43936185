"""Is B better than A? Two runs of a suite item by item, two training runs at equal tokens and at equal FLOPs.

usage: python -m evaluation compare A B ... [output=FILE.json]

  python -m evaluation compare runs/eval/dense runs/eval/moe output=compared.json    # folders of `evaluation run`
  python -m evaluation compare runs/dense runs/moe                                   # folders of `training`

The first is what the others are compared with. Both models answered the same items, so the noise of the items cancels:
on 14,042 items the standard error of a difference is about 0.4 points instead of 0.6. A metric has

    difference  B - A, with a 95 % interval: 10,000 bootstrap draws of items (of whole texts where texts are scored)
    p           0 or 1 an item: exact McNemar. Else: 10,000 random exchanges of A and B, item by item
    Holm        p corrected for how many comparisons there are; headlines (whole suites and groups) are one family,
                their parts (subjects, domains) another

Randomness is named by what is compared, so the same two runs give the same numbers.

keys, with defaults and meaning: docs/config.md
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluation import measures, results
from evaluation.measures import Measure
from evaluation.results import Evaluation, Item
from training.observe import plots
from training.observe.metrics import FILE as METRICS
from upcycle import cli
from upcycle.config import read
from upcycle.disk import write_atomic

DRAWS = 10_000
WIDTH = 60  # characters of an answer that are shown
CHUNK = 1 << 22  # numbers drawn at a time
PREFERRED = ("acc_norm", "exact_match", "acc", "bits_per_byte")  # a task is judged by one metric: the first it has
Array = NDArray[np.float64]


# ---- statistics: arrays in, numbers out


def mcnemar(only_a: int, only_b: int) -> float:
    """Exact two-sided p of the counts of items that only A and only B has right, as heads and tails of a fair coin."""
    tosses = only_a + only_b
    ways, total = 1, 0
    for heads in range(min(only_a, only_b) + 1):
        total += ways
        ways = ways * (tosses - heads) // (heads + 1)
    return float(min(1.0, 2 * total / 2**tosses))


def exchange(difference_N: Array, key: str) -> float:
    """Two-sided p of a sum of paired differences: how often random signs reach it."""
    rng, observed, hits = generator("exchange", key), abs(difference_N.sum()), 0
    for draws in chunks(len(difference_N)):
        signs = rng.integers(0, 2, (draws, len(difference_N)), dtype=np.int8) * 2 - 1
        # equal sums may round differently
        hits += int((np.abs(signs @ difference_N) >= observed * (1 - 1e-12)).sum())
    return (1 + hits) / (1 + DRAWS)


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


def holm(p: Sequence[float]) -> list[float]:
    """Holm's step-down correction, in the given order."""
    corrected, largest = [0.0] * len(p), 0.0
    for rank, at in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        largest = max(largest, min(1.0, (len(p) - rank) * p[at]))
        corrected[at] = largest
    return corrected


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
    a: float
    b: float
    difference: float
    low: float
    high: float
    p: float
    only_a: int | None = None  # items that only A has right, where an item is right or wrong
    only_b: int | None = None
    p_holm: float = math.nan

    @property
    def verdict(self) -> str:
        if self.p_holm > 0.05:
            return "no difference shown"
        return "better" if (self.difference > 0) == self.higher_is_better else "worse"


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


def compare(folders: Sequence[Path | str]) -> list[Comparison]:
    """Compares every other run with the first."""
    runs = [results.load(folder) for folder in folders]
    items = [keyed(folder) for folder in folders]
    for run, folder, mine in zip(runs[1:], folders[1:], items[1:], strict=True):
        check_same(folders[0], folder, runs[0], run, items[0], mine)
    found = [one(runs[0], run, items[0], mine) for run, mine in zip(runs[1:], items[1:], strict=True)]
    return corrected(found)


def keyed(folder: Path | str) -> dict[tuple[str, str, int], Item]:
    return {item.key: item for item in results.items(folder)}


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


def one(run_a: Evaluation, run_b: Evaluation, items_a: Mapping[Any, Item], items_b: Mapping[Any, Item]) -> Comparison:
    pairs: dict[str, list[tuple[Item, Item]]] = {name: [] for name in run_a.tasks}
    for key, item in items_a.items():
        pairs[item.task].append((item, items_b[key]))
    differences, flips = [], []
    for group in run_a.groups.values():
        joined = [pair for task in group.tasks for pair in pairs[task]]
        if judged := judged_by(group, run_a, joined):
            metric, measure = judged
            higher = run_a.tasks[group.tasks[0]].higher_is_better.get(metric, True)
            headline = not is_inner(group, run_a)
            differences.append(differ(group.name, group.title, metric, higher, headline, joined, measure))
    for task in run_a.tasks.values():
        if judged := judged_by(task, run_a, pairs[task.name]):
            metric, measure = judged
            higher, headline = task.higher_is_better.get(metric, True), not task.groups
            differences.append(differ(task.name, task.title, metric, higher, headline, pairs[task.name], measure))
            flips += [found for a, b in pairs[task.name] if (found := flip(a, b, metric))]
    flips.sort(key=lambda found: -abs(found.swing))
    notes = tuple(dict.fromkeys(run_a.notes + run_b.notes))
    return Comparison(run_a.model, run_b.model, tuple(differences), tuple(flips), run_a.suite, notes)


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
    name: str,
    title: str,
    metric: str,
    higher: bool,
    headline: bool,
    pairs: Sequence[tuple[Item, Item]],
    measure: Measure,
) -> Difference:
    key = f"{name} {metric}"
    sides = [[(pair[side].task, pair[side].scores[metric]) for pair in pairs] for side in (0, 1)]
    value = measure.ratio([task for task, _ in sides[0]])
    if value is None:  # no sums give it: all items are needed for every draw
        a, b = map(measure.value, sides)
        low, high = measure.interval(sides, generator("bootstrap", key))
        p = measure.exchange(sides[0], sides[1], generator("exchange", key))
        return Difference(name, title, metric, higher, headline, len(pairs), a, b, b - a, low, high, p)
    (a_N, unit_N), (b_N, _) = (measure.sums(side).T for side in sides)
    a, b = (float(value(side.sum() / unit_N.sum())) for side in (a_N, b_N))
    low, high = bootstrap(a_N, b_N, unit_N, value, key)
    right = (unit_N == 1).all() and all(((side == 0) | (side == 1)).all() for side in (a_N, b_N))
    only_a, only_b = (int((a_N > b_N).sum()), int((b_N > a_N).sum())) if right else (None, None)
    p = exchange(b_N - a_N, key) if only_a is None or only_b is None else mcnemar(only_a, only_b)
    return Difference(
        name, title, metric, higher, headline, len(pairs), a, b, b - a, low, high, p, only_a, only_b
    )  # fmt: skip


def flip(a: Item, b: Item, metric: str) -> Flip | None:
    before, after = a.scores[metric], b.scores[metric]
    if before == after or not all(score in (0.0, 1.0) for score in (before, after)):
        return None
    swing = margin(b) - margin(a) if len(a.choices) > 1 else 0.0
    return Flip(a.task, a.doc, after > before, right(a), answer(a, metric), answer(b, metric), swing)


def right(item: Item) -> str:
    """The right answer's text. A target is a choice or its number."""
    if item.choices and item.target not in item.choices and item.target.isdecimal():
        return item.choices[int(item.target)]
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
    """Fills in p_holm. A family is all comparisons of every run that was given, headlines and parts apart."""
    rows = [list(comparison.differences) for comparison in found]
    for headline in (True, False):
        places = [(i, j) for i, row in enumerate(rows) for j, d in enumerate(row) if d.headline == headline]
        for (i, j), p in zip(places, holm([rows[i][j].p for i, j in places]), strict=True):
            rows[i][j] = replace(rows[i][j], p_holm=p)
    return [replace(c, differences=tuple(row)) for c, row in zip(found, rows, strict=True)]


# ---- training runs


@dataclass(frozen=True)
class Loss:
    """One validation set of two runs, at a point that both reached. There is no interval: a log has one number."""

    domain: str
    a: float
    b: float
    difference: float


@dataclass(frozen=True)
class Losses:
    runs: tuple[str, ...]
    flops_per_token: tuple[float | None, ...]
    tokens: float  # where they are compared
    flops: float | None
    at_equal_tokens: Mapping[str, tuple[Loss, ...]] = field(default_factory=dict)  # by run, the first left out
    at_equal_flops: Mapping[str, tuple[Loss, ...]] = field(default_factory=dict)


def compare_losses(folders: Sequence[Path | str]) -> Losses:
    runs = plots.read_runs([Path(folder) for folder in folders])
    sets = [set(run.keys(plots.VALID)) for run in runs]
    domains = sorted(set.intersection(*sets))
    if not domains:
        raise ValueError(
            f"{' and '.join(run.name for run in runs)} have no validation set in common ("
            f"{'; '.join(', '.join(sorted(names)) or 'none' for names in sets)}); name the same under data.valid"
        )
    reached = [max(run.points(f"valid/{domain}/loss")[0][-1] for domain in domains) for run in runs]
    rates = [flops_per_token(run) for run in runs]
    tokens, flops = min(reached), None
    by_flops: dict[str, tuple[Loss, ...]] = {}
    if all(rates):
        flops = min(rate * last for rate, last in zip(rates, reached, strict=True) if rate)
        by_flops = losses_at(runs, domains, [flops / rate for rate in rates if rate])
    by_tokens = losses_at(runs, domains, [tokens] * len(runs))
    return Losses(tuple(run.name for run in runs), tuple(rates), tokens, flops, by_tokens, by_flops)


def flops_per_token(run: plots.Curves) -> float | None:
    row = next((row for row in reversed(run.rows) if row.get("flops") and row.get("tokens")), None)
    return None if row is None else row["flops"] / row["tokens"]


def losses_at(
    runs: Sequence[plots.Curves], domains: Sequence[str], tokens: Sequence[float]
) -> dict[str, tuple[Loss, ...]]:
    """Losses at each run's `tokens`, beside the first run's. Between two validations a loss is on the straight line."""

    def loss(run: plots.Curves, domain: str, at: float) -> float:
        return float(np.interp(at, *run.points(f"valid/{domain}/loss")))

    first = {domain: loss(runs[0], domain, tokens[0]) for domain in domains}
    found = {}
    for run, at in zip(runs[1:], tokens[1:], strict=True):
        mine = {domain: loss(run, domain, at) for domain in domains}
        found[run.name] = tuple(Loss(d, first[d], mine[d], mine[d] - first[d]) for d in domains)
    return found


# ---- as text


def number(value: float, metric: str) -> str:
    return f"{100 * value:.2f}" if is_share(metric) else f"{value:.4f}"


def is_share(metric: str) -> bool:
    """Whether a metric is a share, which is shown in per cent."""
    return bool(re.match(r"acc|exact_match|f1", metric))


def p_text(p: float) -> str:
    return "< 0.001" if p < 1e-3 else f"{p:.3f}"


def table(found: Comparison) -> str:
    """A comparison as Markdown."""
    families = [sum(d.headline == headline for d in found.differences) for headline in (True, False)]
    lines = [
        f"A = {found.a.name}, B = {found.b.name}; suite {found.suite}; "
        f"{families[0]} headline and {families[1]} part comparisons, p corrected by Holm in each family",
        "",
        "| | metric | items | A | B | B - A | 95 % interval | only A / only B | p | Holm | B is |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for d in found.differences:
        lines.append(
            f"| {d.title} | {d.metric}{' %' * is_share(d.metric)} | {d.items:,} | {number(d.a, d.metric)} | "
            f"{number(d.b, d.metric)} | {signed(d.difference, d.metric)} | {signed(d.low, d.metric)} to "
            f"{signed(d.high, d.metric)} | {'' if d.only_a is None else f'{d.only_a} / {d.only_b}'} | {p_text(d.p)} | "
            f"{p_text(d.p_holm)} | {d.verdict} |"
        )
    gained = sum(f.gained for f in found.flips)
    lines += ["", f"{len(found.flips)} items flipped: {gained} gained, {len(found.flips) - gained} lost"]
    for f in found.flips[:10]:
        target, a, b = apart((f.target, f.a, f.b))
        lines.append(f"- {'gained' if f.gained else 'lost'}: {f.task} {f.doc}: right is {target!r}; A {a!r}, B {b!r}")
    return "\n".join([*lines, *(f"\nNote: {note}" for note in found.notes)])


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
    for title, by_run, at in (
        ("equal tokens", found.at_equal_tokens, f"{plots.count(found.tokens)} tokens"),
        ("equal FLOPs", found.at_equal_flops, f"{found.flops or 0:.3g} FLOPs of continued training"),
    ):
        for name, rows in by_run.items():
            lines += [
                f"Validation loss at {title} ({at}), nats a token; A = {found.runs[0]}, B = {name}", "",
                "| | A | B | B - A |", "|---|---|---|---|",
                *(f"| {r.domain} | {r.a:.4f} | {r.b:.4f} | {r.difference:+.4f} |" for r in rows), "",
            ]  # fmt: skip
    if found.flops is None:
        lines.append("No comparison at equal FLOPs: a log has no FLOPs (written by an older version).")
    return "\n".join(lines).rstrip()


@dataclass(frozen=True)
class CompareConfig:
    output: str = ""  # a JSON file to write


def main(words: Sequence[str]) -> int:
    folders, keys = cli.names_and_words(words)
    config = read(CompareConfig, "", keys)
    if len(folders) < 2:
        raise ValueError("compare needs two runs or more, the first is what the others are compared with: compare A B")
    output: dict[str, Any] = {}
    if all((Path(folder) / "run.json").is_file() for folder in folders):
        compared = compare(folders)
        output["comparisons"] = [asdict(found) for found in compared]
        print("\n\n".join(table(found) for found in compared))
    if all((Path(folder) / METRICS).is_file() for folder in folders):
        losses = compare_losses(folders)
        output["losses"] = asdict(losses)
        print(loss_table(losses))
    if not output:
        raise ValueError(
            f"{', '.join(folders)} are not all of one kind; give folders of `python -m evaluation run`, or folders of "
            "training runs"
        )
    if config.output:
        write_atomic(Path(config.output), (json.dumps(output, indent=1) + "\n").encode())
    return 0
