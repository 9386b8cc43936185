"""Numbers that all ranks scale or decide by are the same bits on every rank, even where their sums are not."""

from __future__ import annotations

from unittest import mock

import torch
from torch import Tensor

from tests.parallel import models
from tests.parallel.ranks import run
from training import build, step
from training.build import data_rank, learner
from training.config import ModelConfig, TrainConfig
from training.data.mixture import DataConfig
from training.optim import OptimConfig
from training.parallel.collectives import Group, all_reduce, local
from training.parallel.mesh import MeshConfig, ParallelMesh
from training.parallel.shard import parallelize


def two_steps(rank: int, world: int) -> list[Tensor]:
    """Loss and gradient's norm of two steps, then all weights. The ranks hold copies of them, and each rank's sums are
    off by a share of its own."""

    def uneven(x: Tensor, group: Group | None) -> Tensor:
        total = all_reduce(x, group)
        return total * (1 + 1e-3 * rank) if total.is_floating_point() else total

    mesh = ParallelMesh(MeshConfig(dp_replicate=world))
    model = models.make("dense", torch.float32)
    parallelize(model, mesh)
    # the weights do move with the norm: it is above the limit
    config = TrainConfig(
        model=ModelConfig(source="none", compute="float32"),
        data=DataConfig(sequence=models.SEQUENCE),
        mesh=mesh.config,
        batch=2 * world,
        micro_batch=2,
        optim=OptimConfig(name="muon", clip=1e-3),
    )
    learns, found = learner(config, [model], mesh, torch.device("cpu")), []
    data = models.batch(2 * world)
    own = data.each(lambda x: x.chunk(world)[data_rank(mesh)])
    with mock.patch.object(build, "all_reduce", uneven), mock.patch.object(step, "all_reduce", uneven):
        for _ in range(2):
            learned = step.train_step(learns, [own], 1e-2)
            found += [learned["loss"].clone(), learned["grad_norm"].clone()]
    return [*found, *(local(p).detach().clone() for p in model.parameters())]


def test_ranks_step_by_the_same_bits() -> None:
    first, second = run(2, two_steps)
    assert float(first[0]) > 0 and float(first[1]) > 1e-3, "nothing to scale"
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
