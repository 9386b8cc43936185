"""Runs of lm-eval as runs of ours: `load` and `items` read what any lm-eval wrote with --output_path and --log_samples.

    results_TIME.json           one object: scores, groups, and each task's config
    samples_TASK_TIME.jsonl     an item and a filter a line: its document, what was asked, the answers, the scores

lm-eval keeps of a metric's function at most its name. A name is taken where it gives the number that lm-eval wrote of
the items; a metric for which none does is shown, with a note, and not compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from evaluation.judge import metrics as measures
from evaluation.judge import results
from evaluation.judge.answers import (
    Samples,
    answers_digest,
    answers_of,
    clusters,
    metric_name,
    numbers,
    own_functions,
    score,
)
from evaluation.judge.results import Evaluation, Group, Item, Model, Task, tuples
from upcycle.io import strict

OPTIONS = ("model", "model_args", "limit", "gen_kwargs", "batch_size")


def is_run(place: str | Path) -> bool:
    """Whether it is a folder of `evaluation run`, or one of lm-eval, or lm-eval's results file itself."""
    return (Path(place) / "run.json").is_file() or newest(Path(place)) is not None


def load(place: str | Path) -> Evaluation:
    if (Path(place) / "run.json").is_file():
        return results.load(place)
    return read(*found(place))[0]


def items(place: str | Path) -> Iterator[Item]:
    if (Path(place) / "run.json").is_file():
        return results.items(place)
    return iter(read(*found(place))[1])


def found(place: str | Path) -> tuple[Path, float]:
    path = newest(Path(place))
    if path is None:
        raise ValueError(
            f"{place} has no run.json, nor results_*.json of lm-eval; give a folder that `python -m evaluation run` or "
            "lm-eval (--output_path FOLDER --log_samples) has finished"
        )
    return path, path.stat().st_mtime


def newest(place: Path) -> Path | None:
    """lm-eval's results file: the path itself, or the last one in the folder, or in its only folder that has any."""
    if place.is_file():
        return place if place.name.endswith(".json") and time_of(place) else None
    folders = [place, *(sorted(inner for inner in place.iterdir() if inner.is_dir()) if place.is_dir() else ())]
    every = [sorted(folder.glob("results_*.json"), key=time_of) for folder in folders]
    every = every[:1] if every[0] else [paths for paths in every if paths]
    if len(every) > 1:
        names = " and ".join(str(paths[0].parent) for paths in every[:2])
        raise ValueError(f"{place} holds lm-eval's results of several models ({names}, ...); name one of these folders")
    return every[0][-1] if every else None


def time_of(path: Path) -> str:
    """When it was written, the end of every name that lm-eval gives; "" if the name is another."""
    stem, _, time = path.stem.rpartition("_")
    return time if stem and time[:2].isdigit() else ""


# ---- one run


@lru_cache(4)
def read(path: Path, changed: float) -> tuple[Evaluation, tuple[Item, ...]]:
    """The scores and the items of a results file. `changed`: when, so that a file is read again that is another now."""
    whole = opened(path)
    lacking = [key for key in ("results", "configs", "config", "n-shot", "versions") if key not in whole]
    if lacking:
        raise ValueError(f"{path} has no {', '.join(lacking)}; is it a results file of lm-eval 0.4 or newer?")
    rows = {name: samples(path, name) for name in whole["configs"]}
    found_tasks = {name: task(name, whole, rows[name]) for name in rows}
    groups, notes = groups_of(whole, found_tasks)
    inside = {name: sorted((len(g.tasks), g.name) for g in groups.values() if name in g.tasks) for name in rows}
    found_tasks = {
        name: replace(each, groups=tuple(group for _, group in inside[name])) for name, each in found_tasks.items()
    }
    config = whole["config"]
    top = [name for name in (*groups, *rows) if not any(name in g.tasks for g in groups.values() if g.name != name)]
    run = Evaluation(
        model=model(config, whole, rows),
        suite=",".join(top),
        command=f"lm-eval run --model {config.get('model')} --tasks {','.join(top)}",
        options={key: config[key] for key in OPTIONS if config.get(key)},
        versions={"lm_eval": str(whole.get("lm_eval_version")), "transformers": str(whole.get("transformers_version"))},
        started=time_of(path),
        seconds=float(whole.get("total_evaluation_time_seconds") or 0),
        work={},
        tasks=found_tasks,
        groups=groups,
        notes=(*notes, *own_functions(found_tasks), *limited(config)),
    )
    return run, tuple(item for name in rows for item in items_of(name, whole["configs"][name], rows[name]))


