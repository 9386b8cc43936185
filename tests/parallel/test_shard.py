"""Every mapping is one process: the same loss and the same gradient of every parameter, in float64, with other tokens
on every rank. Dropping too, against a process that lets each rank's tokens compete among themselves."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parallel import models
from tests.parallel.ranks import run
from tests.sweeps import swept
from training.config.schema import ModelConfig, TrainConfig
from training.data.mixture import DataConfig
from training.dispatch.alltoall import AllToAll
from training.estimating.memory import memory
from training.model.decoder import Decoder
from training.model.moe import MoE
from training.optim import balance as balance_module
from training.optim import loads
from training.optim.balance import Balance, BalanceConfig
from training.optim.config import OptimConfig
from training.optim.loads import LayerLoad
from training.optim.optimizer import Optimizer
from training.parallel import shard
from training.parallel.collectives import local
from training.parallel.mesh import AXES, MeshConfig, ParallelMesh
from training.parallel.shard import one_step, own_part, parallelize, reshard
from training.run.build import data_rank, learner
from training.run.parts import stages_of_rank
from training.run.step import gradients, nll

CPU = torch.device("cpu")
BATCH, MICRO = 8, 2  # sequences a step; micro-batches a step, so that gradients and counts add up over them
GLOBAL = BalanceConfig(aux_weight=0.1, z_weight=0.01)
SEQUENCE = replace(GLOBAL, aux_scope="sequence")
EACH = replace(GLOBAL, aux_scope="micro_batch")
DROP = replace(GLOBAL, capacity_factor=1.0)
PAD = replace(DROP, pad_to_capacity=True)


@dataclass(frozen=True)
class Case:
    world: int
    mesh: MeshConfig
    model: str = "moe"
    balance: BalanceConfig = GLOBAL
    recompute: str = "none"

    def __str__(self) -> str:
        sizes = " ".join(f"{k}{v}" for k, v in vars(self.mesh).items() if k in AXES and v > 1)
        rest = [
            self.balance.aux_scope,
            "pad" if self.balance.pad_to_capacity else "drop" if self.balance.capacity_factor else "",
            self.recompute if self.recompute != "none" else "",
        ]
        return " ".join(filter(None, [str(self.world), sizes, self.model, *rest, "" if self.mesh.reshard else "kept"]))


@dataclass(frozen=True)
class Result:
    loss: float
    gradients: dict[str, Tensor] = field(repr=False)
    loads: dict[str, LayerLoad] = field(repr=False)  # by layer
    # which tokens (sequence, place) of each micro-batch this rank had
    own: list[Tensor] = field(repr=False)
    held: int = 0  # elements of parameters


# ---- on the ranks


def on_ranks(rank: int, world: int, cases: list[Case]) -> list[Result]:
    return [of_rank(case) for case in cases]


def config_of(case: Case, micro_batch: int) -> TrainConfig:
    data, source = DataConfig(sequence=models.SEQUENCE), ModelConfig(source="none")
    return TrainConfig(
        model=source, data=data, mesh=case.mesh, balance=case.balance, batch=BATCH, micro_batch=micro_batch
    )


def of_rank(case: Case, device: torch.device = CPU) -> Result:
    mesh, spec = ParallelMesh(case.mesh, device_type=device.type), models.SPECS[case.model]
    parts = [
        models.make(case.model, part=layers, experts="grouped").to(device) for layers in stages_of_rank(spec, mesh)
    ]
    for part in parts:
        parallelize(part, mesh, recomputed=case.recompute)
    size = BATCH // MICRO // mesh.dp
    config = config_of(case, size)
    run = learner(config, parts, mesh, device, learns=False)
    model = run.model
    data, batches, own = models.batch(BATCH), [], []
    for micro in range(MICRO):
        first = (micro * mesh.dp + data_rank(mesh)) * size
        batches.append(data.each(lambda tensor, first=first: tensor[first : first + size]))
        place = torch.arange(BATCH * models.SEQUENCE).view(BATCH, -1)[first : first + size]
        own.append(own_part(replace(data, tokens=place, labels=place, positions=place), mesh).tokens.flatten())
    asked, plain = [], AllToAll.plan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AllToAll, "plan", lambda self, w, e, room: (asked.append(room), plain(self, w, e, room))[1])
        loss = gradients(run, batches)
    assert all((room is not None) == case.balance.pad_to_capacity for room in asked)
    run.balance.end_step()
    loads = dict(zip(moe_layers(model), run.balance.load.fetch(run.reduce), strict=True))
    found = {name: models.whole(p.grad).cpu() for name, p in model.named_parameters()}
    with torch.no_grad():  # and a pass without a backward, such as validation's, leaves the model as it was
        share = own_part(batches[0].to(device), mesh)
        if run.pipeline is not None:
            run.pipeline.evaluate(share, models.SEQUENCE)
        else:
            nll(run, share)
        reshard(model)
    assert all(p.grad is not None for p in model.parameters()), "gradients went with the weights they belong to"
    held = sum(local(p).numel() for p in model.parameters())
    return Result(float(loss), found, loads, own, held)


def moe_layers(model: Decoder) -> list[str]:
    return [number for number, layer in model.layers.items() if isinstance(layer.ffn, MoE)]


# ---- one process


@functools.cache
def one(
    model: str,
    balance: BalanceConfig,
    sets: tuple[tuple[tuple[int, ...], ...], ...] = (),
    device: torch.device = CPU,  # the same: angles are float32 everywhere, and have another last bit on another device
) -> Result:
    """`sets`: of each micro-batch, which tokens compete for an expert's capacity."""
    decoder, data, size = models.make(model).to(device), models.batch(BATCH).to(device), BATCH // MICRO
    watch = Balance(balance, decoder, scale=1 / MICRO, sequences=size)
    scored, nats = int(data.scored.sum()), 0.0
    with pytest.MonkeyPatch.context() as patch:
        for micro in range(MICRO):
            if balance.capacity_factor:
                patch.setattr(balance_module, "capacity_mask", apart(capacity_mask, sets[micro], micro * size))
            part = data.each(lambda tensor, micro=micro: tensor[micro * size : (micro + 1) * size])
            loss = decoder.loss(part.tokens, part.labels, part.positions, part.documents)
            (loss / scored).backward()
            nats += float(loss.detach())
    gradients = {name: p.grad.cpu() for name, p in decoder.named_parameters() if p.grad is not None}
    assert all(name in gradients and bool(gradients[name].any()) for name, _ in decoder.named_parameters()), "idle"
    watch.end_step()
    return Result(nats / scored, gradients, dict(zip(moe_layers(decoder), watch.load.fetch(), strict=True)), [])


