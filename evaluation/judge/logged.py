"""Read runs of suites from lm-eval's files (--output_path and --log_samples): `load` reads ours and any lm-eval's.

    results_TIME.json           one object: scores, groups, and each task's config
    samples_TASK_TIME.jsonl     a line for each item and filter: its document, prompt, answers and scores

Our runs add the key `upcycle` (class Own) to the results: the command, notes for the reader, and checksums of all that
was written, because a digit that changes on a disk would change a score silently. Their samples hold documents and
prompts only if log_samples=true.

lm-eval keeps at most the name of a metric's function. We use a name if it gives the number that lm-eval wrote. A metric
without such a name is shown with a note and not compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from hashlib import sha256 as sha
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np

from evaluation.judge import metrics as measures
from evaluation.judge.results import Evaluation, Group, Item, Model, Raw, Task
from upcycle.io import strict
from upcycle.io.disk import sha256
from upcycle.io.publish import digest

OPTIONS = ("model", "model_args", "limit", "gen_kwargs", "batch_size")
AGAIN = "run the evaluation again"
# keys of documents that group items, the widest group first: items of one group are not independent (compare)
FROM = ("file", "path", "url", "document", "article", "story", "passage", "context")


class Own(TypedDict):
    """Hold the part that our runs add to lm-eval's results."""

    suite: str
    name: str  # the model's name in tables
    command: str
    options: dict[str, Any]
    started: str
    work: dict[str, float]
    notes: list[str]
    aggregation: dict[str, dict[str, str]]  # by task and metric, for functions other than the mean
    alike: dict[str, list[str]]  # by group: the metrics that weigh all tasks equally
    samples: dict[str, str]  # the sha256 of each task's samples
    sum: str  # the sum of the whole file without this key


class Settings(TypedDict):
    """Hold the keys that we read from the `config` of results."""

    limit: NotRequired[float | None]
    model_num_parameters: NotRequired[int | None]
    model_active_parameters: NotRequired[int | None]
    model_step: NotRequired[int | None]


Rows = dict[str, dict[str, Any]]
Whole = TypedDict(
    "Whole",
    {
        "results": Rows, "configs": Rows, "config": Settings, "versions": dict[str, Any],
        "n-shot": dict[str, Any], "n-samples": NotRequired[dict[str, dict[str, int]]], "groups": NotRequired[Rows],
        "group_subtasks": NotRequired[dict[str, list[str]]], "higher_is_better": NotRequired[Rows],
        "total_evaluation_time_seconds": NotRequired[str | float | None], "upcycle": NotRequired[Own],
    },
)  # fmt: skip


class Sample(TypedDict):
    """Hold the keys that we read from a line of samples."""

    doc_id: strict.Count
    doc: Any
    target: Any
    arguments: Any
    resps: list[list[Any]]
    doc_hash: str
    prompt_hash: str
    filter: NotRequired[str]
    metrics: NotRequired[list[str]]
    choices: NotRequired[list[str]]  # set in our runs without log_samples, as are clusters
    clusters: NotRequired[dict[str, str]]


Samples = Mapping[str, Sequence[Mapping[str, Any]]]  # of each task


def is_run(place: str | Path) -> bool:
    """Return whether the path is a results file or a folder with one."""
    return newest(Path(place)) is not None


def load(place: str | Path) -> Evaluation:
    """Return the scores and items of a run, given its results file, its folder, or the parent folder."""
    path = newest(Path(place))
    if path is None:
        raise ValueError(
            f"{place} has no results_*.json; give a folder that `upcycle eval` of this version or lm-eval "
            "(--output_path FOLDER --log_samples) has finished"
        )
    return read(path, path.stat().st_mtime)


def newest(place: Path) -> Path | None:
    """Return lm-eval's results file: the path itself, the last one in the folder, or in its only folder with
    results."""
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
    """Return the time in the name of a results file; "" if lm-eval does not write such a name."""
    stem, _, time = path.stem.rpartition("_")
    return time if stem and time[:2].isdigit() else ""


