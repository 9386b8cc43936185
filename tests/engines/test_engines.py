"""What engines make of what we write: greedy text and log-probabilities beside transformers' on the same folder.

`make engines` builds the environments and asks all; `make test` builds llama.cpp's, which is light, and asks it for some plain
models; elsewhere what is not there is skipped. Both hold an engine to upcycle/engines.json, which plan, README and model
card read, so a new version that reads better or worse is seen.

python -m tests.engines.test_engines [ENGINE ...]   asks these, or all that are there, and writes their columns anew
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

import upcycle
from tests.engines import engines
from tests.engines.engines import ENGINES, Answer
from tests.engines.models import CASES, TRAINED, adapt, make
from tests.unit.training.test_data import texts
from upcycle.arch import engines as known
from upcycle.arch.registry import target

ALL = os.environ.get("ENGINES") == "all"
SMOLLM2 = engines.ROOT / "runs" / "smollm2"
ROWS = [(name, trained) for name in CASES for trained in (False, True) if not trained or name in TRAINED]
# rows whose experts vLLM's own backend cannot fuse -> the class that computes them with our plug-in, on a CPU
PLUGGED = {
    ("upcycled gelu", True): "PaddedExperts",
    ("upcycled biases in FFNs", False): "PaddedExperts",
    ("upcycled uneven", False): "PaddedExperts",
    ("upcycled of gemma3_text", True): "PaddedExperts",
    ("upcycled of nemotron", True): "UpcycledLooseExperts",
}
LIGHT = [(name, False) for name in ("mixtral", "qwen2_moe", "qwen3_moe", "granitemoe")]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@cache
def question(place: Path, name: str, trained: bool) -> dict[str, Any]:
    folder = make(CASES[name], place / re.sub(r"\W+", "_", f"{name} {trained}"), trained=trained)
    words = " ".join(texts(20, 5)).split()
    return engines.question(folder, " ".join(words[:6]), " ".join(words[6:]))


@cache
def wanted(place: Path, name: str, trained: bool) -> Answer:
    return engines.transformers(question(place, name, trained))


def read(engine: str, place: Path, rows: Sequence[tuple[str, bool]]) -> dict[tuple[str, bool], str]:
    """Return each row's verdict."""
    found = engines.ask(ENGINES[engine], [question(place, *row) for row in rows], place)
    for row, got in zip(rows, found, strict=True):
        if "refused" not in got:
            equal, difference = engines.same(got, wanted(place, *row))
            print(f"{engine}, {describe(*row)}: {equal} of 64 tokens, log-probabilities within {difference:.1e}")
    return {row: engines.verdict(got, wanted(place, *row)) for row, got in zip(rows, found, strict=True)}


def claims(engine: str, name: str) -> bool:
    """Return whether an engine is asked: only some engines run a modelling file from the model's folder."""
    if engine in known.OWN_ONLY or name.startswith("upcycled wide"):
        return engine in known.OWN_ONLY and name.startswith("upcycled wide")
    return target(CASES[name].target).can.stock or engine in known.FLAGS


def describe(name: str, trained: bool) -> str:
    return f"{name}, {'trained' if trained else 'converted'}"


def in_table() -> dict[tuple[str, bool], dict[str, str]]:
    return {(row["case"], row["trained"]): row["read"] for row in known.table()["rows"]}


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_reads_as_the_table_says(engine: str, place: Path) -> None:
    light = not ALL
    if light and engine != "llama.cpp":
        pytest.skip("asked by `make engines` alone, which takes minutes")
    engines.need(engine)
    if engine not in known.table()["engines"]:
        pytest.skip(f"no column in the table yet; python -m tests.engines.test_engines {engine} asks and writes it")
    table, rows = in_table(), LIGHT if light else ROWS
    found = read(engine, place, [row for row in rows if engine in table[row]])
    # right, wrong or refused: by how much, and in which words, differs between machines
    assert {describe(*row): said.split(":")[0] for row, said in found.items()} == {
        describe(*row): table[row][engine].split(":")[0] for row in found
    }, found


