"""A dense teacher: its divergence and gradient against torch's own, and a run that learns beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from tests.parity import tiny
from tests.unit.training.test_frozen import first_batches
from tests.unit.training.test_plan import CONFIG, D, M
from tests.unit.training.test_train import Stopped, config, losses, stops_before
from tests.unit.training.test_train import place as place
from training.checkpoint.layout import opened
from training.data.mixture import DataConfig
from training.estimating.estimate import table
from training.estimating.memory import Model, memory
from training.model import loss as loss_module
from training.model.loss import Lesson, linear_cross_entropy, taught_cross_entropy
from training.observe.metrics import read as read_metrics
from training.optim.teacher import TeacherConfig, weights
from training.run import step as step_module
from training.run.build import begin, start
from training.run.loop import train
from training.run.preflight import preflight
from training.run.step import gradients
from upcycle.arch.spec import DenseSpec
from upcycle.planning.size import dense_flops

QUICK = ["schedule.peak=1e-2", "data.valid=[]", "checkpoint.asynchronous=false"]
TEACHER = ["teacher.weight=0.5", "teacher.temperature=2"]


def described(folder: Path) -> DenseSpec:
    with opened(folder) as origin:
        return origin.dense


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("cap", [0.0, 1.5])
@pytest.mark.parametrize("chunk", [40, 1 << 20])
def test_the_divergence_and_its_gradient_are_torchs(cap: float, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, in one chunk and in many, with soft caps, scales, temperature, and labels that are not scored."""
    monkeypatch.setattr(loss_module, "TAUGHT", chunk)
    x, w = drawn(11, 5, seed=0).requires_grad_(), drawn(13, 5, seed=1).requires_grad_()
    label = torch.arange(11).where(torch.arange(11) % 3 > 0, torch.tensor(-100))
    lesson = Lesson(drawn(11, 7, seed=2), drawn(13, 7, seed=3), 0.8, 2 * cap, 3.0, 0.7)
    found = taught_cross_entropy(x, w, label, 1.2, cap, lesson)

    def bent(logits: Tensor, cap: float) -> Tensor:
        return cap * torch.tanh(logits / cap) if cap else logits

    ours, told = bent(1.2 * (x @ w.T), cap), bent(0.8 * (lesson.x_TD @ lesson.weight_VD.T), 2 * cap)
    p, q = ((z / 3.0).log_softmax(-1) for z in (told, ours))
    divergence = functional.kl_div(q, p, reduction="none", log_target=True)[label >= 0].sum() * 9.0
    nats = functional.cross_entropy(ours, label, reduction="sum")
    for have, want in zip(found, (nats + 0.7 * divergence, nats, divergence), strict=True):
        torch.testing.assert_close(have, want, rtol=1e-13, atol=0)
    assert float(divergence.detach()) > 1
    have = torch.autograd.grad(found[0] / 7, (x, w))
    want = torch.autograd.grad((nats + 0.7 * divergence) / 7, (x, w))
    torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-14)
    assert not found[1].requires_grad and not found[2].requires_grad


def test_a_teacher_that_says_the_same_adds_no_bit() -> None:
    x, w = drawn(11, 5, seed=0).float().requires_grad_(), drawn(13, 5, seed=1).float().requires_grad_()
    lesson = Lesson(x.detach(), w.detach(), 1.2, 0.0, 2.0, 100.0)
    learned, _, divergence = taught_cross_entropy(x, w, torch.arange(11), 1.2, 0.0, lesson)
    alone = linear_cross_entropy(x, w, torch.arange(11), 1.2)
    assert float(divergence) == 0.0 and torch.equal(learned, alone)
    for have, want in zip(torch.autograd.grad(learned, (x, w)), torch.autograd.grad(alone, (x, w)), strict=True):
        assert torch.equal(have, want)


def test_an_exact_upcycle_begins_at_its_teacher(place: Path, tmp_path: Path) -> None:
    """And so learns from the labels alone in the first step; one that lost an expert does not."""
    found = []
    for words in ([], TEACHER):
        with start(config(place, tmp_path / "x", "model.dtype=float64", *words), torch.device("cpu")) as run:
            begin(run)
            if run.teacher is not None:
                run.teacher.weight = 0.5
            gradients(run, first_batches(run))
            found.append({name: p.grad for name, p in run.model.named_parameters()})
            if run.teacher is not None:
                assert abs(float(run.teacher.divergence)) < 1e-12
                assert not any(p.requires_grad or p.grad is not None for p in run.teacher.decoder.parameters())
                for p in run.model.parameters():
                    p.grad = None
                run.model.get_parameter("layers.0.ffn.experts.down").data[0] = 0
                gradients(run, first_batches(run))
                assert float(run.teacher.divergence) > 1e-3
    for name, gradient in found[0].items():
        other = found[1][name]
        assert gradient is not None and other is not None
        torch.testing.assert_close(other, gradient, rtol=1e-6, atol=1e-9, msg=name)


