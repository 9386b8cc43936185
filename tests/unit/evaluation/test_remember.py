"""What is remembered belongs to the model as computed: whatever may change an answer gives it another name."""

from __future__ import annotations

import copy
import json
import shutil
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

MOE = ("target=mixtral", "method.name=drop", "experts=4", "top_k=2", "router.init.std=0.3")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("asked")
    asked.make(place / "llama")
    assert upcycle(["convert", f"source={place / 'llama'}", f"output={place / 'mixtral'}", *MOE]) == 0
    return {name: place / name for name in ("llama", "mixtral")}


# ---- the model as computed


def named(origin: Origin, tokenizer: Path, weights: str = "w", **how: str) -> str:
    return load.identity(
        weights, origin, tokenizer, **{"dtype": "float32", "experts": "grouped", "device": "cpu"} | how
    )


def other(value: Any) -> Any:
    """Another value of about the same kind."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return value + 1
    return f"{value}x" if isinstance(value, str) else [*value, 1]


def mutations(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Each value in a config changed, left out, and one added, as (where, the whole)."""
    leaves: list[tuple[tuple[Any, ...], Any]] = []

    def walk(inner: Any, at: tuple[Any, ...]) -> None:
        for name, child in inner.items() if isinstance(inner, dict) else enumerate(inner):
            leaves.append(((*at, name), child))
            if isinstance(child, dict | list):
                walk(child, (*at, name))

    walk(value, path)
    for at, child in leaves:
        for what in ("changed", "left out"):
            whole = copy.deepcopy(value)
            inner = whole
            for step in at[:-1]:
                inner = inner[step]
            if what == "changed":
                inner[at[-1]] = {**child, "new": 1} if isinstance(child, dict) else other(child)
            else:
                del inner[at[-1]]
            yield (*at, what), whole
    yield ("added",), {**value, "a_key_of_tomorrow": 1}


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_every_key_of_the_config_names_another_model(folders: dict[str, Path], name: str) -> None:
    with layout.opened(folders[name]) as origin:
        before, seen = named(origin, folders[name]), set()
        assert named(origin, folders[name]) == before
        shuffled = dict(reversed(list(origin.config.items())))
        assert named(replace(origin, config=shuffled), folders[name]) == before  # the same, written in another order
        for where, config in mutations(dict(origin.config)):
            if where[0] in load.IRRELEVANT:
                continue
            found = named(replace(origin, config=config), folders[name])
            assert found != before, where
            seen.add(found)
        assert len(seen) > 30  # no two mutations of many are one


@pytest.mark.parametrize("name", ["llama", "mixtral"])
@torch.no_grad()
def test_what_is_left_out_of_the_name_changes_no_number(folders: dict[str, Path], name: str, tmp_path: Path) -> None:
    """The short list: each key of it changed, the model gives the same logits, and has the same name."""
    tokens = torch.arange(24)[None] % asked.VOCAB

    def asks(folder: Path) -> tuple[Any, str]:
        with layout.opened(folder) as origin:
            return layout.load(Decoder(origin.spec), origin)(tokens), named(origin, folder)

    logits, before = asks(folders[name])
    folder = shutil.copytree(folders[name], tmp_path / "changed")
    config = json.loads((folder / "config.json").read_text())
    assert load.IRRELEVANT
    for irrelevant in load.IRRELEVANT:
        (folder / "config.json").write_text(json.dumps(config | {irrelevant: "something else"}))
        again, found = asks(folder)
        assert torch.equal(again, logits) and found == before, irrelevant


def test_files_beside_the_weights_and_how_it_is_computed_name_another_model(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = set()

    def note(**how: str) -> None:
        with layout.opened(tmp_path / "moe") as origin:
            names.add(named(origin, tmp_path / "moe", **how))

    folder = shutil.copytree(folders["mixtral"], tmp_path / "moe")
    note()
    files = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    for file in files:  # every leaf of each
        value = json.loads((folder / file).read_text())
        count = len(names)
        few = list(mutations(value))[:: 1 if file != "tokenizer.json" else 97]
        for where, changed in few:
            (folder / file).write_text(json.dumps(changed))
            before = len(names)
            note()
            assert len(names) > before or where[-1] == "left out", (file, where)
        assert len(names) > count
        (folder / file).write_text(json.dumps(value))
    count = len(names)
    for file in ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "merges.txt"):
        (folder / file).write_text("{}")
        note()
    for how in ({"dtype": "bfloat16"}, {"experts": "reference"}, {"device": "cuda"}, {"weights": "v"}):
        note(**how)
    assert len(names) == count + 8
    real = load.version
    for name in ("torch", "transformers", "tokenizers", "VERSION", "__version__"):
        with monkeypatch.context() as patch:
            if hasattr(load, name) and name != "torch":
                patch.setattr(load, name, "another")
            else:
                patch.setattr(
                    load, "version", lambda package, name=name: "another" if package == name else real(package)
                )
            count = len(names)
            note()
            assert len(names) == count + 1, name


