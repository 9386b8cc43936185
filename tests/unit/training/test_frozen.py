"""Groups of parameters by name: their rates and decays, and what is frozen: no gradient, no moment, not a bit moved."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

from tests.parallel import models
from tests.unit.training.test_plan import CONFIG, EXPERTS, M
from tests.unit.training.test_train import Stopped, config, stops_before
from tests.unit.training.test_train import place as place
from training.config.schema import TrainConfig
from training.data.mixture import DataConfig
from training.data.open import open_training
from training.estimating.memory import memory
from training.model.lora import LoraConfig, attach, is_adapter
from training.observe.flops import spared_flops
from training.optim.config import OptimConfig, ParameterGroup
from training.optim.optimizer import Optimizer
from training.optim.slots import check_groups, freeze, multiplier
from training.parallel.mesh import MeshConfig
from training.run import step as step_module
from training.run.build import begin, loader_of, start
from training.run.loop import train
from training.run.step import gradients

NAMES = [
    "embed.weight", "layers.0.attn_norm.weight", "layers.0.attention.q_norm.weight", "layers.0.ffn.router.weight",
    "layers.0.ffn.experts.up", "layers.10.ffn.experts.down", "layers.10.ffn.shared.up.weight", "head.weight",
]  # fmt: skip


@pytest.mark.parametrize(
    ("pattern", "held"),
    [
        ("experts", [4, 5]),
        ("experts.*", [4, 5]),
        ("experts.up", [4]),
        ("layers.1?.ffn", [5, 6]),
        ("layers.[0-3]", [1, 2, 3, 4]),
        ("*norm", [1, 2]),
        ("shared.up", [6]),
        ("weight", [0, 1, 2, 3, 6, 7]),
        ("expert", []),
        ("ffn.up", []),
        ("up.weight.x", []),
    ],
)
def test_words_of_a_pattern_are_neighbours_in_a_name(pattern: str, held: list[int]) -> None:
    group = ParameterGroup(match=pattern)
    assert [number for number, name in enumerate(NAMES) if group.holds(name)] == held


def test_the_last_group_decides_and_keys_decide_of_what_is_in_none() -> None:
    groups = (
        {"match": "ffn", "lr": 0.5},
        {"match": "experts", "lr": 0},
        {"match": "experts.up", "lr": 2, "decay": 0.25},
    )
    optim = OptimConfig(router_lr=3.0, embed_lr=4.0, groups=groups)
    assert [multiplier(optim, name) for name in NAMES] == [4.0, 1.0, 1.0, 0.5, 2.0, 0.0, 0.5, 4.0]
    assert multiplier(OptimConfig(router_lr=3.0, expert_lr=5.0), NAMES[4]) == 5.0


def test_the_last_group_that_says_a_decay_decides_of_it() -> None:
    groups = ({"match": "weight", "decay": 0.5}, {"match": "embed", "lr": 2}, {"match": "*norm", "decay": 0})
    parameters = {name: torch.nn.Parameter(torch.ones(2, 2)) for name in NAMES}
    slots = {slot.name: slot.decay for slot in Optimizer(OptimConfig(groups=groups), parameters.items()).slots}
    assert slots == dict(zip(NAMES, [0.5, 0, 0, 0.5, 0.1, 0.1, 0.5, 0.5], strict=True))


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        (
            [{"match": "expert", "lr": 0}],
            r"groups\.0\.match is 'expert', which matches no parameter; did you mean 'exp",
        ),
        ([{"match": "*", "lr": 0}], "freezes every parameter"),
        ([{"lr": 0}], r"groups\.0\.match is ''; write words"),
        ([{"match": "norm..x"}], r"groups\.0\.match"),
        ([{"match": "head", "lr": -1}], r"groups\.0\.lr is -1"),
        ([{"match": "head"}, {"match": "head", "decay": float("nan")}], r"groups\.1\.decay is nan"),
        ([{"match": "head", "rate": 1}], r"unknown key 'optim\.groups\.0\.rate'"),
        (["head"], r"optim\.groups\.0 is 'head'; it must be keys and values"),
    ],
)
def test_what_is_wrong_with_groups_is_a_sentence(groups: list[Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_groups(OptimConfig(groups=tuple(groups)), NAMES)


FROZEN = "optim.groups=[{match: experts, lr: 0}, {match: layers.0.attention, lr: 0}, {match: embed, lr: 0}]"
STILL = ("experts", "layers.0.attention", "embed")


def still(name: str) -> bool:
    return any(ParameterGroup(match=pattern).holds(name) for pattern in STILL)


def stepped(settings: TrainConfig) -> dict[str, torch.Tensor | None]:
    """Each parameter's gradient of the first step."""
    with start(settings, torch.device("cpu")) as run:
        begin(run)
        batches = first_batches(run)
        gradients(run, batches)
        held = {slot.name for slot in run.optimizer.slots} if run.optimizer else set()
        assert held == {name for name, p in run.model.named_parameters() if p.requires_grad}
        return {name: p.grad for name, p in run.model.named_parameters()}


def first_batches(run: Any) -> list[Any]:
    run.place.samples = open_training(run.config.data, run.origin.dense.vocab)
    with loader_of(run, run.place.samples) as loader:
        return [next(loader)[0] for _ in range(run.micro_batches)]