class Sample(TypedDict):
    """What is read of a line of samples."""

    doc_id: strict.Count
    doc: Any
    target: Any
    arguments: Any
    resps: list[Any]
    doc_hash: str
    prompt_hash: str


def opened(path: Path) -> dict[str, Any]:
    return strict.read_object(path, constants=True)


def samples(results_file: Path, name: str) -> list[dict[str, Any]]:
    path = results_file.with_name(f"samples_{name}_{time_of(results_file)}.jsonl")
    if not path.is_file():
        raise ValueError(f"{path} is missing, and runs are compared item by item; run lm-eval with --log_samples")
    try:
        return [
            strict.held(strict.parse(line, where, constants=True), Sample, where)
            for where, line in strict.read_lines(path)
        ]
    except ValueError as error:
        raise ValueError(f"{path} is not what lm-eval writes ({error}); run lm-eval again") from None


def limited(config: Mapping[str, Any]) -> Iterator[str]:
    if config.get("limit"):
        yield f"limit={config['limit']:g}: not all items of each task"


def model(config: Mapping[str, Any], whole: Mapping[str, Any], rows: Samples) -> Model:
    """lm-eval keeps no fingerprint of other models than ours: a digest of all answers stands for it."""
    given = config.get("model_args")
    named = (
        given if isinstance(given, dict) else dict(part.split("=", 1) for part in str(given).split(",") if "=" in part)
    )
    source = str(named.get("pretrained") or named.get("model") or whole.get("model_name") or config.get("model"))
    digest = answers_digest(rows)
    parameters = int(config.get("model_num_parameters") or 0)
    return Model(
        name=Path(source).name,
        source=source,
        fingerprint=str(config.get("model_sha") or digest) if config.get("model_identity") else digest,
        kind=str(config.get("model_type") or config.get("model")),
        parameters=parameters,
        active=int(config.get("model_active_parameters") or parameters),
        dtype=str(config.get("model_dtype") or named.get("dtype") or "").removeprefix("torch."),
        identity=str(config.get("model_identity") or digest),
    )


