"""Score a model on a suite, and write the folder of its scores in the format of `upcycle eval`.

    results_TIME.json, samples_TASK_TIME.jsonl    for compare, report and study (evaluation/judge/logged.py)
    facts.md                                      the table

Each group (told, untold, known) is three tasks: GROUP_exact, GROUP_choice and GROUP_text. Items are clustered by
entity, or by document.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from hashlib import blake2b, sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from evaluation.ask import load
from evaluation.ask.engine import Engine
from evaluation.facts import suite as suites
from evaluation.facts.asking import Answered, Read, ask
from evaluation.judge import logged
from evaluation.judge.intervals import Figure, figure
from evaluation.judge.metrics import PER_UNIT
from evaluation.judge.results import Evaluation, Model
from training.parallel.mesh import MeshConfig, ParallelMesh
from training.parallel.processes import processes
from upcycle import __version__
from upcycle.config.values import at_least, check_values, one_of
from upcycle.io import disk, strict
from upcycle.io.publish import LOCK, alone, digest

GROUPS = ("told", "untold", "known")
DTYPES = ("float32", "bfloat16", "float64")
NAME = "facts"
METRICS = {"exact": "exact_match", "choice": "acc", "text": "nats_a_token"}
TITLES = {"exact": "exact match", "choice": "choice", "text": "nats a token"}
TABLE = "facts.md"


@dataclass(frozen=True)
class ScoreConfig:
    model: str = ""  # a Hugging Face folder, a hub id, or a training run's folder
    suite: str = ""  # a folder of `upcycle facts write`
    output: str = ""  # the folder to make; "": runs/eval/facts-MODEL-DIGEST
    name: str = ""  # the model's name in tables; "": the folder's
    dtype: str = "float32"  # float32 | bfloat16 | float64
    forward_tokens: int = 32768  # tokens of one forward, at most
    tokenizer: str = ""  # a folder with a tokenizer, or a hub id; "": the model's own
    device: str = ""  # cuda | cpu; "": cuda if there is one

    def __post_init__(self) -> None:
        check_values(self, "", {"dtype": one_of(DTYPES), "forward_tokens": at_least(1)})
        for key in ("model", "suite"):
            if not getattr(self, key):
                raise ValueError(f"{key} is not set; write upcycle facts score MODEL suite=FOLDER")


@dataclass(frozen=True)
class Task:
    """Hold the items of a task, as logged.Sample has them, and each item's score, unit and cluster."""

    name: str
    rows: tuple[Mapping[str, Any], ...]
    score_N: tuple[float, ...]
    unit_N: tuple[float, ...]
    cluster_N: tuple[str, ...]
    part_N: tuple[str, ...]  # sort and kind of each question, for the table

    @property
    def group(self) -> str:
        return self.name.partition("_")[0]

    @property
    def what(self) -> str:
        return self.name.partition("_")[2]

    def figure(self, part: str = "") -> Figure:
        """Return the figure of all items, or of those of one part."""
        kept = [n for n, each in enumerate(self.part_N) if part in ("", each)]
        score, unit = (np.array([values[n] for n in kept]) for values in (self.score_N, self.unit_N))
        return figure(score, unit, [self.cluster_N[n] for n in kept])


def score(config: ScoreConfig, command: str = "") -> Evaluation:
    """Ask a model a suite, write the folder, and return the scores."""
    started, clock = datetime.now(UTC), time.monotonic()
    asked = suites.read(config.suite)
    if config.output:
        check_folder(Path(config.output))
    with processes(config.device) as device:
        mesh = ParallelMesh(MeshConfig(), device_type=device.type)
        loaded = load.opened(config.model, config.dtype, mesh, device, tokenizer=config.tokenizer)
        engine, ready = Engine(loaded.model, config.forward_tokens), time.monotonic()
        answered, read = ask(engine, loaded.tokenizer, asked)
    mark = sha256(f"{loaded.about.identity} {asked.mark}".encode()).hexdigest()
    folder = Path(config.output or f"runs/eval/facts-{loaded.about.name}-{mark[:8]}")
    tasks = [*question_tasks(answered), *text_tasks(read)]
    work = {
        **engine.work, "requests": float(sum(len(a.scores) for a in answered) + sum(map(len, read.values()))),
        "loading_seconds": ready - clock, "asking_seconds": time.monotonic() - ready,
    }  # fmt: skip
    own = {
        "suite": NAME, "name": config.name or loaded.about.name, "command": command, "options": asdict(config),
        "started": started.isoformat(timespec="seconds"), "work": work, "notes": [], "alike": {},
        "aggregation": {task.name: {METRICS["text"]: PER_UNIT} for task in tasks if task.what == "text"},
    }  # fmt: skip
    with alone(folder / LOCK, folder):
        check_folder(folder)
        disk.sweep(folder)
        return written(folder, tasks, loaded.about, own, time.monotonic() - clock)


