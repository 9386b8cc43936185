"""Load a suite as lm-eval's tasks: `load` reads a file of suites/ and returns its tasks with their documents.

The keys of a suite:

tasks:    names that lm-eval knows (tasks, groups), or whole tasks, whose files lie next to the suite
folders:  the folders of lm-eval's collection to read; without this key all are read, which takes 11 seconds
fewshot:  examples in a prompt, if a task does not fix them
texts:    true if the suite takes texts=[...] and has a task for each file, instead of `tasks`
notes:    {task: a note for the reader if its documents come from files}

A suite may come from a stranger: its templates run in a sandbox, and a metric that lm-eval would fetch as code is
refused. Python that a task names with !function runs only with trust_code=true. The Python code of lm-eval's own tasks
runs as it is.
"""

from __future__ import annotations

import io
import logging
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypedDict
from unittest.mock import patch

import datasets
import lm_eval.api.metrics
import lm_eval.api.registry
import lm_eval.api.task
import lm_eval.tasks
import lm_eval.tasks._yaml_loader
import lm_eval.utils
import numpy as np
import torch
import tqdm
from jinja2 import Environment, Template
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from evaluation.ask import offline
from upcycle.config.reading import build
from upcycle.io import strict
from upcycle.plugin import nearest
from upcycle.text import templates
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
Few = Annotated[int, strict.Range(0, 10_000)]  # examples of a prompt
Names = str | list[str]


class Filter(TypedDict):
    name: str
    filter: list[dict[str, Any]]


