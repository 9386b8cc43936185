"""Measure lm-eval's own model (HFLM on transformers) and ours on the same items, one after the other.

usage: python -m benchmarks.evaluation CHECKPOINT [key=value ...]

  python -m benchmarks.evaluation ./moe limit=50  # mmlu from the Hub; data=FOLDER reads files
  python -m benchmarks.evaluation ./llama 'tasks=[mmlu_anatomy]' 'batch_sizes=[1,16]'     # only these tasks
  python -m benchmarks.evaluation ./llama suite=tiny limit=4

The time includes everything between the items and the scores: prompts, tokens, forwards and metrics. `answering` is the
part after the prompts, which lm-eval makes for both models. Before the clock starts, the model is on its device and has
answered one item. The last line is a row of JSON, including versions.

keys, with defaults and meaning: docs/config.md
"""

from __future__ import annotations

from upcycle.cli import frame as cli

if __name__ == "__main__":  # before the imports below, which take seconds
    cli.program("benchmarks.evaluation")

import json
import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any
from unittest.mock import patch

import lm_eval.evaluator
import torch
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM

from evaluation.ask import load, tasks
from evaluation.ask.engine import Engine
from evaluation.ask.harness import DTYPES
from evaluation.ask.lm import DecoderLM
from evaluation.ask.run import ask, versions
from evaluation.judge.logged import numbers
from training.parallel.mesh import MeshConfig, ParallelMesh
from training.parallel.processes import processes
from upcycle.config.reading import read
from upcycle.config.values import BATCH, at_least, check_values

SAME = 1e-5  # relative difference of scores that count as equal, because perplexities are sums of rounded numbers


@dataclass(frozen=True)
class BenchConfig:
    checkpoint: str = ""  # a Hugging Face folder or a Hub id of a model that transformers can load
    suite: str = "mmlu"  # a file of evaluation/suites, or your own
    tasks: tuple[str, ...] = ()  # only these tasks of the suite; []: all
    data: str = ""  # a folder with the suite's files; "": from the Hub
    fewshot: int | None = None  # examples in a prompt, for tasks that do not set a number
    limit: int = 0  # items of each task; 0: all
    dtype: str = "float32"  # float32 | bfloat16 | float64
    forward_tokens: int = 8192  # most tokens in one forward of our model
    batch_sizes: tuple[int, ...] = (1, 16)  # batch sizes of HFLM, which runs once with each
    expert_backend: str = "grouped"  # a file of training/experts
    device: str = ""  # cuda | cpu; "": cuda if there is one

    def __post_init__(self) -> None:
        if not self.checkpoint:
            raise ValueError("checkpoint is not set; write for instance ./model data=FOLDER")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}")
        if not self.batch_sizes or not 1 <= min(self.batch_sizes) <= max(self.batch_sizes) <= BATCH:
            raise ValueError(f"batch_sizes is {list(self.batch_sizes)}; write one or more numbers from 1 to {BATCH:,}")
        check_values(self, "", {"fewshot limit": at_least(0), "forward_tokens": at_least(1)})


@dataclass(frozen=True)
class Asked:
    seconds: float
    answering: float  # the part of these seconds between requests and answers
    tokens: int
    forwards: int
    answers: dict[tuple[str, int], list[Any]]  # (task, document) -> log-probabilities or texts
    scores: dict[str, dict[str, float]]  # task -> metric -> value


class CountingHFLM(HFLM):  # type: ignore[misc]
    """Count the tokens, including padding, and the forwards that go through HFLM's model."""

    tokens = forwards = 0

    def _model_call(self, inps: torch.Tensor, *rest: Any, **more: Any) -> Any:
        self.tokens, self.forwards = self.tokens + inps.numel(), self.forwards + 1
        return super()._model_call(inps, *rest, **more)

    def _model_generate(self, *rest: Any, **more: Any) -> Any:
        out = super()._model_generate(*rest, **more)
        self.tokens, self.forwards = self.tokens + out.numel(), self.forwards + 1
        return out


