"""What lm-eval says of an item and of a task, in the form that results.py keeps: of our own runs and of logged ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b, sha256
from typing import Any

import numpy as np

from evaluation.judge import metrics as measures
from evaluation.judge.results import Raw, Task

Samples = Mapping[str, Sequence[Mapping[str, Any]]]  # of each task, as lm-eval logs them
# keys of documents that say what several share, the widest first: items of one are no independent evidence (compare)
FROM = ("file", "path", "url", "document", "article", "story", "passage", "context")


def metric_name(metric: str, chosen: str) -> str:
    """lm-eval's `acc,none` becomes acc; exact_match,strict-match keeps the filter that found the answer."""
    return metric if chosen == "none" else f"{metric},{chosen}"


def numbers(row: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """(metrics, standard errors) of a row of lm-eval's results."""
    values: dict[str, float] = {}
    errors: dict[str, float] = {}
    for name, value in row.items():
        metric, comma, chosen = name.partition(",")
        if not comma or not isinstance(value, float | int | np.number):  # "N/A"; lists and tables of a task's own
            continue
        if metric.endswith("_stderr"):
            errors[metric_name(metric.removesuffix("_stderr"), chosen)] = float(value)
        else:
            values[metric_name(metric, chosen)] = float(value)
    return values, errors


def own_functions(scored: Mapping[str, Task]) -> Iterator[str]:
    """A sentence about each task with metrics that nobody but the task can compute again."""
    for task in scored.values():
        if own := [metric for metric, function in task.aggregation.items() if function == measures.OWN]:
            yield f"{task.name}: {', '.join(own)} is made by a function of the task's own: no interval, not compared"


def answers_of(answers: Sequence[Any], choices: int = 0) -> tuple[str, tuple[float, ...], tuple[bool, ...]]:
    """(text, log-probabilities, whether greedy) of the answers to an item's requests, of whatever kinds these are. Of a
    choice's those that its metrics compare: acc_mutual_info asks for each once more, alone."""
    text = next((answer for answer in answers if isinstance(answer, str)), "")
    likely = [answer for answer in answers if not isinstance(answer, str)]
    pairs = [answer if isinstance(answer, tuple | list) else (answer, None) for answer in likely][: choices or None]
    return text, tuple(float(a) for a, _ in pairs), tuple(bool(b) for _, b in pairs if b is not None)


def clusters(doc: Any) -> dict[str, str]:
    found = {name: doc[name] for name in FROM if isinstance(doc, Mapping) and isinstance(doc.get(name), str)}
    return {name: blake2b(value.encode(), digest_size=8).hexdigest() for name, value in found.items() if value}


def answers_digest(samples: Samples) -> str:
    """Stands for the weights of a model that is not ours: another one answers otherwise."""
    sums = sha256()
    for name, rows in sorted(samples.items()):
        sums.update(repr((name, [(row["doc_id"], row["resps"]) for row in rows])).encode())
    return sums.hexdigest()


def score(value: Any) -> Raw:
    found = measures.plain(value)
    return float(found) if isinstance(found, bool | int) else found
