"""The ready studies: the tiny one end to end, stopped in the middle and started again; the real one as far as its plan."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evaluation.__main__ import main as study
from evaluation.studies import running
from evaluation.studies.lengths import flops, steps
from evaluation.studies.plan import read_study, trials
from tests.parallel.ranks import Program
from tests.unit.training.test_data import jsonl, make_tokenizer, texts
from training.__main__ import main as train_command
from training.checkpoint.layout import online
from training.cli.prepare import main as prepare
from training.data.shards import META
from training.observe import metrics
from training.run.loop import train
from upcycle.arch.sample import make_llama
from upcycle.config.reading import build, keys_of
from upcycle.config.ready import TRAIN
from upcycle.config.schema import UpcycleConfig
from upcycle.io.checkpoint import Checkpoint

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
SMOLLM2 = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 2, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 2048, "tie_word_embeddings": True,
    "dtype": "bfloat16",
}  # fmt: skip

KINDS = ("embed", "attn", "gate", "experts")  # of tensors, by what is in their names; gate is the router
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}{{ eos_token }}{% endif %}{% endfor %}"


# of every process of a study: the run that is named waits for Ctrl-C once it has logged the step. A run of 24 toy steps is
# over in a moment, and on a busy machine one ends, and the next begins, before another is where it is to be stopped
HOLD = """
import signal, sys, time
steps = {"dense/seed-0.yaml": 3, "copies/seed-0.yaml": 9}
last = [step for name, step in steps.items() if sys.orig_argv[-1].endswith(name)]
if last:
    from training.observe.metrics import Metrics
    log, came = Metrics.log, []

    def held(self, step, **more):
        log(self, step, **more)
        if step >= last[0]:
            before = signal.signal(signal.SIGINT, lambda *given: (came.append(given), before(*given)))
            while not came:
                time.sleep(0.05)

    Metrics.log = held