# ---- one run


@lru_cache(16)
def read(path: Path, changed: float) -> Evaluation:
    """Return the run of a results file; `changed` is the file's time, so that a new version is read again."""
    whole = opened(path)
    names = dict.fromkeys([*(name for name in whole["results"] if name in whole["configs"]), *whole["configs"]])
    rows = {name: samples(path, name, whole) for name in names}
    try:
        tasks = {name: task(name, whole, rows[name]) for name in rows}
        groups, notes = groups_of(whole, tasks)
        seconds = float(whole.get("total_evaluation_time_seconds") or 0)
        items = tuple(item for name in rows for item in items_of(name, whole["configs"][name], rows[name]))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{path} and its samples do not have lm-eval's format ({error!s:.300}); {AGAIN}") from None
    inside = {name: sorted((len(g.tasks), g.name) for g in groups.values() if name in g.tasks) for name in rows}
    tasks = {name: replace(each, groups=tuple(group for _, group in inside[name])) for name, each in tasks.items()}
    config: Mapping[str, Any] = whole["config"]
    own = whole.get("upcycle")
    top = [name for name in (*groups, *rows) if not any(name in g.tasks for g in groups.values() if g.name != name)]
    suite = ",".join(top)
    if own:
        check_items(path, items, tasks, whole)
    return Evaluation(
        model=model(config, whole, rows),
        suite=own["suite"] if own else suite,
        command=own["command"] if own else f"lm-eval run --model {config.get('model')} --tasks {suite}",
        options=own["options"] if own else {key: config[key] for key in OPTIONS if config.get(key)},
        versions={key.removesuffix("_version"): str(whole.get(key)) for key in whole if key.endswith("_version")},
        started=own["started"] if own else time_of(path),
        seconds=seconds,
        work=own["work"] if own else {},
        tasks=tasks,
        groups=groups,
        notes=(*(own["notes"] if own else limited(config)), *notes, *own_functions(tasks)),
        items=items,
        place=str(path),
    )


def opened(path: Path) -> Whole:
    """Return the content of a results file, after checking the sum if it is ours."""
    value = strict.read_object(path, constants=True)
    try:
        whole: Whole = strict.held(value, Whole, str(path))
    except ValueError as error:
        raise ValueError(f"{error}: is it a results file of lm-eval 0.4 or newer?") from None
    if own := value.get("upcycle"):
        unsigned = {key: each for key, each in own.items() if key != "sum"}
        if own["sum"] != digest(value | {"upcycle": unsigned}):
            raise ValueError(f"{path} was changed after it was written: its sum differs; {AGAIN}")
    return whole


def samples(results_file: Path, name: str, whole: Whole) -> list[dict[str, Any]]:
    path, own = results_file.with_name(f"samples_{name}_{time_of(results_file)}.jsonl"), whole.get("upcycle")
    if not path.is_file():
        raise ValueError(f"{path} is missing, and a comparison needs every item; run lm-eval with --log_samples")
    if own and sha256(path) != own["samples"].get(name):
        raise ValueError(
            f"{path} was changed after it was written: its sha256 is not the one in {results_file.name}; {AGAIN}"
        )
    try:
        return [
            strict.held(strict.parse(line, where, constants=True), Sample, where)
            for where, line in strict.read_lines(path)
        ]
    except ValueError as error:
        raise ValueError(f"{path} does not have lm-eval's format ({error!s:.300}); {AGAIN}") from None


def check_items(path: Path, items: Sequence[Item], tasks: Mapping[str, Task], whole: Whole) -> None:
    """Raise a ValueError unless our run has all its items and their numbers are finite."""
    for item in items:
        check_finite(item.task, item.doc, [item.logprobs, item.scores], f"{path} is damaged; {AGAIN}")
        if len(item.logprobs) < len(item.choices):
            raise ValueError(f"{item.task} {item.doc} has more choices than log-probabilities in {path}; {AGAIN}")
    for name, each in tasks.items():
        wanted = whole.get("n-samples", {}).get(name, {}).get("effective")
        if each.items != wanted:
            raise ValueError(f"{path} has {wanted} items of {name} and its samples {each.items}; {AGAIN}")


