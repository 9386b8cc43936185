"""Ask a model the items of a suite and keep every answer, for `upcycle eval`."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lm_eval.api.metrics
import lm_eval.evaluator
import lm_eval.evaluator_utils
import torch
import torch.distributed as dist
from lm_eval.api.model import LM
from lm_eval.api.registry import get_model, model_registry
from lm_eval.loggers import EvaluationTracker

from evaluation.ask import load, tasks
from evaluation.ask.engine import Engine
from evaluation.ask.harness import NAME, AskConfig, UpcycleLM, ranks_of
from evaluation.ask.lm import DecoderLM
from evaluation.ask.written import CACHE, Written, check_folder, redacted
from evaluation.judge import logged
from evaluation.judge.results import Evaluation, Group, Task
from training.checkpoint.layout import Origin
from training.config.resume import flat
from training.config.schema import EvalConfig
from training.model.decoder import Decoder
from training.parallel.mesh import ParallelMesh
from training.parallel.processes import alone, processes
from upcycle import __version__
from upcycle.cli import frame as cli
from upcycle.config.reading import read
from upcycle.config.ready import EVAL
from upcycle.config.values import COUNT, at_least, check_values
from upcycle.io import strict
from upcycle.plugin import nearest

HOW = ("output", "log_samples", "name", "forward_tokens", "device", "mesh")  # keys that do not change an answer
OF_THE_MODEL = ("checkpoint", "dtype", "tokenizer", "expert_backend")  # keys that the model's identity covers
BOOTSTRAP = 1000  # draws for standard errors without a formula (perplexity)


@dataclass(frozen=True)
class RunConfig(AskConfig):
    suite: str = ""  # a file of evaluation/suites, or one of your own
    checkpoint: str = ""  # a Hugging Face folder, a hub id, or a training run's folder
    tasks: tuple[str, ...] = ()  # instead of a suite: names that lm-eval knows, or YAML files
    include_path: tuple[str, ...] = ()  # folders with more tasks, as lm-eval's --include_path
    trust_code: bool = False  # run the Python that your tasks name with !function; lm-eval's own tasks always run
    data: str = ""  # a folder with the suite's files; "": from the hub
    texts: tuple[str, ...] = ()  # perplexity: .txt, .jsonl or .jsonl.zst, each a domain
    fewshot: int | None = None  # examples in a prompt, where the task leaves it open
    limit: float = 0  # items of each task; below 1: this share of them; 0: all
    samples: dict[str, list[int]] = field(default_factory=dict)  # {task: numbers of its items}; {}: all items
    output: str = ""  # the folder to make; "": runs/eval/SUITE-NAME-DIGEST, with a digest of model and options
    log_samples: bool = False  # keep documents and whole prompts in samples_TASK_*.jsonl, as lm-eval does
    name: str = ""  # the model's name in tables; "": the checkpoint's
    # upcycle (ours) | hf | vllm | another model type of lm-eval's, for models that our decoder cannot run
    model: str = NAME
    model_args: dict[str, Any] = field(default_factory=dict)  # arguments for lm-eval's model: {batch_size: 8}
    generate: int = 0  # tokens of a written answer at most; 0: as the task says, or 256
    # these replace a task's own: {max_gen_toks: 64, until: [Q]}
    gen_kwargs: dict[str, Any] = field(default_factory=dict)
    # true: make prompts conversations by the tokenizer's template; or the name of a template
    apply_chat_template: Any = False
    system_instruction: str = ""  # a text before every prompt
    # make examples turns of the conversation; null: yes if there is a chat template
    fewshot_as_multiturn: bool | None = None
    seeds: tuple[int, ...] = ()  # of python, numpy, torch and examples, or one for all; []: lm-eval's 0 and 1234

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values(self, "", {"limit generate fewshot": at_least(0)})
        for number in self.seeds:
            if not 0 <= number < 2**32:
                raise ValueError(f"seeds has {number}; each must be from 0 to {2**32 - 1:,}, which numpy takes")
        for task, numbers in self.samples.items():
            if any(not 0 <= number <= COUNT for number in numbers):
                raise ValueError(f"samples has {numbers} for {task}; write numbers of its items, counted from 0")
        together = [
            (self.suite and self.tasks,
             f"suite={self.suite} and tasks={','.join(self.tasks)} are both set; write one of them"),
            (self.limit and self.samples, "limit and samples are both set; write one of them"),
            (len(self.seeds) not in (0, 1, 4),
             f"seeds are {len(self.seeds)} numbers; write four (python, numpy, torch, examples) or one"),
            (self.fewshot_as_multiturn and not self.apply_chat_template,
             "fewshot_as_multiturn is set without a conversation; write apply_chat_template=true too"),
            (self.model not in model_registry,
             f"there is no model {self.model!r}{nearest(self.model, list(model_registry))}"),
            (self.model == NAME and self.model_args,
             f"model_args are for lm-eval's models, and model is {NAME}; write them as keys"),
            (self.model != NAME and self.model_args.get("trust_remote_code"),
             "trust_remote_code runs a stranger's program, which this command does not do; leave it out"),
        ]  # fmt: skip
        for wrong, sentence in together:
            if wrong:
                raise ValueError(sentence)

    @property
    def label(self) -> str:
        """Return the name of the suite or tasks, for tables and folders."""
        return self.suite or ",".join(Path(name).stem for name in self.tasks)

    def asking(self) -> dict[str, Any]:
        """Return the options for lm_eval.evaluator.evaluate."""
        multiturn = bool(self.apply_chat_template) if self.fewshot_as_multiturn is None else self.fewshot_as_multiturn
        # sorted, because lm-eval pairs the numbers in the given order with the items in their own order
        picked = {task: sorted(set(numbers)) for task, numbers in self.samples.items()}
        return {
            "limit": self.limit or None, "samples": picked or None, "fewshot_as_multiturn": multiturn,
            "system_instruction": self.system_instruction or None, "apply_chat_template": self.apply_chat_template,
        }  # fmt: skip

    def deciding(self) -> dict[str, Any]:
        """Return the options that decide the answers, as JSON values; our model's own options are in its identity."""
        left_out = HOW if self.model != NAME else (*HOW, *OF_THE_MODEL)
        found: dict[str, Any] = redacted(json.loads(json.dumps(asdict(self))))
        return {key: value for key, value in found.items() if key not in left_out}

    @property
    def four_seeds(self) -> tuple[int, ...]:
        """Return the seeds of python, numpy, torch and examples; an empty result means lm-eval's own."""
        return self.seeds * 4 if len(self.seeds) == 1 else self.seeds


