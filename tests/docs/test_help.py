"""What --help shows: how each command is called, where its keys are, and examples, every one of which is tried.

They run as they stand, in a folder that has what they name: a small Llama, its MoE, two books, runs. Words added to a
command make it small; where it says 8 processes, there are two. What needs a GPU, the hub or minutes is read only, and so
are meshes of 8, which test_journeys.py runs.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.docs.test_docs import command_lines, my_yaml, understood
from tests.docs.test_journeys import TRAINING, Walk, make_model
from tests.unit.training.test_data import texts
from upcycle.cli import frame
from upcycle.cli.main import MODULES

PROGRAMS = ("benchmarks.converting", "benchmarks.evaluation", "benchmarks.kernels", "examples.demo")
SMALL = [*TRAINING[:-1], "steps=12"]
# words for the commands in which a key is
MORE = {
    "train stories": SMALL,
    "train model.source": SMALL,
    "train my.yaml": SMALL,
    "upcycle add": [*SMALL[:-1], "steps=2", "model.upcycle.calibration.sequence=64"],
    "architecture=./moe/config.json": ["data.sequence=32", "batch=2", "steps=1", "warmup=0"],
    "upcycle eval": ["device=cpu"],
    "facts write": ["asked=3"],
    "facts score": ["device=cpu"],
    "upcycle chat": ["device=cpu", "tokens=4", "prompt=the cat"],
    "benchmarks.evaluation ./llama": ["device=cpu", "batch_sizes=[2]"],
    "profile=10-12": ["batch=1"],
}
READ = (
    "meta-llama/", "hf:", "mmlu", "benchmarks.evaluation ./moe", "bench-qwen3", "benchmarks.kernels", "examples.demo",
    "benchmarks.converting", "upcycle study", " mesh.ep=8", "evaluation lm-eval", "-{0,1,2}", "measure=",
    "islands.serve=", "recommend org/", "xmine.yaml", "islands.join=", "islands.local=", "upcycle quantize",
    "upcycle watch",
)  # fmt: skip
# what the folder has -> what it is made of, in this order
MADE = {
    "runs/demo/dense": "cp llama",
    "runs/data": "upcycle prepare runs/data tokenizer=./llama sources=[book.txt]",
    "runs/stories-data": "cp runs/data",
    "runs/stories-valid": "cp runs/data",
    "runs/valid": "cp runs/data",
    "moe": "upcycle convert source=./llama output=./moe",
    "moe-trained": "cp moe",
    "slices": "upcycle convert source=./llama output=./slices method.name=virtual_group target=upcycled",
    "parts/book": "upcycle add ./llama documents=book.txt general=other-book.txt name=book output=parts/book",
    "joined": "upcycle join ./llama parts/book output=joined",
    "runs/dense": "upcycle train model.source=./llama data.train=[runs/data] data.valid=[runs/valid] output=runs/dense",
    "runs/moe": "upcycle train my.yaml export=",
    "facts": "upcycle facts write output=facts people=100 places=0 events=0",
    "runs/eval/dense": "upcycle eval tiny runs/dense output=runs/eval/dense limit=2",
    "runs/eval/moe": "upcycle eval tiny runs/moe output=runs/eval/moe limit=2",
}


HELPS = {name: frame.about(MODULES[name]) for name in MODULES} | {name: frame.about(name) for name in PROGRAMS}
EXAMPLES = sorted(
    {line for text in HELPS.values() for line in command_lines(text, "upcycle ", "python -m ", "torchrun ")}
)


def written(command: str) -> set[str]:
    """What it makes, and must not be there."""
    if "check=true" in command:
        return set()
    found = set(re.findall(r"(?:output=(?:\./)?|upcycle prepare )(\S+)", command))
    return found | ({"runs/moe", "moe-trained"} if "train my.yaml" in command else set())


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


def test_what_is_added_is_of_use() -> None:
    for key in (*MORE, *READ):
        assert any(key in command for command in EXAMPLES), key