def check_finite(task: str, doc: int, value: Any, how: str) -> None:
    """Raise a ValueError if the value has a nan or infinite number at any depth."""
    if isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            check_finite(task, doc, inner, how)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"item {doc} of {task} has a number that is not finite; {how}")


def limited(config: Mapping[str, Any]) -> Iterator[str]:
    if limit := config.get("limit"):
        yield f"limit={limit:g}: not all items of each task"


def own_functions(tasks: Mapping[str, Task]) -> Iterator[str]:
    """Yield a sentence about each task whose metrics only its own code can compute."""
    for each in tasks.values():
        if own := [metric for metric, function in each.aggregation.items() if function == measures.OWN]:
            yield f"{each.name}: {', '.join(own)} comes from the task's own function: it has no interval and is not "
            "compared"


# ---- the model


def model(config: Mapping[str, Any], whole: Whole, rows: Samples) -> Model:
    """Return the model; if lm-eval kept no fingerprint, a digest of all answers takes its place."""
    given, own = config.get("model_args"), whole.get("upcycle")
    named = (
        given if isinstance(given, dict) else dict(part.split("=", 1) for part in str(given).split(",") if "=" in part)
    )
    source = str(named.get("pretrained") or named.get("model") or whole.get("model_name") or config.get("model"))
    answers = answers_digest(rows)
    parameters = int(config.get("model_num_parameters") or 0)
    return Model(
        name=own["name"] if own else Path(source).name,
        source=source,
        fingerprint=str(config.get("model_sha") or answers) if config.get("model_identity") else answers,
        kind=str(config.get("model_type") or config.get("model")),
        parameters=parameters,
        active=int(config.get("model_active_parameters") or parameters),
        dtype=str(config.get("model_dtype") or named.get("dtype") or "").removeprefix("torch."),
        step=config.get("model_step"),
        identity=str(config.get("model_identity") or answers),
    )


def answers_digest(rows: Samples) -> str:
    """Return a digest of all answers, which stands for the weights of a model that is not ours."""
    sums = sha()
    for name, lines in sorted(rows.items()):
        sums.update(repr((name, [(line["doc_id"], line["resps"]) for line in lines])).encode())
    return sums.hexdigest()


# ---- tasks and groups


def metric_name(metric: str, chosen: str) -> str:
    """Return lm-eval's `acc,none` as acc; exact_match,strict-match keeps its filter."""
    return metric if chosen == "none" else f"{metric},{chosen}"


