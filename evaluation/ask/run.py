"""Ask a model the items of a suite, and keep every answer.

usage: python -m evaluation run SUITE CHECKPOINT [key=value ...]

  python -m evaluation run mmlu ./moe fewshot=0                            # from the hub; data=FOLDER: from files
  python -m evaluation run perplexity runs/moe texts=[book.txt]            # a training run: its newest checkpoint
  python -m evaluation run tiny ./moe limit=10 dtype=bfloat16
  torchrun --nproc-per-node 8 -m evaluation run tiny ./moe mesh.ep=8
  python -m evaluation run ./moe tasks=[mmlu_astronomy,arc_easy] limit=0.1    # any tasks of lm-eval's

Suites are the files of evaluation/suites, or a file of your own; SUITE may also be a ready config (configs/eval).
Killed and started again, it goes on where it was.

keys, with defaults and meaning: docs/config.md
"""

from __future__ import annotations

import platform
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from typing import Any

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
from evaluation.ask.harness import DTYPES, NAME, UpcycleLM, ranks_of
from evaluation.ask.lm import DecoderLM
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
from evaluation.judge.results import Evaluation, Group, Item, Model, Raw, Task
from training.checkpoint.layout import Origin
from training.config.resume import flat
from training.config.schema import EvalConfig
from training.model.decoder import Decoder
from training.parallel.mesh import MeshConfig, ParallelMesh
from training.parallel.processes import alone, processes
from upcycle import __version__
from upcycle.cli import frame as cli
from upcycle.config.reading import read
from upcycle.config.ready import EVAL
from upcycle.io import strict
from upcycle.plugin import nearest

BOOTSTRAP = 1000  # draws for the standard errors that have no formula (perplexity)


