"""Ask a model the items of a suite, and keep every answer.

usage: python -m evaluation run SUITE CHECKPOINT [key=value ...]

  python -m evaluation run mmlu ./moe fewshot=0                            # from the hub; data=FOLDER: from files
  python -m evaluation run perplexity runs/moe texts=[book.txt]            # a training run: its newest checkpoint
  python -m evaluation run tiny ./moe limit=10 dtype=bfloat16
  torchrun --nproc-per-node 8 -m evaluation run tiny ./moe mesh.ep=8

Suites are the files of evaluation/suites, or a file of your own; SUITE may also be a ready config (configs/eval).
Killed and started again, it goes on where it was.

keys, with defaults and meaning: docs/config.md
"""

from __future__ import annotations

import math
import platform
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lm_eval.api.metrics
import lm_eval.evaluator
import lm_eval.evaluator_utils
import numpy as np
import torch.distributed as dist

from evaluation import load, measures, results, tasks
from evaluation.engine import Engine
from evaluation.lm import DecoderLM
from evaluation.ranks import Ranks
from evaluation.remember import Remembered
from evaluation.results import Evaluation, Group, Item, Raw, Task
from training.checkpoint.layout import Origin
from training.checkpoint.resume import flat
from training.evaluate import Ask, EvalConfig, Poll
from training.model.decoder import Decoder
from training.parallel.mesh import MeshConfig, ParallelMesh
from training.parallel.processes import processes
from upcycle import __version__, cli, strict
from upcycle.config import read

READY = Path(__file__).parent.parent / "configs" / "eval"
DTYPES = ("float32", "bfloat16", "float64")
# keys of documents that say what several share, the widest first: items of one are no independent evidence (compare)
FROM = ("file", "path", "url", "document", "article", "story", "passage", "context")
BOOTSTRAP = 1000  # draws for the standard errors that have no formula (perplexity)


