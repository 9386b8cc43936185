"""lm-eval's own model (HFLM on transformers) and ours give the same prompts, log-probabilities, texts and scores.

The models are small ones with random weights, made on the spot, and where the shared data folder is a trained Llama of
260,000 parameters; and of each a Mixtral whose experts differ.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import lm_eval.evaluator
import numpy as np
import pytest
import torch
from lm_eval.models.huggingface import HFLM
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from evaluation.__main__ import main
from evaluation.ask import tasks
from evaluation.ask.offline import Splits
from evaluation.ask.remember import Remembered, written
from evaluation.ask.run import RunConfig, evaluate, evaluate_live
from evaluation.judge import logged
from evaluation.judge.logged import metric_name, numbers
from evaluation.judge.results import Evaluation
from tests.parity import asked
from training.__main__ import main as train
from training.checkpoint import layout
from training.cli.prepare import main as prepare
from training.model.decoder import Decoder
from training.parallel.mesh import MeshConfig, ParallelMesh
from upcycle.__main__ import main as upcycle

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
STORIES, EVAL, CORPUS = SHARED / "stories260k", SHARED / "eval", SHARED / "corpus"
shared = pytest.mark.skipif(not STORIES.is_dir(), reason="the shared data folder is not here")

# suite -> its keys, and the tasks that are compared; texts and data by name lie beside the models
SUITES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "tiny": ({}, ()),
    "core": ({"data": str(EVAL), "limit": 3}, ()),
    "mmlu": ({"data": str(EVAL), "limit": 1, "fewshot": 0}, ()),
    "mmlu, 5 examples": ({"data": str(EVAL), "limit": 4, "fewshot": 5}, ("mmlu_astronomy", "mmlu_world_religions")),
    "perplexity": ({"texts": ("stories.jsonl",)}, ()),  # one is longer than the context
    "gsm8k": ({"data": str(EVAL), "limit": 3, "generate": 16}, ()),
}
ANYWHERE: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "tiny": ({}, ()),
    "perplexity": ({"texts": ("stories.jsonl",)}, ()),
    "gsm8k, own": ({"data": "own", "limit": 1, "generate": 8}, ()),
}
TRAINED = [("llama", name) for name in SUITES] + [("mixtral", name) for name in ("tiny", "mmlu, 5 examples", "gsm8k")]
MADE = [("random llama", name) for name in ANYWHERE] + [("random mixtral", name) for name in ("tiny", "gsm8k, own")]
SUITES |= ANYWHERE
CASES = [pytest.param(*case, marks=shared) for case in TRAINED] + [pytest.param(*case) for case in MADE]


@pytest.fixture(scope="module", autouse=True)
def offline() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    asked.make(place / "random llama", max_position_embeddings=2048)
    if STORIES.is_dir():
        shutil.copytree(STORIES, place / "llama", copy_function=shutil.copyfile)
        (place / "llama").chmod(0o755)
        config = json.loads((place / "llama" / "config.json").read_text())
        config["max_position_embeddings"] = 2048  # a context that five examples fit in
        (place / "llama" / "config.json").write_text(json.dumps(config))
    words = ["target=mixtral", "method.name=drop", "experts=4", "top_k=2", "router.init.std=0.3"]
    for dense in list(place.glob("*llama")):
        moe = place / dense.name.replace("llama", "mixtral")
        assert upcycle(["convert", f"source={dense}", f"output={moe}", *words]) == 0
    long = "".join(f"Tom had {n} red balls and Lily had {n + 3}. They played all day.\n" for n in range(170))
    lines = [json.dumps({"text": text}) for text in ("One day, a dog sat in the sun.", long, "", "The end")]
    (place / "stories.jsonl").write_text("\n".join(lines))
    (place / "own" / "gsm8k").mkdir(parents=True)
    row = {"question": "What is 1 + 1?", "answer": "It is 2.\n#### 2"}
    (place / "own" / "gsm8k" / "test.jsonl").write_text(json.dumps(row) + "\n")
    return {folder.name: folder for folder in place.iterdir() if (folder / "config.json").is_file()}


@cache
def stock(folder: Path, name: str) -> Any:
    """What lm-eval makes of it, in batches with padding."""
    options, only = options_of(folder, name)
    found = tasks.load(suite(name), options.get("data", ""), options.get("texts", ()), options.get("fewshot"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    lm = HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(folder), batch_size=8)
    if "generate" in options:
        for task in found.loaded["tasks"].values():
            task.set_config("generation_kwargs", {"max_gen_toks": options["generate"]}, update=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISABLE_MULTIPROC", "1")
        return lm_eval.evaluator.evaluate(
            lm=lm, task_dict=chosen(found.loaded, only), limit=options.get("limit"), bootstrap_iters=0
        )


def options_of(folder: Path, name: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    options, only = SUITES[name]
    texts = tuple(str(folder.parent / text) for text in options.get("texts", ()))
    data = {"data": str(folder.parent / options["data"])} if "data" in options else {}  # EVAL is absolute and stays
    return options | data | {"texts": texts}, only


def suite(name: str) -> str:
    return name.partition(",")[0]


def chosen(loaded: Any, only: tuple[str, ...]) -> Any:
    return {"tasks": {name: loaded["tasks"][name] for name in only}, "groups": {}} if only else loaded


def ours(folder: Path, name: str, output: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> Path:
    options, only = options_of(folder, name)
    real = tasks.load

    def some(*arguments: Any, **keys: Any) -> tasks.Tasks:
        found = real(*arguments, **keys)
        return tasks.Tasks(chosen(found.loaded, only), found.notes)

    monkeypatch.setattr(tasks, "load", some)
    config = RunConfig(suite=suite(name), checkpoint=str(folder), output=str(output), **(options | more))
    evaluate(config)
    return output


@pytest.mark.parametrize(("model", "name"), CASES)
def test_every_suite_gives_lm_evals_numbers(
    folders: dict[str, Path], model: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = stock(folders[model], name)
    folder = ours(folders[model], name, tmp_path / "run", monkeypatch)
    found, items = logged.load(folder), list(logged.load(folder).items)
    assert set(found.tasks) == set(expected["samples"])
    for task in [*found.tasks.values(), *found.groups.values()]:
        row = expected["results"][task.name] if task.name in found.tasks else expected["groups"][task.name]
        values, errors = numbers(row)
        assert task.metrics.keys() == values.keys()
        for metric, value in values.items():
            assert task.metrics[metric] == pytest.approx(value, rel=2e-5), (task.name, metric)
            if metric in errors:
                assert task.stderr[metric] == pytest.approx(errors[metric], rel=1e-4)
    assert len(items) == sum(task.items for task in found.tasks.values())
    samples = {(task, s["doc_id"], s["filter"]): s for task, all_ in expected["samples"].items() for s in all_}
    for item in items:
        for sample in (s for key, s in samples.items() if key[:2] == (item.task, item.doc)):
            assert (item.doc_hash, item.prompt_hash) == (sample["doc_hash"], sample["prompt_hash"])
            for metric in sample["metrics"]:
                assert metric_name(metric, sample["filter"]) in item.scores
            answers = [answer[0] for answer in sample["resps"]]
            if isinstance(answers[0], str):
                assert item.text == answers[0]
                continue
            pairs = [answer if isinstance(answer, tuple) else (answer, None) for answer in answers]
            # float32, and 1,500 tokens before the answer; in float64 each request is exact (tests/unit/evaluation/test_lm.py)
            assert item.logprobs == pytest.approx([a for a, _ in pairs], rel=2e-6, abs=1e-4)
            assert item.greedy == tuple(b for _, b in pairs if b is not None)


def test_a_broken_weight_gives_other_numbers_and_no_remembered_ones(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = shutil.copytree(folders["random mixtral"], tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.1.block_sparse_moe.experts.3.w2.weight"][5, 5] += 3.0
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    output = tmp_path / "run"  # the same folder for both
    before = logged.load(ours(folders["random mixtral"], "tiny", output, monkeypatch))
    Path(before.place).unlink()  # as if it had been killed: the answers are remembered there, and no results
    after = logged.load(ours(broken, "tiny", output, monkeypatch))
    assert before.model.fingerprint != after.model.fingerprint and after.work["recalled"] == 0
    apart = [np.subtract(x.logprobs, y.logprobs) for x, y in zip(before.items, after.items, strict=True)]
    assert max(abs(np.concatenate(apart))) > 1e-3
    wanted = numbers(stock(folders["random mixtral"], "tiny")["results"]["tiny_text"])[0]["bits_per_byte"]
    assert before.tasks["tiny_text"].metrics["bits_per_byte"] == pytest.approx(wanted, rel=1e-5)
    assert after.tasks["tiny_text"].metrics["bits_per_byte"] != pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("model", ["random llama", "random mixtral"])
def test_a_killed_run_ends_with_the_digits_of_one_that_never_was(
    model: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def put(self: Remembered, answers: Any) -> None:
        if next(left):  # in the middle of a line of this forward's answers
            self.file.write(b"\n".join(written(*pair, self.identity) for pair in answers.items())[:-9])
            raise Killed
        real(self, answers)

    real = Remembered.put
    for before in (1, 4, 11):  # forwards that are done
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            left = iter([False] * before + [True])
            patch.setattr(Remembered, "put", put)
            ours(folders[model], "tiny", tmp_path / "run", patch, forward_tokens=100)
    with pytest.warns(UserWarning, match="not an answer"):
        stopped = logged.load(ours(folders[model], "tiny", tmp_path / "run", monkeypatch, forward_tokens=100))
    whole = logged.load(ours(folders[model], "tiny", tmp_path / "whole", monkeypatch, forward_tokens=100))
    assert 0 < stopped.work["recalled"] < stopped.work["requests"] == whole.work["requests"]
    assert stopped.items == whole.items  # every digit
    if model == "random llama":
        large = logged.load(ours(folders[model], "tiny", tmp_path / "large", monkeypatch))
        assert large.work["recalled"] == 0
        for a, b in zip(whole.items, large.items, strict=True):
            assert (a.key, a.prompt_hash, a.greedy, a.text) == (b.key, b.prompt_hash, b.greedy, b.text)
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def test_a_training_run_is_evaluated_as_what_it_exports_and_while_it_trains(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = folders["random llama"]
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a little dog. The dog ran to the park to play with a ball. " * 60)
    assert prepare([str(tmp_path / "data"), f"tokenizer={source}", f"sources=[{text}]"]) == 0
    router = {"init": {"std": 0.3}}
    moe = {"source": str(source), "target": "mixtral", "experts": 4, "top_k": 2, "router": router}
    words = ["steps=3", "batch=2", "data.sequence=32", "schedule.peak=1e-2", "schedule.warmup=1", "model.dtype=float32"]
    made = [f"output={tmp_path / 'run'}", f"export={tmp_path / 'moe'}", f"model.upcycle={json.dumps(moe)}"]
    assert train([*made, f"data.train=[{tmp_path / 'data'}]", *words]) == 0

    def scored(folder: Path, *more: str) -> Evaluation:
        assert main(["run", "tiny", str(folder), f"output={tmp_path / 'scores' / folder.name}", *more]) == 0
        return logged.load(tmp_path / "scores" / folder.name)

    one, exported = scored(tmp_path / "run"), scored(tmp_path / "moe")
    assert one.model.fingerprint == exported.model.fingerprint and one.items == exported.items
    assert (one.model.step, exported.model.step, one.model.name) == (3, None, "run")
    assert one.model.active < one.model.parameters == exported.model.parameters
    step = scored(tmp_path / "run" / "checkpoints" / "step-00000003", "limit=1")
    assert step.model.fingerprint == one.model.fingerprint
    with layout.opened(tmp_path / "moe") as origin:
        model = layout.load(Decoder(origin.spec), origin)
    live = evaluate_live(model, AutoTokenizer.from_pretrained(source), "tiny", ParallelMesh(MeshConfig()))
    wanted = {f"eval/{t.name}/{metric}": v for t in one.tasks.values() for metric, v in t.metrics.items()}
    assert live == pytest.approx(wanted, rel=1e-6) and model.training
    (tmp_path / "moe" / "tokenizer.json").unlink()
    capsys.readouterr()
    assert main(["run", "tiny", str(tmp_path / "moe")]) == 2
    assert "has no tokenizer" in capsys.readouterr().err


# an item in the hub's columns, and where it is in the files: (task, its folder, data set, split, row, number)
HUB: list[tuple[str, str, str, str, dict[str, Any], int]] = [
    ("arc_easy", "arc", "allenai/ai2_arc", "test", {"id": "x", "question": "Which piece of safety equipment is used to keep mold spores from entering the respiratory system?", "choices": {"text": ["safety goggles", "breathing mask", "rubber gloves", "lead apron"], "label": ["A", "B", "C", "D"]}, "answerKey": "B"}, 1),
    ("winogrande", "winogrande", "allenai/winogrande", "validation", {"sentence": "Sarah was a much better surgeon than Maria so _ always got the easier cases.", "option1": "Sarah", "option2": "Maria", "answer": "2"}, 0),
    ("hellaswag", "hellaswag", "Rowan/hellaswag", "validation", {"ind": 24, "activity_label": "Roof shingle removal", "ctx_a": "A man is sitting on a roof.", "ctx_b": "he", "ctx": "A man is sitting on a roof. he", "endings": ["is using wrap to wrap a pair of skis.", "is ripping level tiles off.", "is holding a rubik's cube.", "starts pulling up roofing on a roof."], "label": "3"}, 0),
    ("gsm8k_cot", "gsm8k", "openai/gsm8k", "test", {"question": "A robe takes 2 bolts of blue fiber and half that much white fiber.  How many bolts in total does it take?", "answer": "It takes 2/2=<<2/2=1>>1 bolt of white fiber\nSo the total amount of fabric is 2+1=<<2+1=3>>3 bolts of fabric\n#### 3"}, 1),
    ("mmlu_astronomy", "mmlu/default", "cais/mmlu", "test", {"question": 'What is true for a type-Ia ("type one-a") supernova?', "subject": "astronomy", "choices": ["This type occurs in binary systems.", "This type occurs in young galaxies.", "This type produces gamma-ray bursts.", "This type produces high amounts of X-rays."], "answer": 0}, 0),
]  # fmt: skip


@shared
@pytest.mark.parametrize(("name", "folder", "dataset", "split", "row", "number"), HUB, ids=[case[0] for case in HUB])
def test_the_hubs_documents_give_the_prompts_that_the_files_give(
    name: str, folder: str, dataset: str, split: str, row: Any, number: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    suite = tmp_path / "own.yaml"
    suite.write_text(f"tasks: [{name}]\nfolders: [{folder}]\n")

    def load_dataset(path: str, **_: Any) -> Any:
        assert path == dataset
        return Splits({split: datasets.Dataset.from_list([row])})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    asked = []
    for data, item in ((str(EVAL), number), ("", 0)):
        task = tasks.load(str(suite), data).loaded["tasks"][name]
        task.build_all_requests(limit=item + 1, rank=0, world_size=1)
        requests = [instance.args for instance in task.instances if instance.doc_id == item]
        asked.append((requests, task.doc_to_target(task.eval_docs[item])))
    assert asked[0] == asked[1]