@dataclass(frozen=True)
class RunConfig:
    suite: str = ""  # a file of evaluation/suites, or one of your own
    checkpoint: str = ""  # a Hugging Face folder, a hub id, or a training run's folder
    tasks: tuple[str, ...] = ()  # instead of a suite: names that lm-eval knows, or YAML files
    include_path: tuple[str, ...] = ()  # folders with more tasks, as lm-eval's --include_path
    data: str = ""  # a folder with the suite's files; "": from the hub
    texts: tuple[str, ...] = ()  # perplexity: .txt, .jsonl or .jsonl.zst, each a domain
    fewshot: int | None = None  # examples in a prompt, where the task leaves it open
    limit: float = 0  # items of each task; below 1: that share of them; 0: all
    samples: dict[str, list[int]] = field(default_factory=dict)  # {task: numbers of its items}; {}: all
    output: str = ""  # the folder to make; "": runs/eval/SUITE-NAME-IDENTITY
    log_samples: bool = False  # also write lm-eval's samples_TASK_*.jsonl, which hold whole prompts
    name: str = ""  # of the model in tables; "": the checkpoint's
    model: str = NAME  # upcycle (ours) | hf | vllm | another model of lm-eval's, for what our decoder is not made for
    model_args: dict[str, Any] = field(default_factory=dict)  # more for a model of lm-eval's: {batch_size: 8}
    dtype: str = "float32"  # float32 | bfloat16 | float64
    tokens: int = 8192  # tokens of one forward, at most
    max_length: int = 0  # tokens that are read at most; 0: the model's context
    generate: int = 0  # tokens of a written answer at most; 0: as the task says, or 256
    gen_kwargs: dict[str, Any] = field(default_factory=dict)  # over those of tasks: {max_gen_toks: 64, until: [Q]}
    apply_chat_template: Any = False  # true: prompts are conversations, by the tokenizer's template; or the name of one
    system_instruction: str = ""  # before every prompt
    fewshot_as_multiturn: bool | None = None  # examples are turns of the conversation; null: with a chat template
    seeds: tuple[int, ...] = ()  # of python, numpy, torch and examples, or one of all; []: lm-eval's 0 and 1234
    experts: str = "grouped"  # a backend, a file of training/experts
    tokenizer: str = ""  # a folder with one; "": the checkpoint's
    device: str = ""  # cuda | cpu; "": cuda if there is one
    mesh: MeshConfig = field(default_factory=MeshConfig)  # how several processes divide the model

    def __post_init__(self) -> None:
        for name, least in (("tokens", 1), ("limit", 0), ("generate", 0), ("max_length", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if self.fewshot is not None and self.fewshot < 0:
            raise ValueError(f"fewshot is {self.fewshot}; it must be at least 0")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}")
        if self.mesh.pp > 1:
            raise ValueError(f"mesh.pp={self.mesh.pp}: evaluation has no pipeline; divide the model by mesh.ep or tp")
        if self.suite and self.tasks:
            raise ValueError(f"suite={self.suite} and tasks={','.join(self.tasks)} are both set; write one of them")
        if self.limit and self.samples:
            raise ValueError("limit and samples are both set; write one of them")
        if len(self.seeds) not in (0, 1, 4):
            raise ValueError(f"seeds are {len(self.seeds)} numbers; write four (python, numpy, torch, examples) or one")
        if self.fewshot_as_multiturn and not self.apply_chat_template:
            raise ValueError("fewshot_as_multiturn is set without a conversation; write apply_chat_template=true too")
        if self.model not in model_registry:
            raise ValueError(f"there is no model {self.model!r}{nearest(self.model, list(model_registry))}")
        if self.model == NAME and self.model_args:
            raise ValueError(f"model_args are of lm-eval's models, and model is {NAME}; write them as keys")
        if self.model != NAME and self.model_args.get("trust_remote_code"):
            raise ValueError(
                "trust_remote_code runs a stranger's program, which this command does not do; leave it out"
            )

    @property
    def picked(self) -> dict[str, list[int]]:
        """`samples` in order: lm-eval pairs the numbers as given with the items as they come."""
        return {task: sorted(set(numbers)) for task, numbers in self.samples.items()}

    @property
    def four_seeds(self) -> tuple[int, ...]:
        """Of python, numpy, torch and examples; none where lm-eval's own are wanted."""
        return self.seeds * 4 if len(self.seeds) == 1 else self.seeds

    @property
    def label(self) -> str:
        """The name of what is asked, in tables and folders."""
        return self.suite or ",".join(Path(name).stem for name in self.tasks)


def main(words: Sequence[str]) -> int:
    config = read_config(words)
    command = shlex.join(["python", "-m", "evaluation", "run", *words])
    run(config, command)
    return 0


def read_config(words: Sequence[str]) -> RunConfig:
    names, more = cli.names_and_words(words)
    if len(names) == 1 and any(word.startswith("tasks=") for word in more):
        names = ["", *names]  # there is no suite to name
    if len(names) > 2:
        raise ValueError(f"{names[2]!r} is one name too many; write run SUITE CHECKPOINT key=value ...")
    if len(names) == 2:
        more.append(f"checkpoint={names[1]}")
    file = names[0] if names else ""
    if file and not is_config(file):
        file, more = "", [*more, f"suite={file}"]
    config = read(RunConfig, file, more, EVAL)
    if not config.label or not config.checkpoint:
        lacks = "checkpoint" if config.label else "suite"
        raise ValueError(f"{lacks} is not set; write for instance run tiny ./model")
    return config


def is_config(name: str) -> bool:
    """Whether `name` is a config, which is a YAML file with the key `suite`; else it names a suite."""
    path = next((p for p in (Path(name), EVAL / f"{name}.yaml") if p.is_file()), None)
    if path is None:
        return False
    try:
        found = strict.read_yaml(path)
    except ValueError:
        return True  # read() says what is wrong with it
    return isinstance(found, dict) and "suite" in found


def run(config: RunConfig, command: str) -> Path:
    """Asks the model and returns the folder with the results (results.py)."""
    started, clock = datetime.now(UTC), time.monotonic()
    with processes(config.device, settings=flat(asdict(config) | {"device": ""})), ExitStack() as stack:
        # before the model: what is missing is found in seconds
        found = tasks_to_ask(config)
        lm = model_to_ask(config)
        first = not dist.is_initialized() or dist.get_rank() == 0
        about = about_of(lm, config)
        name = Path(config.label).stem if config.suite else config.label[:60]
        folder = Path(config.output or f"runs/eval/{name}-{about.name}-{about.identity[:8]}")
        stack.enter_context(alone(folder))
        if isinstance(lm, UpcycleLM):
            lm.remember(folder / "cache")
        prepared = time.monotonic()

        sums: list[str] = []

        def keep(samples: Samples) -> None:
            if isinstance(lm, UpcycleLM) and lm.remembered:
                lm.remembered.close()
            if first:
                sums.append(results.save_items(folder, items_of(samples, found)))

        answered = ask(
            lm, found, config.limit, BOOTSTRAP, keep, seeds=config.four_seeds, samples=config.picked or None,
            system_instruction=config.system_instruction or None, apply_chat_template=config.apply_chat_template,
            fewshot_as_multiturn=multiturn(config),
        )  # fmt: skip
        clock_end, scored = time.monotonic(), tasks_of(answered, found)
        if not about.fingerprint:
            about = replace(about, fingerprint=answers_digest(answered["samples"]))
        evaluation = Evaluation(
            model=about,
            suite=config.label,
            command=command,
            options=asdict(config),
            versions=versions(),
            started=started.isoformat(timespec="seconds"),
            seconds=clock_end - clock,
            work=work_of(lm, answered) | {"loading_seconds": prepared - clock, "asking_seconds": clock_end - prepared},
            tasks=scored,
            groups=groups_of(answered, found),
            notes=(*found.notes, *notes_of(config, lm), *own_functions(scored)),
        )
        if first:
            results.save_run(folder, evaluation, sums[0])
            written = save_as_lm_eval(folder, config, lm, about, answered)
            print(table(evaluation))
            print(f"\n{folder}: run.json, items.jsonl, {', '.join(written)}")
    return folder


def tasks_to_ask(config: RunConfig) -> tasks.Tasks:
    # our model takes `generate` itself, whatever a task calls the number
    limit = {"max_gen_toks": config.generate} if config.generate and config.model != NAME else {}
    return tasks.load(
        config.suite, config.data, config.texts, config.fewshot, names=config.tasks, include_path=config.include_path,
        gen_kwargs=config.gen_kwargs | limit, greedy=config.model == NAME, seeds=config.four_seeds,
    )  # fmt: skip


def model_to_ask(config: RunConfig) -> LM:
    """Our model, or one of lm-eval's own."""
    shared = {name: value for name in ("dtype", "tokenizer", "max_length") if (value := getattr(config, name))}
    if config.model == NAME:
        return UpcycleLM(
            config.checkpoint, **shared, tokens=config.tokens, max_gen_toks=config.generate, experts=config.experts,
            device=config.device, mesh=asdict(config.mesh),
        )  # fmt: skip
    if dist.is_initialized():
        raise ValueError(f"model={config.model} is lm-eval's, which divides its work itself; start it without torchrun")
    given = {"pretrained": config.checkpoint, **shared, **config.model_args}
    kind = get_model(config.model)
    lm: LM = kind.create_from_arg_obj(given, {"device": config.device or device_instead(kind)})
    return lm


def device_instead(kind: type[LM]) -> str | None:
    """The CPU, where a model of lm-eval's would itself take CUDA and there is none."""
    taken = getattr(signature(kind).parameters.get("device"), "default", None)
    return "cpu" if taken == "cuda" and not torch.cuda.is_available() else None


def about_of(lm: LM, config: RunConfig) -> Model:
    """What is known of the model; of lm-eval's own no fingerprint, because their weights are not seen here."""
    if isinstance(lm, UpcycleLM):
        return replace(lm.about, name=config.name or lm.about.name)
    info: Mapping[str, Any] = lm.get_model_info() if hasattr(lm, "get_model_info") else {}
    parameters = int(info.get("model_num_parameters", 0))
    name = Path(config.checkpoint).resolve().name if Path(config.checkpoint).exists() else config.checkpoint
    asked = repr(
        (config.checkpoint, config.model, config.model_args, config.dtype, config.tokenizer, config.max_length)
    )
    return Model(
        config.name or name.replace("/", "_"), config.checkpoint, "", config.model, parameters, parameters,
        config.dtype, identity=sha256(asked.encode()).hexdigest(),
    )  # fmt: skip


def multiturn(config: RunConfig) -> bool:
    wanted = config.fewshot_as_multiturn
    return bool(config.apply_chat_template) if wanted is None else wanted


def ready(config: EvalConfig, origin: Origin) -> None:
    """Raises what is wrong with the `eval` keys of a run: its suite, its files, its packages, its tokenizer."""
    tokenizer_of(config, origin)
    tasks.load(config.suite, config.data, config.texts, config.fewshot)


def tokenizer_of(config: EvalConfig, origin: Origin) -> Any:
    source = str(origin.files[0].parent) if origin.files else "the checkpoint"
    return load.load_tokenizer(source, origin, config.tokenizer)


def live(
    config: EvalConfig, model: Decoder, origin: Origin, mesh: ParallelMesh, poll: Callable[[], object]
) -> Callable[[], Mapping[str, float]]:
    """A function that asks a model in training the suite of its run's `eval` keys; see training.run.suite.Suite."""
    tokenizer = tokenizer_of(config, origin)
    options: dict[str, Any] = {name: getattr(config, name) for name in ("data", "texts", "fewshot", "limit")}
    return partial(evaluate_live, model, tokenizer, config.suite, mesh, poll, **options)


def evaluate_live(
    model: Decoder,
    tokenizer: Any,
    suite: str,
    mesh: ParallelMesh,
    poll: Callable[[], object] = bool,
    *,
    data: str = "",
    texts: Sequence[str] = (),
    fewshot: int | None = None,
    limit: int = 0,
    tokens: int = 8192,
) -> dict[str, float]:
    """The suite's numbers of a model in training, sharded as it is; all ranks call it, and all get them."""
    found = tasks.load(suite, data, texts, fewshot)
    engine = Engine(model, tokens, ranks_of(mesh), mesh.group("tp"), progress=False, poll=poll)
    answered = ask(DecoderLM(engine, tokenizer), found, limit, bootstrap=0)
    out: dict[str, float] = {}
    parts: dict[str, Task | Group] = {**tasks_of(answered, found), **groups_of(answered, found)}
    for name, part in parts.items():
        out |= {f"eval/{name}/{metric}": value for metric, value in part.metrics.items()}
    return out


def ask(
    lm: LM,
    found: tasks.Tasks,
    limit: float,
    bootstrap: int,
    keep: Callable[[Samples], None] | None = None,
    *,
    seeds: Sequence[int] = (),
    **options: Any,
) -> Any:
    """lm-eval's results, with its own prompts, metrics and standard errors. Processes divide only the forwards.

    `keep` gets the items of all tasks before a metric is computed of them: what was asked for hours is not lost to a
    metric that cannot be computed. `options` are those of lm_eval.evaluator.evaluate.
    """
    real = lm_eval.evaluator._process_results

    def processed(collected: Any, *rest: Any) -> Any:
        if keep:
            keep({name: one["logged_samples"] for name, one in collected.items()})
        computable(collected)
        return real(collected, *rest)

    with (
        tasks.alone(*seeds[:3]),
        tasks.replaced(lm_eval.evaluator, "_process_results", processed),
        tasks.replaced(lm_eval.evaluator_utils, "stderr_for_metric", error_where_there_is_one),
    ):
        if options.get("apply_chat_template"):
            lm.chat_template(options["apply_chat_template"])  # chooses it, or says that there is none
        return lm_eval.evaluator.evaluate(
            lm=lm, task_dict=found.loaded, limit=limit or None, bootstrap_iters=bootstrap, log_samples=True, **options
        )


def error_where_there_is_one(metric: Any, bootstrap_iters: int) -> Callable[..., Any] | None:
    """lm-eval's function for the standard error of a metric, without one where it has no finite value."""
    real = lm_eval.api.metrics.stderr_for_metric(metric, bootstrap_iters)

    def error(scores: Any) -> Any:
        try:
            return real(scores)
        except ArithmeticError:  # draws of perplexities whose squares are beyond all numbers
            return "N/A"

    return real and error


def computable(collected: Any) -> None:
    """Raises ValueError about the first metric that cannot be computed of its items."""
    for name, one in collected.items():
        for (metric, _), scores in one["raw_metrics"].items():
            try:
                aggregation(one["task"], metric)(scores)
            except Exception as error:  # of any library that computes a metric
                raise ValueError(
                    f"{name}: {metric} cannot be computed of its {len(scores)} items ({' '.join(str(error).split())}); "
                    "they are in items.jsonl and the answers are remembered; take the metric out and run again"
                ) from None


# ---- lm-eval's results as ours


def aggregation(task: Any, metric: str) -> Callable[..., Any]:
    """The function that makes the metric of its items' scores; lm-eval takes the mean where a task names none."""
    found: Callable[..., Any] = task.aggregation().get(metric, lm_eval.api.metrics.mean)
    return found


def tasks_of(answered: Any, found: tasks.Tasks) -> dict[str, Task]:
    members = tasks.all_groups(found.loaded)
    out = {}
    for name, task in found.loaded["tasks"].items():
        values, errors = numbers(answered["results"][name])
        functions = {
            metric: aggregation_of(task, answered["samples"][name], metric, values[metric]) for metric in values
        }
        higher = answered["higher_is_better"].get(name, {})
        within = sorted((len(inside), group) for group, inside in members.items() if name in inside)
        out[name] = Task(
            name=name,
            title=str(task.config.task_alias or name),
            metrics=values,
            stderr=errors,
            higher_is_better={metric: bool(higher.get(metric.partition(",")[0], True)) for metric in values},
            items=int(answered["n-samples"][name]["effective"]),
            total=int(answered["n-samples"][name]["original"]),
            fewshot=int(answered["n-shot"].get(name) or 0),
            version=str(answered["versions"].get(name)),
            output=str(task.OUTPUT_TYPE),
            groups=tuple(group for _, group in within),
            aggregation={metric: function for metric, function in functions.items() if function != "mean"},
        )
    return out


def aggregation_of(task: Any, samples: Sequence[Mapping[str, Any]], metric: str, value: float) -> str:
    """The name of the function that makes `value` of the items, as measures.aggregate takes it."""
    base, _, chosen = metric.partition(",")
    scores = [
        score(sample[base])
        for sample in samples
        if base in sample["metrics"] and sample["filter"] == (chosen or "none")
    ]
    return measures.name_of(aggregation(task, base), scores, value)


def groups_of(answered: Any, found: tasks.Tasks) -> dict[str, Group]:
    out = {}
    for name, inside in tasks.all_groups(found.loaded).items():
        values, errors = numbers(answered.get("groups", {}).get(name, {}))
        items = sum(int(answered["n-samples"][task]["effective"]) for task in inside)
        title = str(found.loaded["groups"][name].alias or name)
        out[name] = Group(
            name, title, values, errors, tuple(inside), items, alike(found.loaded["groups"][name], values)
        )
    return out


def alike(group: Any, metrics: Iterable[str]) -> tuple[str, ...]:
    """The group's metrics in which its tasks weigh the same."""
    unweighted = {each.metric for each in group.aggregate_metric_list or () if not each.weight_by_size}
    return tuple(metric for metric in metrics if metric.partition(",")[0] in unweighted)


def items_of(samples: Samples, found: tasks.Tasks) -> Iterator[Item]:
    for name, task in found.loaded["tasks"].items():
        merged: dict[int, Item] = {}
        for sample in samples[name]:
            scores = {metric_name(metric, sample["filter"]): score(sample[metric]) for metric in sample["metrics"]}
            known = merged.get(sample["doc_id"])
            if known is None:
                merged[sample["doc_id"]] = item(name, task, sample, scores)
            else:  # another filter, which finds the answer in the same text its own way
                merged[sample["doc_id"]] = replace(known, scores={**known.scores, **scores})
        yield from (merged[number] for number in sorted(merged))


def item(name: str, task: Any, sample: Mapping[str, Any], scores: Mapping[str, Raw]) -> Item:
    rolling, many = (kind == task.OUTPUT_TYPE for kind in ("loglikelihood_rolling", "multiple_choice"))
    choices: Sequence[Any] = task.doc_to_choice(sample["doc"]) if many else ()
    text, logprobs, greedy = answers_of([response[0] for response in sample["resps"]], len(choices))
    return Item(
        task=name,
        doc=int(sample["doc_id"]),
        doc_hash=sample["doc_hash"],
        prompt_hash=sample["prompt_hash"],
        target="" if rolling else str(sample["target"]),
        scores=scores,
        logprobs=logprobs,
        greedy=greedy,
        text=text,
        choices=tuple(map(str, choices)),
        clusters=clusters(sample["doc"]),
    )


# ---- as lm-eval writes it


def save_as_lm_eval(folder: Path, config: RunConfig, lm: LM, about: Model, answered: Any) -> list[str]:
    """Writes results_TIME.json, and samples_TASK_TIME.jsonl if asked for, by lm-eval's own writer, over older ones."""
    for old in [*folder.glob("results_*.json"), *folder.glob("samples_*.jsonl")]:
        old.unlink()
    samples = answered["samples"]
    settings = {name: getattr(config, name) for name in ("device", "limit", "gen_kwargs")}
    row: dict[str, Any] = {name: value for name, value in answered.items() if name != "samples"}
    row["config"] = {
        "model": config.model,
        "model_args": {"pretrained": config.checkpoint, "dtype": config.dtype} | config.model_args,
        **(lm.get_model_info() if hasattr(lm, "get_model_info") else {}),
        **settings,
        "bootstrap_iters": BOOTSTRAP,
    }
    row |= {f"{name}_version": text for name, text in versions().items()}
    tracker = EvaluationTracker(output_path=str(folder / "results.json"))
    chat = config.apply_chat_template
    tracker.general_config_tracker.log_experiment_args(
        model_source=config.model, model_args={"pretrained": about.source},
        system_instruction=config.system_instruction or None,
        chat_template=lm.chat_template(chat) if chat else None, fewshot_as_multiturn=multiturn(config),
    )  # fmt: skip
    with tasks.alone():
        tracker.save_results_aggregated(row, samples)
        for name in samples if config.log_samples else ():
            tracker.save_results_samples(name, samples[name])
    return sorted(path.name for path in [*folder.glob("results_*.json"), *folder.glob("samples_*.jsonl")])


# ---- about a run: versions, work, notes, table


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
    ]
    return "\n".join(lines)
