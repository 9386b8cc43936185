"""How the scores of items become a metric's number: by lm-eval's own function, whose name a run keeps.

Most metrics are a function of two sums (a mean; nats over bytes), and their draws are quick. The others need all items
at once (F1, Matthews' correlation, BLEU), and every draw is computed by lm-eval's function.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluation.results import Group, Raw, Task

# lm-eval's aggregations that are a function of sum / sum; a score is a number, or a number and its units
RATIOS: dict[str, Callable[[Any], Any]] = {
    "mean": lambda mean: mean,
    "perplexity": lambda mean: np.exp(-mean),
    "weighted_perplexity": lambda mean: np.exp(-mean),
    "bits_per_byte": lambda mean: -mean / math.log(2),
}
WITH_UNITS = ("weighted_perplexity", "bits_per_byte")
OWN = ""  # of a function that only the task has
DRAWS = 1000
FEW_DRAWS = 100  # as lm-eval takes of those that read every text again
SLOW = ("bleu", "chrf", "chrf++", "ter")

Scored = tuple[str, Raw]  # an item's task and its score


@dataclass(frozen=True)
class Measure:
    """Of the items of one task, or of a group: the mean of its tasks' numbers."""

    aggregations: Mapping[str, str]  # of each task: a name in lm-eval's registry
    by_size: bool = True  # whether a group weighs its tasks by their items, or all alike

    def value(self, scored: Sequence[Scored]) -> float:
        """The metric of these items. A task without items does not count."""
        by_task: dict[str, list[Raw]] = {}
        for task, score in scored:
            by_task.setdefault(task, []).append(score)
        values = [aggregate(self.aggregations[task], scores) for task, scores in by_task.items()]
        weights = [len(scores) if self.by_size else 1 for scores in by_task.values()]
        return float(np.average(values, weights=weights))

    def ratio(self, tasks: Sequence[str]) -> Callable[[Any], Any] | None:
        """The metric as a function of sum / sum of sums(); None if it is no such function."""
        kinds = {self.aggregations[task] for task in tasks}
        single = len(kinds) == 1 and (len(set(tasks)) == 1 or kinds == {"mean"})
        return RATIOS.get(kinds.pop()) if single else None

    def sums(self, scored: Sequence[Scored]) -> NDArray[np.float64]:
        """[N, 2]: what an item adds above and below the line."""
        tasks, count = np.unique([task for task, _ in scored], return_counts=True)
        weight = {task: 1.0 if self.by_size else 1 / n for task, n in zip(tasks.tolist(), count.tolist(), strict=True)}
        pairs = [score if self.aggregations[task] in WITH_UNITS else (score, 1.0) for task, score in scored]
        weight_N = np.array([weight[task] for task, _ in scored])
        sums_N2: NDArray[np.float64] = np.array(pairs, np.float64).reshape(-1, 2) * weight_N[:, None]
        return sums_N2

    def draws(self) -> int:
        return FEW_DRAWS if any(name in SLOW for name in self.aggregations.values()) else DRAWS

    def interval(self, sides: Sequence[Sequence[Scored]], rng: np.random.Generator) -> tuple[float, float]:
        """95 % bootstrap interval of the last side less those before it; each task's items are drawn anew, and all
        sides answered the same ones."""
        groups: dict[str, list[int]] = {}
        for number, (task, _) in enumerate(sides[0]):
            groups.setdefault(task, []).append(number)
        found = []
        for _ in range(self.draws()):
            drawn = [number for items in groups.values() for number in rng.choice(items, len(items))]
            *before, last = (self.value([side[number] for number in drawn]) for side in sides)
            found.append(last - sum(before))
        low, high = np.percentile(found, (2.5, 97.5))
        return float(low), float(high)

    def exchange(self, a: Sequence[Scored], b: Sequence[Scored], rng: np.random.Generator) -> float:
        """Two-sided p of the difference: how often one as large is left when A and B change places, item by item."""
        observed, hits = abs(self.value(b) - self.value(a)), 0
        if observed == 0:
            return 1.0
        for _ in range(self.draws()):
            swap = rng.integers(0, 2, len(a)).astype(bool).tolist()
            one = [y if s else x for x, y, s in zip(a, b, swap, strict=True)]
            two = [x if s else y for x, y, s in zip(a, b, swap, strict=True)]
            # equal differences may round differently
            hits += abs(self.value(two) - self.value(one)) >= observed * (1 - 1e-12)
        return (1 + hits) / (1 + self.draws())


def of(part: Task | Group, metric: str, tasks: Mapping[str, Task]) -> Measure | None:
    """The measure of a task's or a group's metric; None if a task has a function of its own for it."""
    names = part.tasks if isinstance(part, Group) else (part.name,)
    found = {name: tasks[name].aggregation.get(metric, "mean") for name in names}
    by_size = metric not in part.alike if isinstance(part, Group) else True
    return None if OWN in found.values() else Measure(found, by_size)


def aggregate(name: str, scores: Sequence[Raw]) -> float:
    """lm-eval's aggregation `name` of the scores of a task's items."""
    if name == "mean":  # lm-eval's, without reading all of lm-eval
        return sum(scores) / len(scores)
    from lm_eval.api.registry import get_aggregation

    with warnings.catch_warnings():  # a draw may have a class or a label too few
        warnings.simplefilter("ignore")
        return float(get_aggregation(name)(list(scores)))


def name_of(function: Callable[..., Any], scores: Sequence[Raw], value: float) -> str:
    """The name of lm-eval's function; OWN if it has none, or if what is kept of the items does not give `value`."""
    from lm_eval.api.registry import AGGREGATION_REGISTRY

    name = next((name for name, known in AGGREGATION_REGISTRY.items() if known is function), OWN)
    if name == OWN:
        return OWN
    try:
        again = aggregate(name, scores)
    except (TypeError, ValueError, KeyError, IndexError):
        return OWN
    return name if math.isclose(again, value, rel_tol=1e-9) or (math.isnan(again) and math.isnan(value)) else OWN


def plain(value: Any) -> Raw:
    """A score as JSON can hold it and as results.items() reads it: lists are tuples, numpy's numbers Python's."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return tuple(plain(inner) for inner in value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
