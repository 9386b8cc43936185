"""Suites as lm-eval's tasks: `load` reads a file of suites/ and gives the tasks it names, with their documents.

The keys of a suite:

tasks:    names that lm-eval knows (tasks, groups), or tasks written out, with files beside the suite
folders:  those of lm-eval's own collection that have these names; without it all, which takes 11 seconds to read
fewshot:  examples in a prompt, where a task does not fix them
texts:    true if the suite takes texts=[...] and has a task for each file, instead of `tasks`
notes:    {task: what a reader must know of it when it is read from files}
"""

from __future__ import annotations

import io
import logging
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import datasets
import lm_eval.api.task
import lm_eval.tasks
import lm_eval.utils
import numpy as np
import tqdm
import yaml

from evaluation import offline
from upcycle.config import build
from upcycle.plugin import nearest
from upcycle.text import SUFFIXES

SUITES = Path(__file__).parent / "suites"
LM_EVAL = Path(lm_eval.tasks.__file__).parent
SEED = 1234  # draws the examples of prompts; lm-eval's own value


@dataclass(frozen=True)
class Suite:
    tasks: tuple[Any, ...] = ()
    folders: tuple[str, ...] = ()
    fewshot: int | None = None
    texts: bool = False
    notes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Tasks:
    loaded: Any  # lm-eval's tasks and groups, by name
    notes: tuple[str, ...]


def read_suite(name: str) -> tuple[Suite, Path]:
    """The suite, and the folder that its files are in."""
    path = next((p for p in (Path(name), SUITES / f"{name}.yaml") if p.is_file()), None)
    if path is None:
        known = sorted(p.stem for p in SUITES.glob("*.yaml"))
        raise ValueError(f"there is no suite {name!r}; give a file or one of {', '.join(known)}{nearest(name, known)}")
    try:
        return build(Suite, yaml.safe_load(path.read_text()), f"{path.name}: "), path.parent
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from None


def load(name: str, data: str = "", texts: Sequence[str] = (), fewshot: int | None = None) -> Tasks:
    suite, beside = read_suite(name)
    if texts and not suite.texts:
        raise ValueError(f"suite {name} takes no texts; use suite=perplexity")
    text_tasks: list[Any] = [text_task(text) for text in found_texts(data, texts)] if suite.texts else []
    names = list(text_tasks or suite.tasks)
    borrowed = any(isinstance(task, str) for task in names)
    folders = [LM_EVAL / folder for folder in suite.folders] or [LM_EVAL] * borrowed
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"lm-eval has no folder {folder.name}, which suite {name} needs; install lm-eval>=0.4.13")
    known = lm_eval.tasks.TaskManager(include_path=folders, include_defaults=False)
    notes = []
    with alone(), reading(Path(data) if data else None, beside):
        if data:
            names, left_out = with_files(known, names)
            notes += [f"{task} is left out: it cannot be read from files" for task in left_out]
        unknown = [task for task in names if isinstance(task, str) and task not in known.task_index]
        if unknown:
            near = nearest(unknown[0], list(known.task_index))
            raise ValueError(f"lm-eval has no task {unknown[0]!r} in the folders of suite {name}{near}")
        loaded = known.load(names)
    if data:
        notes += [note for task, note in suite.notes.items() if task in loaded["tasks"]]
    for task in loaded["tasks"].values():
        examples(task, suite.fewshot if fewshot is None else fewshot)
    return Tasks(loaded, tuple(notes))


def examples(task: Any, wanted: int | None) -> None:
    """Sets a task's number of examples as lm-eval's own command does: a task that fixes it to 0 keeps 0."""
    fixed = task.get_config("num_fewshot")
    if fixed is None or (wanted is not None and fixed != 0):
        task.set_config(key="num_fewshot", value=wanted or 0)
    task.set_fewshot_seed(seed=SEED)
    count, sampler = task.get_config("num_fewshot"), getattr(task, "sampler", None)
    if count and sampler is not None and len(sampler.df) < count:
        raise ValueError(
            f"{task.task_name} has {len(sampler.df)} documents to take {count} examples from in its files; "
            f"write fewshot={len(sampler.df)}"
        )


