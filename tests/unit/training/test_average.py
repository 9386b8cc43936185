"""optim.average: a run ends with the mean of its last steps' weights."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.training.test_plan import ALL, CONFIG, M
from tests.unit.training.test_train import Stopped, config, losses, stops_before
from tests.unit.training.test_train import place as place
from training import export
from training.checkpoint.state import moments
from training.estimating.memory import memory
from training.optim.config import OptimConfig
from training.run import step as step_module
from training.run.build import start
from training.run.loop import train
from training.run.saving import checkpoints_of

EVERY = ["checkpoint.every=1", "checkpoint.keep=9", "valid_every=4"]


def test_a_run_ends_with_the_mean_of_its_last_steps_weights(place: Path, tmp_path: Path) -> None:
    plain = train(config(place, tmp_path / "plain", *EVERY, steps=4))
    mean = train(config(place, tmp_path / "mean", *EVERY, "optim.average=0.75", steps=4))
    steps = []
    for step in (2, 3, 4):
        export(plain / "checkpoints" / f"step-{step:08}", tmp_path / f"step-{step}")
        steps.append(load_file(tmp_path / f"step-{step}" / "model.safetensors"))
    export(mean, tmp_path / "last")
    export(mean / "checkpoints" / "step-00000003", tmp_path / "before")  # steps before the last are not touched
    before, last = (load_file(tmp_path / name / "model.safetensors") for name in ("before", "last"))
    moved = 0.0
    for name, tensor in last.items():
        assert torch.equal(before[name], steps[1][name]), name
        if name.endswith("e_score_correction_bias"):
            assert torch.equal(tensor, steps[-1][name])  # moved by balance, not by gradients: the last step's
            continue
        expected = torch.stack([step[name].double() for step in steps]).mean(0)
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-6, atol=1e-8)
        moved = max(moved, float((tensor - steps[-1][name]).abs().max()))
    assert moved > 1e-4
    assert losses(plain)[:-1] == losses(mean)[:-1] and losses(plain)[-1][1:3] == losses(mean)[-1][1:3]
    assert losses(plain)[-1][3] != losses(mean)[-1][3]  # the last validation is the mean's


def test_a_resume_is_the_run_that_never_stopped(place: Path, tmp_path: Path) -> None:
    words = ["optim.average=0.5", "checkpoint.every=1"]
    whole = train(config(place, tmp_path / "whole", *words, f"export={tmp_path / 'a'}", steps=6))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(step_module, "train_step", stops_before(6))
        train(config(place, tmp_path / "parts", *words, steps=6))
    parts = train(config(place, tmp_path / "parts", *words, f"export={tmp_path / 'b'}", steps=6))
    assert losses(whole) == losses(parts)
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_resume_may_begin_to_average_and_keeps_its_moments(place: Path, tmp_path: Path) -> None:
    plain = train(config(place, tmp_path / "plain", "checkpoint.every=1", "checkpoint.keep=9", steps=6))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(step_module, "train_step", stops_before(5))
        train(config(place, tmp_path / "late", "checkpoint.every=1", steps=6))
    with pytest.warns(UserWarning, match=r"optim\.average was 0\.0 and is 1\.0"):
        late = train(config(place, tmp_path / "late", "optim.average=1", steps=6))
    assert losses(late)[-1][1:3] == losses(plain)[-1][1:3]  # the moments went on
    for step in (5, 6):
        export(plain / "checkpoints" / f"step-{step:08}", tmp_path / f"step-{step}")
    export(late, tmp_path / "last")
    five, six, last = (load_file(tmp_path / name / "model.safetensors") for name in ("step-5", "step-6", "last"))
    name = "model.embed_tokens.weight"
    torch.testing.assert_close(last[name], (five[name] + six[name]) / 2, rtol=1e-6, atol=1e-8)


def test_more_steps_have_a_mean_of_their_own(place: Path, tmp_path: Path) -> None:
    """After four steps, the last two of them in a mean, go four more: their mean begins anew, with step 5."""
    for steps in (4, 8):
        words = config(place, tmp_path / "run", *EVERY, "optim.average=0.5", steps=steps)
        train(words)
    with start(words, torch.device("cpu")) as run:
        checkpoints_of(run).load(run.state)
        assert run.optimizer is not None and run.optimizer.param_groups[0]["averaged"] == 4


@pytest.mark.parametrize(
    ("parts", "counted"),
    [
        ([["optim.average=1"], ["optim.average=0"], ["optim.average=1"]], 2),  # the mean ends, and begins again
        ([["optim.average=1", "optim.groups=[{match: embed, lr: 0}]"], ["optim.average=1"], ["optim.average=1"]], 6),
        ([["optim.average=1", "optim.name=muon"], *[["optim.average=1", "resume.allow=[optim.name]"]] * 2], 6),
    ],
    ids=["off and on", "frozen", "another rule"],
)
def test_a_mean_that_a_checkpoint_lacks_is_not_of_zeros(
    place: Path, tmp_path: Path, parts: list[list[str]], counted: int
) -> None:
    """Two steps by each part's words. Nothing moves far in six steps, so a mean of them is as long as the weights are."""
    every = ["checkpoint.every=1", "checkpoint.keep=9", "schedule.warmup=0"]
    for steps, words in zip((2, 4, 6), parts, strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other settings
            run = train(config(place, tmp_path / "run", *every, *words, steps=steps))
    with (
        start(config(place, run, *every, *parts[-1], steps=6), torch.device("cpu")) as again,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        checkpoints_of(again).load(again.state)
        assert again.optimizer is not None and again.optimizer.param_groups[0]["averaged"] == counted
    export(run / "checkpoints" / "step-00000001", tmp_path / "first")
    export(run, tmp_path / "last")
    first, last = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "last"))
    for name, tensor in last.items():
        if not name.endswith("e_score_correction_bias"):
            assert float(tensor.norm()) == pytest.approx(float(first[name].norm()), rel=0.02), name


def test_moments_of_another_dtype_go_on_with_a_mean_beside_them() -> None:
    own = {"exp_avg": torch.zeros(2), "mean": torch.zeros(2)}
    found = moments(own, {"exp_avg": torch.ones(2, dtype=torch.bfloat16)})
    assert found["exp_avg"].dtype == torch.float32 and found["exp_avg"].tolist() == [1, 1] and "mean" in found
    assert moments({"exp_avg": own["exp_avg"]}, {**found}).keys() == {"exp_avg"}
    assert moments({"momentum": torch.zeros(2)}, {**found})["momentum"].tolist() == [0, 0]  # another rule's start anew


def test_the_plan_counts_the_mean() -> None:
    plain, mean = (memory(M, replace(CONFIG, optim=OptimConfig(average=share)), 1) for share in (0, 0.2))
    assert mean == replace(plain, moments=plain.moments + 4 * ALL)
