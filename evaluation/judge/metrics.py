"""How the scores of items become a metric's number: by lm-eval's own function, whose name a run keeps.

Most metrics are a function of two sums (a mean; nats over bytes), and their draws are quick. The others need all items
at once (F1, BLEU), and every draw is computed by lm-eval's function.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluation.judge.intervals import LEAST
from evaluation.judge.results import Group, Raw, Task
from upcycle.io.strict import short

# lm-eval's aggregations that are a function of sum / sum; a score is a number, or a number and its units
RATIOS: dict[str, Callable[[Any], Any]] = {
    "mean": lambda mean: mean,
    "perplexity": lambda mean: np.exp(-mean),
    "weighted_perplexity": lambda mean: np.exp(-mean),
    "bits_per_byte": lambda mean: -mean / math.log(2),
    "mean_of_all": lambda mean: mean,
}
WITH_UNITS = ("weighted_perplexity", "bits_per_byte")
OF_ALL = "mean_of_all"  # not lm-eval's: items have several parts, all of which weigh the same (IFEval's instructions)
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
        pairs = [parts(self.aggregations[task], score) for task, score in scored]
        weight_N = np.array([weight[task] for task, _ in scored])
        try:
            sums_N2: NDArray[np.float64] = np.array(pairs, np.float64).reshape(-1, 2) * weight_N[:, None]
        except TypeError:
            raise ValueError(f"scores like {short(scored[0][1])} of {scored[0][0]:.60} are no numbers") from None
        return sums_N2

    def draws(self) -> int:
        return FEW_DRAWS if any(name in SLOW for name in self.aggregations.values()) else DRAWS

    def interval(
        self, plus: Sequence[Sequence[Scored]], minus: Sequence[Sequence[Scored]], cluster_N: Sequence[str],
        rng: np.random.Generator,
    ) -> tuple[float, float] | None:  # fmt: skip
        """95 % bootstrap interval of the mean over runs in `plus` less that in `minus`, which answered the same items;
        each task's clusters of items are drawn anew. None with too few of them."""
        groups: dict[str, dict[str, list[int]]] = {}
        for number, (task, _) in enumerate(plus[0]):
            groups.setdefault(task, {}).setdefault(cluster_N[number], []).append(number)
        if len(set(cluster_N)) < LEAST:
            return None
        every = [list(clusters.values()) for clusters in groups.values()]
        found = []
        for _ in range(self.draws()):
            drawn = [n for some in every for at in rng.integers(0, len(some), len(some)) for n in some[at]]
            values = [[self.value([run[n] for n in drawn]) for run in side] for side in (plus, minus)]
            found.append(sum(values[0]) / len(plus) - sum(values[1]) / max(len(minus), 1))
        low, high = np.percentile(found, (2.5, 97.5))
        return float(low), float(high)


def of(part: Task | Group, metric: str, tasks: Mapping[str, Task]) -> Measure | None:
    """The measure of a task's or a group's metric; None if a task has a function of its own for it."""
    names = part.tasks if isinstance(part, Group) else (part.name,)
    found = {name: tasks[name].aggregation.get(metric, "mean") for name in names}
    by_size = metric not in part.alike if isinstance(part, Group) else True
    return None if OWN in found.values() else Measure(found, by_size)


def parts(aggregation: str, score: Raw) -> tuple[float, float]:
    """What an item adds above and below the line."""
    if aggregation == OF_ALL:
        return float(sum(score)), float(len(score))
    return score if aggregation in WITH_UNITS else (score, 1.0)


def aggregate(name: str, scores: Sequence[Raw]) -> float:
    """lm-eval's aggregation `name` of the scores of a task's items."""
    try:
        if name == OF_ALL:
            return float(sum(map(sum, scores)) / sum(map(len, scores)))
        if name == "mean":  # lm-eval's, without reading all of lm-eval
            return float(sum(scores) / len(scores))
        from lm_eval.api.registry import get_aggregation

        with warnings.catch_warnings():  # a draw may have a class or a label too few
            warnings.simplefilter("ignore")
            return float(get_aggregation(name)(list(scores)))
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"scores like {short(scores[0])} have no {name:.60} ({short(str(error))})") from None


def plain(value: Any) -> Raw:
    """A score as JSON can hold it and as logged.load() reads it: lists are tuples, numpy's numbers Python's."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return tuple(plain(inner) for inner in value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