def with_files(known: Any, names: Sequence[Any]) -> tuple[list[Any], list[str]]:
    """(names whose data sets can be read from files, the other names)."""
    readable: list[Any] = []
    left_out: list[str] = []
    for name in names:
        entry = known.task_index.get(name) if isinstance(name, str) else None
        path = (entry.cfg or {}).get("dataset_path") if entry else None
        if entry and path is None and entry.yaml_path:
            path = lm_eval.tasks._yaml_loader.load_yaml(entry.yaml_path, resolve_func=False).get("dataset_path")
        (left_out if path and path not in offline.READERS else readable).append(name)
    return readable, left_out


# ---- texts


def found_texts(data: str, texts: Sequence[str]) -> list[str]:
    """The texts given; else the validation texts of the data folder (DOMAIN.val.jsonl.zst), if it has any."""
    if texts or not data:
        return list(texts)
    return sorted(str(path) for path in Path(data).glob("*.val.*") if path.name.endswith(SUFFIXES))


def text_task(path: str) -> dict[str, Any]:
    return {
        "task": f"ppl_{Path(path).name.split('.')[0]}",
        "dataset_path": "text",
        "dataset_name": os.path.abspath(path),
        "output_type": "loglikelihood_rolling",
        "test_split": "test",
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": [
            {"metric": metric, "aggregation": aggregation, "higher_is_better": False}
            for metric, aggregation in (
                ("word_perplexity", "weighted_perplexity"),
                ("byte_perplexity", "weighted_perplexity"),
                ("bits_per_byte", "bits_per_byte"),
            )
        ],
        "metadata": {"version": 1},
    }


# ---- patches of lm-eval, in place only while it works for us


@contextmanager
def reading(folder: Path | None, beside: Path) -> Iterator[None]:
    """Within, documents come from files: a suite's own from its folder `beside`, with `folder` the hub's from there."""
    real = datasets.load_dataset

    def load_dataset(path: str, name: str | None = None, **options: Any) -> Any:
        if path in ("jsonl", "text"):
            return offline.splits(beside, path, name)
        if folder is not None:
            return offline.splits(folder, path, name)
        try:
            return real(path=path, name=name, **options)
        except (OSError, ConnectionError) as error:
            first = " ".join(str(error).split())
            raise ValueError(f"{path} cannot be had from the hub ({first}); write data=FOLDER to read files") from None

    with replaced(datasets, "load_dataset", load_dataset):
        yield


@contextmanager
def alone() -> Iterator[None]:
    """Within, lm-eval has its own seeds and leaves ours alone, prints nothing, shows no bars and forks no processes.

    Compiled templates are kept, so prompts are made 40 times faster: lm-eval compiles one anew for every document and
    every example.
    """
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    logger, bars = logging.getLogger("lm_eval"), datasets.utils.are_progress_bars_disabled()
    level, environment = logger.level, lm_eval.utils.env
    random.seed(0)
    np.random.seed(SEED)  # noqa: NPY002
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        with (
            replaced(environment, "from_string", lru_cache(1024)(environment.from_string)),
            replaced(lm_eval.api.task, "tqdm", no_bar),
            replaced(tqdm, "tqdm", no_bar),
            patched_environment(DISABLE_MULTIPROC="1"),
            redirect_stdout(io.StringIO()),
        ):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        logger.setLevel(level)
        if not bars:
            datasets.enable_progress_bars()


def no_bar(items: Any = (), *_: Any, **__: Any) -> Any:
    return items


@contextmanager
def patched_environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def replaced(owner: Any, name: str, value: Callable[..., Any]) -> Iterator[None]:
    own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def all_groups(loaded: Mapping[str, Any]) -> dict[str, list[str]]:
    """Each group's tasks, through inner groups."""
    return {name: [task.task_name for task in group.get_all_tasks()] for name, group in loaded["groups"].items()}
