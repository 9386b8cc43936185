"""Load a suite as lm-eval's tasks: `load` reads a file of suites/ and returns its tasks with their documents.

The keys of a suite:

tasks:    names that lm-eval knows (tasks, groups), or whole tasks, whose files lie next to the suite
folders:  the folders of lm-eval's collection to read; without this key all are read, which takes 11 seconds
fewshot:  examples in a prompt, if a task does not fix them
texts:    true if the suite takes texts=[...] and has a task for each file, instead of `tasks`
notes:    {task: a note for the reader if its documents come from files}

A suite may come from a stranger: its templates run in a sandbox, and a metric that lm-eval would fetch as code is
refused. The Python code of lm-eval's own tasks runs as it is.
"""

from __future__ import annotations

import io
import logging
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import datasets
import lm_eval.api.metrics
import lm_eval.api.registry
import lm_eval.api.task
import lm_eval.tasks
import lm_eval.utils
import numpy as np
import torch
import tqdm
from jinja2 import Environment
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from evaluation.ask import offline
from upcycle.config.reading import build
from upcycle.io import strict
from upcycle.plugin import nearest
from upcycle.text.tokens import SUFFIXES

SUITES = Path(__file__).parents[1] / "suites"
LM_EVAL = Path(lm_eval.tasks.__file__).parent
ANY = ("any",)  # marks a setting that does not change greedy texts
# generation settings, and the values with which a text is greedy; we write greedy texts only
GREEDY: dict[str, tuple[Any, ...]] = {
    "do_sample": (False,), "temperature": (0,), "num_beams": (1,), "repetition_penalty": (1,),
    "num_return_sequences": (1,), "no_repeat_ngram_size": (0,), "encoder_repetition_penalty": (1,),
    "min_new_tokens": (0,), "min_length": (0,),
    "num_beam_groups": (1,), "diversity_penalty": (0,), "penalty_alpha": (0,), "frequency_penalty": (0,),
    "presence_penalty": (0,),
    **dict.fromkeys(("until", "max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"), ANY),
    **dict.fromkeys(("top_k", "top_p", "min_p", "typical_p", "length_penalty", "early_stopping", "use_cache"), ANY),
}  # fmt: skip
SEED = 1234  # seed for the examples of prompts; lm-eval's own value


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
    """Return the suite and the folder of its files."""
    path = next((p for p in (Path(name), SUITES / f"{name}.yaml") if p.is_file()), None)
    if path is None:
        known = sorted(p.stem for p in SUITES.glob("*.yaml"))
        near = "; the suite comes first, then the model's folder" if Path(name).is_dir() else nearest(name, known)
        raise ValueError(f"there is no suite {name!r}; give a file or one of {', '.join(known)}{near}")
    return build(Suite, strict.read_yaml(path), f"{path.name}: "), path.parent


def load(
    name: str, data: str = "", texts: Sequence[str] = (), fewshot: int | None = None, *, names: Sequence[str] = (),
    include_path: Sequence[str] = (), gen_kwargs: Mapping[str, Any] | None = None, greedy: bool = True,
    seeds: Sequence[int] = (),
) -> Tasks:  # fmt: skip
    """Return the tasks of a suite, or the tasks `names` from the folders of include_path and lm-eval's collection.

    `gen_kwargs` replace the tasks' own generation settings; `greedy` refuses tasks whose texts are not greedy.
    """
    suite, beside = read_suite(name) if name else (Suite(tuple(names)), Path(next(iter(include_path), ".")))
    name = name or "tasks=" + ",".join(names)
    if texts and not suite.texts:
        raise ValueError(f"suite {name} takes no texts; use suite=perplexity")
    asked: list[Any] = [text_task(text) for text in found_texts(data, texts)] if suite.texts else []
    asked = asked or list(suite.tasks)
    known = collection(name, suite.folders, include_path, asked)
    asked = expanded(known, asked)
    check_metrics(name, asked)
    check_unique(name, asked)
    notes = []
    with alone(*seeds[:2]), reading(Path(data) if data else None, beside):
        if data:
            readable = [task for task in asked if has_files(known, task, beside)]
            notes += [f"{task} is left out: it cannot be read from files" for task in asked if task not in readable]
            if asked and not readable:
                raise ValueError(f"no task of suite {name} can be read from files; leave data out to use the hub")
            asked = readable
        unknown = [task for task in asked if isinstance(task, str) and task not in known.task_index]
        if unknown:
            near = nearest(unknown[0], list(known.task_index))
            raise ValueError(f"lm-eval has no task {unknown[0]!r} in the folders of suite {name}{near}")
        try:
            loaded = known.load(asked)
        except ImportError as error:  # a task's own code may need more packages than lm-eval
            raise ValueError(f"suite {name} needs {error.name}, which is not installed: pip install it") from None
    if data:
        notes += [note for task, note in suite.notes.items() if task in loaded["tasks"]]
    for task in loaded["tasks"].values():
        if "/" in task.task_name:
            raise ValueError(
                f"the task {task.task_name} has a slash in its name, and files get that name too; rename it"
            )
        examples(task, suite.fewshot if fewshot is None else fewshot, seeds[-1] if seeds else SEED)
        if task.OUTPUT_TYPE == "generate_until":
            if gen_kwargs:
                task.set_config("generation_kwargs", dict(gen_kwargs), update=True)
            if greedy:
                check_greedy(task.config.generation_kwargs or {}, task.task_name)
    return Tasks(loaded, tuple(notes))


