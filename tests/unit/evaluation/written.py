"""Runs of a suite that nobody has asked: made-up scores and items, in the files that `upcycle eval` leaves behind."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lm_eval.loggers import EvaluationTracker

from evaluation.ask.written import Written
from evaluation.judge.results import Evaluation, Group, Item, Task


def save(folder: str | Path, run: Evaluation, items: Iterable[Item]) -> Path:
    """Write the run with these items, and return its folder."""
    items, tracker = list(items), EvaluationTracker()
    samples = {name: [row for item in items if item.task == name for row in rows(item)] for name in run.tasks}
    parts: dict[str, Task | Group] = {**run.tasks, **run.groups}
    model = run.model
    tracker.general_config_tracker.log_experiment_args("upcycle", {"pretrained": model.source}, None, None, False)
    tracker.general_config_tracker.start_time = time.perf_counter() - run.seconds
    found = {
        "results": {name: scores(part) for name, part in parts.items()},
        "groups": {name: scores(group) for name, group in run.groups.items()},
        "group_subtasks": {name: list(group.tasks) for name, group in run.groups.items()},
        "configs": {t.name: {"task_alias": t.title, "output_type": t.output} for t in run.tasks.values()},
        "versions": {t.name: t.version for t in run.tasks.values()},
        "n-shot": {t.name: t.fewshot for t in run.tasks.values()},
        "n-samples": {t.name: {"original": t.total, "effective": t.items} for t in run.tasks.values()},
        "higher_is_better": {t.name: dict(t.higher_is_better) for t in run.tasks.values()},
        "config": {
            "model": "upcycle", "model_args": {"pretrained": model.source, "dtype": model.dtype},
            "model_num_parameters": model.parameters, "model_active_parameters": model.active, "model_dtype": model.dtype,
            "model_type": model.kind, "model_sha": model.fingerprint, "model_step": model.step,
            "model_identity": model.identity or f"{model.fingerprint} {model.dtype}",
        },
        **{f"{name}_version": version for name, version in run.versions.items()},
    }  # fmt: skip
    own = {
        "suite": run.suite, "name": model.name, "command": run.command, "options": run.options, "started": run.started,
        "work": run.work, "notes": run.notes, "aggregation": {t.name: t.aggregation for t in run.tasks.values()},
        "alike": {name: group.alike for name, group in run.groups.items()},
    }  # fmt: skip
    written = Written(Path(folder), tracker)
    written.save_samples(samples, found["configs"], True)
    written.save_results(found, samples, own)
    return Path(folder)


def scores(part: Task | Group) -> dict[str, Any]:
    values = {of_filter(metric): value for metric, value in part.metrics.items()}
    errors = {of_filter(metric, "_stderr"): value for metric, value in part.stderr.items()}
    return {"alias": part.title, **values, **errors}


def of_filter(metric: str, end: str = "") -> str:
    base, _, chosen = metric.partition(",")
    return f"{base}{end},{chosen or 'none'}"


def rows(item: Item) -> list[Mapping[str, Any]]:
    """Return the lines that lm-eval logs of an item: one for each filter."""
    pairs = zip_longest(item.logprobs, item.greedy, fillvalue=False)
    answers: list[Any] = [[pair] for pair in pairs] or [[item.text]]
    row = {
        "doc_id": item.doc, "doc": {}, "target": item.target, "arguments": [], "resps": answers, "filtered_resps": [],
        "doc_hash": item.doc_hash, "prompt_hash": item.prompt_hash, "target_hash": "", "choices": item.choices,
        "clusters": item.clusters,
    }  # fmt: skip
    by_filter: dict[str, dict[str, Any]] = {}
    for metric, score in item.scores.items():
        base, _, chosen = metric.partition(",")
        by_filter.setdefault(chosen or "none", {})[base] = score
    return [{**row, "filter": chosen, "metrics": list(kept), **kept} for chosen, kept in by_filter.items()]