def read_config(words: Sequence[str]) -> RunConfig:
    names, more = cli.names_and_words(words)
    if len(names) == 1 and any(word.startswith("tasks=") for word in more):
        names = ["", *names]  # tasks= takes the place of a suite's name
    if len(names) > 2:
        raise ValueError(f"{names[2]!r} is one name too many; write upcycle eval SUITE CHECKPOINT key=value ...")
    if len(names) == 2:
        more.append(f"checkpoint={names[1]}")
    file = names[0] if names else ""
    if file and not is_config(file):
        file, more = "", [*more, f"suite={file}"]
    config = read(RunConfig, file, more, EVAL)
    if not config.label or not config.checkpoint:
        lacks = "checkpoint" if config.label else "suite"
        raise ValueError(f"{lacks} is not set; write for instance upcycle eval tiny ./model")
    return config


def is_config(name: str) -> bool:
    """Return whether `name` is a config, a YAML file with the key `suite`; otherwise it names a suite."""
    path = next((p for p in (Path(name), EVAL / f"{name}.yaml") if p.is_file()), None)
    if path is None:
        return False
    try:
        found = strict.read_yaml(path)
    except ValueError:
        return True  # read() raises the error
    return isinstance(found, dict) and "suite" in found


# ---- a run


def evaluate(config: RunConfig, command: str = "") -> Evaluation | None:
    """Ask the model, keep its answers in the output folder, and return them; return None except in the first
    process."""
    started, clock, tracker = datetime.now(UTC), time.monotonic(), EvaluationTracker()
    with processes(config.device, settings=flat(asdict(config) | {"device": ""})), ExitStack() as stack:
        if config.output:
            check_folder(Path(config.output), config.deciding())
        found = tasks_to_ask(config)  # before the model is loaded, so that a missing file shows in seconds
        lm = model_to_ask(config)
        first = not dist.is_initialized() or dist.get_rank() == 0
        name, identity = name_and_identity(lm, config)
        folder = Path(config.output) if config.output else own_folder(config, name, identity)
        stack.enter_context(alone(folder))
        check_folder(folder, config.deciding(), identity)
        if isinstance(lm, UpcycleLM):
            lm.remember(folder / CACHE)
        prepared, written = time.monotonic(), Written(folder, tracker)

        def keep(samples: logged.Samples) -> None:
            if isinstance(lm, UpcycleLM) and lm.remembered:
                lm.remembered.close()
            if first:
                configs = {name: task.dump_config() for name, task in found.loaded["tasks"].items()}
                written.save_samples(samples, configs, config.log_samples)

        answered = ask(lm, found, BOOTSTRAP, keep, seeds=config.four_seeds, **config.asking())
        seconds = {"loading_seconds": prepared - clock, "asking_seconds": time.monotonic() - prepared}
        own = {
            "suite": config.label, "name": config.name or name, "command": command, "options": asdict(config),
            "started": started.isoformat(timespec="seconds"), "work": work_of(lm, answered) | seconds,
            "notes": [*found.notes, *notes_of(config, lm)], **functions_of(answered, found),
        }  # fmt: skip
        if not first:
            return None
        describe(tracker, lm, config)
        written.save_results(results_of(answered, lm, config), answered["samples"], own)
        return logged.load(folder)


