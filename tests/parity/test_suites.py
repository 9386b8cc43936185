"""Suites whose data sets only the Hub has: lm-eval's own tasks on documents in the Hub's columns, written here. What is
asked of them reaches a number, the page and a comparison."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import numpy as np
import pytest

from evaluation.__main__ import main
from evaluation.ask import tasks
from evaluation.ask.offline import Splits
from evaluation.judge import compare, logged
from evaluation.judge import metrics as measures
from tests.parity import asked

SUBJECTS = (
    "biology", "business", "chemistry", "computer science", "economics", "engineering", "health", "history", "law", "math",
    "other", "philosophy", "physics", "psychology",
)  # fmt: skip
INSTRUCTIONS = (["punctuation:no_comma"], ["punctuation:no_comma", "startend:quotation"], ["change_case:english_lowercase", "startend:quotation"])  # fmt: skip


def pro(subject: str) -> dict[str, Any]:
    return {"question": f"What is {subject}?", "options": [f"{i} of it" for i in range(10)], "answer": "C", "answer_index": 2, "cot_content": "A: Let's think step by step. The answer is (C).", "category": subject}  # fmt: skip


def gpqa(number: int) -> dict[str, Any]:
    return {"Question": f"What is {number}?", "Correct Answer": "right", **{f"Incorrect Answer {i}": f"wrong {i}" for i in (1, 2, 3)}}  # fmt: skip


def ifeval(number: int) -> dict[str, Any]:
    ids = INSTRUCTIONS[number % 3]
    return {"key": number, "prompt": f"Say {number}.", "instruction_id_list": ids, "kwargs": [{} for _ in ids]}


SUM = [{"question": f"What is {i} and 1?", "answer": f"It is {i + 1}.\n#### {i + 1}"} for i in range(8)]
ARC = [{"id": str(i), "question": f"What is {i}?", "choices": {"text": ["a", "b", "c", "d"], "label": list("ABCD")}, "answerKey": "B"} for i in range(30)]  # fmt: skip
ENDINGS = [{"ind": i, "activity_label": "Work", "ctx_a": "A man sits.", "ctx_b": "he", "ctx": "A man sits. he", "endings": ["is", "was", "runs", "eats"], "label": "2"} for i in range(12)]  # fmt: skip
# suite -> (its data sets by name on the Hub, keys, tasks, a metric that the suite is known for)
HUB: dict[str, tuple[dict[str, dict[str, list[Any]]], list[str], int, str]] = {
    "mmlu_pro": ({"TIGER-Lab/MMLU-Pro": {"test": [pro(s) for s in SUBJECTS], "validation": [pro(s) for s in SUBJECTS for _ in range(5)]}}, [], 14, "exact_match,custom-extract"),
    "gpqa": ({"Idavidrein/gpqa": {"train": [gpqa(i) for i in range(4)]}}, [], 2, "acc_norm"),
    "ifeval": ({"google/IFEval": {"train": [ifeval(i) for i in range(12)]}}, [], 1, "inst_level_strict_acc"),
    "bbh": ({"SaylorTwift/bbh": {"test": [{"input": "not True is", "target": "False"}]}}, [], 27, "exact_match,get-answer"),
    "gsm8k-5shot": ({"openai/gsm8k": {"train": SUM, "test": SUM}}, [], 1, "exact_match,strict-match"),
    "arc": ({"allenai/ai2_arc": {"train": ARC, "validation": ARC, "test": ARC}}, ["fewshot=25"], 2, "acc_norm"),
    "hellaswag": ({"Rowan/hellaswag": {"train": ENDINGS, "validation": ENDINGS}}, ["fewshot=10"], 1, "acc_norm"),
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("suites")
    return [asked.make(place / name, seed=seed) for seed, name in enumerate(("a", "b"))]


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    every = {name: splits for sets, *_ in HUB.values() for name, splits in sets.items()}

    def load_dataset(path: str, **_: Any) -> Any:
        return Splits({split: datasets.Dataset.from_list(rows) for split, rows in every[path].items()})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("evaluation.ask.run.BOOTSTRAP", 2)
    monkeypatch.setattr(measures, "DRAWS", 20)
    yield


@pytest.fixture
def instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """What IFEval's own code imports, where it is not installed: of each so much as these documents need."""
    for name, parts in {
        "langdetect": {"detect": lambda _: "en", "LangDetectException": ValueError},
        "immutabledict": {"immutabledict": dict},
    }.items():
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            module = ModuleType(name)
            vars(module).update(parts)
            monkeypatch.setitem(sys.modules, name, module)
    nltk = pytest.importorskip("nltk", reason="nltk, which IFEval's own code imports, is not installed")
    monkeypatch.setattr(nltk, "download", lambda *_, **__: True)


