"""What --help shows: how each command is called, where its keys are, and examples, every one of which is tried.

They run as they stand, in a folder that has what they name: a small Llama, its MoE, two books, runs. Words added to a
command make it small; where it says 8 processes, there are two. What needs a GPU, the hub or minutes is read only, and so
are meshes of 8, which test_journeys.py runs.
"""

from __future__ import annotations

import io
import json
import re
import shutil
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path

import pytest

from evaluation.__main__ import COMMANDS
from tests.docs.test_docs import command_lines, my_yaml, understood
from tests.docs.test_journeys import TRAINING, Walk, make_model
from tests.unit.training.test_data import texts
from tests.unit.upcycle import test_cli
from upcycle.cli import frame as cli

VERBS = ("plan", "convert", "verify", "inspect", "push")
FOLDERS = (*cli.OURS, "training.islands")
MODULES = {name: f"{name}.__main__" if name in FOLDERS else name for name in test_cli.COMMANDS}
SHOWN_BY_MAIN = ("upcycle", "evaluation", "training.cli.prepare", "training.cli.plots", "benchmarks.converting")
KEYLESS = (
    "upcycle verify",
    "upcycle inspect",
    "upcycle push",
    "training.cli.plots",
    "benchmarks.kernels",
    "benchmarks.converting",
    "training.cli.export",
)
SMALL = [*TRAINING[:-1], "steps=12"]
# words for the commands in which a key is
MORE = {
    "-m training stories": SMALL,
    "-m training model.source": SMALL,
    "-m training my.yaml": SMALL,
    "architecture=./moe/config.json": ["sequence=32", "batch=2", "steps=1", "warmup=0"],
    "-m evaluation run": ["device=cpu"],
    "benchmarks.evaluation ./llama": ["device=cpu", "batch_sizes=[2]"],
    "profile=10-12": ["batch=1"],
}
READ = (
    "meta-llama/", "hf:", "mmlu", "benchmarks.evaluation ./moe", "bench-qwen3", "kernels.bench", "benchmarks.converting",
    "examples.demo", "evaluation study", " mesh.ep=8", "evaluation lm-eval", "-{0,1,2}", "plan measure", "islands serve", "islands.join=", "islands.local=",
)  # fmt: skip
# what the folder has -> what it is made of, in this order
MADE = {
    "runs/demo/dense": "cp llama",
    "runs/data": "python -m training.cli.prepare runs/data tokenizer=./llama sources=[book.txt]",
    "runs/stories-data": "cp runs/data",
    "runs/stories-valid": "cp runs/data",
    "runs/valid": "cp runs/data",
    "moe": "upcycle convert source=./llama output=./moe",
    "moe-trained": "cp moe",
    "runs/dense": "python -m training model.source=./llama data.train=[runs/data] data.valid=[runs/valid] output=runs/dense",
    "runs/moe": "python -m training my.yaml export=",
    "runs/eval/dense": "python -m evaluation run tiny runs/dense output=runs/eval/dense limit=2",
    "runs/eval/moe": "python -m evaluation run tiny runs/moe output=runs/eval/moe limit=2",
}


def helps() -> dict[str, str]:
    """Of each command, and of those that are a word of a command."""
    found = {name: cli.about(module) for name, module in MODULES.items()}
    for name in (*SHOWN_BY_MAIN, *(f"upcycle {verb}" for verb in VERBS), *(f"evaluation {name}" for name in COMMANDS)):
        program, *words = name.split()
        with redirect_stdout(io.StringIO()) as shown:
            assert import_module(MODULES[program]).main([*words, "--help"]) == 0
        found[name] = shown.getvalue()
    return found


HELPS = helps()
EXAMPLES = sorted(
    {line for text in HELPS.values() for line in command_lines(text, "upcycle ", "python -m ", "torchrun ")}
)


@pytest.mark.parametrize("name", HELPS)
def test_help_says_how_it_is_called_and_where_the_keys_are(name: str) -> None:
    text = HELPS[name]
    assert (
        f"usage: {'' if name.startswith('upcycle') and name != 'benchmarks.converting' else 'python -m '}{name}" in text
    )
    assert command_lines(text, "upcycle ", "python -m ", "torchrun "), "an example"
    assert ("docs/config.md" in text) == (name not in KEYLESS)


def written(command: str) -> set[str]:
    """What it makes, and must not be there."""
    found = set(re.findall(r"(?:output=(?:\./)?|training\.prepare )(\S+)", command))
    return found | ({"runs/moe", "moe-trained"} if "training my.yaml" in command else set())


def link(folder: Path, name: str, to: Path) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).symlink_to(to)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make_model(folder / "llama", "llama3-8b")
    for seed, book in enumerate(("book.txt", "other-book.txt")):
        (folder / book).write_text("\n".join(texts(100, seed)))
    (folder / "prepare.yaml").write_text("tokenizer: ./llama\nsources: [book.txt]\n")
    (folder / "my.yaml").write_text(my_yaml())
    shutil.copytree(folder / "llama", folder / "llama-chat")
    settings = json.loads((folder / "llama/tokenizer_config.json").read_text())
    settings["chat_template"] = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (folder / "llama-chat/tokenizer_config.json").write_text(json.dumps(settings))
    talks = [json.dumps({"prompt": text[:20], "completion": text[20:40]}) for text in texts(9)]
    (folder / "talks.jsonl").write_text("\n".join(talks))
    with pytest.MonkeyPatch.context() as patch:
        walk = Walk(folder, patch)
        for name, command in MADE.items():
            if command.startswith("cp "):
                shutil.copytree(folder / command.split()[1], folder / name)
            else:
                walk([command], {key: words for key, words in MORE.items() if key in command})
    return folder


@pytest.mark.parametrize("command", EXAMPLES)
def test_an_example_runs(command: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walk = Walk(tmp_path, monkeypatch)
    for name in ("llama", "llama-chat", "talks.jsonl", "book.txt", "other-book.txt", "prepare.yaml", "my.yaml", *MADE):
        if name not in written(command):
            link(tmp_path, name, made / name)
    if any(part in command for part in READ):
        understood(command)
    else:
        walk([command], {key: words for key, words in MORE.items() if key in command})


@pytest.mark.parametrize("command", [line for line in EXAMPLES if "upcycle plan" in line or "upcycle convert" in line])
def test_an_example_needs_nothing_that_the_demo_made(command: str) -> None:
    assert "source=" in command


def test_what_is_added_is_of_use() -> None:
    for key in (*MORE, *READ):
        assert any(key in command for command in EXAMPLES), key