def collection(suite: str, names: Sequence[str], include_path: Sequence[str], asked: Sequence[Any]) -> Any:
    """Return lm-eval's TaskManager for these folders; if none is named and a task is missing, for all of its own
    too."""
    folders, more = [LM_EVAL / folder for folder in names], [Path(folder) for folder in include_path]
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"lm-eval has no folder {folder.name}, which suite {suite} needs; install lm-eval>=0.4.13")
    for folder in more:
        if not folder.is_dir():
            raise ValueError(f"include_path={folder} is not a folder; give a folder that has YAML files of tasks")
    known = lm_eval.tasks.TaskManager(include_path=[*folders, *more], include_defaults=False)
    if folders or all(not isinstance(task, str) or is_file(task) or known.match_tasks([task]) for task in asked):
        return known
    return lm_eval.tasks.TaskManager(include_path=[LM_EVAL, *more], include_defaults=False)


def is_file(task: str) -> bool:
    return task.endswith((".yaml", ".yml"))


def expanded(known: Any, asked: Sequence[Any]) -> list[Any]:
    """Return `asked` with files replaced by their content and patterns (mmlu_*) by the names that match."""
    out: list[Any] = []
    for task in asked:
        if isinstance(task, str) and is_file(task):
            if not Path(task).is_file():
                raise ValueError(f"there is no file {task}; give the YAML of a task, or a name")
            out.append(lm_eval.tasks._yaml_loader.load_yaml(os.path.abspath(task), resolve_func=True))
        elif isinstance(task, str) and "*" in task:
            out += known.match_tasks([task]) or [task]
        else:
            out.append(task)
    return out


def check_unique(suite: str, names: Sequence[Any]) -> None:
    """Raise a ValueError if two tasks have the same name, because one would be lost."""
    seen: dict[str, Any] = {}
    for each in names:
        name = each if isinstance(each, str) else str(each.get("task"))
        if name in seen:
            what = [str(one.get("dataset_name", name)) if isinstance(one, dict) else name for one in (seen[name], each)]
            raise ValueError(f"suite {suite} has two tasks called {name} ({' and '.join(what)}); rename one of them")
        seen[name] = each


def check_metrics(suite: str, own: Any) -> None:
    """Raise a ValueError about a metric that lm-eval lacks, because it would fetch code of that name and run it."""
    if isinstance(own, Mapping) and "metric" in own:
        metric = own["metric"]
        known = isinstance(metric, str) and metric in lm_eval.api.registry.metric_registry
        if own.get("hf_evaluate") or not known:
            raise ValueError(
                f"suite {suite} has the metric {metric!r}{' of hf_evaluate' * bool(own.get('hf_evaluate'))}, which is "
                "code that lm-eval would fetch and run; write one that it has, such as acc or exact_match"
            )
    for inner in own.values() if isinstance(own, Mapping) else own if isinstance(own, list | tuple) else ():
        check_metrics(suite, inner)


def check_greedy(settings: Mapping[str, Any], who: str) -> None:
    """Raise a ValueError about the first generation setting whose text would not be greedy."""
    for name, value in settings.items():
        neutral = GREEDY.get(name, ())
        if neutral is not ANY and value is not None and value not in neutral:
            raise ValueError(
                f"{who} asks for texts with {name}={value}, and this command writes greedy texts only; "
                f"{f'write {name}: {neutral[0]} in' if neutral else f'take {name} out of'} its generation_kwargs"
            )


def examples(task: Any, wanted: int | None, seed: int = SEED) -> None:
    """Set a task's number of examples as lm-eval's own command does; a task that fixes it to 0 keeps 0."""
    fixed = task.get_config("num_fewshot")
    if fixed is None or (wanted is not None and fixed != 0):
        task.set_config(key="num_fewshot", value=wanted or 0)
    task.set_fewshot_seed(seed=seed)
    count, sampler = task.get_config("num_fewshot"), getattr(task, "sampler", None)
    if count and sampler is not None and len(sampler.df) < count:
        raise ValueError(
            f"{task.task_name} has {len(sampler.df)} documents in its files, and fewshot={count} needs at least as "
            "many; "
            f"write fewshot={len(sampler.df)}"
        )


