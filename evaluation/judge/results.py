"""What a run of a suite leaves behind: a folder of two files, which everything else here reads.

    run.json      one object: the model, where the numbers come from, and every task's scores (class Evaluation)
    items.jsonl   one object a line: every item of every task with what the model answered (class Item)

run.json has a sum of itself and of items.jsonl: a digit that changes on a disk would move a score without a word.

Two runs are compared item by item: join on Item.key, and refuse where prompt_hash differs, because then the two models
were asked different things. Nothing is a pickle, and floats are kept to the last bit.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from upcycle.converting.convert import jsonable
from upcycle.io import strict
from upcycle.io.disk import make_folder, sha256, write_atomic
from upcycle.io.publish import digest

FORMAT = 3
Raw = Any  # what lm-eval's task makes of an item: a number, a tuple of them or of texts, ...
T = TypeVar("T", "Item", "Evaluation")


@dataclass(frozen=True)
class Item:
    task: str
    doc: int  # its number in the task
    doc_hash: str  # lm-eval's, of the document's content
    prompt_hash: str  # lm-eval's, of the text that the model saw
    target: str
    # by metric, as the task's aggregation takes them (measures.py): 0 or 1 (acc, exact_match); (log-likelihood in nats,
    # units) of a text (bits_per_byte); (right class, chosen class) for f1 and mcc; (reference, text) for bleu
    scores: Mapping[str, Raw]
    logprobs: tuple[float, ...] = ()  # of each choice in nats; one for a text; none for a generation
    greedy: tuple[bool, ...] = ()  # whether each choice is what greedy decoding would write
    text: str = ""  # what was generated
    choices: tuple[str, ...] = ()  # what each log-probability is of; empty for texts
    # digests by name of those of the document's keys that say where it is from (file, passage, ...; see answers.FROM)
    clusters: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, int]:
        """Names an item in every run of a suite. The number tells apart the few documents that a task has twice."""
        return self.task, self.doc_hash, self.doc


@dataclass(frozen=True)
class Task:
    name: str
    title: str  # for tables
    metrics: Mapping[str, float]
    stderr: Mapping[str, float]  # where lm-eval gives one
    higher_is_better: Mapping[str, bool]
    items: int
    total: int  # items that the task has; more than `items` under a limit
    fewshot: int
    version: str
    output: str  # multiple_choice | loglikelihood | loglikelihood_rolling | generate_until
    groups: tuple[str, ...] = ()  # that it counts in, innermost first
    aggregation: Mapping[str, str] = field(default_factory=dict)  # of metrics that are not the mean: see measures.py


@dataclass(frozen=True)
class Group:
    name: str
    title: str
    metrics: Mapping[str, float]  # weighted by the tasks' sizes, but for those that `alike` names
    stderr: Mapping[str, float]
    tasks: tuple[str, ...]  # all of them, through inner groups too
    items: int
    alike: tuple[str, ...] = ()  # metrics in which all tasks weigh the same, whatever their sizes


@dataclass(frozen=True)
class Model:
    name: str  # for tables and legends
    source: str  # folder, hub id or training run
    fingerprint: str  # of the weights: the same model has the same one, wherever it lies
    kind: str  # model_type, of config.json
    parameters: int
    active: int  # parameters that a token uses
    dtype: str
    step: int | None = None  # of a training run's checkpoint
    identity: str = ""  # of the model as computed: weights, config, tokenizer, dtype, versions; see load.identity


@dataclass(frozen=True)
class Evaluation:
    model: Model
    suite: str
    command: str
    options: Mapping[str, Any]
    versions: Mapping[str, str]  # python, torch, lm_eval, transformers, upcycle
    started: str  # ISO 8601, UTC
    seconds: float
    work: Mapping[str, float]  # tokens through the model, forwards, requests, requests answered by the cache, seconds
    tasks: Mapping[str, Task]
    groups: Mapping[str, Group] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what a reader must know: items cut, official lists not used, a limit


def save(folder: str | Path, run: Evaluation, items: Iterable[Item]) -> Path:
    """Writes both files and returns the folder. run.json is written last: a folder that has one is whole."""
    return save_run(folder, run, save_items(folder, items))


def save_items(folder: str | Path, items: Iterable[Item]) -> str:
    """Writes items.jsonl, removes run.json, which would be of other items, and returns the sum of the new ones."""
    folder = Path(folder)
    make_folder(folder)
    (folder / "run.json").unlink(missing_ok=True)
    lines = []
    for item in items:
        check_finite(item, "the model gives numbers that cannot be judged; try dtype=float32")
        lines.append(json.dumps(asdict(item), ensure_ascii=False, separators=(",", ":")) + "\n")
    data = "".join(lines).encode()
    write_atomic(folder / "items.jsonl", data)
    return hashlib.sha256(data).hexdigest()


def save_run(folder: str | Path, run: Evaluation, items: str) -> Path:
    """Writes run.json; `items`: the sum of the run's items, as save_items returns it."""
    value = jsonable({"format": FORMAT} | asdict(run) | {"items_sha256": items})
    write_atomic(Path(folder) / "run.json", json.dumps(value | {"sum": digest(value)}, indent=1).encode() + b"\n")
    return Path(folder)


