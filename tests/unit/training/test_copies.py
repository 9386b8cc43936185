"""Copies of an expert learn from each other, and give up a part of what tells them apart where the model is used."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parallel import models
from tests.parallel.ranks import run
from tests.unit.training.test_train import config, losses
from tests.unit.training.test_train import place as place
from training import export
from training.checkpoint import state
from training.checkpoint.layout import described, load, opened
from training.checkpoint.standalone import load_step, no_weights, shards_of
from training.checkpoint.state import Checkpoints, TrainState
from training.model.decoder import Decoder
from training.optim.config import OptimConfig, settled
from training.optim.copies import pull_
from training.optim.optimizer import Optimizer
from training.optim.slots import multiplier
from training.parallel.mesh import MeshConfig, ParallelMesh
from training.parallel.shard import parallelize
from training.run import measures
from training.run.build import start
from training.run.loop import train
from training.run.preflight import preflight
from upcycle.__main__ import main as upcycle
from upcycle.arch.spec import MoESpec
from upcycle.io.publish import MANIFEST
from upcycle.verifying.inspect import check

SLICES = models.SPECS["slices"]
ROLE = "layers.0.ffn.experts.down"


def pulled(experts: Tensor, slices: int, share: float) -> Tensor:
    """By a loop."""
    rows = []
    for number, row in enumerate(experts):
        copies = [other for at, other in enumerate(experts) if at % slices == number % slices]
        rows.append(row + share * (sum(copies) / len(copies) - row))
    return torch.stack(rows)


@pytest.mark.parametrize("slices", [1, 2, 4])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_every_expert_moves_towards_the_mean_of_its_copies(slices: int, share: float) -> None:
    experts = torch.randn(8, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    want = pulled(experts, slices, share)
    pull_(experts, slices, share)
    torch.testing.assert_close(experts, want, rtol=1e-12, atol=1e-12)


def test_bfloat16_is_summed_in_float32() -> None:
    experts = torch.full((256, 2), 1.0, dtype=torch.bfloat16)
    experts[0] = 3.0
    pull_(experts, 1, 1.0)
    assert (experts == torch.tensor(258 / 256).bfloat16()).all()


def over_ranks(rank: int, world: int) -> float:
    """The largest difference to one process, of every way to divide experts."""
    worst = 0.0
    for mesh in (
        MeshConfig(ep=4),
        MeshConfig(ep=2),
        MeshConfig(),
        MeshConfig(ep=2, etp=2, tp=2),
        MeshConfig(ep=2, dp_replicate=2),
    ):
        model = models.make("slices")
        whole = {name: p.detach().clone() for name, p in model.named_parameters() if "experts" in name.split(".")}
        parallelize(model, ParallelMesh(mesh, device_type="cpu"))
        for name, parameter in model.named_parameters():
            for slices in (2, 4) if name in whole else ():
                moved = parameter.detach().clone()
                pull_(moved, slices, 0.5)
                want = pulled(whole[name], slices, 0.5)
                assert not torch.equal(want, whole[name]) and moved.shape == want.shape
                worst = max(worst, float((models.whole(moved) - want).abs().max()))
    return worst


def test_copies_on_several_ranks_are_copies() -> None:
    assert max(run(4, over_ranks)) < 1e-12


def test_what_copies_share_is_asked_for_or_follows_from_the_router() -> None:
    def found(config: OptimConfig, spec: MoESpec | None) -> tuple[float | None, float | None, float]:
        made = settled(config, spec)
        return made.share, made.shrink, multiplier(made, "layers.0.ffn.router.weight")

    assert found(OptimConfig(), SLICES) == (0.5, 0.3, 0.3)
    assert found(OptimConfig(share=0.0, shrink=0.7, router_lr=0.0), SLICES) == (0.0, 0.7, 0.0)
    free = replace(SLICES, choice="any")
    assert found(OptimConfig(), free) == found(OptimConfig(), None) == (0.0, 0.0, 1.0)
    assert found(OptimConfig(share=0.25, router_lr=2.0), free) == (0.25, 0.0, 2.0)
    apart = replace(SLICES, equal=False)  # noise, drop, branch_train_mix: the copies differ on purpose
    assert found(OptimConfig(), apart) == (0.0, 0.0, 0.3)
    assert found(OptimConfig(share=0.25), apart) == (0.25, 0.0, 0.3)
    by_name = OptimConfig(groups=({"match": "router", "lr": 0.7},))
    assert found(by_name, SLICES) == (0.5, 0.3, 0.7)
    slots = Optimizer(OptimConfig(), models.make("slices").named_parameters(), SLICES).slots
    assert {slot.multiplier for slot in slots if "router" in slot.name} == {0.3}
    for spec in (None, replace(free, disjoint=True), replace(free, copies=1)):
        with pytest.raises(ValueError, match=r"optim.shrink is 0.1, but no expert .* leave it out"):
            settled(OptimConfig(shrink=0.1), spec)


def experts_after_a_step(config: OptimConfig, dtype: torch.dtype = torch.float64) -> tuple[Optimizer, Tensor, Tensor]:
    """An optimiser after one step of random gradients, with eight equal experts, and the gradients."""
    weight = nn.Parameter(torch.ones(8, 3, 4, dtype=dtype))
    weight.grad = torch.randn(8, 3, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    gradient = weight.grad.clone()
    optimizer = Optimizer(config, [(ROLE, weight)], SLICES)
    optimizer.step(0.1)
    return optimizer, weight, gradient


def test_with_all_shared_copies_stay_copies_and_learn_as_the_dense_model_does() -> None:
    _, weight, gradient = experts_after_a_step(OptimConfig(share=1.0, shrink=0.0, clip=0, eps=0))
    dense = nn.Parameter(torch.ones(2, 3, 4, dtype=torch.float64))
    dense.grad = gradient.unflatten(0, (4, 2)).sum(0)
    Optimizer(OptimConfig(clip=0, eps=0), [(ROLE, dense)]).step(0.1)
    torch.testing.assert_close(weight, dense.repeat(4, 1, 1), rtol=1e-12, atol=0)
    _, alone, _ = experts_after_a_step(OptimConfig(share=0.0, shrink=0.0, clip=0, eps=0))
    assert (alone - alone[[2, 3, 4, 5, 6, 7, 0, 1]]).abs().max() > 0.1


def test_a_part_is_shared_by_default_where_the_router_chooses_in_each_slice() -> None:
    _, weight, gradient = experts_after_a_step(OptimConfig(name="muon"))
    half = nn.Parameter(torch.ones(8, 3, 4, dtype=torch.float64))
    half.grad = pulled(gradient, 2, 0.5)
    Optimizer(OptimConfig(name="muon"), [(ROLE, half)]).step(0.1)
    torch.testing.assert_close(weight, half, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_view_pulls_copies_together_and_restores_every_bit(dtype: torch.dtype) -> None:
    optimizer, weight, _ = experts_after_a_step(OptimConfig(share=0.0, shrink=0.25), dtype)
    master = optimizer.slots[0].master.detach()
    before, rounded = master.clone(), weight.detach().clone()
    with optimizer.viewed():
        assert torch.equal(master, before)  # no step was finished, as after loading an older checkpoint
    optimizer.finish(4, 4)
    assert torch.equal(master, before)
    want = pulled(before, 2, 0.25)
    with pytest.raises(KeyboardInterrupt), optimizer.viewed():
        torch.testing.assert_close(master, want, rtol=1e-6, atol=0)
        assert torch.equal(weight, want.to(dtype)) and not torch.equal(want, before)
        raise KeyboardInterrupt
    assert torch.equal(master, before) and torch.equal(weight, rounded)


SLICED = [
    "target=upcycled",
    "method.name=virtual_group",
    "experts=4",
    "granularity=2",
    "top_k=2",
    "router.choice=each-slice",
]
RUN = [
    *(f"model.upcycle.{word}" for word in ("target=upcycled", "router.choice=each-slice")),
    *("schedule.shape=constant", "schedule.warmup=0", "schedule.peak=5e-3", "model.dtype=float32"),
    *("checkpoint.every=2", "checkpoint.keep=9", "valid_every=2"),
]


def masters(run: Path, step: int) -> dict[str, Tensor]:
    """The experts in a checkpoint."""
    saved = shards_of(run, run / "checkpoints" / f"step-{step:08}")
    names = [name for name in saved.tensors if name.startswith("model.") and "experts" in name.split(".")]
    return {name: saved.read(name) for name in names}


def used(folder: Path) -> dict[str, Tensor]:
    """The experts of an exported folder, stacked as in a checkpoint."""
    with opened(folder) as origin:
        model = load(Decoder(origin.spec), origin)
    return {f"model.{n}": p.detach() for n, p in model.named_parameters() if "experts" in n.split(".")}


def with_old_ends(patch: pytest.MonkeyPatch) -> None:
    """Let runs end as they did before checkpoints said their shrink: the last step pulled the masters."""

    def finish(self: Optimizer, step: int, steps: int, last: bool = True) -> None:
        for slot in self.slots if step == steps else ():
            if "experts" in slot.name.split("."):
                pull_(slot.master, self.slices, self.shrink)

    real = TrainState.tensors

    def tensors(self: TrainState, rank: int, **options: bool) -> dict[str, Tensor]:
        for group in self.groups().values():
            group.pop("shrink", None)
        found = real(self, rank, **options)
        for group in self.groups().values():
            group["shrink"] = 0.0
        return found

    patch.setattr(Optimizer, "finish", finish)
    patch.setattr(TrainState, "tensors", tensors)


def test_a_finished_run_that_goes_on_is_the_run_in_one_piece(place: Path, tmp_path: Path) -> None:
    """Its validations, which other runs do not make, leave no trace either."""
    whole = train(config(place, tmp_path / "whole", *RUN, f"export={tmp_path / 'a'}", steps=4))
    quiet = train(config(place, tmp_path / "quiet", *RUN, "data.valid=[]", steps=4))
    parts = train(config(place, tmp_path / "parts", *RUN, steps=2))
    with pytest.warns(UserWarning, match=r"steps was 2 and is 4"):
        train(config(place, parts, *RUN, f"export={tmp_path / 'b'}", steps=4))
    assert losses(parts) == losses(whole) and losses(whole)[-1][3]
    for step in (2, 4):
        want = masters(whole, step)
        assert all(torch.equal(each, masters(quiet, step)[name]) for name, each in want.items())
        assert all(torch.equal(each, masters(parts, step)[name]) for name, each in want.items())
    a, b = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
    assert a == b


def test_every_export_and_validation_is_of_the_pulled_weights(place: Path, tmp_path: Path) -> None:
    run = train(config(place, tmp_path / "run", *RUN, f"export={tmp_path / 'own'}", steps=4))
    export(run, tmp_path / "step-4")
    assert (tmp_path / "own" / "model.safetensors").read_bytes() == (
        tmp_path / "step-4" / "model.safetensors"
    ).read_bytes()
    export(run / "checkpoints" / "step-00000002", tmp_path / "step-2")
    for step in (2, 4):
        folder, held = tmp_path / f"step-{step}", masters(run, step)
        have = used(folder)
        assert have.keys() == held.keys() and held
        for name, each in held.items():
            torch.testing.assert_close(have[name], pulled(each, 2, 0.3), rtol=1e-6, atol=1e-7)
            assert not torch.equal(have[name], each)
        with opened(folder) as origin, torch.device("meta"):
            model = Decoder(origin.spec)
        model.to_empty(device="cpu")
        load_step(model, run, run / "checkpoints" / f"step-{step:08}")  # what evaluation reads
        assert all(torch.equal(model.get_parameter(name.removeprefix("model.")), have[name]) for name in have)
        again = [*RUN, "model.upcycle=null", f"model.source={folder}", "balance.bias_rate=0", "batch=2"]
        first = losses(train(config(place, tmp_path / f"again-{step}", *again, steps=1)))[0][3]
        assert first == pytest.approx(next(row[3] for row in losses(run) if row[0] == step), rel=1e-6)


@pytest.mark.parametrize("room", [True, False])
def test_a_last_checkpoint_that_is_written_slowly_holds_the_masters_that_a_validation_changes(
    room: bool, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "room_for_two", lambda tensors: room)
    plain = train(config(place, tmp_path / "plain", *RUN, "data.valid=[]", steps=2))
    validates, wrote = threading.Event(), threading.Event()
    write, measured = Checkpoints.write, measures.measured

    def writes(self: Checkpoints, *given: Any) -> None:
        # the weights are written while a validation shows others, or before it begins
        assert validates.wait(60 if room else 2) == room
        write(self, *given)
        wrote.set()

    def measures_meanwhile(metrics: Any, step: int, wanted: Any) -> bool:
        if step == 2:
            validates.set()
            assert wrote.wait(60)
        return measured(metrics, step, wanted)

    monkeypatch.setattr(Checkpoints, "write", writes)
    monkeypatch.setattr(measures, "measured", measures_meanwhile)
    run = train(config(place, tmp_path / "run", *RUN, steps=2))
    have, want = masters(run, 2), masters(plain, 2)
    assert want and all(torch.equal(have[name], want[name]) for name in want)


def test_an_older_run_is_not_pulled_twice(place: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        with_old_ends(patch)
        run = train(config(place, tmp_path / "run", *RUN, "data.valid=[]", steps=2))
    held = masters(run, 2)
    train(config(place, run, *RUN, f"export={tmp_path / 'own'}", steps=2))  # which also validates
    export(run, tmp_path / "later")
    for folder in (tmp_path / "own", tmp_path / "later"):
        have = used(folder)
        assert held and all(torch.equal(have[name], each) for name, each in held.items())
    with pytest.warns(UserWarning, match=r"steps was 2 and is 3"):
        train(config(place, run, *RUN, steps=3))  # new steps are marked
    export(run, tmp_path / "third")
    have, name = used(tmp_path / "third"), next(iter(held))
    torch.testing.assert_close(have[name], pulled(masters(run, 3)[name], 2, 0.3), rtol=1e-6, atol=1e-7)


def test_a_run_knows_its_copies_and_refuses_to_have_none(place: Path, tmp_path: Path) -> None:
    words = ["model.upcycle.target=upcycled", "model.upcycle.router.choice=each-slice"]
    with start(config(place, tmp_path / "run", *words), torch.device("cpu")) as begun:
        optimizer = begun.optimizer
        assert optimizer and (optimizer.share, optimizer.shrink, optimizer.slices, len(optimizer.copies)) == (
            0.5,
            0.3,
            2,
            4,
        )
    dense = ["model.upcycle=null", f"model.source={place / 'dense'}", "optim.share=0.5"]
    with pytest.raises(ValueError, match=r"optim.share is 0.5, but no expert"):
        preflight(config(place, tmp_path / "dense", *dense))


@pytest.mark.parametrize(
    ("source", "words", "copies"),
    [
        ("dense", ["experts=4"], True),
        ("dense", ["method.name=virtual_group", "experts=4", "granularity=2"], True),
        ("dense", ["method.name=split", "experts=4"], False),  # parts of one FFN
        ("moe", ["experts=2", "top_k=4"], False),  # copies lie beside each other, not a whole FFN apart
    ],
    ids=["copies", "slices", "split", "grown"],
)
def test_a_folder_says_whether_its_experts_are_copies(
    place: Path, tmp_path: Path, source: str, words: list[str], copies: bool
) -> None:
    """Else optim.shrink would mix what has nothing in common."""
    moe, folder = tmp_path / "copies", tmp_path / "moe"
    assert upcycle(["convert", f"source={place / 'dense'}", f"output={moe}", "target=qwen2_moe", "experts=4"]) == 0
    base = moe if source == "moe" else place / "dense"
    assert upcycle(["convert", f"source={base}", f"output={folder}", "target=auto", *words]) == 0
    own = ["model.upcycle=null", f"model.source={folder}", "balance.bias_rate=0", "optim.shrink=0.3"]
    with nullcontext() if copies else pytest.raises(ValueError, match=r"optim.shrink is 0.3, but no expert"):
        preflight(config(place, tmp_path / "run", *own))


@pytest.mark.parametrize(
    ("words", "copies"),
    [(["target=mixtral", "experts=4"], False), (SLICED, True)],
    ids=["mixtral", "each-slice"],
)
def test_a_strangers_folder_has_no_copies_unless_its_router_says_so(
    place: Path, tmp_path: Path, words: list[str], copies: bool
) -> None:
    """Nothing says how a plain mixture of experts was made, and another tool's upcycle.json is none. Of one that the
    decoder alone knows, OLMoE say, nothing can."""
    folder = tmp_path / "moe"
    assert upcycle(["convert", f"source={place / 'dense'}", f"output={folder}", *words]) == 0
    own = ["model.upcycle=null", f"model.source={folder}", "balance.bias_rate=0", "optim.share=0.3"]
    preflight(config(place, tmp_path / "run", *own))
    (folder / MANIFEST).unlink()
    with nullcontext() if copies else pytest.raises(ValueError, match=r"optim.share is 0.3, but no expert"):
        preflight(config(place, tmp_path / "run", *own))
    facts = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64, "num_experts": 8}
    facts |= {"intermediate_size": 16, "num_experts_per_tok": 2}
    olmoe = described("olmoe", {"model_type": "olmoe", **facts}, no_weights, ())
    with pytest.raises(ValueError, match=r"optim.shrink is 0.3, but no expert"):
        settled(OptimConfig(shrink=0.3), olmoe.spec)


@pytest.mark.parametrize("online", [True, False], ids=["upcycled as it loads", "a converted folder"])
def test_copies_stay_known_over_a_resume_and_an_export(place: Path, tmp_path: Path, online: bool) -> None:
    """An export says which slices its experts are copies of, or all would be pulled to one mean."""
    words, folder = ["balance.bias_rate=0", "optim.shrink=0.3", "schedule.warmup=0", "device=cpu"], tmp_path / "moe"
    if not online:
        made = ["target=mixtral", "method.name=virtual_group", "experts=4", "granularity=2", "top_k=2"]
        assert upcycle(["convert", f"source={place / 'dense'}", f"output={folder}", *made]) == 0
        words += ["model.upcycle=null", f"model.source={folder}"]
    train(config(place, tmp_path / "run", *words, steps=1))
    out = tmp_path / "out"
    train(config(place, tmp_path / "run", *words, f"export={out}", steps=2))
    with opened(out) as origin:
        assert isinstance(origin.spec, MoESpec)
        assert (origin.spec.copies, origin.spec.granularity, origin.spec.disjoint) == (4, 2, False)
    again = [*words, "model.upcycle=null", f"model.source={out}"]
    train(config(place, tmp_path / "again", *again, f"export={tmp_path / 'third'}", steps=1))
    with opened(tmp_path / "third") as origin:
        assert isinstance(origin.spec, MoESpec) and origin.spec.granularity == 2
    assert check(out)
