"""Nothing that a suite asks for is lost in silence: it is done, left out with a note, or refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from evaluation.ask import offline, tasks
from evaluation.ask.engine import Engine
from evaluation.ask.harness import check_ranks
from evaluation.ask.lm import DecoderLM
from evaluation.ask.remember import Remembered
from evaluation.ask.run import RunConfig, evaluate
from evaluation.show import facts
from tests.parallel import models
from training.parallel.mesh import MeshConfig

SETTINGS = [
    ("num_beams", 4), ("repetition_penalty", 1.3), ("do_sample", True), ("temperature", 0.7), ("no_repeat_ngram_size", 3),
    ("bad_words_ids", [[1]]), ("a_setting_of_tomorrow", 1),
]  # fmt: skip


def written(folder: Path, name: str = "writes", **settings: Any) -> dict[str, Any]:
    (folder / "rows.jsonl").write_text(json.dumps({"text": "a", "word": "b"}) + "\n")
    return {
        "task": name, "dataset_path": "jsonl", "dataset_name": "rows.jsonl", "output_type": "generate_until",
        "test_split": "test", "doc_to_text": "{{text}}", "doc_to_target": "{{word}}",
        "generation_kwargs": {"until": ["."], **settings}, "metric_list": [{"metric": "exact_match"}],
    }  # fmt: skip


def suite(folder: Path, *given: Any, **more: Any) -> str:
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump({"tasks": list(given), **more}))
    return str(path)


@pytest.mark.parametrize(("name", "value"), SETTINGS)
def test_a_generation_that_is_not_greedy_is_refused_at_the_door_and_by_the_model(
    name: str, value: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"writes asks for texts with {name}="):
        tasks.load(suite(tmp_path, written(tmp_path, **{name: value})))
    lm = DecoderLM(Engine(models.make("dense"), 64, progress=False), Words())
    with pytest.raises(ValueError, match=f"t asks for texts with {name}="):
        lm.generate_until([SimpleNamespace(args=("a", {"until": ["."], name: value}), task_name="t")])  # type: ignore[list-item]


class Words:
    eos_token_id, bos_token_id, is_fast, name_or_path = 0, None, False, ""

    def decode(self, *_: Any, **__: Any) -> str:
        return "<end>"

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[1, 2] for _ in texts]}


def test_settings_that_leave_the_likeliest_text_are_taken(tmp_path: Path) -> None:
    settings = {"num_beams": 1, "repetition_penalty": 1.0, "do_sample": False, "temperature": 0.0, "top_p": 0.9}
    assert tasks.load(suite(tmp_path, written(tmp_path, **settings))).loaded["tasks"]
    for name in ("gsm8k", "tiny"):
        tasks.check_greedy({"until": ["a"], "max_gen_toks": 16, "do_sample": False}, name)


def test_another_end_token_is_another_text(tmp_path: Path) -> None:
    """What was remembered with other tokens that end a text is not taken for it."""
    recalled = []
    for stops in ((), (5,), (7,), (5,)):
        kept = Remembered(tmp_path, "a" * 64)
        lm = DecoderLM(Engine(models.make("dense"), 64, progress=False), Words(), stops=stops, remembered=kept)
        lm.texts(["a"], 4, ())
        kept.close()
        recalled.append(lm.recalled)
    assert recalled == [0, 0, 0, 1]


def test_two_tasks_of_one_name_are_refused(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "law.txt").write_text("Some text.")
    texts = [str(tmp_path / folder / "law.txt") for folder in ("a", "b")]
    with pytest.raises(ValueError, match=r"two tasks called ppl_law \(.*a/law.txt and .*b/law.txt\); rename"):
        tasks.load("perplexity", texts=texts)
    with pytest.raises(ValueError, match="two tasks called writes"):
        tasks.load(suite(tmp_path, written(tmp_path), written(tmp_path)))
    with pytest.raises(ValueError, match="the task a/b has a slash in its name"):
        tasks.load(suite(tmp_path, written(tmp_path, "a/b")))


def test_a_task_of_local_json_files_is_kept_beside_data(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    own = written(tmp_path, "mine") | {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
    }
    del own["dataset_name"]
    elsewhere = own | {"task": "elsewhere", "dataset_kwargs": {"data_files": {"test": "https://example.org/x.json"}}}
    for each in (own, elsewhere):
        (tmp_path / "mine" / f"{each['task']}.yaml").write_text(yaml.safe_dump(each))
    found = tasks.load(suite(tmp_path, "mine", "elsewhere", folders=[str(tmp_path / "mine")]), data=str(tmp_path))
    assert len(found.loaded["tasks"]["mine"].eval_docs) == 1
    assert found.notes == ("elsewhere is left out: it cannot be read from files",)
    beside = own | {"task": "beside", "dataset_kwargs": {"data_files": {"test": ["rows.jsonl"]}}}
    found = tasks.load(suite(tmp_path, beside), data=str(tmp_path))
    assert len(found.loaded["tasks"]["beside"].eval_docs) == 1


def test_documents_that_are_nested_deeply_are_refused_at_once(tmp_path: Path) -> None:
    """The time that a table of lists takes doubles with each list in a list: for thirty it never came back."""
    (tmp_path / "own.jsonl").write_text(json.dumps({"question": [["q"]]}) + "\n")
    assert len(offline.splits(tmp_path, "jsonl", "own.jsonl")["test"]) == 1
    (tmp_path / "own.jsonl").write_text(f'{{"question": ["q", {"[" * 30}"q"{"]" * 30}, "q"]}}\n')
    with pytest.raises(ValueError, match="that do not form a table: it is nested too deeply"):
        offline.splits(tmp_path, "jsonl", "own.jsonl")


@pytest.mark.parametrize(
    ("dataset", "part"), [("aps/super_glue", "copa"), ("aps/super_glue", None), ("EleutherAI/lambada_openai", "de")]
)
def test_a_reader_gives_no_other_part_of_a_data_set(dataset: str, part: str | None, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read from files"):
        offline.splits(tmp_path, dataset, part)
    (tmp_path / "mine").mkdir()
    task = written(tmp_path, "mine") | {"dataset_path": dataset, "dataset_name": part}
    (tmp_path / "mine" / "mine.yaml").write_text(yaml.safe_dump(task))
    with pytest.raises(ValueError, match=r"no task of suite .* can be read from files"):
        tasks.load(suite(tmp_path, "mine", folders=[str(tmp_path / "mine")]), data=str(tmp_path))


def test_what_a_task_needs_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "helper.py").write_text("import a_package_that_is_not_here\n\ndef f(doc):\n    return 1\n")
    text = yaml.safe_dump(written(tmp_path, "mine")) + "doc_to_decontamination_query: !function helper.f\n"
    (tmp_path / "mine" / "mine.yaml").write_text(text)
    with pytest.raises(ValueError, match="needs a_package_that_is_not_here, which is not installed"):
        tasks.load(suite(tmp_path, "mine", folders=[str(tmp_path / "mine")]), trust_code=True)


def test_a_mesh_of_more_processes_than_there_are_is_a_sentence(tmp_path: Path) -> None:
    config = RunConfig(suite="tiny", checkpoint=str(tmp_path), mesh=MeshConfig(ep=2), device="cpu")
    with pytest.raises(ValueError, match=r"mesh.ep=2 needs a multiple of 2 processes, and there is 1; start it with"):
        evaluate(config)
    check_ranks(MeshConfig(ep=2), 4)


def test_half_a_routing_file_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "routing.json"
    path.write_text('{"kind": "routing", "experts": 4, "to')
    with pytest.raises(ValueError, match=r"routing.json is not whole JSON .*make it again"):
        facts.named([path])
    path.write_text('{"kind": "routing", "experts": 4}')
    with pytest.raises(ValueError, match=r"routing.json has no \w+, which is required; make it again"):
        facts.named([path])
