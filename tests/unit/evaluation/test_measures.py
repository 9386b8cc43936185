"""Metrics of every kind are lm-eval's own, and what is compared of them is what was scored."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from string import printable
from typing import Any

import lm_eval
import lm_eval.api.registry
import lm_eval.tasks
import numpy as np
import pytest
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from evaluation.ask import load, tasks
from evaluation.ask.engine import Engine
from evaluation.ask.lm import DecoderLM
from evaluation.ask.run import RunConfig, evaluate
from evaluation.judge import compare, logged, results
from evaluation.judge import metrics as measures
from evaluation.show import facts
from tests.unit.evaluation.written import save
from training.parallel.mesh import MeshConfig, ParallelMesh
from upcycle.arch.sample import make_llama

SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 257, "max_position_embeddings": 128, "bos_token_id": 256, "eos_token_id": 256,
    "dtype": "float32",
}  # fmt: skip
MEAN = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]


def spoken(folder: Path, seed: int = 0) -> Path:
    """A small model of random weights, which reads bytes."""
    make_llama(folder, SHAPE, seed=seed)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>").save_pretrained(folder)
    return folder


def choice(name: str, metrics: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {
        "task": name, "dataset_path": "jsonl", "dataset_name": f"{name}.jsonl", "output_type": "multiple_choice",
        "test_split": "test", "doc_to_text": "{{text}}", "doc_to_target": "label", "doc_to_choice": ["no", "yes"],
        "metric_list": metrics, "metadata": {"version": 1}, **more,
    }  # fmt: skip


def registered(*names: str) -> list[dict[str, Any]]:
    return [{"metric": name} for name in names]


@pytest.fixture(scope="module", autouse=True)
def few_draws() -> Iterator[None]:
    """scikit-learn takes milliseconds for each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measures, "DRAWS", 60)
        patch.setattr("evaluation.ask.run.BOOTSTRAP", 10)
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, and a suite with metrics of every kind and a group that weighs its tasks alike."""
    place = tmp_path_factory.mktemp("metrics")
    draw = random.Random(0)
    sizes = {"pairs": 30, "few": 4, "many": 21}
    for name, size in sizes.items():
        rows = [{"text": "".join(draw.choices("abc ", k=9)), "label": draw.randrange(2)} for _ in range(size)]
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [
        {"text": "".join(draw.choices("abc ", k=9)), "word": "".join(draw.sample(printable, 80))} for _ in range(12)
    ]
    for name in ("written", "last"):  # of all letters, so that what a random model writes shares some
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    writes = {"output_type": "generate_until", "doc_to_target": "word", "doc_to_choice": None}
    suite = {
        "tasks": [
            choice("pairs", [*MEAN, *registered("f1", "mcc", "brier_score")]),
            choice("written", registered("chrf", "bleu", "ter"), **writes)
            | {"generation_kwargs": {"until": ["\n"], "max_gen_toks": 32}},
            choice("last", registered("perplexity", "acc"), output_type="loglikelihood", doc_to_target=" {{word[:8]}}"),
            "alike",
        ],
        "folders": [str(place / "own")],
    }
    group = {
        "group": "alike",
        "task": ["few", "many"],
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": False}],
    }
    (place / "own").mkdir()
    for name, task in (("few", choice("few", MEAN)), ("many", choice("many", MEAN)), ("alike", group)):
        (place / "own" / f"{name}.yaml").write_text(yaml.safe_dump(task))
    del suite["tasks"][1]["doc_to_choice"], suite["tasks"][2]["doc_to_choice"]  # type: ignore[attr-defined]
    (place / "suite.yaml").write_text(yaml.safe_dump(suite))
    for seed, name in enumerate(("a", "b")):
        spoken(place / name, seed)
        config = RunConfig(
            suite=str(place / "suite.yaml"), checkpoint=str(place / name), output=str(place / f"run-{name}")
        )
        evaluate(config)
    return place


def test_metrics_of_every_kind_are_those_of_simple_evaluate(place: Path) -> None:
    found = tasks.load(str(place / "suite.yaml"))
    mesh = ParallelMesh(MeshConfig())
    model = load.opened(str(place / "a"), "float32", mesh, torch.device("cpu"))
    lm = DecoderLM(Engine(model.model, 8192, progress=False), model.tokenizer)
    with pytest.MonkeyPatch.context() as patch, tasks.alone(), lm.engine.open():
        patch.setattr(lm_eval.tasks.TaskManager, "load", lambda *_: found.loaded)
        expected: Any = lm_eval.simple_evaluate(
            model=lm,
            tasks=["alike"],
            bootstrap_iters=0,
            task_manager=lm_eval.tasks.TaskManager(include_path=[place], include_defaults=False),
        )
    ours = logged.load(place / "run-a")
    kinds = {"f1", "mcc", "brier_score", "bleu", "chrf", "ter", "perplexity", "acc"}
    assert kinds == {metric for task in ours.tasks.values() for metric in task.metrics}
    for part in (*ours.tasks.values(), *ours.groups.values()):
        row = expected["results"][part.name]
        assert part.metrics
        for metric, value in part.metrics.items():
            assert value == pytest.approx(row[f"{metric},none"], rel=1e-12), (part.name, metric)


def test_the_items_give_the_metric_again_and_the_interval_is_around_it(place: Path) -> None:
    run, by_task = logged.load(place / "run-a"), dict[str, list[results.Item]]()
    for item in logged.load(place / "run-a").items:
        by_task.setdefault(item.task, []).append(item)
    for part in (*run.tasks.values(), *run.groups.values()):
        items = [item for task in getattr(part, "tasks", (part.name,)) for item in by_task[task]]
        for metric, value in part.metrics.items():
            measure = measures.of(part, metric, run.tasks)
            assert measure is not None
            assert measure.value([(item.task, item.scores[metric]) for item in items]) == pytest.approx(value), metric
    for score in facts.scores(place / "run-a"):
        part = run.tasks.get(score.name) or run.groups[score.name]
        assert score.value == pytest.approx(part.metrics[score.metric])
        assert score.low <= score.value <= score.high and score.low < score.high


@pytest.mark.parametrize("metric", ["f1", "mcc", "chrf", "perplexity"])
def test_any_metric_is_compared(place: Path, tmp_path: Path, metric: str) -> None:
    """As if the task had no other metric: then it is the one to judge by."""
    for name in ("a", "b"):
        done = logged.load(place / f"run-{name}")
        [task] = [task for task in done.tasks.values() if metric in task.metrics]
        kept = results.Task(**{**vars(task), "metrics": {metric: task.metrics[metric]}, "groups": ()})
        items = [item for item in logged.load(place / f"run-{name}").items if item.task == task.name]
        whole = {**vars(done), "tasks": {task.name: kept}, "groups": {}}
        save(tmp_path / name, results.Evaluation(**whole), items)
    [found] = compare.compare([tmp_path / "a", tmp_path / "b"]).comparisons
    [difference] = found.differences
    assert (difference.metric, difference.a) == (
        metric,
        pytest.approx(logged.load(tmp_path / "a").tasks[task.name].metrics[metric]),
    )
    assert difference.difference == pytest.approx(difference.b - difference.a)
    assert difference.items_low <= difference.difference <= difference.items_high
    assert difference.verdict == "one run each: no verdict"
    [same] = compare.compare([tmp_path / "a", tmp_path / "a"]).comparisons
    assert (same.differences[0].items_low, same.differences[0].items_high) == (0, 0)


def test_a_group_that_weighs_its_tasks_alike_is_compared_so(place: Path) -> None:
    [found] = compare.compare([place / "run-a", place / "run-b"]).comparisons
    [group] = [d for d in found.differences if d.name == "alike"]
    for side, name in ((group.a, "a"), (group.b, "b")):
        done = logged.load(place / f"run-{name}")
        assert side == pytest.approx(done.groups["alike"].metrics["acc"])
        assert side == pytest.approx(np.mean([done.tasks[t].metrics["acc"] for t in ("few", "many")]))


def test_items_are_saved_before_they_are_aggregated(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = tmp_path / "own.yaml"
    (tmp_path / "three.jsonl").write_text("".join(json.dumps({"text": "a", "label": n}) + "\n" for n in range(3)))
    suite.write_text(yaml.safe_dump({"tasks": [choice("three", registered("f1"), doc_to_choice=["a", "b", "c"])]}))
    config = RunConfig(suite=str(suite), checkpoint=str(place / "a"), output=str(tmp_path / "run"))
    with pytest.raises(ValueError, match=r"three.*f1.*samples_\*\.jsonl"):  # f1 is of two classes
        evaluate(config)
    [samples] = (tmp_path / "run").glob("samples_three_*.jsonl")
    assert len(samples.read_text().splitlines()) == 3 and not logged.is_run(tmp_path / "run")