# ---- tasks


def question_tasks(answered: Sequence[Answered]) -> Iterator[Task]:
    """Yield the tasks of questions: is the right answer written, and is it the likeliest?"""
    for group in GROUPS:
        mine = [each for each in answered if each.question.group == group]
        for what in ("exact", "choice") if mine else ():
            right = [float(each.exact if what == "exact" else each.chosen) for each in mine]
            yield Task(
                f"{group}_{what}", tuple(question_row(n, each, what) for n, each in enumerate(mine)), tuple(right),
                (1.0,) * len(mine), tuple(each.question.entity for each in mine),
                tuple(f"{each.question.sort}: {each.question.kind}" for each in mine),
            )  # fmt: skip


def question_row(number: int, each: Answered, what: str) -> dict[str, Any]:
    q, right = each.question, float(each.exact if what == "exact" else each.chosen)
    scores, choices = (each.scores, [q.answer, *q.others]) if what == "choice" else (each.scores[:1], [])
    row = row_of(number, q.entity, json.dumps([q.prompt, q.answer, q.others]), q.prompt, METRICS[what], right)
    return row | {"target": q.answer, "choices": choices, "resps": [[[nats, best]] for nats, best in scores]}


def text_tasks(read: Mapping[str, Sequence[Read]]) -> Iterator[Task]:
    """Yield the tasks of held-out documents: nats a token."""
    for group, mine in read.items():
        if mine:
            rows = []
            for number, each in enumerate(mine):
                row = row_of(
                    number, each.text["entity"], each.text["text"], "", METRICS["text"], [each.nats, each.tokens]
                )
                rows.append(row | {"target": "", "choices": [], "resps": [[-each.nats]]})
            yield Task(
                f"{group}_text", tuple(rows), tuple(each.nats for each in mine), tuple(float(e.tokens) for e in mine),
                tuple(each.text["entity"] for each in mine), ("",) * len(mine),
            )  # fmt: skip


def row_of(number: int, entity: str, doc: str, prompt: str, metric: str, value: Any) -> dict[str, Any]:
    return {
        "doc_id": number, "doc": {}, "arguments": [], "filter": "none", "metrics": [metric], metric: value,
        "doc_hash": sha256(doc.encode()).hexdigest(), "prompt_hash": sha256(prompt.encode()).hexdigest(),
        "clusters": {"entity": blake2b(entity.encode(), digest_size=8).hexdigest()},
    }  # fmt: skip


# ---- the folder


def check_folder(folder: Path) -> None:
    """Raise a ValueError unless the folder is new, empty, or has only earlier or unfinished scores of facts."""
    if folder.is_dir():
        own = {folder / LOCK, *results_in(folder), *samples_in(folder)}
        if (folder / TABLE).is_file() or all(p in own or disk.TEMPORARY.fullmatch(p.name) for p in folder.iterdir()):
            return
    if folder.exists():
        raise ValueError(f"{folder} exists and `upcycle facts score` did not write it; choose another output")


def results_in(folder: Path) -> list[Path]:
    """Return the results of facts in a folder."""
    every = [(path, strict.read_object(path, constants=True).get("upcycle")) for path in folder.glob("results_*.json")]
    return [path for path, own in every if isinstance(own, dict) and own.get("suite") == NAME]


def samples_in(folder: Path) -> list[Path]:
    """Return the samples of facts in a folder."""
    names = [f"{group}_{what}" for group in GROUPS for what in METRICS]
    return [path for name in names for path in folder.glob(f"samples_{name}_*.jsonl")]


