"""Stages of a run: each has its own steps, data, length, schedule, groups and balance, and a resume is bitwise in any."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.unit.training.test_data import jsonl, texts
from tests.unit.training.test_train import config, losses, moe
from tests.unit.training.test_train import place as place
from training.checkpoint.storage import read_manifest
from training.cli.estimate import main as plan
from training.cli.prepare import main as prepare
from training.config.schema import TrainConfig
from training.config.stages import stages_of, tokens_by
from training.estimating.estimate import table
from training.estimating.memory import Model, memory
from training.observe import plots
from training.observe.metrics import read as read_metrics
from training.parallel.shard import learns_anew
from training.run import stages
from training.run.build import begin, start
from training.run.loop import train
from training.run.parts import source
from training.run.preflight import preflight
from training.run.saving import checkpoints_of
from training.run.stages import enter

LOGGED = ("step", "stage", "loss", "grad_norm", "lr", "tokens", "flops", "skipped", "valid/", "balance/", "epochs/")


@pytest.fixture(scope="module")
def two(place: Path) -> Path:
    """A second source beside the first."""
    source = jsonl(place / "curated.jsonl", texts(9, 2))
    assert prepare([str(place / "curated"), f"tokenizer={place / 'tokenizer'}", f"sources=[{source}]"]) == 0
    return place


def staged(place: Path) -> str:
    """The router alone, then all; then other data, twice the length, another schedule, batch and balance."""
    both = [{"path": str(place / "data"), "weight": 1}, {"path": str(place / "curated"), "weight": 3}]
    stages = [
        {"name": "router", "steps": 2, "schedule": {"warmup": 1}, "optim": {"groups": [{"match": "*", "lr": 0}, {"match": "router"}]}},
        {"name": "all", "steps": 3, "schedule": {"warmup": 0}, "balance": {"bias_rate": 0.0, "aux_weight": 0.1}},
        {
            "name": "decay", "tokens": 3 * 2 * 48 - 5, "batch": 2, "micro_batch": 1,
            "data": {"train": both, "sequence": 48}, "schedule": {"shape": "linear", "warmup": 0, "final": 0.0},
            "optim": {"weight_decay": 0.0, "average": 0.5},
        },
    ]  # fmt: skip
    return f"stages={json.dumps(stages)}"


def run_of(place: Path, folder: Path, *words: str) -> TrainConfig:
    return config(place, folder, staged(place), "checkpoint.every=3", "checkpoint.keep=99", *words, steps=1000)


@pytest.fixture(scope="module")
def whole(two: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stages")
    return train(run_of(two, folder / "whole", f"export={folder / 'whole-out'}"))


def rows(folder: Path) -> list[dict[str, Any]]:
    kept = [{k: v for k, v in row.items() if k.startswith(LOGGED)} for row in read_metrics(folder)]
    return [{k: v for k, v in row.items() if k != "tokens_per_s"} for row in kept]


def back_to(whole: Path, folder: Path, step: int) -> Path:
    """A run's folder as it was after a step."""
    shutil.copytree(whole, folder)
    for path in (folder / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    return folder


@pytest.mark.parametrize("step", [2, 3, 5, 6])
def test_a_resume_is_bitwise_in_a_stage_and_at_its_ends(two: Path, whole: Path, tmp_path: Path, step: int) -> None:
    train(run_of(two, back_to(whole, tmp_path / "run", step), f"export={tmp_path / 'out'}"))
    assert rows(tmp_path / "run") == rows(whole)
    have, want = (load_file(f / "model.safetensors") for f in (tmp_path / "out", whole.with_name("whole-out")))
    assert all(torch.equal(have[name], tensor) for name, tensor in want.items())


def test_each_stage_has_its_own_settings(whole: Path) -> None:
    found = rows(whole)
    assert [row["stage"] for row in found] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    # one step of warm-up and the cosine's first; the cosine's three without any; a line to 0
    assert [row["lr"] for row in found[1:]] == pytest.approx([1e-3, 1e-3, 1e-3, 5.1e-4, 2e-5, 1e-3, 5e-4, 0])
    assert [row["tokens"] for row in found[1:]] == [96 * n for n in range(1, 9)]
    valid = [row["step"] for row in found if "valid/valid/loss" in row]
    assert valid == [0, 2, 5, 8], "a stage's end is validated"
    frozen, all_learn, longer = (found[n]["flops"] - (found[n - 1].get("flops") or 0) for n in (1, 5, 8))
    assert 1 < longer / all_learn < 1.5, "tokens of longer sequences cost more"
    assert 0.6 < frozen / all_learn < 1, "the router alone has a gradient"


def test_what_a_stage_freezes_keeps_its_bits_and_learns_later(two: Path, whole: Path, tmp_path: Path) -> None:
    weights = {}
    with start(run_of(two, tmp_path / "new"), torch.device("cpu")) as run:
        begin(run)
        weights[0] = {name: p.detach().clone() for name, p in run.model.named_parameters()}
        for step in (2, 5):
            run.folder = back_to(whole, tmp_path / f"at-{step}", step)
            with checkpoints_of(run) as checkpoints:
                assert checkpoints.load(run.state) == step
            weights[step] = {name: p.detach().clone() for name, p in run.model.named_parameters()}
            moments = run.optimizer.state if run.optimizer else {}
            for name, p in run.model.named_parameters():
                assert bool(moments[p]["step"] == 0) == (step == 2 and "router" not in name), name
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[2][name]) == ("router" not in name), name
        moved = not torch.equal(weights[2][name], weights[5][name])
        assert moved or "shared" in name, name  # which are empty