def test_a_wrong_expert_is_not_read_right(place: Path) -> None:
    """The twin: one matrix of one expert of the folder is another than transformers was asked about."""
    asked = question(place, "mixtral", False)
    wrong = Path(shutil.copytree(asked["folder"], place / "wrong"))
    tensors = load_file(wrong / "model.safetensors")
    tensors["model.layers.0.block_sparse_moe.experts.1.w2.weight"] *= 1.01
    save_file(tensors, wrong / "model.safetensors", {"format": "pt"})
    got = engines.transformers(asked | {"folder": str(wrong)})  # engines are not to blame
    assert engines.verdict(got, wanted(place, "mixtral", False)).startswith("wrong: ")


@pytest.mark.parametrize(
    "row", [row for row in ROWS if CASES[row[0]].target == "upcycled"], ids=lambda row: describe(*row)
)
def test_the_twin_of_an_upcycled_row_is_wrong(row: tuple[str, bool], place: Path) -> None:
    """In a trained twin, which has slices, a token takes the best experts of all; in a converted one a matrix differs."""
    if not ALL and row != ("upcycled", True):
        pytest.skip("asked by `make engines` alone, which takes minutes")
    asked = question(place, *row)
    twin = make_twin(place, row)
    got = engines.transformers(asked | {"folder": str(twin)})
    shutil.rmtree(twin)
    assert engines.verdict(got, wanted(place, *row)).startswith("wrong: ")


def make_twin(place: Path, row: tuple[str, bool]) -> Path:
    folder = Path(question(place, *row)["folder"])
    twin = Path(shutil.copytree(folder, place / f"{folder.parent.name}_twin" / "moe", dirs_exist_ok=True))
    config = json.loads((twin / "config.json").read_text())
    if row[1]:  # as converted, the best experts of all are one copy of each slice
        assert config.pop("expert_slices") == 4
        (twin / "config.json").write_text(json.dumps(config))
    else:
        tensors = load_file(twin / "model.safetensors")
        tensors["model.layers.1.mlp.experts.1.down_proj.weight"] *= 1.01
        save_file(tensors, twin / "model.safetensors", {"format": "pt"})
    return twin


@pytest.mark.parametrize("row", PLUGGED, ids=lambda row: describe(*row))
def test_the_plug_in_reads_what_the_backend_cannot_fuse(row: tuple[str, bool], place: Path) -> None:
    """Ask vLLM with our wheel next to it; trained models are compiled, which vLLM cannot do without it, and have twins."""
    if not ALL:
        pytest.skip("asked by `make engines` alone, which takes minutes")
    engines.need("vLLM")
    asked = question(place, *row)
    twins = [asked | {"folder": str(make_twin(place, row))}] if row[1] else []
    got, *wrong = engines.ask(engines.PLUGGED, [asked | {"compile": row[1]}, *twins], place)
    assert "refused" not in got, got
    equal, difference = engines.same(got, wanted(place, *row))
    print(f"plug-in, {describe(*row)}: {equal} of 64 tokens, log-probabilities within {difference:.1e}")
    experts = {name.rpartition(".")[2] for name in got["modules"]} & {*PLUGGED.values()}
    assert "upcycle.serving.vllm.UpcycledForCausalLM" in got["modules"] and experts == {PLUGGED[row]}
    assert engines.verdict(got, wanted(place, *row)) == known.RIGHT
    assert all(engines.verdict(twin, wanted(place, *row)).startswith("wrong: ") for twin in wrong)


