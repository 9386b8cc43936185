"""What is remembered belongs to the model as computed: whatever may change an answer gives it another name."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evaluation.ask import load
from evaluation.ask.remember import Remembered, key
from evaluation.ask.run import RunConfig, evaluate
from evaluation.judge.results import Evaluation
from tests.parity import asked
from training.checkpoint import layout
from training.checkpoint.layout import Origin
from training.model.decoder import Decoder
from upcycle.__main__ import main as upcycle

ROOT = Path(__file__).parents[3]

MOE = ("target=mixtral", "method.name=drop", "experts=4", "top_k=2", "router.init.std=0.3")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("asked")
    asked.make(place / "llama")
    assert upcycle(["convert", f"source={place / 'llama'}", f"output={place / 'mixtral'}", *MOE]) == 0
    return {name: place / name for name in ("llama", "mixtral")}


# ---- the model as computed


def named(origin: Origin, tokenizer: Path, weights: str = "w", **how: str) -> str:
    kept = {"dtype": "float32", "experts": "grouped", "device": "cpu"} | how
    return load.identity(weights, origin, tokenizer, **kept)


def other(value: Any) -> Any:
    """Another value of about the same kind."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, dict):
        return {**value, "new": 1}
    return value + 1 if isinstance(value, int | float) else f"{value}x" if isinstance(value, str) else [*value, 1]