# the types of a task's keys
KEYS: dict[str, Any] = {
    **dict.fromkeys(("group", "dataset_path", "dataset_name", "training_split", "validation_split"), str),
    **dict.fromkeys(("test_split", "fewshot_split", "description", "target_delimiter", "fewshot_delimiter"), str),
    **dict.fromkeys(("output_type", "process_results", "use_prompt", "gen_prefix", "task_alias", "group_alias"), str),
    **dict.fromkeys(("doc_to_decontamination_query", "process_docs", "doc_to_image", "doc_to_audio"), str),
    **dict.fromkeys(("dataset_kwargs", "generation_kwargs", "metadata", "fewshot_config"), dict[str, Any]),
    **dict.fromkeys(("unsafe_code", "should_decontaminate"), bool),
    "num_fewshot": Few, "repeats": Annotated[int, strict.Range(1, 1000)],
    "task": str | list[str | dict[str, Any]], "tag": Names,
    "doc_to_text": str | int, "doc_to_target": str | int | list[Any], "doc_to_choice": str | dict[str, Any] | list[Any],
    "metric_list": list[dict[str, Any]], "filter_list": list[Filter],
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
    suite: str = ""


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
    seeds: Sequence[int] = (), trust_code: bool = False,
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
    with explained(name), functions(trust_code):
        known = collection(name, suite.folders, include_path, asked)
        asked = expanded(known, asked)
        check_keys(name, asked)
        check_metrics(name, asked)
        check_unique(name, asked)
    notes = []
    with (
        alone(*seeds[:2]), reading(Path(data) if data else None, beside), explained(name), functions(trust_code),
    ):  # fmt: skip
        if data:
            readable = [task for task in asked if has_files(known, task, beside)]
            notes += [f"{task} is left out: it cannot be read from files" for task in asked if task not in readable]
            if asked and not readable:
                raise ValueError(f"no task of suite {name} can be read from files; leave data out to use the hub")
            asked = readable
        unknown = [task for task in asked if isinstance(task, str) and task not in known.task_index]
        if unknown:
            near = nearest(unknown[0], list(known.task_index))
            raise ValueError(f"lm-eval has no task {strict.short(unknown[0])} in the folders of suite {name}{near}")
        try:
            loaded = known.load(asked)
        except ImportError as error:  # a task's own code may need more packages than lm-eval
            lacks = f"needs {error.name}, which is not installed: pip install it" if error.name else f"fails: {error}"
            raise ValueError(f"suite {name} {lacks}") from None
    if data:
        notes += [note for task, note in suite.notes.items() if task in loaded["tasks"]]
    for task in loaded["tasks"].values():
        if "/" in task.task_name:
            raise ValueError(
                f"the task {task.task_name:.160} has a slash in its name, and files get that name too; rename it"
            )
        examples(task, suite.fewshot if fewshot is None else fewshot, seeds[-1] if seeds else SEED)
        if task.OUTPUT_TYPE == "generate_until":
            if gen_kwargs:
                task.set_config("generation_kwargs", dict(gen_kwargs), update=True)
            if greedy:
                check_greedy(task.config.generation_kwargs or {}, task.task_name)
        task.apply_filters = partial(filtered, task, task.apply_filters)
    return Tasks(loaded, tuple(notes), name)


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
            if not os.path.isfile(task):  # also where a name is too long for a file
                raise ValueError(f"there is no file {strict.short(task)}; give the YAML of a task, or a name")
            check_yaml(Path(task))
            out.append(lm_eval.tasks._yaml_loader.load_yaml(os.path.abspath(task), resolve_func=True))
        elif isinstance(task, str) and "*" in task:
            out += known.match_tasks([task]) or [task]
        else:
            out.append(task)
    return out


def check_yaml(path: Path, seen: frozenset[Path] = frozenset()) -> None:
    """Raise a ValueError for a task's YAML, or one that it includes, that is too large or too deep to read."""
    path = path.resolve()
    if path in seen:
        raise ValueError(f"{path} includes itself; take that include out")
    found = strict.parse_yaml(strict.read_text(path, strict.MAX_YAML).replace("!function", ""), str(path))
    included = found.get("include", ()) if isinstance(found, dict) else ()
    for each in (
        [included] if isinstance(included, str) else strict.held(included or [], list[str], f"include of {path}")
    ):
        check_yaml(path.parent / each, seen | {path})


@contextmanager
def functions(trust_code: bool) -> Iterator[None]:
    """Let tasks outside lm-eval's own collection name Python (!function) only with trust_code=true."""
    real = lm_eval.tasks._yaml_loader._import_func_in_yml

    def imported(name: str, folder: Path) -> Any:
        if not trust_code and not Path(folder).resolve().is_relative_to(LM_EVAL.resolve()):
            raise ValueError(
                f"a task in {folder} names the Python function {strict.short(name)}, which could do anything on this "
                "machine; read it, then write trust_code=true, or take !function out"
            )
        return real(name, folder)

    with patch.object(lm_eval.tasks._yaml_loader, "_import_func_in_yml", imported):
        yield


@contextmanager
def explained(suite: str, lm: Any = None) -> Iterator[None]:
    """Turn every exception about a suite's keys or documents into one sentence, except exceptions of the model `lm`."""
    try:
        yield
    except (ValueError, OSError, ImportError):
        raise
    except Exception as error:  # lm-eval checks few types, so a wrong one may raise anything
        frame = error.__traceback__
        while lm is not None and frame is not None:
            if frame.tb_frame.f_locals.get("self") is lm:
                raise
            frame = frame.tb_next
        said = " ".join(str(error).split())
        raise ValueError(
            f"suite {suite} has a key or a document that lm-eval cannot use ({type(error).__name__}: {said:.300}); "
            "correct it"
        ) from error


def check_keys(suite: str, asked: Sequence[Any]) -> None:
    """Raise a ValueError about the first key of a written-out task with a value of another type than lm-eval takes."""
    for task in asked:
        if isinstance(task, str):
            continue
        own = strict.held(task, dict, f"a task of suite {suite}")
        name = own.get("group", own.get("task"))
        if not isinstance(name, str):
            raise ValueError(f"suite {suite} has a task without a name; write task: NAME first in it")
        for key, value in own.items():
            if key in KEYS and value is not None and not callable(value):
                strict.held(without_functions(value), KEYS[key], f"suite {suite}: {name:.60}: {key}")
        if isinstance(own.get("task"), list):
            check_keys(suite, own["task"])


def without_functions(value: Any) -> Any:
    """Return the value with texts in place of Python functions, which only trust_code=true lets in."""
    if isinstance(value, dict):
        return {key: without_functions(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_functions(inner) for inner in value]
    return "function" if callable(value) else value


def filtered(task: Any, apply: Callable[[], Any]) -> Any:
    """Apply a task's filters to the answers; stop a regex that does not end."""
    with templates.bounded(f"a filter of {task.task_name}", templates.SECONDS + len(task.instances) / 100):
        return apply()


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
    if lost := next((text for text in texts if not Path(text).is_file()), ""):
        raise ValueError(f"there is no file {lost}; texts=[FILE,...] names .txt, .jsonl or .jsonl.zst files")
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


class Bounded(Template):
    """Bound the work and the length of what a template writes."""

    def render(self, *args: Any, **kwargs: Any) -> str:
        with templates.bounded("a template of the suite"):
            said = super().render(*args, **kwargs)
        if len(said) > strict.MAX_LINE:
            raise ValueError(f"a template of the suite writes {len(said)} characters; {strict.MAX_LINE} are allowed")
        return said


class Sandbox(ImmutableSandboxedEnvironment):
    """Run lm-eval's templates without access to Python; by default they can run any command."""

    template_class = Bounded

    @staticmethod
    def like(real: Environment) -> Sandbox:
        made = Sandbox(loader=real.loader, undefined=real.undefined, keep_trailing_newline=real.keep_trailing_newline)
        made.filters.update(real.filters)
        return made

    def from_string(self, *args: Any, **kwargs: Any) -> Any:
        with templates.bounded("a template of the suite"):  # jinja computes constants when it compiles
            return super().from_string(*args, **kwargs)

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