def numbers(row: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Return (metrics, standard errors) of a row of lm-eval's results."""
    values: dict[str, float] = {}
    errors: dict[str, float] = {}
    for name, value in row.items():
        metric, comma, chosen = name.partition(",")
        if not comma or not isinstance(value, float | int | np.number):  # "N/A", or a task's own lists and tables
            continue
        kept, base = (errors, metric.removesuffix("_stderr")) if metric.endswith("_stderr") else (values, metric)
        kept[metric_name(base, chosen)] = float(value)
    return values, errors


def task(name: str, whole: Whole, rows: Sequence[Mapping[str, Any]]) -> Task:
    config, (values, errors) = whole["configs"][name], numbers(whole["results"].get(name, {}))
    higher = whole.get("higher_is_better", {}).get(name) or {}
    if own := whole.get("upcycle"):
        functions = own["aggregation"].get(name, {})
    else:
        functions = {metric: function_of(metric, value, config, rows) for metric, value in values.items()}
    effective = len({row["doc_id"] for row in rows})
    return Task(
        name=name,
        title=str(config.get("task_alias") or name),
        metrics=values,
        stderr=errors,
        higher_is_better={metric: bool(higher.get(metric.partition(",")[0], True)) for metric in values},
        items=effective,
        total=whole.get("n-samples", {}).get(name, {}).get("original") or effective,
        fewshot=int(whole["n-shot"].get(name) or 0),
        version=str(whole["versions"].get(name)),
        output=str(config.get("output_type")),
        aggregation={metric: function for metric, function in functions.items() if function != "mean"},
    )


def function_of(metric: str, value: float, config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the name of lm-eval's function that computes `value` from the items' scores; OWN if there is none."""
    from lm_eval.api import metrics as _  # noqa: F401 - fills the registries
    from lm_eval.api.registry import AGGREGATION_REGISTRY, METRIC_AGGREGATION_REGISTRY

    base, _comma, chosen = metric.partition(",")
    scores = [score(row[base]) for row in rows if base in row and row.get("filter", "none") == (chosen or "none")]
    entries = [each for each in config.get("metric_list") or () if each.get("metric") == base]
    named = [str(each["aggregation"]) for each in entries if each.get("aggregation")]
    if not named:  # the metric's usual function, or the function of a task that is a class
        usual = METRIC_AGGREGATION_REGISTRY.get(base)
        named = [name for name, function in AGGREGATION_REGISTRY.items() if function is usual] + [
            "mean",
            measures.OF_ALL,
        ]
    elif not AGGREGATION_REGISTRY.keys() & named:
        named = [measures.OF_ALL]  # a task's own function of right and wrong parts
    for name in named:
        try:
            again = measures.aggregate(name, scores)
        except (TypeError, ValueError, KeyError, IndexError, ArithmeticError):
            continue
        if math.isclose(again, value, rel_tol=1e-9, abs_tol=1e-12) or (math.isnan(again) and math.isnan(value)):
            return name
    return measures.OWN


def groups_of(whole: Whole, known: Mapping[str, Task]) -> tuple[dict[str, Group], list[str]]:
    """Return (groups, notes); the group's number shows how it weighs its tasks, which lm-eval does not write."""
    children, own = whole.get("group_subtasks", {}), whole.get("upcycle")
    out, notes = dict[str, Group](), list[str]()

    def leaves(name: str, around: tuple[str, ...] = ()) -> list[str]:
        if name in around:
            raise ValueError(f"the group {name:.60} contains itself; {AGAIN}")
        inner = [leaf for child in children.get(name, ()) for leaf in leaves(child, (*around, name))]
        return list(dict.fromkeys(inner)) or ([name] if name in known else [])

    for name in children:
        inside, row = leaves(name), whole.get("groups", {}).get(name, {})
        if not inside or name in known:
            continue
        values, errors = numbers(row)
        if own:
            alike = own["alike"].get(name, [])
        else:
            weights = {metric: weights_of(metric, value, inside, known) for metric, value in values.items()}
            alike = [metric for metric, by_size in weights.items() if by_size is False]
            values = {metric: value for metric, value in values.items() if weights[metric] is not None}
            lost = [metric for metric, by_size in weights.items() if by_size is None]
            notes += [f"{name}: {metric} is not a mean of its tasks' numbers, so it is not compared" for metric in lost]
        title = str(row.get("alias") or name).strip(" -")
        errors = {metric: error for metric, error in errors.items() if metric in values}
        count = sum(known[each].items for each in inside)
        out[name] = Group(name, title, values, errors, tuple(inside), count, tuple(alike))
    return out, notes


def weights_of(metric: str, value: float, inside: Sequence[str], known: Mapping[str, Task]) -> bool | None:
    """Return whether the group's number weighs its tasks by their items; None if it is not a mean of their numbers."""
    mine = [known[each] for each in inside if metric in known[each].metrics and known[each].items]
    numbers_of = [each.metrics[metric] for each in mine]
    if mine and math.isclose(value, np.average(numbers_of, weights=[each.items for each in mine]), rel_tol=1e-9):
        return True
    return False if mine and math.isclose(value, float(np.mean(numbers_of)), rel_tol=1e-9) else None


# ---- items


def items_of(name: str, config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Iterator[Item]:
    """Yield a task's items in the order of their documents, each with the scores of all filters."""
    merged, seen = dict[int, Item](), set[tuple[int, str]]()
    for row in rows:
        doc, chosen = row["doc_id"], row.get("filter", "none")
        if (doc, chosen) in seen:
            raise ValueError(f"the item {name} {doc} is there twice")
        seen.add((doc, chosen))
        bases = row.get("metrics") or [each.get("metric") for each in config.get("metric_list") or ()]
        scores = {metric_name(base, chosen): score(row[base]) for base in bases if base in row}
        if doc in merged:  # another filter of the same answer
            merged[doc] = replace(merged[doc], scores={**merged[doc].scores, **scores})
        else:
            merged[doc] = item(name, config, row, scores)
    yield from (merged[number] for number in sorted(merged))


def item(name: str, config: Mapping[str, Any], row: Mapping[str, Any], scores: Mapping[str, Raw]) -> Item:
    output = str(config.get("output_type"))
    choices = choices_of(config, row)
    text, logprobs, greedy = answers_of([reply(each[0], output) for each in row["resps"]], len(choices))
    return Item(
        task=name,
        doc=row["doc_id"],
        doc_hash=row["doc_hash"],
        prompt_hash=row["prompt_hash"],
        target="" if output == "loglikelihood_rolling" else str(row["target"]),
        scores=scores,
        logprobs=logprobs,
        greedy=greedy,
        text=text,
        choices=choices,
        clusters=row["clusters"] if "clusters" in row else clusters(row["doc"]),
    )


def score(value: Any) -> Raw:
    """Return a score in the form that metrics take: numbers as floats, lists as tuples at every depth."""
    found = measures.plain(value)
    return float(found) if isinstance(found, bool | int) else found


def reply(value: Any, output: str) -> Any:
    """Return an answer from lm-eval's texts: (log-probability, greedy), a log-probability, or a text."""
    if isinstance(value, list) and len(value) == 2:
        return float(value[0]), value[1] in (True, "True")
    return float(value) if output == "loglikelihood_rolling" else value


def answers_of(answers: Sequence[Any], choices: int = 0) -> tuple[str, tuple[float, ...], tuple[bool, ...]]:
    """Return (text, log-probabilities, whether greedy) of the answers to an item's requests.

    Leave out the answers of acc_mutual_info, which asks for each choice again without its context.
    """
    text = next((answer for answer in answers if isinstance(answer, str)), "")
    likely = [answer for answer in answers if not isinstance(answer, str)]
    pairs = [answer if isinstance(answer, tuple | list) else (answer, None) for answer in likely][: choices or None]
    return text, tuple(float(a) for a, _ in pairs), tuple(bool(b) for _, b in pairs if b is not None)


def clusters(doc: Any) -> dict[str, str]:
    """Return digests of the document's values that group items, by key."""
    found = {name: doc[name] for name in FROM if isinstance(doc, Mapping) and isinstance(doc.get(name), str)}
    return {name: blake2b(value.encode(), digest_size=8).hexdigest() for name, value in found.items() if value}


def choices_of(config: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the texts that the log-probabilities belong to: the endings, or the beginnings if the endings are
    equal."""
    if "choices" in row or config.get("output_type") != "multiple_choice":
        return tuple(row.get("choices", ()))
    asked = [(each["arg_0"], each["arg_1"]) for each in row["arguments"].values()]
    half = len(asked) // 2
    if half and all(context == "" for context, _ in asked[half:]) and asked[0][0]:
        asked = asked[:half]  # acc_mutual_info asks for each ending again, without its context
    endings = [ending.removeprefix(str(config.get("target_delimiter", " "))) for _, ending in asked]
    return tuple(endings if len(set(endings)) > 1 else [context for context, _ in asked])