def task(name: str, whole: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Task:
    config, (values, errors) = whole["configs"][name], numbers(whole["results"].get(name, {}))
    higher = whole.get("higher_is_better", {}).get(name) or {}
    functions = {metric: function_of(metric, value, config, rows) for metric, value in values.items()}
    count = whole.get("n-samples", {}).get(name) or {}
    effective = len({row["doc_id"] for row in rows})
    return Task(
        name=name,
        title=str(config.get("task_alias") or name),
        metrics=values,
        stderr=errors,
        higher_is_better={metric: bool(higher.get(metric.partition(",")[0], True)) for metric in values},
        items=effective,
        total=int(count.get("original") or effective),
        fewshot=int(whole["n-shot"].get(name) or 0),
        version=str(whole["versions"].get(name)),
        output=str(config.get("output_type")),
        aggregation={metric: function for metric, function in functions.items() if function != "mean"},
    )


def function_of(metric: str, value: float, config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """The name of lm-eval's function that makes `value` of the items' scores; OWN if none does."""
    from lm_eval.api import metrics as _  # noqa: F401 - fills the registries
    from lm_eval.api.registry import AGGREGATION_REGISTRY, METRIC_AGGREGATION_REGISTRY

    base, _comma, chosen = metric.partition(",")
    scores = [score_of(row[base]) for row in rows if base in row and row.get("filter", "none") == (chosen or "none")]
    asked = [each.get("aggregation") for each in config.get("metric_list") or () if each.get("metric") == base]
    usual = METRIC_AGGREGATION_REGISTRY.get(base, None)
    asked += [name for name, function in AGGREGATION_REGISTRY.items() if function is usual]
    for name in dict.fromkeys([*asked, "mean", measures.OF_ALL]):
        if name in ("mean", measures.OF_ALL) or name in AGGREGATION_REGISTRY:
            try:
                again = measures.aggregate(name, scores)
            except (TypeError, ValueError, KeyError, IndexError, ArithmeticError):
                continue
            if math.isclose(again, value, rel_tol=1e-9, abs_tol=1e-12) or (math.isnan(again) and math.isnan(value)):
                return str(name)
    return measures.OWN


def score_of(value: Any) -> Any:
    return score(tuples(value))


def groups_of(whole: Mapping[str, Any], known: Mapping[str, Task]) -> tuple[dict[str, Group], list[str]]:
    """(groups, notes). lm-eval does not write how a group weighs its tasks: it is seen from its number."""
    children, out, notes = whole.get("group_subtasks") or {}, {}, []

    def leaves(name: str) -> list[str]:
        inner = [leaf for child in children.get(name, ()) for leaf in leaves(child)]
        return list(dict.fromkeys(inner)) or ([name] if name in known else [])

    for name in children:
        inside, row = leaves(name), (whole.get("groups") or {}).get(name, {})
        if not inside or name in known:
            continue
        values, errors = numbers(row)
        alike, kept = [], {}
        for metric, value in values.items():
            mine = [known[each] for each in inside if metric in known[each].metrics]
            numbers_of = [each.metrics[metric] for each in mine]
            if mine and math.isclose(
                value, np.average(numbers_of, weights=[each.items for each in mine]), rel_tol=1e-9
            ):
                kept[metric] = value
            elif mine and math.isclose(value, float(np.mean(numbers_of)), rel_tol=1e-9):
                kept[metric] = value
                alike.append(metric)
            else:
                notes.append(f"{name}: {metric} is no mean of its tasks' numbers: not compared")
        title = str(row.get("alias") or name).strip(" -")
        errors = {metric: error for metric, error in errors.items() if metric in kept}
        out[name] = Group(name, title, kept, errors, tuple(inside), sum(known[t].items for t in inside), tuple(alike))
    return out, notes


def items_of(name: str, config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Iterator[Item]:
    output, merged = str(config.get("output_type")), dict[int, Item]()
    for row in rows:
        chosen = row.get("filter", "none")
        bases = row.get("metrics") or [each.get("metric") for each in config.get("metric_list") or ()]
        scores = {metric_name(base, chosen): score_of(row[base]) for base in bases if base in row}
        before = merged.get(row["doc_id"])
        if before is not None:  # another filter of the same answer
            merged[row["doc_id"]] = replace(before, scores={**before.scores, **scores})
            continue
        choices = choices_of(row, str(config.get("target_delimiter", " "))) if output == "multiple_choice" else ()
        text, logprobs, greedy = answers_of([reply(each[0], output) for each in row["resps"]], len(choices))
        merged[row["doc_id"]] = Item(
            task=name,
            doc=int(row["doc_id"]),
            doc_hash=row["doc_hash"],
            prompt_hash=row["prompt_hash"],
            target="" if output == "loglikelihood_rolling" else str(row["target"]),
            scores=scores,
            logprobs=logprobs,
            greedy=greedy,
            text=text,
            choices=choices,
            clusters=clusters(row["doc"]),
        )
    yield from (merged[number] for number in sorted(merged))


def reply(value: Any, output: str) -> Any:
    """An answer, of whose parts lm-eval writes texts: (log-probability, greedy), a log-probability, or a text."""
    if isinstance(value, list) and len(value) == 2:
        return float(value[0]), value[1] in (True, "True")
    return float(value) if output == "loglikelihood_rolling" else value


def choices_of(row: Mapping[str, Any], delimiter: str) -> tuple[str, ...]:
    """What the log-probabilities are of: the endings, or where these are the same the beginnings."""
    asked = [(each["arg_0"], each["arg_1"]) for each in row["arguments"].values()]
    half = len(asked) // 2
    if half and all(context == "" for context, _ in asked[half:]) and asked[0][0]:
        asked = asked[:half]  # acc_mutual_info asks for each ending once more, alone
    endings = [ending.removeprefix(delimiter) for _, ending in asked]
    return tuple(endings if len(set(endings)) > 1 else [context for context, _ in asked])
