"""Which mappings can a config run on so many GPUs, which of them fit, and which is the fastest?

All divisors of the GPUs on all axes are tried, and held to the checks that training makes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tqdm import tqdm

from training.config.schema import TrainConfig
from training.estimating import hardware
from training.estimating.memory import Memory, Model, memory
from training.estimating.seconds import Routing, Seconds, step
from training.model.stock.model import dense_of
from training.parallel.mesh import MeshConfig, changed_to, in_sizes, problem
from training.parallel.pipeline import SINGLE
from training.run.preflight import check_batch
from upcycle.arch.spec import DenseSpec, MoESpec

AXES = ("tp", "cp", "pp", "ep", "etp")  # that are divided in all ways; dp_replicate is of the best
COPIED = 64  # mappings that are also tried with a copy of the model in each node
SPARE = 3e9  # bytes of a GPU that NCCL, CUDA and the allocator take, and no plan counts


@dataclass(frozen=True)
class Timed:
    mesh: MeshConfig
    memory: Memory
    seconds: Seconds


def mappings(spec: DenseSpec | MoESpec, config: TrainConfig, world: int) -> Iterator[MeshConfig]:
    """All mappings that can run, without copies of the model."""
    sharded, layers = replace(config.mesh, dp_replicate=1), dense_of(spec).layers

    def alone(axis: str, size: int) -> bool:
        mesh = changed_to(changed_to(sharded, AXES, [1] * len(AXES)), [axis], [size])
        return not in_sizes(mesh, world, spec, config.data.sequence)

    possible = [[n for n in range(1, world + 1) if world % n == 0 and alone(axis, n)] for axis in AXES]
    for values in itertools.product(*possible):
        mesh = changed_to(sharded, AXES, values)
        stages_of_all = mesh.pp * (1 if mesh.schedule in SINGLE else 2)
        if stages_of_all > layers or problem(mesh, world, spec, config.data.sequence):
            continue
        if dense_of(spec).carried is not None and mesh.tp * mesh.cp * mesh.pp * mesh.etp > 1:
            continue  # build.check_stock
        enough = micro_batches(config, mesh, world) >= mesh.pp
        if enough and not refusal(config, mesh, world) and goes_with(config, mesh):
            yield mesh


def data_ranks(mesh: MeshConfig, world: int) -> int:
    return world // (mesh.tp * mesh.cp * mesh.pp)


def micro_batches(config: TrainConfig, mesh: MeshConfig, world: int) -> int:
    return config.batch // (config.micro_batch * data_ranks(mesh, world))


def refusal(config: TrainConfig, mesh: MeshConfig, world: int) -> str:
    """Why training refuses to cut the batch for a mapping; "": it does not."""
    try:
        check_batch(config, mesh, data_ranks(mesh, world))
    except ValueError as error:
        return str(error)
    return ""


def refused(config: TrainConfig, world: int) -> str:
    """A sentence where the config's own mapping does not train, for which there are no seconds then."""
    reason = refusal(config, config.mesh, world)
    return f"This config does not train on {world} GPUs: {reason}" if reason else ""


def goes_with(config: TrainConfig, mesh: MeshConfig) -> bool:
    """Whether a config's other keys allow a mapping: a teacher or an evaluation, for instance, allows no pipeline."""
    try:
        replace(config, mesh=mesh)
    except ValueError:
        return False
    return True


def ranked(
    spec: DenseSpec | MoESpec,
    config: TrainConfig,
    world: int,
    card: hardware.Hardware,
    teacher: DenseSpec | None = None,
    whole: TrainConfig | None = None,
    routing: Routing | None = None,
) -> tuple[list[Timed], Timed]:
    """(the mappings that fit, the fastest first; the config's own, which may not run). `whole`: of all stages."""
    model = Model(spec, config, teacher, whole)

    def timed(mesh: MeshConfig) -> Timed:
        changed = replace(config, mesh=mesh)
        size = memory(spec, changed, world, model)
        if not fits(size, card) and mesh != config.mesh:
            return Timed(mesh, size, Seconds())
        ranges = model.ranges(mesh.pp, mesh.schedule)
        return Timed(mesh, size, step(spec, changed, world, card, routing, ranges=ranges, taken=size.total))

    own = timed(config.mesh)
    every = tqdm(list(mappings(spec, config, world)), desc="mappings", leave=False, delay=2, disable=None)
    found = [own, *(timed(mesh) for mesh in every if mesh != config.mesh)]
    runs = found[1:] if refused(config, world) else found
    fit = sorted((each for each in runs if fits(each.memory, card)), key=lambda each: each.seconds.total)
    # a copy of the model in each node: of the best, for it takes as much memory as a node's GPUs alone have
    best = [each.mesh for each in fit[:COPIED] if world > each.mesh.pp * card.node]
    copied = [replace(mesh, dp_replicate=world // (mesh.pp * card.node)) for mesh in best]
    copied = [m for m in copied if m != config.mesh and not problem(m, world, spec, config.data.sequence)]
    fit += [each for each in map(timed, copied) if fits(each.memory, card)]
    return sorted(fit, key=lambda each: each.seconds.total), own


def fits(size: Memory, card: hardware.Hardware) -> bool:
    return size.total + SPARE <= card.memory * 1e9