class Clock:
    """Count the seconds in the three methods that lm-eval calls for answers."""

    def __init__(self, lm: Any) -> None:
        self.seconds = 0.0
        for name in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
            setattr(lm, name, self.timed(getattr(lm, name)))

    def timed(self, answer: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return answer(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - start

        return call


def items(config: BenchConfig) -> tasks.Tasks:
    """Read the tasks to ask. Read them again for each model, because tasks draw their examples while they run."""
    found = tasks.load(config.suite, config.data, (), config.fewshot)
    if config.tasks:
        known = found.loaded["tasks"]
        for name in config.tasks:
            if name not in known:
                raise ValueError(f"suite {config.suite} has no task {name!r}; it has {', '.join(sorted(known))}")
        found.loaded["tasks"] = {name: known[name] for name in config.tasks}
        found.loaded["groups"] = {}
    return found


def ours(config: BenchConfig, model: load.Loaded) -> Asked:
    def fresh() -> DecoderLM:
        return DecoderLM(Engine(model.model, config.forward_tokens, progress=False), model.tokenizer, stops=model.stops)

    ask(fresh(), first(items(config)), 0, limit=1)
    found, lm = items(config), fresh()
    clock, start = Clock(lm), time.perf_counter()
    answered = ask(lm, found, 0, limit=config.limit or None)
    seconds, work = time.perf_counter() - start, lm.engine.work
    return asked(answered, seconds, clock, int(work["tokens"]), int(work["forwards"]))


def stock(config: BenchConfig, model: Any, tokenizer: Any, size: int) -> Asked:
    def evaluate(lm: HFLM, found: tasks.Tasks, limit: int) -> Any:
        with patch.dict(os.environ, DISABLE_MULTIPROC="1"):  # a fork may hang while threads run
            return lm_eval.evaluator.evaluate(
                lm=lm, task_dict=found.loaded, limit=limit or None, bootstrap_iters=0, log_samples=True
            )

    def fresh() -> CountingHFLM:
        return CountingHFLM(pretrained=model, tokenizer=tokenizer, batch_size=size)

    evaluate(fresh(), first(items(config)), 1)
    found, lm = items(config), fresh()
    clock, start = Clock(lm), time.perf_counter()
    answered = evaluate(lm, found, config.limit)
    return asked(answered, time.perf_counter() - start, clock, lm.tokens, lm.forwards)


def first(found: tasks.Tasks) -> tasks.Tasks:
    """Return only the first task."""
    name = next(iter(found.loaded["tasks"]))
    return tasks.Tasks({"tasks": {name: found.loaded["tasks"][name]}, "groups": {}}, ())


def asked(answered: Any, seconds: float, clock: Clock, tokens: int, forwards: int) -> Asked:
    answers = {
        (task, sample["doc_id"]): [
            reply[0] if isinstance(reply[0], str | float) else reply[0][0] for reply in sample["resps"]
        ]
        for task, samples in answered["samples"].items()
        for sample in samples
    }
    scores = {task: numbers(answered["results"][task])[0] for task in answered["samples"]}
    return Asked(seconds, clock.seconds, tokens, forwards, answers, scores)


def accuracy(result: Asked) -> dict[str, float]:
    """Return the mean of each metric over the items of all tasks that have it."""
    sizes = Counter(task for task, _ in result.answers)
    names = dict.fromkeys(metric for metrics in result.scores.values() for metric in metrics)
    out = {}
    for name in names:
        parts = [(sizes[task], metrics[name]) for task, metrics in result.scores.items() if name in metrics]
        out[name] = sum(size * value for size, value in parts) / sum(size for size, _ in parts)
    return out


def compared(result: Asked, reference: Asked) -> dict[str, Any]:
    """Return how far two results are apart: the largest difference of numbers, and how many texts differ."""
    assert result.answers.keys() == reference.answers.keys()
    pairs = [pair for key, mine in result.answers.items() for pair in zip(mine, reference.answers[key], strict=True)]
    logprobs = [abs(a - b) for a, b in pairs if not isinstance(a, str)]
    return {
        "largest_logprob_difference": max(logprobs, default=None),
        "other_texts": sum(a != b for a, b in pairs if isinstance(a, str)),
        "scores_equal": all(
            math.isclose(value, reference.scores[task][name], rel_tol=SAME, abs_tol=1e-12)
            for task, metrics in result.scores.items()
            for name, value in metrics.items()
        ),
    }


def figures(result: Asked) -> dict[str, Any]:
    return {
        "seconds": result.seconds,
        "answering_seconds": result.answering,
        "tokens": result.tokens,
        "forwards": result.forwards,
        "scores": accuracy(result),
    }


def bench(config: BenchConfig) -> dict[str, Any]:
    with processes(config.device) as device:
        if torch.distributed.is_initialized():
            raise ValueError("benchmarks.evaluation runs in one process; start it without torchrun")
        loaded = load.opened(
            config.checkpoint, config.dtype, ParallelMesh(MeshConfig(), device_type=device.type), device,
            expert_backend=config.expert_backend,
        )  # fmt: skip
        mine, tokenizer = ours(config, loaded), loaded.tokenizer
        say("ours", mine)
        del loaded  # frees its memory before transformers' model is loaded
        model: Any = AutoModelForCausalLM.from_pretrained(config.checkpoint, dtype=getattr(torch, config.dtype))
        model = model.to(device).eval()
        rows = []
        for size in config.batch_sizes:
            theirs = stock(config, model, tokenizer, size)
            say(f"HFLM, batch size {size}", theirs)
            rows.append({"batch_size": size, **figures(theirs), **compared(mine, theirs)})
        return {
            **asdict(config),
            **versions(),
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
            "items": len(mine.answers),
            "ours": figures(mine),
            "hflm": rows,
        }


def say(name: str, result: Asked) -> None:
    shown = ", ".join(f"{metric} {value:.4f}" for metric, value in accuracy(result).items())
    print(
        f"{name:>20}: {result.seconds:8.1f} s, {result.answering:8.1f} s answering, {result.tokens:,} tokens in "
        f"{result.forwards:,} forwards; {shown}",
        flush=True,
    )


@cli.command()
def main(words: Sequence[str]) -> int:
    checkpoint, words = cli.file_and_words(words)
    print(json.dumps(bench(read(BenchConfig, "", [f"checkpoint={checkpoint}", *words] if checkpoint else words))))
    return 0
