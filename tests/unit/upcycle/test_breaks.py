"""Planted breaks: a converted folder with one thing wrong, through `verify` and `inspect check=true`.

A slice runs here; all of them:

    python -m tests.unit.upcycle.test_breaks 200
"""

from __future__ import annotations

import io
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.parity import tiny
from tests.unit.upcycle.plans import load, readable
from upcycle.__main__ import main
from upcycle.converting.convert import convert

METHODS: dict[str, list[str]] = {
    "exact copy": ["experts=4"],
    "exact copy to bfloat16": ["experts=4", "dtype=bfloat16"],
    "exact groups": ["method.name=virtual_group", "experts=2", "granularity=2", "top_k=2"],
    "exact groups of our own": [
        "method.name=virtual_group",
        "experts=2",
        "granularity=2",
        "top_k=2",
        "target=upcycled",
    ],
    "published": ["method.name=virtual_group", "experts=2", "granularity=4", "top_k=4", "scale=published"],
    "drop": ["method.name=drop", "experts=4"],
    "drop to bfloat16, shared": ["method.name=drop", "experts=4", "shared=0.25", "dtype=bfloat16"],
    "noise": ["method.name=noise", "experts=4"],
    "split": ["method.name=split", "experts=4"],
}


def weight(folder: Path, chance: random.Random) -> str:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = chance.choice(sorted(tensors))
    tensor = tensors[name]
    change = chance.choice(["one element", "times 1.03", "zeros", "rows swapped", "a copy of another"])
    if change == "one element":
        tensor.view(-1)[chance.randrange(tensor.numel())] += 0.1
    elif change == "times 1.03":
        tensor *= 1.03
    elif change == "zeros":
        tensor.zero_()
    elif change == "rows swapped":
        a, b = chance.sample(range(len(tensor)), 2)
        tensor[[a, b]] = tensor[[b, a]]
    else:
        others = [
            n for n, t in sorted(tensors.items()) if n != name and (t.shape, t.dtype) == (tensor.shape, tensor.dtype)
        ]
        tensors[name] = tensors[chance.choice(others)].clone() if others else tensor * 2
    save_file(tensors, file, {"format": "pt"})
    return f"{name}: {change}"


def every_expert(folder: Path, chance: random.Random) -> str:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    factor = chance.choice([0.0, 1.03, -1.0])
    last = chance.choice([("w2.", "down_proj.", "output_linear."), ("w1.", "gate_proj."), ("w",)])
    chosen = [n for n in tensors if "expert" in n and any(part in n for part in last)] or [
        n for n in tensors if ".w2." in n
    ]
    for name in chosen:
        tensors[name] *= factor
    save_file(tensors, file, {"format": "pt"})
    return f"{len(chosen)} experts' matrices ({last[0]}): times {factor}"


def config_key(folder: Path, chance: random.Random) -> str:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    key = chance.choice(sorted(config))
    value = config[key]
    config[key] = (
        not value
        if isinstance(value, bool)
        else value + chance.choice([1, 2, -1])
        if isinstance(value, int)
        else value * 1.5 + 1
        if isinstance(value, float)
        else value + "x"
        if isinstance(value, str)
        else chance.choice([1, "x", {}])
    )
    if chance.random() < 0.2:
        del config[key]
    file.write_text(json.dumps(config))
    return f"config.json: {key}={value!r} -> {config.get(key, 'gone')!r}"


def tokenizer(folder: Path, chance: random.Random) -> str:
    file = folder / "tokenizer.json"
    if chance.random() < 0.2:
        file.unlink()
        return "no tokenizer.json"
    parts = json.loads(file.read_text())
    vocab = parts["model"]["vocab"]
    a, b = chance.sample(sorted(vocab), 2)
    vocab[a], vocab[b] = vocab[b], vocab[a]
    file.write_text(json.dumps(parts))
    return f"tokenizer.json: {a} and {b} swapped"


def manifest(folder: Path, chance: random.Random) -> str:
    file = folder / "upcycle.json"
    body: dict[str, Any] = json.loads(file.read_text())
    where = chance.choice(["plan", "promise", "config", "source", "files", "seed", "method", "read", "gone"])
    if where == "gone":
        file.unlink()
        return "no upcycle.json"
    if where == "promise":
        body["promise"]["exact"] = not body["promise"]["exact"]
    elif where == "config":
        key = chance.choice(["top_k", "experts", "granularity", "dtype", "seed"])
        where += f".{key}"
        body["config"][key] = "float16" if key == "dtype" else body["config"][key] + 1
    elif where == "method":
        body["method"] = {"name": "noise", "std": 0.02}
    elif where == "seed":
        body["seed"] += 1
    elif where == "files":
        body["files"]["model.safetensors"]["sha256"] = "0" * 64
    elif where == "read":
        body["read"][0][3] = "0" * 64
    else:
        body[where] = "0" * 64 if where == "plan" else ["0" * 64]
    file.write_text(json.dumps(body))
    return f"upcycle.json: {where}"


BREAKS = [weight, weight, every_expert, config_key, config_key, tokenizer, manifest]
# exit codes that say so. Of the 200 verify passes number 87, zeros times 1.03, which is no change; inspect the six
# without an upcycle.json, of which it says that there is nothing to compare with, and verify ends with 3
CODES = {"verify": (1, 2, 3), "inspect": (1, 2)}


def folders(at: Path) -> Iterator[tuple[str, Path, Path]]:
    dense, _ = readable(tiny.make("llama", at / "llama"), at)
    for name, words in METHODS.items():
        folder = at / name.replace(" ", "-")
        convert(*load(f"source={dense}", f"output={folder}", *words), quiet=True)
        yield name, dense, folder


def broken(made: list[tuple[str, Path, Path]], number: int, at: Path) -> tuple[str, str, int, int]:
    """(method, what is broken, exit codes of verify and of inspect check=true) of break `number`."""
    chance = random.Random(number)
    name, dense, folder = made[number % len(made)]
    copy = shutil.copytree(folder, at / f"broken-{number}")
    what = chance.choice(BREAKS)(copy, chance)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        codes = main(["verify", str(dense), str(copy), "tokens=32"]), main(["inspect", str(copy), "check=true"])
    shutil.rmtree(copy)
    return name, what, *codes


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, Path, Path]]:
    return list(folders(tmp_path_factory.mktemp("breaks")))


def test_what_is_not_broken_holds(made: list[tuple[str, Path, Path]]) -> None:
    for name, dense, folder in made:
        assert main(["verify", str(dense), str(folder), "tokens=32"]) == 0, name
        assert main(["inspect", str(folder), "check=true"]) == 0, name


def test_planted_breaks_are_found(made: list[tuple[str, Path, Path]], tmp_path: Path) -> None:
    for number in range(20):
        name, what, verified, inspected = broken(made, number, tmp_path)
        assert verified in CODES["verify"], (number, name, what)
        if what != "no upcycle.json":  # then inspect has nothing to compare with, and says so
            assert inspected in CODES["inspect"], (number, name, what)


def run(count: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        cases, missed = list(folders(Path(place))), dict[str, list[str]](verify=[], inspect=[])
        for number in range(count):
            name, what, *codes = broken(cases, number, Path(place))
            for verb, code in zip(("verify", "inspect"), codes, strict=True):
                if code not in CODES[verb]:
                    missed[verb].append(f"{number} {name}: {what} (exit code {code})")
        for verb, lines in missed.items():
            print(f"{verb}: {count - len(lines)} of {count} found", *lines, sep="\n  ")


if __name__ == "__main__":
    run(int(sys.argv[1]))
