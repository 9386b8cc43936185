"""lm-eval's own command with our engine as its model, our command, and lm-eval's HFLM say the same of tasks that this
project has no reader for; what lm-eval wrote of any model is compared as what we write."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lm_eval.tasks
import pytest
import yaml

from evaluation.__main__ import main
from evaluation.ask import load, tasks
from evaluation.ask.harness import UpcycleLM
from evaluation.judge import compare, logged
from evaluation.judge import metrics as measures
from evaluation.judge.results import Item
from tests.parity import asked

NAMES = ("two", "three", "aliases", "words")
CHAT = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}[a] {% endif %}"
SPOKEN = {
    "harness": ["--apply_chat_template", "--system_instruction", "Be brief.", "--fewshot_as_multiturn", "true"],
    "ours": ["apply_chat_template=true", "system_instruction=Be brief."],
}
Told = dict[tuple[str, str, int], Item]


def task(name: str, folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")}},
        "output_type": "multiple_choice", "test_split": "test", "metadata": {"version": 2}, **more,
    }  # fmt: skip


def metrics(*names: str) -> dict[str, Any]:
    return {"metric_list": [{"metric": name} for name in names]}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("harness")
    for seed, name in enumerate(("a", "b")):
        asked.make(place / name, seed=seed, max_position_embeddings=512)
        settings = place / name / "tokenizer_config.json"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": CHAT}))
    folder = place / "tasks"
    folder.mkdir()
    words = ["cat", "dog", "sun", "rain", "tree", "house", "ball", "fish", "bird", "road", "milk", "hand"]
    rows = {
        "two": [{"q": f"Is a {w} large?", "answer": i % 2} for i, w in enumerate(words)],
        "three": [{"q": f"What is like a {w}?", "c": [w, f"the {words[i - 1]}", words[i - 2]], "answer": i % 3} for i, w in enumerate(words[:7])],
        "aliases": [{"q": f"Say {w}", "names": [w, w.title(), "[a]"]} for w in words[:5]],
        "words": [{"q": w, "text": f"{w} and {words[i - 1]}"} for i, w in enumerate(words[:5])],
    }  # fmt: skip
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ask = {"doc_to_text": "{{q}}", "doc_to_target": "answer"}
    few = {"until": ["\n"], "max_gen_toks": 12}
    writes = {"output_type": "generate_until", "generation_kwargs": few, "doc_to_text": "{{q}}:"}
    found = [
        task("two", folder, **ask, doc_to_choice=["no", "yes"], num_fewshot=2, fewshot_split="test", **metrics("acc", "f1", "mcc")),
        task("three", folder, **ask, doc_to_choice="{{c}}", **metrics("acc", "acc_norm", "acc_mutual_info")),
        task("aliases", folder, **writes, doc_to_target="{{names}}", **metrics("exact_match"),
             filter_list=[{"name": "first", "filter": [{"function": "regex", "regex_pattern": "(\\w+)"}, {"function": "take_first"}]},
                          {"name": "whole", "filter": [{"function": "take_first"}]}]),
        task("words", folder, **writes, doc_to_target="{{text}}", **metrics("bleu", "chrf")),
        {"group": "by_size", "task": ["two", "three"], "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}]},
        {"group": "alike", "task": ["by_size"], "aggregate_metric_list": [{"metric": "acc", "weight_by_size": False}]},
    ]  # fmt: skip
    for one in found:
        (folder / f"{one.get('task') if 'metadata' in one else one['group']}.yaml").write_text(yaml.safe_dump(one))
    return place


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what takes lm-eval's command half a minute: its own 14,000 tasks, `pip list`, 100,000 draws."""
    real = lm_eval.tasks.TaskManager.__init__

    def none_of_its_own(self: Any, *arguments: Any, **keys: Any) -> None:
        real(self, *arguments, **{**keys, "include_defaults": False})

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(lm_eval.tasks.TaskManager, "__init__", none_of_its_own)
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda _: None)
    monkeypatch.setattr("lm_eval.evaluator_utils.stderr_for_metric", lambda *_, **__: None)
    monkeypatch.setattr("evaluation.ask.run.BOOTSTRAP", 2)
    monkeypatch.setattr(measures, "DRAWS", 20)
    monkeypatch.setattr(measures, "FEW_DRAWS", 20)