capacity_mask = balance_module.capacity_mask


def apart(mask: Callable[..., Any], sets: tuple[tuple[int, ...], ...], first: int) -> Callable[..., Any]:
    def masks(expert_TK: Tensor, weight_TK: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        keep = torch.zeros_like(expert_TK, dtype=torch.bool)
        for tokens in sets:
            at = torch.tensor(tokens, device=keep.device) - first * models.SEQUENCE
            keep[at] = mask(expert_TK[at], weight_TK[at], *options)[0]
        assert not bool(keep.all()), "nothing is dropped"
        return keep, 1 - keep.double().mean()

    return masks


# ---- both


def m(**sizes: Any) -> MeshConfig:
    return MeshConfig(**sizes)


# each axis, model, schedule and mode of recompute, and the pairs that share code: an axis inside FSDP, with copies, with
# experts that are folded over it, with dropping and padding, and with weights that stay gathered
CASES = swept(
    [
        Case(1, m()),
        # one axis at a time
        Case(2, m()),
        Case(2, m(reshard=False)),
        Case(2, m(dp_replicate=2)),
        Case(2, m(tp=2)),
        Case(2, m(tp=2), "odd"),
        Case(2, m(tp=2), "parallel"),
        Case(2, m(tp=2), "dense"),
        Case(2, m(cp=2), "odd", SEQUENCE),
        Case(2, m(cp=2, context="ulysses"), "odd"),
        Case(2, m(ep=2)),
        Case(2, m(ep=2), "odd", EACH),
        Case(2, m(ep=2), balance=DROP),
        Case(2, m(etp=2)),
        Case(2, m(etp=2), "odd", DROP),
        Case(2, m(etp=2), "parallel"),
        Case(2, m(ep=2), "slices"),
        Case(2, m(tp=2), "sandwich", recompute="selective"),
        Case(2, m(ep=2), "sandwich", recompute="experts"),
        Case(2, m(pp=2), "sandwich", recompute="attention"),
        Case(2, m(tp=2), "latent"),
        Case(2, m(tp=2), "sinks", recompute="full"),
        Case(2, m(cp=2), "sinks"),
        Case(2, m(cp=2, context="ulysses"), "sinks", recompute="selective"),
        Case(2, m(cp=2), "latent", recompute="full"),
        Case(2, m(cp=2, context="ulysses"), "latent", recompute="selective"),
        Case(2, m(pp=2), "latent", DROP),
        Case(2, m(pp=2), "odd", DROP),
        Case(2, m(pp=2, schedule="gpipe"), "dense"),
        # products of attention's axes
        Case(4, m(tp=2, cp=2), "odd", SEQUENCE),
        Case(4, m(tp=2, cp=2, context="ulysses")),
        Case(4, m(tp=2, dp_replicate=2), "parallel"),
        Case(4, m(dp_replicate=2), "odd", EACH),
        # and with experts' axes: folded any way
        Case(4, m(ep=2, reshard=False), "odd", DROP),
        Case(4, m(tp=2, ep=2, etp=2), balance=PAD),
        Case(4, m(ep=4, dp_replicate=2), "odd"),
        Case(4, m(tp=2, ep=4), "latent", recompute="attention"),
        Case(4, m(tp=2, ep=2, etp=2), "slices", DROP),
        Case(4, m(tp=4, ep=2, etp=2)),
        Case(4, m(cp=4, ep=2), balance=DROP, recompute="experts"),
        Case(4, m(tp=2, cp=2, ep=4), "odd", DROP),
        Case(4, m(tp=2, ep=2), "odd", DROP, recompute="full"),
        Case(4, m(cp=2, ep=4, reshard=False), "odd", PAD, recompute="experts"),
        # and with the pipeline
        Case(4, m(pp=2, ep=2), "sinks"),
        Case(4, m(pp=2, tp=2), "parallel"),
        Case(4, m(pp=2, cp=2), balance=SEQUENCE),
        Case(4, m(pp=2, etp=2, reshard=False), recompute="full"),
        Case(4, m(pp=2, ep=2), "odd", PAD),
        Case(8, m(pp=2, tp=2, cp=2, ep=2, etp=2), "parallel", DROP),
        Case(8, m(tp=2, dp_replicate=2, ep=2, etp=2), "odd"),
    ],
    [
        Case(2, m(cp=2), "sandwich", recompute="full"),
        Case(2, m(pp=2)),
        Case(4, m(tp=4)),
        Case(4, m(cp=4)),
        Case(4, m(ep=4)),
        Case(4, m(tp=2), "odd", SEQUENCE),
        Case(4, m(tp=2, reshard=False), "parallel"),
        Case(4, m(cp=2), balance=EACH),
        Case(4, m(cp=2, dp_replicate=2), "dense"),
        Case(4, m(ep=2)),
        Case(4, m(etp=2), "odd"),
        Case(4, m(ep=2, etp=2), "odd", SEQUENCE),
        Case(4, m(ep=2, etp=2), "parallel", DROP),
        Case(4, m(ep=2, dp_replicate=2)),
        Case(4, m(tp=2, ep=4)),
        Case(4, m(tp=2, ep=2), "odd", DROP),
        Case(4, m(tp=2, etp=4), "parallel", EACH),
        Case(4, m(cp=2, ep=4), "odd", SEQUENCE),
        Case(4, m(tp=2, cp=2, ep=2, etp=2)),
        Case(4, m(tp=2, ep=2), recompute="selective"),
        Case(4, m(cp=2, ep=4, reshard=False), recompute="experts"),
        Case(4, m(cp=4, ep=2), recompute="attention"),
        Case(4, m(pp=2), "odd"),
        Case(4, m(pp=2, ep=2), "odd", DROP),
        Case(4, m(pp=2, ep=2), "slices", SEQUENCE),
        Case(8, m(pp=2, tp=2, ep=4), "odd"),
        Case(8, m(tp=2, cp=2, ep=4), "odd", SEQUENCE),
        Case(8, m(tp=2, cp=2, ep=4, etp=2), balance=DROP),
        Case(8, m(cp=2, dp_replicate=2, ep=8), "parallel", EACH),
        Case(8, m(tp=4, ep=8), "parallel"),
    ],
)


# cases a process has: each makes groups with threads of their own, and with thousands of them no rank gets on
AT_ONCE = 3


@pytest.fixture(scope="module")
def found() -> dict[Case, list[Result]]:
    out: dict[Case, list[Result]] = {}
    for world in sorted({case.world for case in CASES}):
        every = [case for case in CASES if case.world == world]
        for first in range(0, len(every), AT_ONCE):
            cases = every[first : first + AT_ONCE]
            ranks = run(world, on_ranks, cases, timeout=600.0)
            out |= {case: [rank[i] for rank in ranks] for i, case in enumerate(cases)}
    return out


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_mapping_is_one_process(found: dict[Case, list[Result]], case: Case) -> None:
    assert_same(found[case], reference(case, found[case]))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_plan_counts_what_the_fullest_rank_holds(found: dict[Case, list[Result]], case: Case) -> None:
    planned = memory(models.SPECS[case.model], config_of(case, 1), case.world)
    assert planned.weights == 4 * max(rank.held for rank in found[case])


def reference(case: Case, ranks: list[Result], device: torch.device = CPU) -> Result:
    if not case.balance.capacity_factor:
        return one(case.model, case.balance, device=device)
    sets = tuple(tuple({tuple(rank.own[micro].tolist()) for rank in ranks}) for micro in range(MICRO))
    return one(case.model, case.balance, sets, device)


def assert_same(ranks: list[Result], want: Result) -> None:
    missing = set(want.gradients)
    for number, rank in enumerate(ranks):
        assert rank.loss == pytest.approx(want.loss, rel=1e-10), f"loss of rank {number}"
        for name, gradient in rank.gradients.items():
            expected = want.gradients[name]
            assert gradient.shape == expected.shape, name
            error = float((gradient - expected).abs().max() / expected.abs().max())
            assert error < 1e-10, f"{name} on rank {number}: {error:.1e}"
        missing -= set(rank.gradients)
        for layer, load in rank.loads.items():
            assert load.histogram == want.loads[layer].histogram, f"layer {layer} on rank {number}"
            have, expected = ([vars(of)[name] for name in loads.FIGURES] for of in (load, want.loads[layer]))
            assert have == pytest.approx(expected, rel=1e-10, abs=1e-12, nan_ok=True), f"layer {layer} on rank {number}"
    assert not missing


def steps_with_narrow_experts(rank: int, world: int, split: bool, count: int, mode: str) -> list[dict[str, Tensor]]:
    """Experts of float32 that compute in bfloat16, through three optimiser steps of `count` micro-batches: of each the
    experts' gradients and weights, and how many copies they computed with."""
    mesh = ParallelMesh(MeshConfig(ep=world), device_type="cpu")
    model = models.make("moe", torch.float32, experts="grouped")
    model.compute = torch.bfloat16
    parallelize(model, mesh, recomputed=mode)
    for block in blocks(model):
        local_experts(block).split = split
    optimizer = Optimizer(OptimConfig(), model.named_parameters())
    seen, summed = [], shard.Summed.apply
    for step in range(3):
        made: list[Tensor] = []
        with one_step(blocks(model), count), pytest.MonkeyPatch.context() as patch:
            patch.setattr(shard.Summed, "apply", lambda p, copy, made=made: (made.append(copy), summed(p, copy))[1])
            for seed in range(count):
                batch = own_part(models.batch(2, 100 * step + 10 * rank + seed), mesh)
                model.loss(batch.tokens, batch.labels, batch.positions, batch.documents).backward()
            # gone as soon as the last of them is used: the last backward frees one after the other
            assert not any(local_experts(block).copies for block in blocks(model))
        found = {n: p for n, p in model.named_parameters() if n.endswith(("experts.up", "experts.down"))}
        seen.append({f"{n} gradient": local(p.grad).clone() for n, p in found.items() if p.grad is not None})
        seen[-1]["copies"] = torch.tensor(len({id(copy) for copy in made}))
        optimizer.clip()
        optimizer.step(1e-2)
        optimizer.zero_grad(set_to_none=True)
        seen[-1].update({n: local(p).detach().clone() for n, p in found.items()})
        for block in blocks(model):  # and whoever looks now, such as validation, sees what they have become
            with torch.no_grad():
                narrow = block.experts.weights(block.experts, torch.bfloat16)
                assert torch.equal(narrow.down_EDF, local(block.experts.down).bfloat16())
    return seen


def blocks(model: Decoder) -> list[MoE]:
    return [module for module in model.modules() if isinstance(module, MoE)]


def local_experts(block: MoE) -> shard.LocalExperts:
    weights = block.experts.weights
    assert isinstance(weights, shard.LocalExperts)
    return weights


@pytest.mark.parametrize(("count", "mode"), [(1, "none"), (3, "attention"), (1, "full"), (3, "experts")])
def test_narrow_experts_learn_as_autograd_would_have_them(count: int, mode: str) -> None:
    """The same bits. One micro-batch's gradient stays in bfloat16, where it loses nothing; sums are float32. The copies
    to compute with are made once a step, unless backward is to make them again."""
    got, want = (run(2, steps_with_narrow_experts, split, count, mode) for split in (False, True))
    for mine, right in zip(itertools.chain(*got), itertools.chain(*want), strict=True):
        assert mine.keys() == right.keys() and len(mine) == 4 + 4 + 1
        again = mode in ("experts", "full")
        assert mine.pop("copies") == 4 * (2 * count if again else 1) and right.pop("copies") == 0
        for name, tensor in mine.items():
            if "gradient" in name:
                assert tensor.dtype == (torch.bfloat16 if count == 1 else torch.float32) and tensor.any()
            assert torch.equal(tensor.to(right[name].dtype), right[name]), name


def of_other_dtypes(rank: int, world: int) -> float:
    """The norm of float64 weights' gradients that come in float32, and the other way round."""
    norms = []
    for weights, compute in ((torch.float64, torch.float32), (torch.float32, torch.float64)):
        mesh = ParallelMesh(MeshConfig(ep=world), device_type="cpu")
        model = models.make("odd", weights)
        model.compute = compute
        parallelize(model, mesh)
        batch = own_part(models.batch(2, rank), mesh)
        model.loss(batch.tokens, batch.labels, batch.positions, batch.documents).backward()
        assert all(p.grad.dtype.itemsize <= p.dtype.itemsize for p in model.parameters() if p.grad is not None)
        norms.append(float(Optimizer(OptimConfig(), model.named_parameters()).clip()))
    return norms[0] / norms[1]


def test_gradients_of_any_dtype_have_a_norm() -> None:
    assert run(2, of_other_dtypes) == pytest.approx([1.0, 1.0], rel=1e-4)


def test_a_step_that_breaks_off_leaves_no_copies() -> None:
    model = models.make("moe", torch.float32, compute=torch.bfloat16)
    parallelize(model, ParallelMesh(MeshConfig(), device_type="cpu"))
    batch = models.batch(2)
    with pytest.raises(KeyboardInterrupt), one_step(blocks(model), 2):
        model.loss(batch.tokens, batch.labels, batch.positions, batch.documents)
        assert all(local_experts(block).copies for block in blocks(model))
        raise KeyboardInterrupt
    assert all(local_experts(block).copies is None for block in blocks(model))