def test_a_mixture_goes_on_across_stages(two: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the last stage's six samples of twice the length each source has its share within one, and none begins anew."""
    with start(run_of(two, whole), torch.device("cpu")) as run:
        windows = {}
        with checkpoints_of(run) as checkpoints:
            checkpoints.load(run.state)
        anew = list[tuple[int, nn.Module]]()
        monkeypatch.setattr(stages, "learns_anew", lambda part: anew.append((run.stage.number, part)))
        for stage in run.stages:
            enter(run, stage)
            windows[stage.number] = run.place.samples.state(20)["windows"] if run.place.samples else {}
        assert anew == [(2, run.model)], "where what learns changes, and nowhere else"
    last = rows(whole)[-1]
    assert [row["epochs/data"] for row in rows(whole)[1:6]] == pytest.approx(
        [4 * n / windows[1]["data"] for n in range(1, 6)]
    )
    assert last["epochs/curated"] * windows[3]["curated"] == pytest.approx(6 * 3 / 4, abs=1)
    carried = 20 / windows[1]["data"]  # of an epoch, by the first two
    assert (last["epochs/data"] - carried) * windows[3]["data"] == pytest.approx(6 / 4, abs=2)


def test_a_stage_alone_is_a_run_without(two: Path, tmp_path: Path) -> None:
    plain = train(config(two, tmp_path / "plain", steps=3))
    alone = train(config(two, tmp_path / "alone", "stages=[{steps: 3}]", steps=3))
    assert rows(plain) == rows(alone)


def test_a_finished_run_may_be_given_another_stage(two: Path, tmp_path: Path) -> None:
    """As a decay is put behind a stable run; a change of the stage that it is in is said, and one of the past is not."""
    words = ["schedule.shape=constant", "schedule.warmup=1", "data.valid=[]"]
    train(config(two, tmp_path / "run", *words, steps=2))
    more = "stages=[{steps: 2}, {name: decay, steps: 2, schedule: {shape: linear, warmup: 0}}]"
    train(config(two, tmp_path / "run", more, *words, steps=4))
    found = rows(tmp_path / "run")
    assert [row["lr"] for row in found] == pytest.approx([1e-3, 1e-3, 1e-3, 2e-5])
    assert (
        read_manifest(tmp_path / "run" / "checkpoints" / "step-00000004")["settings"]["stages"] == "decay, after step 2"
    )
    with pytest.raises(ValueError, match=r"data\.sequence was 24 and is 12"):
        bad = more.replace("{name", "{data: {sequence: 12}, name")
        train(config(two, tmp_path / "run", bad, *words, steps=4))


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        ("[{steps: 3, mesh: {ep: 2}}]", r"stages\.0\.mesh cannot differ between stages"),
        ("[{steps: 8, schedule: {peek: 2}}]", r"stages\.0: unknown key 'schedule\.peek'; did you mean 'peak'"),
        ("[{steps: 3}, {steps: 5, schedule: {peak: -2}}]", r"stages\.1: schedule\.peak is -2"),
        ("[{}]", r"stages\.0: steps is 0 and tokens is 0; set exactly one of them"),
        ("[{steps: 3, tokens: 4}]", r"set exactly one of them"),
        ("[{steps: 8, optim: {name: muon}}]", r"stages\.0: optim\.name is 'muon' and the run's is 'adamw'"),
        ("[{steps: 3}]", r"steps is 8, but the stages have 3; leave steps out"),
        ("[{steps: 4, optim: {average: 0.2}}, {steps: 4}]", r"stages\.0 has optim\.average, which applies at the run's end"),
        ("[{steps: 4}, {steps: 4, data: {train: [q/data]}}]", r"stages\.1\.data\.train has data in q/data, which in an"),
        ("[{steps: 6}, {steps: 2}]", r"stages\.1: schedule\.warmup=2 is not below steps=2"),
        ("[{steps: 6}, {steps: 2, schedule: {warmup: 0}, optim: {groups: [{match: ruter, lr: 0}]}}]", r"'ruter', which matches no"),
        ("[{steps: 6}, {steps: 2, schedule: {warmup: 0}, batch: 3}]", r"stages\.1: micro_batch=2 must divide batch=3"),
    ],
)  # fmt: skip
def test_what_cannot_be_staged_is_a_sentence(place: Path, tmp_path: Path, stages: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        preflight(config(place, tmp_path / "run", f"stages={stages}"))


def test_tokens_are_counted_through_stages(place: Path, tmp_path: Path) -> None:
    stages = stages_of(
        config(place, tmp_path, "stages=[{steps: 3}, {tokens: 100, batch: 8}, {steps: 1, batch: 2}]", steps=5)
    )
    assert [stage.last for stage in stages] == [3, 4, 5]
    assert [tokens_by(stages, step) for step in range(6)] == [0, 96, 192, 288, 480, 528]


def test_plots_know_where_a_stage_ends(whole: Path) -> None:
    (curves,) = plots.read_runs([whole])
    assert curves.boundaries() == [192, 480]


def test_the_plan_has_a_line_a_stage(two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = replace(run_of(two, tmp_path / "run"), model=replace(run_of(two, tmp_path).model, dtype="bfloat16"))
    with source(settings) as origin:
        first, second, third = (
            memory(origin.spec, stage.config, 1, Model(origin.spec, stage.config, whole=settings))
            for stage in stages_of(settings)
        )
        said = table(origin.spec, settings, 1)
    assert first.gradients < second.gradients and first.moments == second.moments == third.moments
    assert first.weights == second.weights, "what learns in any stage is float32 in all"
    lines = [line for line in said.splitlines() if "this config" in line]
    assert [line.partition("(")[2] for line in lines] == [
        f"this config, {name})" for name in ("router", "all", "decay")
    ]
    assert f"{second.total / 1e9:11.2f}" in lines[1]
    words = [f"{staged(two)}", f"data.train=[{two / 'data'}]", "data.sequence=24", "batch=4", "micro_batch=2"]
    assert plan([f"model.upcycle={json.dumps(moe(two))}", "gpus=1", "hardware=h100", *words, "schedule.warmup=0"]) == 0
    shown = capsys.readouterr().out
    assert "router: 2 steps, 0.000 B tokens" in shown and "decay: 3 steps" in shown


def test_what_was_frozen_when_fsdp_gathered_it_first_is_summed_as_wide_as_its_master() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(1, 4, dtype=torch.bfloat16)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for part in (*model, model):
            fully_shard(part, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
        model[0].requires_grad_(False)
        model(x).sum().backward()
        model[0].requires_grad_(True)
        learns_anew(model)
        model(x).sum().backward()
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
        assert all(p.grad is not None for p in model.parameters())
    finally:
        dist.destroy_process_group()


def test_the_end_of_a_stage_leaves_copies_where_they_are(place: Path, tmp_path: Path) -> None:
    """optim.shrink, here by default, is for validations and exports."""
    words = ["model.upcycle.target=upcycled", "model.upcycle.router.choice=each-slice", "schedule.shape=constant"]
    words += ["schedule.warmup=0", "valid_every=2"]
    plain = train(config(place, tmp_path / "plain", *words, steps=4))
    staged = train(config(place, tmp_path / "staged", "stages=[{steps: 2}, {steps: 2}]", *words, steps=4))
    assert losses(staged) == losses(plain)