def load(folder: str | Path) -> Evaluation:
    """The scores of a run; its items are read by items()."""
    path = Path(folder) / "run.json"
    value = verified(path)
    del value["items_sha256"]
    run = made(Evaluation, value, path)
    for name, group in run.groups.items():
        if not group.tasks or set(group.tasks) - run.tasks.keys():
            raise ValueError(f"{path} has no tasks of the group {name:.60}; run the evaluation again")
    return run


def verified(path: Path) -> dict[str, Any]:
    """What a run.json holds, if it is as it was written."""
    if not path.is_file():
        raise ValueError(f"{path.parent} has no run.json; give a folder that `python -m evaluation run` has finished")
    value = strict.read_json(path, constants=True)
    if not isinstance(value, dict) or value.pop("format", None) != FORMAT:
        raise ValueError(f"{path} is not of format {FORMAT}, which this version reads; run the evaluation again")
    if value.pop("sum", None) != digest({"format": FORMAT} | value) or "items_sha256" not in value:
        raise ValueError(f"{path} is not what was written: its sum differs; run the evaluation again")
    return value


def items(folder: str | Path) -> Iterator[Item]:
    """The items of a run, in the order of its tasks and of their documents: those that were written, each once, with
    numbers that are finite. Without a run.json, which a run writes last, nothing says whether they are all."""
    path, whole = Path(folder) / "items.jsonl", Path(folder) / "run.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no items.jsonl; give a folder that `python -m evaluation run` has finished")
    tasks = load(folder).tasks if whole.is_file() else None
    if tasks is not None and sha256(path) != verified(whole)["items_sha256"]:
        raise ValueError(f"{path} is not what was written: its sha256 is not run.json's; run the evaluation again")
    count, seen = dict.fromkeys(tasks or (), 0), set[tuple[str, str, int]]()
    for where, line in strict.read_lines(path):
        item = made(Item, strict.parse(line, where, constants=True), where)
        if len(item.logprobs) < len(item.choices):
            raise ValueError(f"{where} has more choices than log-probabilities; run the evaluation again")
        if item.key in seen:
            raise ValueError(f"{where} is {item.task} {item.doc} once more; run the evaluation again")
        check_finite(item, f"{path} is damaged; run the evaluation again")
        seen.add(item.key)
        count[item.task] = count.get(item.task, 0) + 1
        yield replace(item, scores={name: tuples(score) for name, score in item.scores.items()})
    for name, task in (tasks or {}).items():
        if count[name] != task.items:
            raise ValueError(f"{path} has {count[name]} items of {name} and run.json {task.items}; run it again")


def check_finite(item: Item, how: str) -> None:
    if not finite(item.logprobs) or not finite(item.scores):
        raise ValueError(f"item {item.doc} of {item.task} has a number that is not finite; {how}")


def finite(value: Any) -> bool:
    """Whether no number in the value is nan or infinite, at any depth."""
    if isinstance(value, Mapping):
        return all(map(finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def tuples(value: Any) -> Raw:
    """The value with tuples for lists, at every depth."""
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def made(kind: type[T], value: Any, where: Path | str) -> T:
    """A `kind` of a JSON object, whose lists become tuples. ValueError if it is not as this version writes it."""
    try:
        found: T = strict.held(value, kind, str(where))
        return found
    except ValueError as error:
        raise ValueError(f"{error}: not as this version writes it; run the evaluation again") from None
