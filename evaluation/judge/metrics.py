"""Compute a metric from the scores of items with lm-eval's own function, whose name a run keeps.

Most metrics are a function of two sums (a mean; nats over bytes), and their draws are fast. The others (F1, BLEU) need
all items at once, and lm-eval's function computes every draw.
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
    "sum_per_unit": lambda mean: mean,
}
WITH_UNITS = ("weighted_perplexity", "bits_per_byte", "sum_per_unit")
OF_ALL = "mean_of_all"  # not lm-eval's: items have several parts that weigh the same (IFEval's instructions)
PER_UNIT = "sum_per_unit"  # not lm-eval's: nats a token of texts (evaluation/facts)
OWN = ""  # stands for a function that only the task has
DRAWS = 1000
FEW_DRAWS = 100  # draws; lm-eval takes the same number for metrics that read every text again
SLOW = ("bleu", "chrf", "chrf++", "ter")

Scored = tuple[str, Raw]  # an item's task and its score


@dataclass(frozen=True)
class Measure:
    """Compute the metric of a task's items, or of a group: the mean of its tasks' numbers."""

    aggregations: Mapping[str, str]  # for each task, a name in lm-eval's registry
    by_size: bool = True  # whether a group weighs its tasks by their items or equally

    def value(self, scored: Sequence[Scored]) -> float:
        """Return the metric of these items; a task without items does not count."""
        by_task: dict[str, list[Raw]] = {}
        for task, score in scored:
            by_task.setdefault(task, []).append(score)
        values = [aggregate(self.aggregations[task], scores) for task, scores in by_task.items()]
        weights = [len(scores) if self.by_size else 1 for scores in by_task.values()]
        return float(np.average(values, weights=weights))

    def ratio(self, tasks: Sequence[str]) -> Callable[[Any], Any] | None:
        """Return the metric as a function of sum / sum of sums(); None if it has another form."""
        kinds = {self.aggregations[task] for task in tasks}
        single = len(kinds) == 1 and (len(set(tasks)) == 1 or kinds == {"mean"})
        return RATIOS.get(kinds.pop()) if single else None

    def sums(self, scored: Sequence[Scored]) -> NDArray[np.float64]:
        """Return [N, 2]: each item's part of the numerator and of the denominator."""
        tasks, count = np.unique([task for task, _ in scored], return_counts=True)
        weight = {task: 1.0 if self.by_size else 1 / n for task, n in zip(tasks.tolist(), count.tolist(), strict=True)}
        pairs = [parts(self.aggregations[task], score) for task, score in scored]
        weight_N = np.array([weight[task] for task, _ in scored])
        try:
            sums_N2: NDArray[np.float64] = np.array(pairs, np.float64).reshape(-1, 2) * weight_N[:, None]
        except TypeError:
            raise ValueError(f"scores like {short(scored[0][1])} of {scored[0][0]:.60} are not numbers") from None
        return sums_N2

    def draws(self) -> int:
        return FEW_DRAWS if any(name in SLOW for name in self.aggregations.values()) else DRAWS

    def interval(
        self, plus: Sequence[Sequence[Scored]], minus: Sequence[Sequence[Scored]], cluster_N: Sequence[str],
        rng: np.random.Generator,
    ) -> tuple[float, float] | None:  # fmt: skip
        """Return the 95 % bootstrap interval of the mean over the runs in `plus` minus the mean over those in `minus`,
        on the same items; draws take whole clusters of each task. Return None if there are too few clusters."""
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
    """Return the measure for a metric of a task or a group; None if a task has its own function for it."""
    names = part.tasks if isinstance(part, Group) else (part.name,)
    found = {name: tasks[name].aggregation.get(metric, "mean") for name in names}
    by_size = metric not in part.alike if isinstance(part, Group) else True
    return None if OWN in found.values() else Measure(found, by_size)


def parts(aggregation: str, score: Raw) -> tuple[float, float]:
    """Return an item's part of the numerator and of the denominator."""
    if aggregation == OF_ALL:
        return float(sum(score)), float(len(score))
    return score if aggregation in WITH_UNITS else (score, 1.0)


def aggregate(name: str, scores: Sequence[Raw]) -> float:
    """Return lm-eval's aggregation `name` of the scores of a task's items."""
    try:
        if name == OF_ALL:
            return float(sum(map(sum, scores)) / sum(map(len, scores)))
        if name == PER_UNIT:
            return float(sum(value for value, _ in scores) / sum(unit for _, unit in scores))
        if name == "mean":  # import only this module of lm-eval
            return float(sum(scores) / len(scores))
        from lm_eval.api.registry import get_aggregation

        with warnings.catch_warnings():  # a draw may lack a class or a label
            warnings.simplefilter("ignore")
            return float(get_aggregation(name)(list(scores)))
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"scores like {short(scores[0])} have no {name:.60} ({short(str(error))})") from None


def plain(value: Any) -> Raw:
    """Return a score in the form that logged.load() reads: tuples for lists, Python's numbers for numpy's."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return tuple(plain(inner) for inner in value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