def test_a_resume_is_the_run_that_never_stopped_and_keeps_no_teacher(place: Path, tmp_path: Path) -> None:
    words = [*TEACHER, "teacher.final=0.1", *QUICK]
    real, used = step_module.train_step, list[float]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_module, "train_step", lambda run, *a: (used.append(run.teacher.weight), real(run, *a))[1])
        whole = train(config(place, tmp_path / "whole", *words, f"export={tmp_path / 'a'}", steps=4))
    assert used == [weights(TeacherConfig(weight=0.5, final=0.1), 4)(step) for step in range(4)]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(step_module, "train_step", stops_before(4))
        train(config(place, tmp_path / "parts", *words, steps=4))
    parts = train(config(place, tmp_path / "parts", *words, f"export={tmp_path / 'b'}", steps=4))
    assert losses(whole) == losses(parts)
    told = [[row["loss/teacher"] for row in read_metrics(run) if row["step"]] for run in (whole, parts)]
    assert told[0] == told[1] and told[0][0] < 1e-6 < 1e-3 < told[0][-1]
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert all(torch.equal(a[name], b[name]) for name in a)
    plain = train(config(place, tmp_path / "plain", *QUICK, steps=4))
    files = [(run / "checkpoints").rglob("*.safetensors") for run in (whole, plain)]
    sizes = [sum(file.stat().st_size for file in each) for each in files]
    assert abs(sizes[0] - sizes[1]) < 100
    flops = [row["flops"] / row["tokens"] for run in (whole, plain) for row in read_metrics(run)[-1:]]
    assert flops[0] - flops[1] == pytest.approx(dense_flops(described(place / "dense"), 24) / 3)


def test_the_weight_goes_in_a_line() -> None:
    fall = weights(TeacherConfig(weight=2.0, final=0.5), 4)
    assert [fall(step) for step in range(6)] == pytest.approx([2.0, 1.5, 1.0, 0.5, 0.5, 0.5])
    assert [weights(TeacherConfig(weight=2.0), 4)(step) for step in (0, 3)] == [2.0, 2.0]
    assert weights(TeacherConfig(weight=2.0, final=0.5), 1)(0) == 2.0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["teacher.weight=-1"], r"teacher\.weight is -1"),
        (["teacher.weight=1", "teacher.final=nan"], r"teacher\.final is nan"),
        (["teacher.weight=1", "teacher.temperature=0"], r"teacher\.temperature is 0\.0; it must be"),
        (["teacher.source=x"], r"teacher\.weight is 0; write a weight"),
        (["teacher.weight=1", "mesh.pp=2"], r"teacher\.weight=1 does not go with mesh\.pp=2"),
        (["teacher.weight=1", "teacher.source={other}"], r"vocabulary of 300 tokens and the model one of 400"),
        (["teacher.weight=1", "model.upcycle=", "model.source={dense}"], r"this config has no teacher"),
        (["teacher.weight=1", "teacher.source={place}/gone"], r"gone"),
    ],
)
def test_what_cannot_teach_is_a_sentence(place: Path, tmp_path: Path, words: list[str], says: str) -> None:
    if "other" in words[-1]:
        tiny.make("llama", tmp_path / "other", vocab_size=300)
    names = {"other": tmp_path / "other", "dense": place / "dense", "place": place}
    with pytest.raises(ValueError, match=says):
        preflight(config(place, tmp_path / "run", *(word.format(**names) for word in words)))


def test_the_plan_counts_the_teacher() -> None:
    """One GPU: 2 bytes a weight of what is computed in bf16, 4 of norms; 8 tokens' hidden states. Two: half, and the
    whole of embedding and head."""
    teacher = replace(CONFIG, data=DataConfig(sequence=8), teacher=TeacherConfig(weight=1.0))
    parameters, norms, hidden = 2 * 40 + 4 + 2 * (8 + 48 + 72), 4 + 2 * 8, 8 * 4 * 2
    for world in (1, 2):
        taught = replace(teacher, batch=8 * world)
        found = memory(M, taught, world, Model(M, taught, D))
        plain = memory(M, replace(taught, teacher=TeacherConfig()), world)
        weights = (2 * parameters + 2 * norms) // world
        ends = 0 if world == 1 else 2 * 80 + 4 * 4
        assert found.teacher == weights + ends + hidden
        assert found.loss - plain.loss == 8 * 10 * (2 + 5 * 4)
        assert found.total - plain.total == found.teacher + 8 * 10 * 22
    shown = table(M, replace(teacher, batch=8), 2, teacher=D)
    assert "teacher" in shown.splitlines()[0] and "pp=2" not in shown and "pp=2" in table(M, replace(teacher, teacher=TeacherConfig(), batch=8), 2)  # fmt: skip