def harness(place: Path, model: str, output: str, *more: str, which: str = "a") -> Path:
    asked_for = ["--include_path", str(place / "tasks"), "--tasks", "alike,aliases,words"]
    args = f"pretrained={place / which}" + (",dtype=float32" if model == "hf" else "")
    words = ["--model", model, "--model_args", args, *asked_for, "--batch_size", "4", "--device", "cpu"]
    assert main(["lm-eval", "run", *words, "--output_path", str(place / output), "--log_samples", *more]) == 0
    return place / output


def ours(place: Path, output: str, *more: str, which: str = "a") -> Path:
    words = [f"include_path={place / 'tasks'}", "tasks=[alike,aliases,words]", "device=cpu"]
    assert main(["run", str(place / which), *words, f"output={place / output}", *more]) == 0
    return place / output


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, Path]]:
    yield {}


@pytest.fixture
def three(place: Path, runs: dict[str, Path], quick: None) -> dict[str, Path]:
    """The same model asked three ways: lm-eval's command with our engine, our command, lm-eval's command with HFLM."""
    if not runs:
        runs["upcycle"] = harness(place, "upcycle", "upcycle")
        runs["ours"] = ours(place, "ours", "log_samples=true")
        runs["hf"] = harness(place, "hf", "hf")
    return runs


def told(folder: Path) -> Told:
    return {item.key: item for item in logged.load(folder).items}


def test_lm_evals_command_ours_and_hflm_agree_item_by_item(three: dict[str, Path]) -> None:
    every = {name: told(folder) for name, folder in three.items()}
    assert {task for task, _, _ in every["ours"]} == set(NAMES) and len(every["ours"]) == 12 + 7 + 5 + 5
    for name in ("upcycle", "hf"):
        assert every[name].keys() == every["ours"].keys()
        for key, item in every[name].items():
            mine = every["ours"][key]
            assert replace(item, logprobs=()) == replace(mine, logprobs=()), name
            assert item.logprobs == pytest.approx(mine.logprobs, abs=0 if name == "upcycle" else 2e-5)
    assert {item.choices for (task, _, _), item in every["ours"].items() if task == "two"} == {("no", "yes")}
    assert {len(item.choices) for item in every["ours"].values()} == {0, 2, 3}
    assert any(item.text for item in every["ours"].values())


def test_scores_of_every_kind_and_groups_survive_being_written_and_read(three: dict[str, Path]) -> None:
    mine = logged.load(three["ours"])
    kinds = {
        "acc",
        "f1",
        "mcc",
        "acc_norm",
        "acc_mutual_info",
        "bleu",
        "chrf",
        "exact_match,first",
        "exact_match,whole",
    }
    assert {metric for each in mine.tasks.values() for metric in each.metrics} == kinds
    for name in ("upcycle", "hf"):
        theirs = logged.load(three[name])
        assert theirs.tasks.keys() == mine.tasks.keys() and theirs.groups.keys() == mine.groups.keys()
        for part, other in ((part, theirs.tasks[part.name]) for part in mine.tasks.values()):
            assert replace(other, metrics={}, stderr={}) == replace(part, metrics={}, stderr={})
            assert other.metrics == pytest.approx(part.metrics), part.name
        for group, said in ((group, theirs.groups[group.name]) for group in mine.groups.values()):
            assert replace(said, metrics={}, stderr={}) == replace(group, metrics={}, stderr={})
            assert said.metrics == pytest.approx(group.metrics), group.name
    assert mine.groups["alike"].alike == ("acc",) and not mine.groups["by_size"].alike
    assert mine.model.fingerprint == logged.load(three["upcycle"]).model.fingerprint
    assert mine.model.fingerprint != logged.load(three["hf"]).model.fingerprint


