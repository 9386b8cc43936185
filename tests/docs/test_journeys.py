"""Run the commands of README and of each recipe, word for word and in their order, in an empty folder.

What cannot be here is replaced: the models by random ones of the same architecture, with the same keys in config.json
and small sizes that divide as the real ones do; the texts by a few lines; the hub by files. Words added to a command
make it small. Where a page says 8 GPUs or nodes, two processes meet over gloo; under Slurm, whose own programs are
stand-ins of a few lines, two torchruns. Memory is planned with the true sizes, from headers without data.
"""

from __future__ import annotations

import csv
import importlib
import json
import os
import re
import shlex
import stat
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.run import get_args_parser
from transformers import AutoConfig, AutoModelForCausalLM

from evaluation.judge import logged
from tests.docs.test_docs import MODELS, ROOT, shaped
from tests.parallel.ranks import as_torchrun
from tests.parity import tiny
from tests.unit.training.test_chat import chat_tokenizer, conversations, rows, template
from tests.unit.training.test_data import jsonl, make_tokenizer, texts
from training.config.reading import read_config
from training.estimating import hardware
from training.estimating.memory import memory
from training.estimating.seconds import step
from training.observe.metrics import read as read_metrics
from training.run.parts import source

RECIPES = ROOT / "docs" / "recipes"
README = (ROOT / "README.md").read_text()
SAID = " ".join(" ".join([README, *(page.read_text() for page in sorted(RECIPES.glob("*.md")))]).split())
CARD = 80.0  # GB of a GPU: some 85.5 are free on one of "80 GB", of which 3 are the driver's and NCCL's
ALIASES = {"training": ["train"], "evaluation": []}
# model, folder, and what makes it small; all the numbers of experts stay as they are
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm2": ("llama", {}),
    "llama3-8b": ("llama", {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 112}),
    "nemotron4-15b": ("nemotron", {"hidden_act": "relu2", "partial_rotary_factor": 0.5, "intermediate_size": 128}),
    "qwen3-8b-base": ("qwen3", {"head_dim": 16, "intermediate_size": 128}),
}
TRAINING = [
    "data.sequence=64",
    "batch=8",
    "steps=3",
    "schedule.warmup=1",
    "log_every=1",
    "valid_every=0",
    "checkpoint.every=0",
    "device=cpu",
    "model.dtype=float32",
    "mesh.ep=2",
]


def commands(text: str) -> list[str]:
    """Return the commands of a page's blocks without comments, with the shell's `for` loops and braces expanded."""
    blocks = re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    text = re.sub(r"\\\n\s*", "", "".join(blocks))
    text = re.sub(r"^for (\w+) in (.*?); do[^\n]*\n(.*?)^done$", rolled_out, text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"(\S+)\{0,1,2\}", r"\g<1>0 \g<1>1 \g<1>2", text)
    return [found for line in text.splitlines() if (found := line.split("  #")[0].strip())]


def rolled_out(loop: re.Match[str]) -> str:
    name, values, body = loop.groups()
    return "".join(body.replace(f"${name}", value) for value in values.split())


def journey(recipe: str) -> list[str]:
    """Return the commands of a page of docs/recipes, up to its first heading."""
    return commands((RECIPES / f"{recipe}.md").read_text().split("\n## ")[0])