def tasks_to_ask(config: RunConfig) -> tasks.Tasks:
    # our model reads `generate` itself, whatever name a task has for the number
    limit = {"max_gen_toks": config.generate} if config.generate and config.model != NAME else {}
    return tasks.load(
        config.suite, config.data, config.texts, config.fewshot, names=config.tasks, include_path=config.include_path,
        gen_kwargs=config.gen_kwargs | limit, greedy=config.model == NAME, seeds=config.four_seeds,
        trust_code=config.trust_code,
    )  # fmt: skip


def model_to_ask(config: RunConfig) -> LM:
    """Return our model, or one of lm-eval's own."""
    shared = {name: value for name in ("dtype", "tokenizer", "max_length") if (value := getattr(config, name))}
    if config.model == NAME:
        own = {name: getattr(config, name) for name in ("forward_tokens", "expert_backend", "device")}
        return UpcycleLM(config.checkpoint, **shared, **own, max_gen_toks=config.generate, mesh=asdict(config.mesh))
    if dist.is_initialized():
        raise ValueError(
            f"model={config.model} is lm-eval's own, which divides its work itself; start it without torchrun"
        )
    given = {"pretrained": config.checkpoint, **shared, **config.model_args}
    kind = get_model(config.model)
    lm: LM = kind.create_from_arg_obj(given, {"device": config.device or device_instead(kind)})
    return lm


def device_instead(kind: type[LM]) -> str | None:
    """Return the CPU if lm-eval's model would take CUDA by default and there is none."""
    taken = getattr(signature(kind).parameters.get("device"), "default", None)
    return "cpu" if taken == "cuda" and not torch.cuda.is_available() else None


def name_and_identity(lm: LM, config: RunConfig) -> tuple[str, str]:
    """Return the model's name and our model's identity ("" for lm-eval's own models)."""
    if isinstance(lm, UpcycleLM):
        return lm.about.name, lm.about.identity
    name = Path(config.checkpoint).resolve().name if Path(config.checkpoint).exists() else config.checkpoint
    return name, ""


def own_folder(config: RunConfig, name: str, identity: str) -> Path:
    """Return the default folder of an evaluation; another model or other options get another folder."""
    label = Path(config.label).stem if config.suite else config.label[:60]
    mark = sha256(json.dumps([identity, config.deciding()], sort_keys=True).encode()).hexdigest()
    return Path(f"runs/eval/{label}-{name.replace('/', '_')}-{mark[:8]}")


# ---- during training


def ready(config: EvalConfig, origin: Origin) -> None:
    """Raise an error if a run's `eval` keys are wrong: its suite, files, packages or tokenizer."""
    tokenizer_of(config, origin)
    tasks.load(config.suite, config.data, config.texts, config.fewshot)


def tokenizer_of(config: EvalConfig, origin: Origin) -> Any:
    source = str(origin.files[0].parent) if origin.files else "the checkpoint"
    return load.load_tokenizer(source, origin, config.tokenizer)