def mutations(value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Each value in a config changed, left out, and one added, as (where, the whole)."""
    places: list[tuple[Any, ...]] = []

    def walk(inner: Any, at: tuple[Any, ...]) -> None:
        for name, child in inner.items() if isinstance(inner, dict) else enumerate(inner):
            places.append((*at, name))
            if isinstance(child, dict | list):
                walk(child, (*at, name))

    walk(value, ())
    for *path, last in places:
        for what in ("changed", "left out"):
            inner = whole = copy.deepcopy(value)
            for step in path:
                inner = inner[step]
            if what == "changed":
                inner[last] = other(inner[last])
            else:
                del inner[last]
            yield (*path, last, what), whole
    yield ("added",), {**value, "a_key_of_tomorrow": 1}


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_every_key_of_the_config_names_another_model(folders: dict[str, Path], name: str) -> None:
    with layout.opened(folders[name]) as origin:
        before, seen = named(origin, folders[name]), set()
        shuffled = dict(reversed(list(origin.config.items())))
        assert named(replace(origin, config=shuffled), folders[name]) == before  # the same, written in another order
        for where, config in mutations(dict(origin.config)):
            if where[0] not in load.IRRELEVANT:
                found = named(replace(origin, config=config), folders[name])
                assert found != before, where
                seen.add(found)
        assert len(seen) > 30  # no two mutations of many are one


@torch.no_grad()
def test_what_is_left_out_of_the_name_changes_no_number(folders: dict[str, Path], tmp_path: Path) -> None:
    """The short list: each key of it changed, the model gives the same logits, and has the same name."""
    tokens = torch.arange(24)[None] % asked.VOCAB

    def asks(folder: Path) -> tuple[Any, str]:
        with layout.opened(folder) as origin:
            return layout.load(Decoder(origin.spec), origin)(tokens), named(origin, folder)

    logits, before = asks(folders["mixtral"])
    folder = shutil.copytree(folders["mixtral"], tmp_path / "changed")
    config = json.loads((folder / "config.json").read_text())
    for irrelevant in load.IRRELEVANT:
        (folder / "config.json").write_text(json.dumps(config | {irrelevant: "something else"}))
        again, found = asks(folder)
        assert torch.equal(again, logits) and found == before, irrelevant


def test_files_beside_the_weights_and_how_it_is_computed_name_another_model(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, names = shutil.copytree(folders["mixtral"], tmp_path / "moe"), set[str]()

    def is_another(**how: str) -> bool:
        with layout.opened(folder) as origin:
            name = named(origin, folder, **how)
        new = name not in names
        names.add(name)
        return new

    assert is_another() and not is_another()
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):  # every leaf of each
        whole = (folder / file).read_text()
        for where, changed in list(mutations(json.loads(whole)))[:: 97 if file == "tokenizer.json" else 1]:
            (folder / file).write_text(json.dumps(changed))
            assert is_another() or where[-1] == "left out", (file, where)
        (folder / file).write_text(whole)
    for file in ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "merges.txt"):
        (folder / file).write_text("{}")
        assert is_another(), file
    for how in ({"dtype": "bfloat16"}, {"experts": "reference"}, {"device": "cuda"}, {"weights": "v"}):
        assert is_another(**how), how
    real = load.version
    for name in ("torch", "transformers", "tokenizers"):
        monkeypatch.setattr(load, "version", lambda package, name=name: "another" * (package == name) or real(package))
        assert is_another(), name
    for name in ("VERSION", "__version__"):
        monkeypatch.setattr(load, name, "another")
        assert is_another(), name


# ---- end to end


def unfinish(folder: str) -> None:
    """Leave what a run that was killed leaves: another model may then be asked there, next to what is remembered."""
    for path in Path(folder).glob("results_*.json"):
        path.unlink()


def asked_anew(config: RunConfig) -> Evaluation:
    done = evaluate(config)
    assert done is not None
    return done


WORDS = {
    "task": "words", "dataset_path": "jsonl", "dataset_name": "words.jsonl", "output_type": "loglikelihood",
    "test_split": "test", "doc_to_text": "The {{word}} is", "doc_to_target": " {{word}}",
    "metric_list": [{"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}],
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "as it is": {}, "top_k": {"num_experts_per_tok": 1}, "eps": {"rms_norm_eps": 1e-2}, "ends": {"eos_token_id": 7},
    "rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
}  # fmt: skip


def test_two_of_one_conversion_share_neither_answers_nor_a_folder(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same weights under another config.json: another model, asked anew, even in one folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text(json.dumps({"tasks": [WORDS]}))
    rows = [{"word": word, "passage": word[:1]} for word in ("dog", "little tree", "sun", "sea")]
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kept, own = {}, set()
    for name, change in CHANGES.items():
        model = tmp_path / name / "moe"  # of one name, so that only the identity tells their folders apart
        shutil.copytree(folders["mixtral"], model)
        config = json.loads((model / "config.json").read_text())
        assert not change.keys() - config.keys()
        (model / "config.json").write_text(json.dumps(config | change))
        one = RunConfig(suite=str(tmp_path / "own.yaml"), checkpoint=str(model))
        own.add(Path(asked_anew(one).place).parent)
        kept[name] = found = asked_anew(replace(one, output="one folder for all"))
        unfinish("one folder for all")
        assert found.work["recalled"] == 0, name
    shared = [item.clusters["passage"] for item in found.items]
    assert len(shared) == 4 and len(set(shared)) == 3 and shared[2] == shared[3]  # for compare's clusters
    again = asked_anew(replace(one, output="one folder for all"))
    assert again.work["recalled"] == again.work["requests"]  # and the same model is not asked twice
    assert len(own) == len(CHANGES) == len({found.model.identity for found in kept.values()})
    assert len({found.model.fingerprint for found in kept.values()}) == 1
    scores = {kept[name].tasks["words"].metrics["perplexity"] for name in CHANGES if name != "ends"}
    assert len(scores) == 4  # other numbers, which were shared before


# ---- answers on disk


@pytest.mark.parametrize(
    "line", ["3", "{}", "[]", '["x"]', '["x", 1]', '["x", [1, true], 5]', "[[], [1, true], 5]", "\xff"]
)
def test_answers_survive_a_kill_and_a_line_that_nobody_wrote_is_none(tmp_path: Path, line: str) -> None:
    first = Remembered(tmp_path, "a" * 64)
    first.put({"x": [-1.25, True]})
    first.put({"y": [-0.1, False]})
    first.close()
    path = next(tmp_path.glob("*/0.jsonl"))
    x, y = path.read_bytes().strip().split(b"\n")
    path.write_bytes(b"\n".join([x, line.encode("latin-1"), x.replace(b"1.25", b"9.25"), y[:-6]]))  # killed in y
    with pytest.warns(UserWarning, match="a{32}: 3 lines are not an answer .*asked again") as said:
        second = Remembered(tmp_path, "a" * 64)
    assert [found.category for found in said].count(UserWarning) == 1
    assert second.answers == {"x": (-1.25, True)}
    second.put({"z": [3, 4]})
    second.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # other processes do not say it too
        assert Remembered(tmp_path, "a" * 64, rank=1).answers == {"x": (-1.25, True), "z": (3, 4)}
        assert Remembered(tmp_path, "b" * 64).answers == {}


def test_a_request_has_a_name_of_its_own() -> None:
    a, b = np.arange(3), np.arange(3, 5)
    assert key("score", a, b) == key("score", a.copy(), b)
    others = [key("write", a, b), key("score", b, a), key("score", a[:2], np.concatenate([a[2:], b])), key("score", a)]
    assert len({key("score", a, b), *others}) == 5


def test_an_evaluation_that_is_killed_ends_with_the_same_digits() -> None:
    """SIGKILL a real process of `upcycle eval` before one of its writes and at a random moment, and run it again."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.crashes", "eval", "--kinds", "kill", "moment", "--each", "2"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr[-3000:]
    assert "killed" in ran.stdout and " 0 faults" in ran.stdout