def has_files(known: Any, task: Any, beside: Path) -> bool:
    """Return whether a task's documents can be read from files."""
    entry = known.task_index.get(task) if isinstance(task, str) else None
    config = dict(entry.cfg or {}) if entry else {}
    if entry and config.get("dataset_path") is None and entry.yaml_path:
        config = lm_eval.tasks._yaml_loader.load_yaml(entry.yaml_path, resolve_func=False)
    path, files = config.get("dataset_path"), (config.get("dataset_kwargs") or {}).get("data_files")
    here = files is not None and local_files(files, beside) is not None
    return not path or here or offline.reads(path, config.get("dataset_name"))


def local_files(files: Any, beside: Path) -> Any:
    """Return a task's data_files (a name, a list, or either by split) with whole paths, looking next to the suite
    first.

    Return None if one of them is not on this machine.
    """
    if isinstance(files, Mapping):
        found = {split: local_files(inner, beside) for split, inner in files.items()}
        return None if None in found.values() else found
    if isinstance(files, list | tuple):
        listed = [local_files(inner, beside) for inner in files]
        return None if None in listed else listed
    path = next((path for path in (beside / str(files), Path(str(files))) if path.is_file()), None)
    return path and str(path.resolve())


# ---- texts


def found_texts(data: str, texts: Sequence[str]) -> list[str]:
    """Return the given texts, or else the validation texts of the data folder (DOMAIN.val.jsonl.zst)."""
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
        "metric_list": [{"metric": metric} for metric in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
        "metadata": {"version": 1},
    }


# ---- patches of lm-eval, active only while it works for us


@contextmanager
def reading(folder: Path | None, beside: Path) -> Iterator[None]:
    """Read a suite's own documents from the folder of the suite, and the hub's from `folder` if it is given."""
    real = datasets.load_dataset

    def load_dataset(path: str, name: str | None = None, **options: Any) -> Any:
        if (files := options.get("data_files")) is not None and (found := local_files(files, beside)) is not None:
            return real(path=path, name=name, **{**options, "data_files": found})
        if path in ("jsonl", "text"):
            return offline.splits(beside, path, name)
        if folder is not None:
            return offline.splits(folder, path, name)
        try:
            return real(path=path, name=name, **options)
        except (OSError, ConnectionError) as error:
            first = " ".join(str(error).split())
            raise ValueError(
                f"{path} could not be fetched from the hub ({first}); write data=FOLDER to read files, or for suite "
                "perplexity texts=[FILE,...]"
            ) from None

    with patch.object(datasets, "load_dataset", load_dataset):
        yield


class Sandbox(ImmutableSandboxedEnvironment):
    """Run lm-eval's templates without access to Python; by default they can run any command."""

    @staticmethod
    def like(real: Environment) -> Sandbox:
        made = Sandbox(loader=real.loader, undefined=real.undefined, keep_trailing_newline=real.keep_trailing_newline)
        made.filters.update(real.filters)
        return made

    def handle_exception(self, source: str | None = None) -> NoReturn:
        error = sys.exc_info()[1]
        if isinstance(error, SecurityError | OverflowError):
            raise ValueError(
                f"a template of the suite asks for more than text ({error}), so it does not run; take that part out "
                "of the template"
            ) from None
        super().handle_exception(source)


@contextmanager
def alone(python_seed: int = 0, numpy_seed: int = SEED, torch_seed: int | None = None) -> Iterator[None]:
    """Give lm-eval its own seeds, and stop it from printing, showing bars and forking processes.

    Keep compiled templates, which makes prompts 40 times faster: lm-eval compiles a template for every document and
    example.
    """
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    logger, bars = logging.getLogger("lm_eval"), datasets.utils.are_progress_bars_disabled()
    level, environment = logger.level, Sandbox.like(lm_eval.utils.env)
    random.seed(python_seed)
    np.random.seed(numpy_seed)  # noqa: NPY002
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        with (
            torch.random.fork_rng(enabled=torch_seed is not None),
            patch.object(lm_eval.utils, "env", environment),
            patch.object(environment, "from_string", lru_cache(1024)(environment.from_string)),
            patch.object(lm_eval.api.task, "tqdm", no_bar),
            patch.object(tqdm, "tqdm", no_bar),
            patch.dict(os.environ, DISABLE_MULTIPROC="1"),
            redirect_stdout(io.StringIO()),
        ):
            if torch_seed is not None:  # for lm-eval's models that draw texts; ours draws none
                torch.manual_seed(torch_seed)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        logger.setLevel(level)
        if not bars:
            datasets.enable_progress_bars()


def no_bar(items: Any = (), *_: Any, **__: Any) -> Any:
    return items