"""


def start(words: list[str], log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "evaluation", "study", "tiny", *words]
    hook = log.with_name("hook")
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(HOLD)
    environment = ENVIRONMENT | {"PYTHONPATH": f"{hook}{os.pathsep}{ROOT}"}
    with log.open("ab") as file:
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file)


def step(folder: Path) -> int:
    rows = metrics.read(folder) if (folder / metrics.FILE).is_file() else []
    return int(rows[-1]["step"]) if rows else 0


def without_time(figures: dict[str, Any]) -> Any:
    """What is learned."""
    losses = {
        (run["arm"], run["seed"], name): [(at["step"], value) for at, value in curve]
        for run in figures["outcomes"]
        for name, curve in run["losses"].items()
    }
    return losses, [{k: v for k, v in one.items() if k != "ratio"} for one in figures["contrasts"]]


def test_the_tiny_study_is_stopped_goes_on_and_does_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, log = tmp_path / "study", tmp_path / "log"
    words = [f"output={home}", "seeds=[0]", "sample.first=4", "sample.characters=30000"]
    first = start(words, log)
    stopped, beside = home / "runs" / "copies" / "seed-0", home / "runs" / "dense" / "seed-0"
    while step(stopped) < 9 or step(beside) < 3:  # a checkpoint is every 6, and where a run is stopped
        assert first.poll() is None, log.read_text()
        time.sleep(0.05)
    first.send_signal(signal.SIGINT)
    assert first.wait() == 130, log.read_text()
    reached = step(stopped)
    assert 9 <= reached < 24, "it ended before it was stopped; stop it sooner"
    for arm in ("dense", "copies"):  # those that ran have saved, and no other has begun
        assert list((home / "runs" / arm / "seed-0" / "checkpoints").glob("step-*"))
    assert not list(home.glob("runs/slices/seed-0/*"))

    torch.set_num_threads(1)  # as the runs have, of which one is taken again here
    forks = SimpleNamespace(Popen=Program, DEVNULL=subprocess.DEVNULL)  # an import of torch takes longer than a run
    monkeypatch.setattr(running, "subprocess", forks)
    assert study(["study", "tiny", *words]) == 0
    figures = json.loads((home / "study.json").read_text())
    ended = {(run["arm"], run["finished"]) for run in figures["outcomes"]}
    assert ended == {(arm, True) for arm in ("dense", "copies", "slices", "dense-flops")}
    assert stopped.with_suffix(".log").read_text().count("step 3/24") == 1  # resumed, not begun again

    # the run that was stopped is the run that never was: by the command that the page gives
    (command,) = [
        line for line in figures["commands"]["Each run by itself"].splitlines() if line.endswith("copies/seed-0.yaml")
    ]
    whole = tmp_path / "whole"
    program, verb, *more = shlex.split(command)
    assert (program, verb) == ("upcycle", "train") and train_command([*more, f"output={whole}"]) == 0
    for a, b in zip(metrics.read(whole), metrics.read(stopped), strict=False):
        keys = {key for key in a.keys() & b.keys() if key.startswith("valid/")}
        assert {key: a[key] for key in keys} == {key: b[key] for key in keys}
    assert metrics.read(whole)[-1]["valid/prose/loss"] == metrics.read(stopped)[-1]["valid/prose/loss"]

    by = {(one["question"], one["what"], one["arm"], one["against"]): one for one in figures["contrasts"]}
    flops_ratio = by["flops", "code", "copies", "dense-flops"]["ratio"]
    assert flops_ratio == pytest.approx(1, abs=0.05)  # whole steps
    assert by["tokens", "prose", "slices", "dense"]["verdict"] == "one run each: no verdict"
    assert ("flops", "prose", "slices", "dense") in by  # a token costs what the control's costs

    runs = {path: path.stat().st_mtime_ns for path in home.rglob("metrics.jsonl")}
    assert study(["study", "tiny", *words]) == 0
    assert {path: path.stat().st_mtime_ns for path in home.rglob("metrics.jsonl")} == runs
    assert without_time(json.loads((home / "study.json").read_text())) == without_time(figures)


def test_the_smollm2_study_plans_what_it_says(tmp_path: Path) -> None:
    make_llama(tmp_path / "dense", SMOLLM2)
    for name in ("train", "encyclopedia", "techdocs", "fiction", "law", "code"):
        (tmp_path / name).mkdir()
        (tmp_path / name / META).touch()
    plan = read_study("smollm2", [f"source={tmp_path / 'dense'}", f"data={tmp_path}", f"output={tmp_path / 'out'}"])
    costs = flops(plan)
    lengths = steps(plan, costs, {"slices": 0.21, "dense-seconds": 0.168})
    some = trials(plan, lengths)
    assert len(some) == 21 and plan.control == "dense"
    assert lengths["dense-flops"] == round(400 * costs["copies"] / costs["dense"])
    assert costs["groups"] == costs["groups-frozen"] == costs["slices"] == costs["dense"] < costs["copies"]
    slices = plan.trial("slices", 0).config.model.upcycle
    assert slices["target"] == "upcycled" and "router" not in slices  # which then chooses in each slice
    assert plan.means == {"in": ("encyclopedia", "techdocs", "fiction"), "law": ("law",), "code": ("code",)}


def tiny_chat(folder: Path) -> list[str]:
    """A tiny model with a chat template, conversations and two sets that are held out: the words of a study with it."""
    make_llama(folder / "dense", {**SMOLLM2, "hidden_size": 36, "intermediate_size": 48, "vocab_size": 400})
    tokenizer = make_tokenizer(folder / "dense", bos=False)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "chat_template": TEMPLATE}
    (folder / "dense" / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, seed in (("talks", 0), ("talks-held-out", 1)):
        rows = [{"prompt": text[:40], "completion": text[:90]} for text in texts(20, seed)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = [f"tokenizer={tokenizer}", f"sources=[{folder / 'rows.jsonl'}]", "kind=chat", "sequence=64"]
        assert prepare([str(folder / name), *words]) == 0
    for name in ("law", "code"):
        source = jsonl(folder / f"{name}.jsonl", texts(9, 2))
        assert prepare([str(folder / name), f"tokenizer={tokenizer}", f"sources=[{source}]"]) == 0
    return [f"source={folder / 'dense'}", f"data={folder}", f"output={folder / 'out'}"]


SHORT = ["steps=2", "batch=2", "micro_batch=2", "schedule.warmup=0", "valid_every=0", "data.sequence=64"]


def test_the_chat_study_plans_what_it_says_and_its_arms_train(tmp_path: Path) -> None:
    """A tiny model with its keys: the arms with a teacher differ from those without by its divergence alone."""
    words = tiny_chat(tmp_path)
    plan = read_study("sft", words)
    assert steps(plan, flops(plan), {}) == dict.fromkeys(plan.arms, 300) and len(plan.arms) == 4
    assert len(trials(plan, steps(plan, flops(plan), {}))) == 12
    plan = read_study("sft", [*words, *(f"base.{word}" for word in [*SHORT, "model.dtype=float32"])])
    for arm in ("dense-taught", "upcycled-taught"):
        rows = metrics.read(train(plan.trial(arm, 0).config))
        assert rows[-1]["loss/teacher"] < 0.1 and {"valid/talks-held-out/loss", "valid/law/loss"} <= rows[-1].keys()


def test_the_adapters_study_plans_what_it_says_and_its_arms_learn_what_their_names_say(tmp_path: Path) -> None:
    words = tiny_chat(tmp_path)
    plan = read_study("adapters", words)
    arms = ("full", "dense", "lora", "lora-fast", "router")
    assert steps(plan, costs := flops(plan), {}) == dict.fromkeys(arms, 300) and plan.control == "full"
    assert len(trials(plan, steps(plan, costs, {}))) == 15
    assert costs["full"] > costs["router"] and costs["full"] > costs["dense"]  # what is frozen has no gradient
    assert costs["lora"] == costs["lora-fast"] > costs["router"], "adapters of rank 16 are no less than these matrices"
    more = [*SHORT, "model.dtype=float32"]
    plan = read_study("adapters", [*words, *(f"base.{word}" for word in more)])
    learned = {"full": set(KINDS), "lora": {"attn", "gate", "experts"}, "router": {"gate"}}
    for arm, changed in learned.items():
        config = plan.trial(arm, 0).config
        train(replace(config, export=str(tmp_path / f"{arm}-out")))
        upcycle = build(UpcycleConfig, config.model.upcycle)
        with online(upcycle) as origin, Checkpoint.open(tmp_path / f"{arm}-out") as out:
            moved = {name for name in out.entries if not torch.equal(out.read(name), origin.read(name))}
        assert {kind for name in moved for kind in KINDS if kind in name} == changed, arm


def test_the_arm_of_a_part_trains_what_upcycle_add_trains(tmp_path: Path) -> None:
    plan = read_study("parts", [f"source={tmp_path / 'dense'}", f"data={tmp_path}", f"output={tmp_path / 'out'}"])
    ours, ready = plan.arms["part"].values, keys_of("part", TRAIN)
    assert {key: ours[key] for key in ("optim", "balance")} == {key: ready[key] for key in ("optim", "balance")}
    upcycle = {**ours["model"]["upcycle"], "source": "", "method": {"name": "part", "part": "part"}}
    assert upcycle.pop("router") == {"init": {"texts": ["general.jsonl", f"{tmp_path}/out/facts/train.jsonl"]}}
    assert upcycle == ready["model"]["upcycle"] and plan.control == "untouched"


def test_stages_are_no_arm(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="arm dense has stages"):
        read_study("sft", ["source=x", f"data={tmp_path}", "arms.dense.stages=[{steps: 300}]"])


def test_a_ready_study_says_what_it_was_not_given(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="arm dense begins with no model; write source=FOLDER"):
        read_study("smollm2", [f"data={tmp_path}"])