def test_adapters_of_attention_load_in_vllm_and_others_are_refused(place: Path, tmp_path: Path) -> None:
    """Compare vLLM on the base with adapters to transformers on the merged export; the twin is the base alone."""
    if not ALL:
        pytest.skip("asked by `make engines` alone, which takes minutes")
    engine, base = engines.need("vLLM"), question(place, "upcycled of nemotron", False)
    asked, folders = [], []
    for match in ("[attention]", "[attention,experts,router]"):
        (folder := tmp_path / str(len(folders))).mkdir()
        folders.append(adapt(Path(base["folder"]), folder, match))
        asked.append(base | {"adapters": str(folders[-1][0])})
    got, refused = engines.ask(engine, asked, place)
    want = engines.transformers(base | {"folder": str(folders[0][1])})
    equal, difference = engines.same(got, want)
    print(f"vLLM, adapters: {equal} of 64 tokens of the merged model, log-probabilities within {difference:.1e}")
    assert engines.verdict(got, want) == known.RIGHT
    assert engines.verdict(wanted(place, "upcycled of nemotron", False), want).startswith("wrong: ")
    assert "expected target modules in" in refused["refused"]


@pytest.mark.parametrize("name", ["glm4_moe", "solar_open"])
def test_llama_cpp_wants_only_some_tokens_of_them(name: str, place: Path) -> None:
    """The reason that a plan gives: with these tokens in the tokenizer, the model is read right."""
    if not ALL:
        pytest.skip("asked by `make engines` alone, which takes minutes")
    engines.need("llama.cpp")
    asked = question(place, name, True)
    folder = Path(shutil.copytree(asked["folder"], place / f"{name} tokens"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(
        ["[gMASK]", "<|user|>", "<|observation|>", "<|endoftext|>", "<|startoftext|>", "<unk>"]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (got,) = engines.ask(ENGINES["llama.cpp"], [asked | {"folder": str(folder)}], place)
    assert engines.verdict(got, wanted(place, name, True)) == known.RIGHT


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine not in known.OWN_ONLY])
def test_smollm2_in_an_engine(engine: str, place: Path) -> None:
    if not (SMOLLM2 / "config.json").is_file():
        pytest.skip("runs/smollm2 is not there; shared/tools/smollm2.py makes it")
    if not ALL:
        pytest.skip("asked by `make engines` alone, which takes minutes")
    engines.need(engine)
    moe = place / "smollm2"
    if not moe.exists():
        upcycle.convert(source=SMOLLM2, target="mixtral", experts=4, top_k=2, output=moe, quiet=True)
    asked = engines.question(moe, "The capital of France is", (engines.ROOT / "README.md").read_text())
    asked["prefixes"] = [p if i % 8 == 7 else None for i, p in enumerate(asked["prefixes"])]  # of a second each
    want, (got,) = engines.transformers(asked | {"folder": str(SMOLLM2)}), engines.ask(ENGINES[engine], [asked], place)
    assert "refused" not in got, got
    equal, difference = engines.same(got, want)
    print(f"{engine}, SmolLM2: {equal} of 64 tokens of the dense model, log-probabilities within {difference:.1e}")
    assert engines.verdict(got, want) == known.RIGHT


def write(names: Sequence[str]) -> None:
    """Ask engines about every row; keep what the table says of the others."""
    there = [engine for engine in names or ENGINES if ENGINES[engine].there]
    with tempfile.TemporaryDirectory() as folder:
        place, rows = Path(folder), []
        with redirect_stdout(sys.stderr):
            found = {}
            for engine in there:
                start, asked = time.monotonic(), [row for row in ROWS if claims(engine, row[0])]
                found[engine] = read(engine, place, asked)
                print(f"{engine}: {len(asked)} models in {time.monotonic() - start:.0f} s")
        known.table.cache_clear()  # another such run may have written its columns meanwhile
        old, versions = in_table(), dict(known.table()["engines"])
        for name, trained in ROWS:
            config = json.loads((Path(question(place, name, trained)["folder"]) / "config.json").read_text())
            new = {engine: found[engine][name, trained] for engine in there if claims(engine, name)}
            said = old.get((name, trained), {}) | new
            asked = known.asks(target(CASES[name].target).read(config))
            rows.append({"case": name, "trained": trained, "target": CASES[name].target, "asks": asked, "read": said})
    versions |= {engine: ENGINES[engine].version for engine in there}
    lines = ",\n".join(json.dumps(row) for row in rows)
    known.FILE.write_text(f'{{"engines": {json.dumps(versions)}, "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    write(sys.argv[1:])