def live(
    config: EvalConfig, model: Decoder, origin: Origin, mesh: ParallelMesh, poll: Callable[[], object]
) -> Callable[[], Mapping[str, float]]:
    """Return the function that asks a model during training the suite of its run."""
    tokenizer = tokenizer_of(config, origin)
    options: dict[str, Any] = {name: getattr(config, name) for name in ("data", "texts", "fewshot", "limit")}
    return partial(evaluate_live, model, tokenizer, config.suite, mesh, poll, **options)


def evaluate_live(
    model: Decoder, tokenizer: Any, suite: str, mesh: ParallelMesh, poll: Callable[[], object] = bool, *,
    data: str = "", texts: Sequence[str] = (), fewshot: int | None = None, limit: int = 0, forward_tokens: int = 8192,
) -> dict[str, float]:  # fmt: skip
    """Return the suite's numbers for a model in training, in its shards; all ranks call this and get the numbers."""
    found = tasks.load(suite, data, texts, fewshot)
    engine = Engine(model, forward_tokens, ranks_of(mesh), mesh.group("tp"), progress=False, poll=poll)
    answered = ask(DecoderLM(engine, tokenizer), found, 0, limit=limit or None)
    rows = {name: answered["results"][name] for name in found.loaded["tasks"]} | answered.get("groups", {})
    scores = {name: logged.numbers(row)[0] for name, row in rows.items()}
    return {f"eval/{name}/{metric}": value for name, row in scores.items() for metric, value in row.items()}


# ---- lm-eval


def ask(
    lm: LM, found: tasks.Tasks, bootstrap: int, keep: Callable[[logged.Samples], None] | None = None, *,
    seeds: Sequence[int] = (), **options: Any,
) -> Any:  # fmt: skip
    """Return lm-eval's results, with its prompts, metrics and standard errors; processes divide only the forwards.

    `keep` gets the items of all tasks before any metric is computed, so hours of answers are not lost to a metric that
    fails. `options` go to lm_eval.evaluator.evaluate.
    """
    real = lm_eval.evaluator._process_results

    def processed(collected: Any, *rest: Any) -> Any:
        if keep:
            keep({name: one["logged_samples"] for name, one in collected.items()})
        computable(collected)
        return real(collected, *rest)

    with (
        tasks.alone(*seeds[:3]),
        tasks.explained(found.suite, lm),
        patch.object(lm_eval.evaluator, "_process_results", processed),
        patch.object(lm_eval.evaluator_utils, "stderr_for_metric", error_where_there_is_one),
    ):
        if options.get("apply_chat_template"):
            lm.chat_template(options["apply_chat_template"])  # choose the template, or raise an error if there is none
        return lm_eval.evaluator.evaluate(
            lm=lm, task_dict=found.loaded, bootstrap_iters=bootstrap, log_samples=True, **options
        )


def error_where_there_is_one(metric: Any, bootstrap_iters: int) -> Callable[..., Any] | None:
    """Return lm-eval's function for a metric's standard error, changed to say N/A if the value is not finite."""
    real = lm_eval.api.metrics.stderr_for_metric(metric, bootstrap_iters)

    def error(scores: Any) -> Any:
        try:
            return real(scores)
        except ArithmeticError:  # draws of perplexities whose squares overflow
            return "N/A"

    return real and error


def computable(collected: Any) -> None:
    """Raise a ValueError about the first metric that cannot be computed from its items."""
    for name, one in collected.items():
        for (metric, _), scores in one["raw_metrics"].items():
            try:
                aggregation(one["task"], metric)(scores)
            except Exception as error:  # whatever the metric's library raises
                raise ValueError(
                    f"{name}: {metric} cannot be computed from its {len(scores)} items "
                    f"({' '.join(str(error).split())}); "
                    "they are in samples_*.jsonl and the answers are remembered; take the metric out and run again"
                ) from None


def aggregation(task: Any, metric: str) -> Callable[..., Any]:
    """Return the function that computes the metric from its items' scores; the mean if a task names none."""
    found: Callable[..., Any] = task.aggregation().get(metric, lm_eval.api.metrics.mean)
    return found


# ---- our own part of the results