# ---- end to end


def asked_anew(config: RunConfig) -> Evaluation:
    done = evaluate(config)
    assert done is not None
    return done


def test_two_of_one_conversion_share_neither_answers_nor_a_folder(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same weights under another config.json: another model, asked anew, even in one folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    suite = tmp_path / "own.yaml"
    suite.write_text(
        "tasks: [{task: words, dataset_path: jsonl, dataset_name: words.jsonl, output_type: loglikelihood, "
        "test_split: test, doc_to_text: '{{text}}', doc_to_target: ' {{word}}', metric_list: [{metric: perplexity, "
        "aggregation: perplexity, higher_is_better: false}]}]\n"
    )
    rows = [
        {"text": f"The {word} is", "word": word, "passage": word[:1]} for word in ("dog", "little tree", "sun", "sea")
    ]
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes: dict[str, dict[str, Any]] = {
        "as it is": {},
        "top_k": {"num_experts_per_tok": 1},
        "rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
        "eps": {"rms_norm_eps": 1e-2},
        "ends": {"eos_token_id": 7},
    }
    kept, own = {}, set()
    for name, change in changes.items():
        model = tmp_path / name / "moe"  # of one name, so that only the identity tells their folders apart
        shutil.copytree(folders["mixtral"], model)
        config = json.loads((model / "config.json").read_text())
        assert not change.keys() - config.keys()
        (model / "config.json").write_text(json.dumps(config | change))
        one = RunConfig(suite=str(suite), checkpoint=str(model))
        own.add(str(Path(asked_anew(one).place).parent))
        kept[name] = found = asked_anew(replace(one, output="one folder for all"))
        assert found.work["recalled"] == 0, name
    kept_of = [item.clusters["passage"] for item in found.items]
    assert len(kept_of) == 4 and len(set(kept_of)) == 3 and kept_of[2] == kept_of[3]  # for compare's clusters
    again = asked_anew(replace(one, output="one folder for all"))
    assert again.work["recalled"] == again.work["requests"]  # and the same model is not asked twice
    assert len(own) == len(changes) == len({found.model.identity for found in kept.values()})
    assert len({found.model.fingerprint for found in kept.values()}) == 1
    scores = [kept[name].tasks["words"].metrics["perplexity"] for name in ("as it is", "top_k", "rope", "eps")]
    assert len(set(scores)) == 4  # other numbers, which were shared before


# ---- answers on disk


def test_answers_survive_a_kill_and_belong_to_their_model(tmp_path: Path) -> None:
    first = Remembered(tmp_path, "a" * 64)
    first.put({"x": [-1.25, True], "y": [-0.1, False]})
    first.close()
    path = next(tmp_path.glob("*/0.jsonl"))
    path.write_bytes(path.read_bytes()[:-6])  # killed while it wrote y
    with pytest.warns(UserWarning, match="a{32}: 1 line is no answer .*asked again") as said:
        second = Remembered(tmp_path, "a" * 64)
    assert second.answers == {"x": (-1.25, True)}
    assert [found.category for found in said].count(UserWarning) == 1
    second.put({"z": [3, 4]})
    second.close()
    assert Remembered(tmp_path, "a" * 64, rank=1).answers == {"x": (-1.25, True), "z": (3, 4)}
    assert Remembered(tmp_path, "b" * 64).answers == {}


@pytest.mark.parametrize(
    "line", ["3", "{}", "[]", '["x"]', '["x", 1]', '["x", [1, true], 5]', "[[], [1, true], 5]", "\xff"]
)
def test_a_line_that_nobody_wrote_is_no_answer(tmp_path: Path, line: str) -> None:
    first = Remembered(tmp_path, "a" * 64)
    first.put({"x": [-1.25, True]})
    first.close()
    path = next(tmp_path.glob("*/0.jsonl"))
    with path.open("ab") as file:
        file.write(line.encode("latin-1") + b"\n")
    path.write_bytes(path.read_bytes() + path.read_bytes().replace(b"1.25", b"9.25"))  # a digit changed later
    with pytest.warns(UserWarning, match="3 lines are no answer") as said:  # the line, twice, and the changed one
        assert Remembered(tmp_path, "a" * 64).answers == {"x": (-1.25, True)}
    assert [found.category for found in said].count(UserWarning) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # other processes do not say it too
        assert Remembered(tmp_path, "a" * 64, rank=1).answers == {"x": (-1.25, True)}
        assert Remembered(tmp_path, "b" * 64).answers == {}


def test_a_request_has_a_name_of_its_own() -> None:
    a, b = np.arange(3), np.arange(3, 5)
    assert key("score", a, b) == key("score", a.copy(), b)
    others = [key("write", a, b), key("score", b, a), key("score", a[:2], np.concatenate([a[2:], b])), key("score", a)]
    assert len({key("score", a, b), *others}) == 5
