"""Find the mappings that a config can run on a number of GPUs, those that fit, and the fastest.

The search tries all divisors of the GPUs on all axes, and applies the checks of training to each.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tqdm import tqdm

from training.config.schema import TrainConfig
from training.estimating import hardware
from training.estimating.memory import SPARE, Memory, Model, memory
from training.estimating.seconds import Routing, Seconds, step
from training.model.stock.model import dense_of
from training.parallel.mesh import MeshConfig, changed_to, in_sizes, problem
from training.parallel.pipeline import SINGLE
from training.run.preflight import check_batch
from upcycle.arch.spec import DenseSpec, MoESpec

AXES = ("tp", "cp", "pp", "ep", "etp")  # axes of the search; dp_replicate is tried on the fastest mappings only
COPIED = 64  # mappings that are also tried with a copy of the model in each node


@dataclass(frozen=True)
class Timed:
    mesh: MeshConfig
    memory: Memory
    seconds: Seconds


def mappings(
    spec: DenseSpec | MoESpec, config: TrainConfig, world: int, axes: Sequence[str] = AXES
) -> Iterator[MeshConfig]:
    """Yield all mappings that can run with FSDP and these axes, without copies of the model."""
    sharded, layers = replace(config.mesh, dp_replicate=1), dense_of(spec).layers

    def alone(axis: str, size: int) -> bool:
        mesh = changed_to(changed_to(sharded, AXES, [1] * len(AXES)), [axis], [size])
        return not in_sizes(mesh, world, spec, config.data.sequence)

    divisors = [n for n in range(1, world + 1) if world % n == 0]
    possible = [[n for n in divisors if alone(axis, n)] if axis in axes else [1] for axis in AXES]
    for values in itertools.product(*possible):
        mesh = changed_to(sharded, AXES, values)
        stages_of_all = mesh.pp * (1 if mesh.schedule in SINGLE else 2)
        if stages_of_all > layers or problem(mesh, world, spec, config.data.sequence):
            continue
        if dense_of(spec).carried is not None and mesh.tp * mesh.cp * mesh.pp * mesh.etp > 1:
            continue  # build.check_stock refuses it
        enough = micro_batches(config, mesh, world) >= mesh.pp
        if enough and not refusal(config, mesh, world) and goes_with(config, mesh):
            yield mesh


def data_ranks(mesh: MeshConfig, world: int) -> int:
    return world // (mesh.tp * mesh.cp * mesh.pp)


def micro_batches(config: TrainConfig, mesh: MeshConfig, world: int) -> int:
    return config.batch // (config.micro_batch * data_ranks(mesh, world))


def refusal(config: TrainConfig, mesh: MeshConfig, world: int) -> str:
    """Return the reason why training cannot divide the batch on a mapping; "" if it can."""
    try:
        check_batch(config, mesh, data_ranks(mesh, world))
    except ValueError as error:
        return str(error)
    return ""


def refused(config: TrainConfig, world: int) -> str:
    """Return a sentence if the config's own mapping cannot train, and so has no seconds; else ""."""
    reason = refusal(config, config.mesh, world)
    return f"This config does not train on {world} GPUs: {reason}" if reason else ""


def goes_with(config: TrainConfig, mesh: MeshConfig) -> bool:
    """Tell whether a config's other keys allow a mapping: for instance, a teacher or an evaluation allows no
    pipeline."""
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
    model: Model | None = None,
    axes: Sequence[str] = AXES,
) -> tuple[list[Timed], Timed]:
    """Return the mappings with these axes that fit, the fastest first, and the config's own mapping, even if it cannot
    run.

    `whole` is the config of all stages if `config` is the config of one. Calls that differ in micro_batch or recompute
    only can share a `model`."""
    model = model or Model(spec, config, teacher, whole)

    def timed(mesh: MeshConfig) -> Timed:
        changed = replace(config, mesh=mesh)
        size = memory(spec, changed, world, model)
        if not fits(size, card) and mesh != config.mesh:
            return Timed(mesh, size, Seconds())
        ranges = model.ranges(mesh.pp, mesh.schedule)
        return Timed(mesh, size, step(spec, changed, world, card, routing, ranges=ranges))

    own = timed(config.mesh)
    every = tqdm(list(mappings(spec, config, world, axes)), desc="mappings", leave=False, delay=2, disable=None)
    found = [own, *(timed(mesh) for mesh in every if mesh != config.mesh)]
    runs = found[1:] if refused(config, world) else found
    fit = sorted((each for each in runs if fits(each.memory, card)), key=lambda each: each.seconds.total)
    # try a copy of the model in each node for the best mappings only: the model must fit the GPUs of one node
    best = [each.mesh for each in fit[:COPIED] if world > each.mesh.pp * card.node]
    copied = [replace(mesh, dp_replicate=world // (mesh.pp * card.node)) for mesh in best]
    copied = [m for m in copied if m != config.mesh and not problem(m, world, spec, config.data.sequence)]
    fit += [each for each in map(timed, copied) if fits(each.memory, card)]
    return sorted(fit, key=lambda each: each.seconds.total), own


def fits(size: Memory, card: hardware.Hardware) -> bool:
    return size.total + SPARE <= card.memory * 1e9