def ask(suite: str, model: Path, output: Path, *more: str) -> Path:
    words = [suite, str(model), f"output={output}", "generate=4", "limit=2", "device=cpu"]
    assert main(["run", *words, *HUB[suite][1], *more]) == 0
    return output


@pytest.mark.parametrize("suite", [name for name in HUB if name != "ifeval"])
def test_a_suite_asks_what_the_hub_has(suite: str, models: list[Path], tmp_path: Path) -> None:
    folder = ask(suite, models[0], tmp_path / "run")
    run, (_, _, count, metric) = logged.load(folder), HUB[suite]
    assert len(run.tasks) == count and len(run.items) == sum(task.items for task in run.tasks.values()) > 0
    assert all(metric in part.metrics for part in (*run.tasks.values(), *run.groups.values()))
    assert all(metric in item.scores for item in run.items)
    shots = {"arc": 25, "hellaswag": 10, "gsm8k-5shot": 5, "mmlu_pro": 5, "bbh": 3, "gpqa": 0}
    assert {task.fewshot for task in run.tasks.values()} == {shots[suite]}


def test_examples_of_a_split_that_the_files_lack_are_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "test.jsonl").write_text('{"question": "a", "answer": "#### 1"}\n')
    with pytest.raises(
        ValueError, match="gsm8k has 0 documents in its files, and fewshot=5 needs at least as many; write fewshot=0"
    ):
        tasks.load("gsm8k-5shot", str(tmp_path))


def test_ifeval_is_compared_and_on_the_page(models: list[Path], tmp_path: Path, instructions: None) -> None:
    """Its score of instructions is made by a function of the task's own, of lists that differ in length."""
    a, b = (logged.load(ask("ifeval", model, tmp_path / model.name, "limit=12")) for model in models)
    found = a.tasks["ifeval"]
    assert found.aggregation == {"inst_level_strict_acc": measures.OF_ALL, "inst_level_loose_acc": measures.OF_ALL}
    lists = [item.scores["inst_level_strict_acc"] for item in a.items]
    assert {len(each) for each in lists} == {1, 2} and 0 < found.metrics["inst_level_strict_acc"] < 1
    measure = measures.of(found, "inst_level_strict_acc", {"ifeval": found})
    assert measure is not None and (value := measure.ratio(["ifeval"])) is not None
    for some in (lists, random.Random(0).sample(lists, 7)):
        scored = [("ifeval", each) for each in some]
        sums = measure.sums(scored).sum(0)
        flat = [right for each in some for right in each]
        assert value(sums[0] / sums[1]) == pytest.approx(measure.value(scored)) == pytest.approx(np.mean(flat))
    assert found.metrics["inst_level_strict_acc"] == pytest.approx(measure.value([("ifeval", each) for each in lists]))
    [compared] = compare.compare([tmp_path / "a", tmp_path / "b"]).comparisons
    [difference] = compared.differences
    assert difference.metric == "prompt_level_strict_acc" and difference.items == 12
    assert difference.b == pytest.approx(b.tasks["ifeval"].metrics["prompt_level_strict_acc"])
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b"), f"output={tmp_path / 'report.html'}"]) == 0
    assert "prompt level strict acc" in (tmp_path / "report.html").read_text()
