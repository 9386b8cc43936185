"""Copies of an expert learn from each other and give up, at the end, a part of what tells them apart."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.parallel import models
from tests.parallel.ranks import run
from tests.unit.training.test_train import config
from tests.unit.training.test_train import place as place
from training.checkpoint.layout import described, opened
from training.checkpoint.standalone import no_weights
from training.optim.config import OptimConfig, settled
from training.optim.copies import pull_
from training.optim.optimizer import Optimizer
from training.optim.slots import multiplier
from training.parallel.mesh import MeshConfig, ParallelMesh
from training.parallel.shard import parallelize
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
def test_the_last_step_gives_up_a_part_of_what_tells_copies_apart(dtype: torch.dtype) -> None:
    optimizer, weight, _ = experts_after_a_step(OptimConfig(share=0.0, shrink=0.25), dtype)
    before = optimizer.slots[0].master.detach().clone()
    optimizer.finish(3, 4)
    assert torch.equal(optimizer.slots[0].master, before)
    optimizer.finish(4, 4)
    want = pulled(before, 2, 0.25)
    torch.testing.assert_close(optimizer.slots[0].master, want, rtol=1e-6, atol=0)
    assert torch.equal(weight, want.to(dtype)) and not torch.equal(want, before)


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
    """Else optim.shrink would end a run by mixing what has nothing in common."""
    moe, folder = tmp_path / "copies", tmp_path / "moe"
    assert upcycle(["convert", f"source={place / 'dense'}", f"output={moe}", "target=qwen2_moe", "experts=4"]) == 0
    base = moe if source == "moe" else place / "dense"
    assert upcycle(["convert", f"source={base}", f"output={folder}", "target=auto", *words]) == 0
    own = ["model.upcycle=null", f"model.source={folder}", "balance.bias_rate=0", "optim.shrink=0.3"]
    with nullcontext() if copies else pytest.raises(ValueError, match=r"optim.shrink is 0.3, but no expert"):
        preflight(config(place, tmp_path / "run", *own))


SLICED = [
    "target=upcycled",
    "method.name=virtual_group",
    "experts=4",
    "granularity=2",
    "top_k=2",
    "router.choice=each-slice",
]


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