@pytest.mark.parametrize("more", [[], ["model.recompute=full"], ["model.expert_backend=reference"]], ids=str)
def test_what_is_frozen_has_no_gradient_and_the_rest_has_the_same(place: Path, tmp_path: Path, more: list[str]) -> None:
    free, frozen = (stepped(config(place, tmp_path, *words, *more)) for words in ([], [FROZEN]))
    assert free.keys() == frozen.keys() and any(map(still, free)) and not all(map(still, free))
    for name, gradient in frozen.items():
        if still(name):
            assert gradient is None, name
        else:
            assert gradient is not None and torch.equal(gradient, free[name]), name  # type: ignore[arg-type]


def test_frozen_weights_keep_their_bits_and_others_learn(place: Path, tmp_path: Path) -> None:
    before = exported(
        place, tmp_path / "before", "schedule.peak=1e-30", "schedule.final=0", "schedule.warmup=0", steps=1
    )
    after = exported(place, tmp_path / "after", FROZEN, "data.valid=[]", "batch=2", "checkpoint.every=0", steps=100)
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        expert = ".mlp.experts." in name or name == "model.embed_tokens.weight"
        frozen = expert or name.startswith("model.layers.0.self_attn.")
        moves = not frozen and "shared_experts" not in name  # which are empty here, because this target must have one
        assert not moves or not torch.equal(tensor, before[name]), name
        assert not frozen or torch.equal(tensor, before[name]), name


def exported(place: Path, folder: Path, *words: str, steps: int) -> dict[str, torch.Tensor]:
    train(config(place, folder, f"export={folder}-out", *words, steps=steps))
    return load_file(f"{folder}-out/model.safetensors")


def test_a_resume_may_thaw_what_was_frozen(place: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(step_module, "train_step", stops_before(5))
        train(config(place, tmp_path / "run", FROZEN))
    with pytest.warns(UserWarning, match=r"optim\.groups\.0\.match was experts and is unset"):
        train(config(place, tmp_path / "run", f"export={tmp_path / 'out'}"))
    frozen = exported(place, tmp_path / "frozen", FROZEN, steps=8)
    assert not torch.equal(load_file(tmp_path / "out" / "model.safetensors")["model.embed_tokens.weight"],
                           frozen["model.embed_tokens.weight"])  # fmt: skip


def test_the_plan_counts_no_gradients_and_no_moments_of_what_is_frozen() -> None:
    for mesh in (MeshConfig(), MeshConfig(ep=2)):
        world = mesh.ep
        config = replace(CONFIG, data=DataConfig(sequence=8), batch=4 * world, mesh=mesh)
        free = memory(M, config, world)
        frozen = memory(M, replace(config, optim=OptimConfig(groups=({"match": "experts", "lr": 0},))), world)
        learned = 4 * EXPERTS // world
        held = EXPERTS // world  # in bfloat16, which without FSDP needs no copy to compute with
        assert free.weights - frozen.weights == 2 * held and free.gathered - frozen.gathered == 2 * held
        assert free.moments - frozen.moments == 2 * learned and free.gradients - frozen.gradients == learned
        head = memory(M, replace(config, optim=OptimConfig(groups=({"match": "head", "lr": 0},))), world)
        assert free.loss - head.loss == (4 + 2) * 10 * 4


# ---- FLOPs


def products(name: str, groups: Sequence[dict[str, Any]] = (), rank: int = 0) -> tuple[float, float]:
    """Of a forward and backward: (FLOPs a token of all matrices, counted as torch runs them; what we say is spared, and
    beside it the little that we do not count: routers, gates of shared experts, what the first layer passes on)."""
    model = models.make(name)
    attach(model, LoraConfig(rank=rank, match=("attention", "experts", "shared", "ffn.down")))
    for key, parameter in model.named_parameters():
        if is_adapter(key):
            parameter.data = torch.ones_like(parameter, dtype=torch.float64)
    freeze(model, OptimConfig(groups=groups))
    part, parameters = models.batch(2), dict(model.named_parameters())
    with FlopCounterMode(display=False) as counted:
        model(part.tokens, part.positions, part.documents).square().sum().backward()
    spared, by_kind = spared_flops(model, models.SPECS[name], models.SEQUENCE), counted.get_flop_counts()["Global"]
    idle = not any(p.requires_grad for key, p in parameters.items() if key.startswith(("layers.0.", "embed")))
    spared -= idle * 4 * 4 * (8 + 8) * models.SEQUENCE / 2  # of attention, which is no such product
    for key, parameter in parameters.items():
        first = rank and re.match(r"layers.0.attention.[qkv].(weight|lora_a)", key)
        if first or (not parameter.requires_grad and re.search(r"(router|shared_gate).weight", key)):
            spared += 2 * parameter.numel() * (2 if idle and key.startswith("layers.0.") else 1)
    return sum(by_kind.get(kind, 0) for kind in (torch.ops.aten.mm, torch.ops.aten.addmm)) / part.tokens.numel(), spared


@pytest.mark.parametrize("name", ["dense", "moe", "sandwich", "slices"])
@pytest.mark.parametrize(
    ("groups", "rank"),
    [
        ([{"match": "experts", "lr": 0}], 0),
        ([{"match": "*", "lr": 0}, {"match": "layers.1", "lr": 1}], 0),
        ([{"match": "embed", "lr": 0}, {"match": "head", "lr": 0}], 0),
        ([], 3),
    ],
    ids=["experts", "all but one layer", "embedding and head", "adapters"],
)
def test_what_does_not_learn_is_spared_its_gradients_flops(name: str, groups: list[dict[str, Any]], rank: int) -> None:
    """The flops that runs log, and that a study holds equal, are those that torch makes."""
    whole, nothing = products(name)
    assert nothing == 0
    part, spared = products(name, groups, rank)
    assert spared == pytest.approx(whole - part), whole