def test_our_files_say_the_same_without_what_is_ours_in_them(three: dict[str, Path], tmp_path: Path) -> None:
    """What compare reads of any lm-eval's files is what our run knows of itself."""
    copy = shutil.copytree(three["ours"], tmp_path / "copy")
    [file] = copy.glob("results_*.json")
    value = json.loads(file.read_text())
    del value["upcycle"]
    file.write_text(json.dumps(value))
    own, read = logged.load(three["ours"]), logged.load(copy)
    assert (read.items, read.tasks, read.groups) == (own.items, own.tasks, own.groups)
    assert read.model == own.model and read.versions == own.versions


def test_samples_hold_no_documents_and_prompts_unless_asked(place: Path, three: dict[str, Path]) -> None:
    slim = ours(place, "slim")
    for mine, whole in zip(told(slim).values(), told(three["ours"]).values(), strict=True):
        assert mine == whole
    for path in slim.glob("samples_*.jsonl"):
        assert all(not row["doc"] and not row["arguments"] for row in map(json.loads, path.read_text().splitlines()))


def test_compare_takes_any_two_runs_of_lm_eval(
    place: Path, three: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = harness(place, "hf", "hf-b", which="b")
    ours_b = ours(place, "ours-b", which="b")
    [logged_ones], [own] = (
        compare.compare([three["hf"], other]).comparisons,
        compare.compare([three["ours"], ours_b]).comparisons,
    )
    assert {d.name: d.metric for d in own.differences}["words"] == "bleu"
    mine = {d.name: d for d in own.differences}
    for a in logged_ones.differences:
        b = mine.pop(a.name)
        assert (a.metric, a.items, a.headline, a.only_a, a.only_b) == (
            b.metric,
            b.items,
            b.headline,
            b.only_a,
            b.only_b,
        )
        assert a.difference == pytest.approx(b.difference)
    assert not mine
    capsys.readouterr()
    assert main(["compare", str(three["hf"]), str(ours_b), f"output={tmp_path / 'c.json'}"]) == 0
    assert "no verdict" in capsys.readouterr().out
    [file] = three["upcycle"].glob("*/results_*.json")
    assert main(["compare", str(file), str(three["hf"])]) == 0
    assert "0 items flipped" in capsys.readouterr().out
    shutil.copytree(three["hf"], tmp_path / "cut")
    [cut] = (tmp_path / "cut").glob("*/samples_two_*.jsonl")
    cut.unlink()
    assert main(["compare", str(tmp_path / "cut"), str(three["hf"])]) == 2
    assert "run lm-eval with --log_samples" in capsys.readouterr().err


def test_conversations_are_lm_evals(place: Path, quick: None) -> None:
    """A chat template, a system instruction and examples as turns, of both commands and of HFLM."""
    limit = ["--limit", "0.3"]
    folders = [harness(place, model, f"chat-{model}", *SPOKEN["harness"], *limit) for model in ("upcycle", "hf")]
    folders.append(ours(place, "chat-ours", *SPOKEN["ours"], "limit=0.3", "log_samples=true"))
    first, *others = [told(folder) for folder in folders]
    assert len(first) == 4 + 3 + 2 + 2
    for other in others:
        assert other.keys() == first.keys()
        for key, item in first.items():
            assert replace(other[key], logprobs=()) == replace(item, logprobs=())
            assert other[key].logprobs == pytest.approx(item.logprobs, abs=2e-5)
    [samples] = folders[2].glob("samples_two_*.jsonl")
    prompt = json.loads(samples.read_text().splitlines()[0])["arguments"]["gen_args_0"]["arg_0"]
    assert prompt.startswith("[system] Be brief.") and prompt.count("[user]") == 3 and prompt.count("[assistant]") == 2
    lm = UpcycleLM(str(place / "a"), device="cpu", progress=False)
    with pytest.raises(ValueError, match="no chat template 'long'"):
        lm.chat_template("long")


def test_options_of_lm_eval_reach_the_run(
    place: Path, three: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("evaluation.ask.tasks.LM_EVAL", place / "tasks")  # all of lm-eval's take 11 seconds to read
    picked = "samples={two: [3, 1], three: [0], aliases: [4], words: [2]}"
    folder = ours(place, "options", picked, "gen_kwargs={max_gen_toks: 3}", "max_length=20", "seeds=[7]")
    items, whole = told(folder), told(three["ours"])
    asked_for = [("aliases", 4), ("three", 0), ("two", 1), ("two", 3), ("words", 2)]
    assert sorted((task, doc) for task, _, doc in items) == asked_for
    assert any("model's context of 20 tokens" in note for note in logged.load(folder).notes)
    written = [(item.text, whole[key].text) for key, item in items.items() if item.text]
    assert written and all(len(short) < len(long) for short, long in written)
    two = [(item.prompt_hash, whole[key].prompt_hash) for key, item in items.items() if item.task == "two"]
    assert any(a != b for a, b in two)  # another seed draws other examples
    known = {"names": ["two"], "include_path": [str(place / "tasks")]}
    assert tasks.load("", fewshot=1, **known).loaded["tasks"]["two"].get_config("num_fewshot") == 1  # type: ignore[arg-type]
    capsys.readouterr()
    loaded: list[Any] = []
    real = load.opened
    monkeypatch.setattr("evaluation.ask.load.opened", lambda *a, **k: loaded.append(a) or real(*a, **k))
    for words, said in (
        (["limit=1", "samples={two: [1]}"], "limit and samples are both set"),
        (["seeds=[1,2]"], "seeds are 2 numbers"),
        (["model=hg"], "there is no model 'hg'"),
        (["max_length=4096"], "max_length is 4096 and the model's context 512"),
        (["model=hf", "model_args={trust_remote_code: true}"], "a stranger's program"),
        (["include_path=nowhere"], "include_path=nowhere is not a folder"),
        (["tasks=[by_siz]"], "no task 'by_siz'"),
        (["gen_kwargs={do_sample: true}"], "asks for texts with do_sample=True"),
    ):
        given = [f"include_path={place / 'tasks'}", "tasks=[alike,words]", "device=cpu", *words]
        assert main(["run", str(place / "a"), *given]) == 2
        assert said in capsys.readouterr().err, said
        assert len(loaded) == ("max_length" in said), "said before a model is loaded"
        loaded.clear()


def test_a_model_of_lm_evals_own_is_asked_by_our_command(
    place: Path, three: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the CPU where there is no GPU, which its own default would not be."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    folder = ours(place, "own-hf", "model=hf", "model_args={batch_size: 4}", "device=")
    for model in ("hf", "upcycle"):
        words = [f"include_path={place / 'tasks'}", "tasks=[words]", f"model={model}", "device=cuda"]
        assert main(["run", str(place / "a"), *words, f"output={place / 'none'}"]) == 2
        assert "device is cuda and this machine has no such device; write device=cpu" in capsys.readouterr().err
    mine, theirs = told(folder), told(three["hf"])
    assert mine.keys() == theirs.keys()
    assert all(mine[key].scores == item.scores and mine[key].logprobs == item.logprobs for key, item in theirs.items())
    assert logged.load(folder).model.kind == "hf" and logged.load(folder).work["forwards"] == 0


def test_wrong_model_args_are_a_sentence(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for args, said in (
        (f"pretrained={place / 'a'},dtpye=float32", "did you mean 'dtype'"),
        (f"pretrained={place / 'a'},mesh.ep=2", "mesh.ep=2 needs a multiple of 2 processes"),
        (f"pretrained={place / 'nothing'}", "nothing"),
    ):
        words = ["--model", "upcycle", "--model_args", args, "--include_path", str(place / "tasks"), "--tasks", "two"]
        assert main(["lm-eval", "run", *words]) == 2
        assert said in capsys.readouterr().err, said