def results_of(answered: Any, lm: LM, config: RunConfig) -> dict[str, Any]:
    """Return lm-eval's results with the model, settings and versions that its own command would add."""
    settings = {
        "model": config.model,
        "model_args": {"pretrained": config.checkpoint, "dtype": config.dtype} | config.model_args,
        **(lm.get_model_info() if hasattr(lm, "get_model_info") else {}),
        **{name: getattr(config, name) for name in ("device", "limit", "gen_kwargs")},
        "bootstrap_iters": BOOTSTRAP,
    }
    found = {name: value for name, value in answered.items() if name != "samples"}
    return found | {"config": settings} | {f"{name}_version": text for name, text in versions().items()}


def describe(tracker: EvaluationTracker, lm: LM, config: RunConfig) -> None:
    options = config.asking()
    template = options.pop("apply_chat_template")
    tracker.general_config_tracker.log_experiment_args(
        model_source=config.model, model_args={"pretrained": config.checkpoint},
        chat_template=lm.chat_template(template) if template else None,
        **{name: options[name] for name in ("system_instruction", "fewshot_as_multiturn")},
    )  # fmt: skip


def functions_of(answered: Any, found: tasks.Tasks) -> dict[str, dict[str, Any]]:
    """Return the functions of metrics other than the mean, by task, and the metrics that weigh a group's tasks
    equally."""
    functions: dict[str, dict[str, str]] = {}
    for name, config in answered["configs"].items():
        values, _ = logged.numbers(answered["results"][name])
        rows = answered["samples"][name]
        named = {metric: logged.function_of(metric, value, config, rows) for metric, value in values.items()}
        functions[name] = {metric: function for metric, function in named.items() if function != "mean"}
    alike = {}
    for name, group in found.loaded["groups"].items():
        unweighted = {each.metric for each in group.aggregate_metric_list or () if not each.weight_by_size}
        values, _ = logged.numbers(answered.get("groups", {}).get(name, {}))
        alike[name] = [metric for metric in values if metric.partition(",")[0] in unweighted]
    return {"aggregation": functions, "alike": alike}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "upcycle": __version__}
    return found | {name: version(name) for name in ("torch", "transformers", "tokenizers", "datasets", "lm_eval")}


def work_of(lm: LM, answered: Any) -> dict[str, float]:
    if not isinstance(lm, DecoderLM):  # does not count
        asked = sum(len(sample["resps"]) for samples in answered["samples"].values() for sample in samples)
        return {"tokens": 0, "forwards": 0, "requests": asked, "recalled": 0}
    each = lm.engine.ranks.gather(lm.engine.work)
    tokens, forwards = (sum(work[name] for work in each) for name in ("tokens", "forwards"))
    return {"tokens": tokens, "forwards": forwards, "requests": lm.asked, "recalled": lm.recalled}


def notes_of(config: RunConfig, lm: LM) -> Iterator[str]:
    if config.limit or config.samples:
        yield f"{f'limit={config.limit:g}' if config.limit else 'samples'}: not all items of each task"
    if isinstance(lm, DecoderLM) and lm.cut:
        yield (
            f"{lm.cut:,} of {lm.asked:,} requests were longer than the model's context of {lm.max_length} tokens and "
            f"lost their beginning, as in lm-eval"
        )


def table(done: Evaluation) -> str:
    lines = [f"{done.model.name}  {done.suite}  {done.model.identity[:8]}  {done.model.dtype}", ""]
    parts: list[Task | Group] = [*done.groups.values(), *done.tasks.values()]
    width = max(len(part.name) for part in parts)
    for part in parts:
        for metric, value in part.metrics.items():
            error = f" +- {part.stderr[metric]:.4f}" if metric in part.stderr else ""
            lines.append(f"{part.name:{width}}  {part.items:>6}  {metric:28} {value:10.4f}{error}")
    work = done.work
    lines += [
        "",
        f"{work['requests']:,} requests ({work['recalled']:,} remembered), {work['tokens']:,.0f} tokens in "
        f"{work['forwards']:,.0f} forwards, {done.seconds:.0f} s",
        *(f"note: {note}" for note in done.notes),
        *(["", f"{done.place} and its samples_*.jsonl"] if done.place else []),
    ]
    return "\n".join(lines)
