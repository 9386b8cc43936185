"""Stages of a model on different ranks: loss and every gradient as in one process, exact in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.parallel import ranks, tiny
from training.balance import Balance, BalanceConfig
from training.context import attach, split
from training.mesh import MeshConfig, ParallelMesh
from training.model.decoder import Decoder
from training.pipeline import SCHEDULES, Pipeline, cut, stages
from upcycle.spec import DenseSpec, MoESpec

LENGTH, SEQUENCES, MICRO_BATCHES = 16, 8, 4
SPECS: dict[str, DenseSpec | MoESpec] = {
    "uneven": tiny.dense(layers=9),
    "tied": tiny.dense(layers=8, tied=True, window=5, window_layers=(2,)),
    "moe": tiny.moe((0, 2, 3, 7), layers=8),
}
BALANCE = BalanceConfig(aux_weight=0.1, z_weight=0.01)
Found = tuple[Tensor, Tensor, dict[str, Tensor]]  # loss, of evaluation, gradients


def balanced(parts: list[Decoder], pieces: int) -> None:
    Balance(BALANCE, nn.ModuleList(parts), scale=1 / pieces)


def of_one(spec: DenseSpec | MoESpec, cp: int = 1) -> Found:
    """Micro-batch by micro-batch, and for MoE share by share: what a router loss is a mean over."""
    model, batch = tiny.model(spec), tiny.batch(SEQUENCES, LENGTH, documents=True)
    balanced([model], MICRO_BATCHES)
    scored, total = batch.scored.sum(), torch.zeros((), dtype=torch.float64)
    for start in range(0, SEQUENCES, SEQUENCES // MICRO_BATCHES):
        piece = batch.each(lambda x, start=start: x[start : start + SEQUENCES // MICRO_BATCHES])
        loss = model.loss(piece.tokens, piece.labels, piece.positions, piece.documents) / scored
        loss.backward()
        total += loss.detach()
    return total, total, tiny.gradients(model)


def of_ranks(pp: int, cp: int, schedule: str, spec: DenseSpec | MoESpec, swapped: bool = False) -> Found:
    mesh = ParallelMesh(MeshConfig(pp=pp, cp=cp))
    at, group = mesh.index("pp"), mesh.group("cp")
    layers = [cut(spec, pp, schedule)[stage] for stage in stages(pp, schedule)[at]]
    parts = [tiny.model(spec, part) for part in layers]
    for part in parts:
        attach(part, group, "ring")
    if swapped:  # two layers that are not where they belong
        names = list(parts[0].layers)
        first, second = parts[0].layers[names[0]], parts[0].layers[names[-1]]
        parts[0].layers[names[0]], parts[0].layers[names[-1]] = second, first
    balanced(parts, MICRO_BATCHES)
    pipeline = Pipeline(parts, mesh, schedule, MICRO_BATCHES)
    batch = tiny.batch(SEQUENCES, LENGTH, documents=True)
    scored = batch.scored.sum()
    batch = split(batch, mesh.index("cp"), cp)
    before = pipeline.evaluate(batch, LENGTH) / scored
    loss = pipeline.step(batch, scored, LENGTH)
    after = pipeline.evaluate(batch.each(lambda x: x[:3]), LENGTH) + pipeline.evaluate(
        batch.each(lambda x: x[3:]), LENGTH
    )
    found = tiny.gradients(*parts)
    if group is not None:
        for tensor in [loss, before, after, *found.values()]:
            dist.all_reduce(tensor, group=group)
    assert abs(float(before - after / scored)) < 1e-10
    return loss, before, found


def worst(pp: int, cp: int, schedule: str, name: str, **broken: Any) -> float:
    loss, evaluated, gradients = of_ranks(pp, cp, schedule, SPECS[name], **broken)
    expected_loss, _, expected = of_one(SPECS[name])
    errors = [abs(float(loss - expected_loss)), abs(float(evaluated - expected_loss))]
    return max(*errors, tiny.worst(gradients, expected))


def every_model(rank: int, world: int, pp: int, cp: int, schedule: str, names: list[str]) -> dict[str, float]:
    return {name: worst(pp, cp, schedule, name) for name in names}


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pipeline_has_the_loss_and_gradients_of_one_process(schedule: str, pp: int) -> None:
    for found in ranks.run(pp, every_model, pp, 1, schedule, list(SPECS)):
        assert {name: error for name, error in found.items() if not error < 1e-10} == {}
