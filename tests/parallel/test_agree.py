"""Numbers that all ranks scale or decide by are the same bits on every rank, even where their sums are not."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tests.parallel import models
from tests.parallel.ranks import run
from training.config.schema import ModelConfig, TrainConfig
from training.data.mixture import DataConfig
from training.optim.config import OptimConfig
from training.parallel.collectives import Group, all_reduce, local
from training.parallel.mesh import MeshConfig, ParallelMesh
from training.parallel.shard import parallelize
from training.run import build, step
from training.run.build import data_rank, learner


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
        model=ModelConfig(source="none", dtype="float32"),
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


def not_none(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def summed_over_copies(rank: int, world: int) -> list[tuple[int, list[Tensor]]]:
    """(sums over copies, gradients) of a step in one micro-batch, and of the same in four."""
    found = []
    for count in (1, 4):
        mesh = ParallelMesh(MeshConfig(dp_replicate=world))
        model = models.make("dense", torch.float32)
        parallelize(model, mesh)
        config = TrainConfig(
            model=ModelConfig(source="none", dtype="float32"), data=DataConfig(sequence=models.SEQUENCE),
            mesh=mesh.config, batch=4 * world, micro_batch=4 // count,
        )  # fmt: skip
        learns, own = learner(config, [model], mesh, torch.device("cpu")), []
        number = data_rank(mesh)
        data = models.batch(4 * world).each(lambda x, number=number: x.chunk(world)[number])
        own = [data.each(lambda x, i=i, n=count: x.chunk(n)[i]) for i in range(count)]
        reduce, calls = dist.all_reduce, []

        def noted(x: Tensor, *args: Any, reduce: Any = reduce, calls: list[int] = calls, **kwargs: Any) -> Any:
            calls.append(x.numel())
            return reduce(x, *args, **kwargs)

        with mock.patch.object(dist, "all_reduce", noted):
            step.gradients(learns, own)
        found.append((sum(n > 16 for n in calls), [local(not_none(p.grad)) for p in model.parameters()]))
    return found


def test_copies_of_a_model_are_summed_once_a_step() -> None:
    """Not after each micro-batch: they are on other nodes. The sums are the same."""
    (once, want), (several, have) = run(2, summed_over_copies)[0]
    assert once == several > 4
    assert all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(want, have, strict=True))