class Walk:
    """Runs commands in a folder, as if the big machines were there."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        monkeypatch.chdir(folder)
        (folder / "configs").symlink_to(ROOT / "configs")
        self.environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": str(ROOT),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def __call__(self, commands: list[str], more: Mapping[str, list[str]]) -> None:
        """`more`: words for the commands that begin like a key; every key must be of use."""
        used = set()
        for command in commands:
            keys = [key for key in more if key in command]
            used |= set(keys)
            begun = time.monotonic()
            self.one(command, [word for key in keys for word in more[key]])
            print(f"{time.monotonic() - begun:.1f} s: {command}")
        assert used == set(more)

    def one(self, command: str, more: list[str]) -> None:
        words = shlex.split(command)
        if "|" in words:
            subprocess.run(["bash", "-o", "pipefail", "-c", command], env=self.environment, check=True)
            return
        if words[0] == "upcycle" or words[:2] == ["python", "-m"]:
            self.upcycle(words, more)
            return
        if words[:2] == ["hf", "download"]:
            helped = subprocess.run(["hf", "download", "--help"], env=self.environment, capture_output=True, text=True)
            assert all(word in helped.stdout for word in words if word.startswith("--")), command
            made = Path(words[words.index("--local-dir") + 1])
            assert made.is_dir(), f"{command}: the model is not made"
        elif words[:3] == ["pip", "install", "-e"]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            assert set(words[3].strip(".[]").split(",")) <= set(extras)
        elif words[:2] == ["vllm", "serve"]:  # tests/engines asks vLLM
            config = json.loads((self.folder / words[2] / "config.json").read_text())
            assert config["auto_map"].keys() >= {"AutoModel"} and words[3:] == ["--trust-remote-code"]
        elif words[0] == "torchrun":
            self.torchrun(words, more)
        elif words[0] == "sbatch":
            self.sbatch(words, more)
        else:
            raise AssertionError(f"nobody knows how to try: {command}")

    def upcycle(self, words: list[str], more: list[str]) -> None:
        """In this process; where it says nproc=8, in two that meet over gloo. A dense model is asked in one process."""
        if words[0] == "python":
            module, *rest = words[2:]
            if module.startswith(("benchmarks", "examples")):
                assert not importlib.import_module(module).main([*rest, *more])
                return
            words = ["upcycle", *ALIASES[module], *rest]
        verb, *given = [word for word in [*words[1:], *more] if not word.startswith("nproc=")]
        several = any(word.startswith("nproc=") for word in words)
        if several and verb in ("convert", "prepare"):
            self.together([[sys.executable, "-m", "upcycle", verb, *given, "nproc=2"]])
        elif several and (verb != "eval" or "mesh.ep=8" in given):
            self.ranks("upcycle.__main__", [verb, *given])
        else:
            assert not importlib.import_module("upcycle.__main__").main([verb, *given]), words

    def torchrun(self, words: list[str], more: list[str]) -> None:
        """Two nodes with a process each, which share this machine. torchrun itself runs under sbatch, with these options;
        here its parser reads them."""
        given = get_args_parser().parse_args(words[1:])
        assert (given.nnodes, given.rdzv_backend, given.module, given.training_script) == (
            "2",
            "c10d",
            True,
            "training",
        )
        self.ranks("training.__main__", [*given.training_script_args, *more])

    def ranks(self, module: str, words: list[str]) -> None:
        said = [self.folder / f"said-{rank}.txt" for rank in range(2)]
        codes = as_torchrun(2, module, words, said)
        assert codes == [0, 0], "\n".join(file.read_text()[:3000] for file in said)

    def sbatch(self, words: list[str], more: list[str]) -> None:
        """The batch script itself, under a Slurm that knows one machine: srun starts what it is given, once a node."""
        assert words[1:3] == ["--nodes", "4"]
        self.program("scontrol", "echo localhost")
        self.program(
            "srun",
            'while [[ $1 == --* ]]; do shift; done\n"$@" &\nfirst=$!\n"$@"\nwait $first',
        )
        self.program("torchrun", f'exec {sys.executable} -m torch.distributed.run "$@"')
        slurm = {
            "SLURM_JOB_NODELIST": "localhost", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "1", "SLURM_JOB_ID": "7",
            "RDZV_PORT": str(free_port()), "PATH": f"{self.folder / 'bin'}:{self.environment['PATH']}",
        }  # fmt: skip
        self.together([["bash", *words[3:], *more]], slurm)

    def program(self, name: str, lines: str) -> None:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{lines}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def together(self, commands: list[list[str]], more: Mapping[str, str] | None = None) -> None:
        said = [self.folder / f"said-{number}.txt" for number, _ in enumerate(commands)]
        started = []
        for command, file in zip(commands, said, strict=True):
            with file.open("wb") as out:
                environment = self.environment | dict(more or {})
                started.append(subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT))
        try:
            codes = [process.wait(240) for process in started]
        finally:
            for process in started:
                process.kill()
        assert not any(codes), "\n".join(file.read_text()[:3000] for file in said)


def free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


@pytest.fixture
def walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Walk:
    return Walk(tmp_path, monkeypatch)


def make_model(folder: Path, model: str) -> None:
    family, sizes = SMALL[model]
    tiny.make(family, folder, dtype=torch.bfloat16, vocab_size=400, bos_token_id=0, eos_token_id=1, **sizes)
    tokenize(folder)


def tokenize(folder: Path) -> None:
    make_tokenizer(folder, bos=True)
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def place(folder: Path, model: str, sets: tuple[str, ...]) -> None:
    """What a user has before the first command that is ours: the model, and texts."""
    make_model(folder / model, model)
    for seed, name in enumerate(sets):
        (folder / "text" / name).mkdir(parents=True)
        for part in ("law", "code"):
            jsonl(folder / "text" / name / f"{part}.jsonl", texts(40, seed))


def fell(folder: Path) -> None:
    losses = [row["loss"] for row in read_metrics(folder) if "loss" in row]
    assert len(losses) == 3 and losses[-1] < losses[0], losses


# ---- the journeys


def test_slices_on_a_laptop(walk: Walk, capsys: pytest.CaptureFixture[str]) -> None:
    place(walk.folder, "smollm2", ("train", "held-out"))
    walk(journey("laptop"), {"upcycle train slices": TRAINING[:-1], "upcycle chat": ["tokens=4"]})
    fell(walk.folder / "runs" / "slices")
    made = json.loads((walk.folder / "slices" / "config.json").read_text())
    assert (len(made["expert_widths"]), made["model_type"]) == (16, "upcycled")
    assert "upcycled" in capsys.readouterr().err


def test_llama_3_8b_on_one_node(walk: Walk) -> None:
    place(walk.folder, "llama3-8b", ("train", "held-out"))
    more = {
        "upcycle train llama3": [*TRAINING, "micro_batch=2", "schedule.peak=1e-3"],
        "model.source=llama3-8b": ["mesh.ep=1"],
        "upcycle recommend": ["sequence=64"],
        "upcycle eval": ["device=cpu"],
        "mesh.ep=8": ["mesh.ep=2"],
    }
    walk(journey("llama3-8b"), more)
    for arm in ("moe", "dense"):
        fell(walk.folder / "runs" / arm)
    # upcycled as it is read, the model began as the dense one
    first = [next(row for row in read_metrics(walk.folder / "runs" / arm) if "loss" in row) for arm in ("moe", "dense")]
    assert first[0]["loss"] == pytest.approx(first[1]["loss"], rel=1e-5)
    made = json.loads((walk.folder / "llama3-8b-slices-trained" / "config.json").read_text())
    assert (len(made["expert_widths"]), made["model_type"]) == (16, "upcycled")
    assert (walk.folder / "report.html").is_file()


def test_the_readmes_ten_commands(walk: Walk, capsys: pytest.CaptureFixture[str]) -> None:
    place(walk.folder, "llama3-8b", ("train", "held-out"))
    section = README.split("\n## I have Llama")[1].split("\n## ")[0]
    lines = commands(section)
    assert len(lines) == 14  # ten, two of them once a seed
    # the seeds after the first run in one process, which starts sooner
    lines = [line.replace(" nproc=8", "") if line.split()[4:5] != ["output=runs/moe-0"] else line for line in lines]
    more = {
        "upcycle train": [*TRAINING[:-1], "micro_batch=2", "schedule.peak=1e-3"],
        "nproc=8": ["mesh.ep=2"],
        "upcycle recommend": ["sequence=64"],
    }
    walk(lines, more)
    said = capsys.readouterr().out
    assert "seeds" in said.split("Validation loss at equal tokens")[1] and "no verdict" not in said
    assert (walk.folder / "report.html").is_file()
    made = json.loads((walk.folder / "llama3-8b-moe" / "config.json").read_text())
    assert (len(made["expert_widths"]), made["model_type"]) == (16, "upcycled")


def test_nemotron_4_15b_under_slurm(walk: Walk) -> None:
    place(walk.folder, "nemotron4-15b", ("train", "held-out"))
    more = {"sbatch": [*TRAINING, "schedule.peak=1e-3"], "upcycle eval": ["device=cpu", "mesh.ep=2"]}
    walk(journey("nemotron4-15b"), more)
    fell(walk.folder / "runs" / "nemotron")
    made = json.loads((walk.folder / "nemotron4-15b-e64t8-trained" / "config.json").read_text())
    assert (len(made["expert_widths"]), made["model_type"]) == (64, "upcycled")


def test_qwen3_8b_on_two_nodes(walk: Walk) -> None:
    place(walk.folder, "qwen3-8b-base", ("train", "held-out"))
    more = {"-m training qwen3": [*TRAINING, "schedule.peak=1e-3"], "upcycle routing": ["tokens=500"]}
    walk(journey("qwen3-8b"), more)
    fell(walk.folder / "runs" / "qwen3")
    made = json.loads((walk.folder / "qwen3-8b-e56t7-trained" / "config.json").read_text())
    assert (len(made["expert_widths"]), made["num_experts_per_tok"], made["model_type"]) == (56, 7, "upcycled")


def test_qwen3_30b_goes_on(walk: Walk) -> None:
    for seed, name in enumerate(("train", "held-out")):
        (walk.folder / "text" / name).mkdir(parents=True)
        for part in ("law", "code"):
            jsonl(walk.folder / "text" / name / f"{part}.jsonl", texts(40, seed))
    folder = walk.folder / "qwen3-30b-a3b"
    sizes = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 16, "norm_topk_prob": True}
    config = AutoConfig.for_model("qwen3_moe", **{**tiny.SIZES, "vocab_size": 400, "head_dim": 16, **sizes})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenize(folder)
    small = ["device=cpu", "dtype=float32"]
    more = {
        "train qwen3": [*TRAINING, "schedule.peak=1e-3", "mesh.ep=1"],
        "upcycle eval": small,
        "upcycle routing": ["tokens=500"],
    }
    # in one process: the other journeys train in two, which take 20 seconds to begin
    walk([line.replace(" nproc=8", "") for line in journey("qwen3-30b")], more)
    fell(walk.folder / "runs" / "qwen3-30b")
    found = json.loads((walk.folder / "routing.json").read_text())
    # random routers may leave the experts that go unused in a layer, so that nothing is lost there
    assert all(len(row["saliency"]) == 128 and 0 <= row["pruned"][0] < 1 for row in found["layers"])
    made = json.loads((walk.folder / "qwen3-23b" / "config.json").read_text())
    assert (made["num_local_experts"], made["num_experts_per_tok"]) == (96, 8)  # as transformers 5 calls them


def test_mmlu_of_dense_and_moe(walk: Walk) -> None:
    place(walk.folder, "llama3-8b", ())
    make_mmlu(walk.folder / "files")
    small = [f"data={walk.folder / 'files'}", "device=cpu", "dtype=float32", "forward_tokens=4096"]
    walk(journey("mmlu"), {"upcycle eval": small, "mesh.ep=8": ["mesh.ep=2"]})
    dense, moe = (logged.load(walk.folder / "runs/eval" / name).groups["mmlu"] for name in ("mmlu-dense", "mmlu-moe"))
    assert dense.items == 57 * 2
    assert dense.metrics == pytest.approx(moe.metrics)  # an exact upcycle


def make_mmlu(folder: Path) -> None:
    """57 subjects, of two questions and five examples each."""
    import lm_eval

    names = (Path(lm_eval.__file__).parent / "tasks" / "mmlu" / "default").glob("mmlu_*.yaml")
    subjects = sorted(name.stem.removeprefix("mmlu_") for name in names)
    assert len(subjects) == 57
    for split, count in (("test", 2), ("dev", 5)):
        (folder / "mmlu" / split).mkdir(parents=True)
        for subject in subjects:
            with (folder / "mmlu" / split / f"{subject}_{split}.csv").open("w", newline="") as file:
                rows = csv.writer(file)
                rows.writerow(["question", "choice0", "choice1", "choice2", "choice3", "answer"])
                for number, words in enumerate(texts(count, seed=len(subject))):
                    rows.writerow([words, "old", "harbour", "grey", "boats", number % 4])


def test_chat_on_one_gpu(walk: Walk) -> None:
    model = walk.folder / "smollm2-135m-instruct"
    tiny.make("llama", model, dtype=torch.bfloat16, vocab_size=430)
    chat_tokenizer(model)
    (model / "chat_template.jinja").write_text(template("smollm2"))
    (walk.folder / "text").mkdir()
    for seed, name in enumerate(("talks", "held-out")):
        rows(walk.folder / "text" / f"{name}.jsonl", [{"messages": talk} for talk in conversations(20, seed)])
    more = {"kind=chat": ["sequence=128"], "upcycle train chat": [*TRAINING, "mesh.ep=1", "data.sequence=128"]}
    more |= {"upcycle chat": ["device=cpu", "tokens=4", "prompt=Where is the cat?"]}
    walk(journey("chat"), more)
    for run, made in {"chat": "chat-moe", "chat-lora": "chat-lora"}.items():
        fell(walk.folder / "runs" / run)
        assert (walk.folder / made / "config.json").is_file()
    assert json.loads((walk.folder / "chat-adapters" / "adapter_config.json").read_text())["r"] == 16


# ---- with the true sizes


# config and model, GPUs, words, room, and the sentence of README or a recipe that says how much it is
PLANNED = [
    ("llama3-8b-slices", 8, [], CARD, "FLOPs, and needs {} GB a GPU by plan"),
    ("llama3-8b-slices", 8, [], CARD, "training needs {} GB a GPU by plan, the dense"),
    ("llama3-8b-slices", 8, ["model.upcycle=", "model.source=SOURCE"], CARD, "the dense control {} GB."),
    ("llama3-8b-slices", 8, ["model.upcycle=", "model.source=SOURCE"], CARD, "dense control, {} GB a GPU"),
    ("llama3-8b-e8t2", 8, [], CARD, "27.8 B parameters, {} GB a GPU"),
    ("llama3-8b-e8t2", 16, ["model.upcycle.layers=all"], CARD, "or {} GB on 16"),
    ("llama3-8b-e8t2", 8, ["model.upcycle.layers=all"], 141.0, "needs {} GB on 8 GPUs"),
    (
        "llama3-8b-e8t2", 8, ["model.upcycle.layers=all", "model.recompute=experts"], 141.0,
        "`model.recompute=experts`, which is faster, {} GB on 8",
    ),
    ("nemotron4-15b-e64t8", 32, [], CARD, "needs {} GB a GPU on 32 by plan"),
    ("qwen3-30b-a3b", 8, ["model.upcycle=", "model.source=SOURCE"], CARD, "needs {} GB a GPU by plan with bfloat16"),
    ("qwen3-8b-e56t7-shared", 16, [], CARD, "needs {} GB a GPU on 16 by plan"),
    ("qwen3-8b-e56t7-shared", 8, ["model.upcycle.experts=4", "mesh.ep=4"], CARD, "`model.upcycle.experts=4 mesh.ep=4`, {} GB"),
]  # fmt: skip


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("headers")
    for name in {name for name, *_ in PLANNED}:
        shaped(folder / name, MODELS[name])
    return folder


@pytest.mark.parametrize(("config", "gpus", "words", "room", "said"), PLANNED)
def test_it_fits_its_gpus(config: str, gpus: int, words: list[str], room: float, said: str, headers: Path) -> None:
    at = headers / config
    words = [word.replace("SOURCE", str(at)) for word in words]
    online = [] if "model.upcycle=" in words else [f"model.upcycle.source={at}"]
    run = read_config(config, [*words, *online])
    with source(run) as origin:
        size = memory(origin.spec, run, gpus).total / 1e9
    assert size < room - 3, "driver, NCCL and the allocator's waste want some too"
    assert said.format(f"{size:.0f}") in SAID, f"no page says {size:.0f} GB"


@pytest.mark.parametrize(
    ("config", "gpus"), [("llama3-8b-slices", 8), ("nemotron4-15b-e64t8", 32), ("qwen3-8b-e56t7-shared", 16)]
)
def test_a_recipe_says_the_hours_that_are_planned(config: str, gpus: int, headers: Path) -> None:
    run = read_config(config, [f"model.upcycle.source={headers / config}"])
    with source(run) as origin:
        seconds = step(origin.spec, run, gpus, hardware.read("h100")).total
    hours = 1e11 / (run.batch * run.data.sequence) * seconds / 3600
    said = f"{hours:,.0f} hours on {gpus}, {hours * gpus:,.0f} GPU-hours, {hours * gpus * 2.5:,.0f}"
    assert said in SAID, said
    if config == "llama3-8b-slices":
        assert f"a run of the MoE takes {hours / 10:.0f} hours on 8 H100s" in SAID


def test_the_journeys_plan_with_the_true_sizes(headers: Path, walk: Walk, capsys: pytest.CaptureFixture[str]) -> None:
    """The same two plan commands, in a folder where the models have their real shapes: the converter's says what lies
    on disk and which command says what a GPU needs, the trainer's says that."""
    for title, folder, model in (
        ("llama3-8b", "llama3-8b", "llama3-8b-slices"),
        ("nemotron4-15b", "nemotron4-15b", "nemotron4-15b-e64t8"),
        ("qwen3-8b", "qwen3-8b-base", "qwen3-8b-e56t7-shared"),
    ):
        (walk.folder / folder).symlink_to(headers / model)
        plans = [command for command in journey(title) if " plan " in command or " estimate " in command]
        assert len(plans) == 2
        capsys.readouterr()
        walk(plans[:1], {})
        table = capsys.readouterr().out
        assert re.search(r"^on disk +\d+(\.\d+)? GB in", table, re.MULTILINE)
        assert plans[1].split(model)[0] + "CONFIG gpus=" in table and "GiB" not in table
        walk(plans[1:], {})
        assert "(this config)" in capsys.readouterr().out