def written(folder: Path, tasks: Sequence[Task], about: Model, own: Mapping[str, Any], seconds: float) -> Evaluation:
    """Write the samples, the table and the results, and then remove earlier results and samples."""
    moment, figures = datetime.now().isoformat().replace(":", "-"), {task.name: task.figure() for task in tasks}
    outputs = {"exact": "loglikelihood", "choice": "multiple_choice", "text": "loglikelihood_rolling"}
    results: dict[str, Any] = {}
    for task in tasks:
        for number, row in enumerate(task.rows):
            logged.check_finite(task.name, number, row["resps"], "the model is damaged, or write dtype=float32")
        found, metric = figures[task.name], METRICS[task.what]
        results[task.name] = {"alias": f"{task.group}, {TITLES[task.what]}", f"{metric},none": found.value}
        if found.error is not None:
            results[task.name][f"{metric}_stderr,none"] = found.error
    facts = {task.name: {part or "all": asdict(task.figure(part)) for part in parts(task)} for task in tasks}
    value: dict[str, Any] = {
        "results": results,
        "configs": {t.name: {"task_alias": results[t.name]["alias"], "output_type": outputs[t.what]} for t in tasks},
        "versions": {task.name: suites.FORMAT for task in tasks},
        "n-shot": {task.name: 0 for task in tasks},
        "n-samples": {task.name: {"original": len(task.rows), "effective": len(task.rows)} for task in tasks},
        "higher_is_better": {task.name: {METRICS[task.what]: task.what != "text"} for task in tasks},
        "config": {"model": "upcycle", "model_args": {"pretrained": about.source}, **load.described(about)},
        "total_evaluation_time_seconds": seconds,
        "upcycle_version": __version__, "torch_version": version("torch"),
        "facts": facts,
    }  # fmt: skip
    earlier = [*results_in(folder), *samples_in(folder)]
    names = {task.name: folder / f"samples_{task.name}_{moment}.jsonl" for task in tasks}
    for task in tasks:
        suites.write_rows(names[task.name], task.rows)
    value["upcycle"] = {**own, "samples": {name: disk.sha256(path) for name, path in names.items()}}
    value["upcycle"]["sum"] = digest(value)
    path = folder / f"results_{moment}.json"
    disk.write_atomic(folder / TABLE, (table(facts, own["name"]) + "\n").encode())
    disk.write_atomic(path, json.dumps(value, indent=1, ensure_ascii=False).encode() + b"\n")
    for old in earlier:
        old.unlink()
    return logged.load(folder)


def parts(task: Task) -> list[str]:
    """Return the parts of a task that have their own figures; "" is the whole."""
    return ["", *(dict.fromkeys(part for part in task.part_N if part))]


# ---- the table


def table(facts: Mapping[str, Mapping[str, Any]], name: str) -> str:
    """Write the figures as Markdown: a line for each group, then a line for each kind of fact that was told."""
    lines = [f"Facts: {name}. Share of right answers, in %, with 95 % intervals over entities.", ""]
    lines += ["| | questions | entities | exact match | choice | nats a token |", "|---|---|---|---|---|---|"]
    for group in GROUPS:
        lines += line(group, *(facts.get(f"{group}_{what}", {}).get("all") for what in METRICS))
    for part in facts.get("told_exact", {}):
        if part != "all":
            lines += line(part, facts["told_exact"][part], facts["told_choice"][part], None)
    return "\n".join(lines)


def line(name: str, exact: Any, choice: Any, text: Any) -> list[str]:
    """Return a line of the table; none if nothing was asked."""
    if not exact and not text:
        return []
    asked = [f"{exact['items']:,}", f"{exact['clusters']:,}"] if exact else ["", ""]
    cells = [name, *asked, percent(exact), percent(choice), nats(text)]
    return [f"| {' | '.join(cells)} |"]


def percent(found: Mapping[str, Any] | None) -> str:
    if not found:
        return ""
    around = "" if found["low"] is None else f" ({100 * found['low']:.1f} to {100 * found['high']:.1f})"
    return f"{100 * found['value']:.1f}{around}"


def nats(found: Mapping[str, Any] | None) -> str:
    if not found:
        return ""
    around = "" if found["error"] is None else f" ± {found['error']:.4f}"
    return f"{found['value']:.4f}{around}"