@dataclass(frozen=True)
class RunConfig:
    suite: str = ""  # a file of evaluation/suites, or one of your own
    checkpoint: str = ""  # a Hugging Face folder, a hub id, or a training run's folder
    data: str = ""  # a folder with the suite's files; "": from the hub
    texts: tuple[str, ...] = ()  # perplexity: .txt, .jsonl or .jsonl.zst, each a domain
    fewshot: int | None = None  # examples in a prompt, where the task leaves it open
    limit: int = 0  # items of each task; 0: all
    output: str = ""  # the folder to make; "": runs/eval/SUITE-NAME-IDENTITY
    name: str = ""  # of the model in tables; "": the checkpoint's
    dtype: str = "float32"  # float32 | bfloat16 | float64
    tokens: int = 8192  # tokens of one forward, at most
    generate: int = 0  # tokens of a written answer at most; 0: as the task says, or 256
    experts: str = "grouped"  # a backend, a file of training/experts
    tokenizer: str = ""  # a folder with one; "": the checkpoint's
    device: str = ""  # cuda | cpu; "": cuda if there is one
    mesh: MeshConfig = field(default_factory=MeshConfig)  # how several processes divide the model

    def __post_init__(self) -> None:
        for name, least in (("tokens", 1), ("limit", 0), ("generate", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if self.fewshot is not None and self.fewshot < 0:
            raise ValueError(f"fewshot is {self.fewshot}; it must be at least 0")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}")
        if self.mesh.pp > 1:
            raise ValueError(f"mesh.pp={self.mesh.pp}: evaluation has no pipeline; divide the model by mesh.ep or tp")


def main(words: Sequence[str]) -> int:
    config = read_config(words)
    command = shlex.join(["python", "-m", "evaluation", "run", *words])
    run(config, command)
    return 0


def read_config(words: Sequence[str]) -> RunConfig:
    names, more = cli.names_and_words(words)
    if len(names) > 2:
        raise ValueError(f"{names[2]!r} is one name too many; write run SUITE CHECKPOINT key=value ...")
    if len(names) == 2:
        more.append(f"checkpoint={names[1]}")
    file = names[0] if names else ""
    if file and not is_config(file):
        file, more = "", [*more, f"suite={file}"]
    config = read(RunConfig, file, more, READY)
    if not config.suite or not config.checkpoint:
        lacks = "checkpoint" if config.suite else "suite"
        raise ValueError(f"{lacks} is not set; write for instance run tiny ./model")
    return config


def is_config(name: str) -> bool:
    """Whether `name` is a config, which is a YAML file with the key `suite`; else it names a suite."""
    path = next((p for p in (Path(name), READY / f"{name}.yaml") if p.is_file()), None)
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
    with processes(config.device, settings=flat(asdict(config) | {"device": ""})) as device:
        # before the model: what is missing is found in seconds
        found = tasks.load(config.suite, config.data, config.texts, config.fewshot)
        check_ranks(config.mesh, dist.get_world_size() if dist.is_initialized() else 1)
        mesh = ParallelMesh(config.mesh, device_type=device.type)
        model = load.opened(
            config.checkpoint, config.dtype, mesh, device, experts=config.experts, tokenizer=config.tokenizer
        )
        about = replace(model.about, name=config.name or model.about.name)
        folder = Path(config.output or f"runs/eval/{Path(config.suite).stem}-{about.name}-{about.identity[:8]}")
        engine = Engine(model.model, config.tokens, ranks_of(mesh), mesh.group("tp"), progress=mesh.rank == 0)
        remembered = Remembered(folder / "cache", about.identity, mesh.rank)
        engine.ranks.any(False)  # all ranks have read the cache before one writes to it
        lm = DecoderLM(engine, model.tokenizer, remembered=remembered, stops=model.stops, generate=config.generate)
        prepared = time.monotonic()

        def keep(samples: Samples) -> None:
            remembered.close()
            if mesh.rank == 0:
                results.save_items(folder, items_of(samples, found))

        answered = ask(lm, found, config.limit, BOOTSTRAP, keep)
        clock_end, scored = time.monotonic(), tasks_of(answered, found)
        evaluation = Evaluation(
            model=about,
            suite=config.suite,
            command=command,
            options=asdict(config),
            versions=versions(),
            started=started.isoformat(timespec="seconds"),
            seconds=clock_end - clock,
            work=work_of(lm) | {"loading_seconds": prepared - clock, "asking_seconds": clock_end - prepared},
            tasks=scored,
            groups=groups_of(answered, found),
            notes=(*found.notes, *notes_of(config, lm), *own_functions(scored)),
        )
        if mesh.rank == 0:
            results.save_run(folder, evaluation)
            print(table(evaluation))
            print(f"\n{folder}: run.json, items.jsonl")
    return folder


def check_ranks(mesh: MeshConfig, ranks: int) -> None:
    for axes in (("tp", "cp", "pp", "dp_replicate"), ("ep", "etp", "pp")):
        size = math.prod(getattr(mesh, axis) for axis in axes)
        if ranks % size:
            words = " ".join(f"mesh.{axis}={getattr(mesh, axis)}" for axis in axes if getattr(mesh, axis) > 1)
            raise ValueError(
                f"{words} needs a multiple of {size} processes, and there {'is' if ranks == 1 else 'are'} {ranks}; "
                f"start it with torchrun --nproc-per-node {size} -m evaluation run ..."
            )


def ready(config: EvalConfig, origin: Origin) -> None:
    """Raises what is wrong with the `eval` keys of a run: its suite, its files, its packages, its tokenizer."""
    tokenizer_of(config, origin)
    tasks.load(config.suite, config.data, config.texts, config.fewshot)


def tokenizer_of(config: EvalConfig, origin: Origin) -> Any:
    source = str(origin.files[0].parent) if origin.files else "the checkpoint"
    return load.load_tokenizer(source, origin, config.tokenizer)


def live(config: EvalConfig, model: Decoder, origin: Origin, mesh: ParallelMesh, poll: Poll) -> Ask:
    """A function that asks a model in training the suite of its run's `eval` keys; see training.evaluate.Suite."""
    tokenizer = tokenizer_of(config, origin)
    options: dict[str, Any] = {name: getattr(config, name) for name in ("data", "texts", "fewshot", "limit")}
    return partial(evaluate_live, model, tokenizer, config.suite, mesh, poll, **options)


def evaluate_live(
    model: Decoder,
    tokenizer: Any,
    suite: str,
    mesh: ParallelMesh,
    poll: Poll = bool,
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


def ranks_of(mesh: ParallelMesh) -> Ranks:
    """Tensor parallel ranks, which are neighbours, ask the same; all others ask something else."""
    return Ranks(mesh.rank // mesh.size("tp"), mesh.world // mesh.size("tp"))


def ask(
    lm: DecoderLM, found: tasks.Tasks, limit: int, bootstrap: int, keep: Callable[[Samples], None] | None = None
) -> Any:
    """lm-eval's results, with its own prompts, metrics and standard errors. Processes divide only the forwards.

    `keep` gets the items of all tasks before a metric is computed of them: what was asked for hours is not lost to a
    metric that cannot be computed.
    """
    was_training = lm.engine.model.training
    real = lm_eval.evaluator._process_results

    def processed(collected: Any, *rest: Any) -> Any:
        if keep:
            keep({name: one["logged_samples"] for name, one in collected.items()})
        computable(collected)
        return real(collected, *rest)

    with (
        tasks.alone(),
        lm.engine.open(),
        tasks.replaced(lm_eval.evaluator, "_process_results", processed),
        tasks.replaced(lm_eval.evaluator_utils, "stderr_for_metric", error_where_there_is_one),
    ):
        try:
            lm.engine.model.eval()
            return lm_eval.evaluator.evaluate(
                lm=lm, task_dict=found.loaded, limit=limit or None, bootstrap_iters=bootstrap, log_samples=True
            )
        finally:
            lm.engine.model.train(was_training)


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

Samples = Mapping[str, Sequence[Mapping[str, Any]]]  # of each task, as lm-eval logs them


def aggregation(task: Any, metric: str) -> Callable[..., Any]:
    """The function that makes the metric of its items' scores; lm-eval takes the mean where a task names none."""
    found: Callable[..., Any] = task.aggregation().get(metric, lm_eval.api.metrics.mean)
    return found


def metric_name(metric: str, chosen: str) -> str:
    """lm-eval's `acc,none` becomes acc; exact_match,strict-match keeps the filter that found the answer."""
    return metric if chosen == "none" else f"{metric},{chosen}"


def numbers(row: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """(metrics, standard errors) of a row of lm-eval's results."""
    values: dict[str, float] = {}
    errors: dict[str, float] = {}
    for name, value in row.items():
        metric, comma, chosen = name.partition(",")
        if not comma or not isinstance(value, float | int | np.number):  # "N/A"; lists and tables of a task's own
            continue
        if metric.endswith("_stderr"):
            errors[metric_name(metric.removesuffix("_stderr"), chosen)] = float(value)
        else:
            values[metric_name(metric, chosen)] = float(value)
    return values, errors


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


def own_functions(scored: Mapping[str, Task]) -> Iterator[str]:
    """A sentence about each task with metrics that nobody but the task can compute again."""
    for task in scored.values():
        if own := [metric for metric, function in task.aggregation.items() if function == measures.OWN]:
            yield f"{task.name}: {', '.join(own)} is made by a function of the task's own: no interval, not compared"


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
    answers = [response[0] for response in sample["resps"]]
    text, logprobs, greedy = "", [], []
    choices: Sequence[Any] = ()
    if task.OUTPUT_TYPE == "generate_until":
        text = str(answers[0])
    elif task.OUTPUT_TYPE == "loglikelihood_rolling":
        logprobs = [float(answers[0])]
    else:
        logprobs, greedy = [float(a) for a, _ in answers], [bool(b) for _, b in answers]
        if task.OUTPUT_TYPE == "multiple_choice":
            choices = task.doc_to_choice(sample["doc"])
    return Item(
        task=name,
        doc=int(sample["doc_id"]),
        doc_hash=sample["doc_hash"],
        prompt_hash=sample["prompt_hash"],
        target="" if task.OUTPUT_TYPE == "loglikelihood_rolling" else str(sample["target"]),
        scores=scores,
        logprobs=tuple(logprobs),
        greedy=tuple(greedy),
        text=text,
        choices=tuple(map(str, choices)),
        clusters=clusters(sample["doc"]),
    )


def clusters(doc: Any) -> dict[str, str]:
    found = {name: doc[name] for name in FROM if isinstance(doc, Mapping) and isinstance(doc.get(name), str)}
    return {name: blake2b(value.encode(), digest_size=8).hexdigest() for name, value in found.items() if value}


def score(value: Any) -> Raw:
    found = measures.plain(value)
    return float(found) if isinstance(found, bool | int) else found


# ---- about a run: versions, work, notes, table


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "upcycle": __version__}
    return found | {name: version(name) for name in ("torch", "transformers", "tokenizers", "datasets", "lm_eval")}


def work_of(lm: DecoderLM) -> dict[str, float]:
    each = lm.engine.ranks.gather(lm.engine.work)
    tokens, forwards = (sum(work[name] for work in each) for name in ("tokens", "forwards"))
    return {"tokens": tokens, "forwards": forwards, "requests": lm.asked, "recalled": lm.recalled}


def notes_of(config: RunConfig, lm: DecoderLM) -> Iterator[str]:
    if config.limit:
        yield f"limit={config.limit}: not all items of each task"
    if lm.cut:
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
