"""Find the smallest sets of changes that make a step fit, and say how much memory of a GPU it then takes.

A change is a word that a user can type, such as micro_batch=1. The estimator tries all changes on the config's own
mapping, on the same mapping with a smaller ep, and on the mappings that take least memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from training.config.reading import upcycle_config
from training.config.schema import TrainConfig
from training.estimating import hardware
from training.estimating.mappings import AXES, fits, goes_with, mappings, refusal
from training.estimating.memory import Memory, Model, memory
from training.model.recompute import MODES
from training.parallel.mesh import MeshConfig, changed_to, problem
from upcycle.arch.spec import DenseSpec, MoESpec

LEANEST = 8  # mappings of least memory on which a change is tried
MOST = 64  # limit of the search for more GPUs, as a multiple of the config's GPUs
SpecOf = Callable[[TrainConfig], DenseSpec | MoESpec]  # returns the spec of a config whose model.upcycle was changed


@dataclass(frozen=True)
class Case:
    """Describe a step that fits no mapping: its model and config, the GPUs, and the inputs for its memory."""

    spec: DenseSpec | MoESpec
    config: TrainConfig
    world: int
    card: hardware.Hardware
    spec_of: SpecOf
    teacher: DenseSpec | None = None
    whole: TrainConfig | None = None


def changes(spec: DenseSpec | MoESpec, config: TrainConfig) -> list[list[str]]:
    """List the words that save memory, in a list for each key, the mildest word first."""
    modes = [
        mode for mode in MODES[MODES.index(config.model.recompute) + 1 :] if mode == "full" or isinstance(spec, MoESpec)
    ]
    found = [
        ["optim.moments=bfloat16"] * (config.optim.moments != "bfloat16"),
        [f"model.recompute={mode}" for mode in modes],
        [f"micro_batch={size}" for size in halves(config.micro_batch, 1)],
    ]
    if isinstance(spec, MoESpec) and config.model.upcycle:
        least = spec.top_k // spec.granularity + 1  # with fewer copies every token would use all of them
        found.append([f"model.upcycle.experts={count}" for count in halves(spec.copies, least)])
        fewer = [n for n in (2, 3, 4) if 0 < spec.dense.layers // n < len(spec.layers)]
        found.append([f"model.upcycle.layers=every:{n}" for n in fewer])
    return [each for each in found if each]


def halves(number: int, least: int) -> Iterator[int]:
    while (number := number // 2) >= least:
        yield number


def changed(config: TrainConfig, words: Sequence[str]) -> TrainConfig:
    """Return the config with these words applied; raise a ValueError if its other keys do not allow them."""
    for word in words:
        key, _, value = word.partition("=")
        given: Any = int(value) if value.isdecimal() else value
        if key.startswith("model.upcycle."):
            key, given = "model.upcycle", asdict(upcycle_config(config.model)) | {key.rpartition(".")[2]: given}
        part, _, name = key.rpartition(".")
        inner = replace(getattr(config, part), **{name: given}) if part else given
        config = replace(config, **{part or name: inner})
    return config


def suggestions(case: Case) -> str:
    """Return a sentence with the smallest sets of changes that make the step fit, or with the memory of all changes."""
    model = Model(case.spec, case.config, case.teacher, case.whole)
    every = [
        (mesh, memory(case.spec, replace(case.config, mesh=mesh), case.world, model))
        for mesh in mappings(case.spec, case.config, case.world)
    ]
    every.sort(key=lambda item: item[1].total)
    own = case.config.mesh
    near = [own, *(changed_to(own, ["ep"], [n]) for n in range(own.ep, 0, -1) if own.ep % n == 0)]
    meshes = list(dict.fromkeys([*near, *(mesh for mesh, _ in every[:LEANEST])]))

    @cache
    def least(words: tuple[str, ...]) -> tuple[Memory, MeshConfig] | None:
        return taken(case, words, meshes, case.world)

    keys = changes(case.spec, case.config)
    said = next(filter(None, (sets(case, keys, count, least) for count in range(1, len(keys) + 1))), [])
    said += more_gpus(case, meshes)
    if said:
        return f"What fits: {'; '.join(said)}"
    strongest = tuple(values[-1] for values in keys)
    all_of_it = least(strongest) if strongest else None
    most = f"{shown(case, strongest, *all_of_it)} does not fit either; " if all_of_it else ""
    return f"{most or 'No change makes it fit; '}take cards with more memory, or a smaller model"


def sets(
    case: Case,
    keys: Sequence[list[str]],
    count: int,
    least: Callable[[tuple[str, ...]], tuple[Memory, MeshConfig] | None],
) -> list[str]:
    """Return the mildest set of changes that fits for every choice of `count` keys."""
    found = []
    for some in itertools.combinations(keys, count):
        for words in itertools.product(*some):
            taken_by = least(words)
            if taken_by and fits(taken_by[0], case.card):
                found.append(shown(case, words, *taken_by))
                break
    return found


def more_gpus(case: Case, meshes: Sequence[MeshConfig]) -> Iterator[str]:
    """Yield the smallest number of GPUs on which the unchanged config fits, found by doubling."""
    world = case.world
    while (world := 2 * world) <= MOST * case.world:
        wider = changed_to(case.config.mesh, ["ep"], [case.config.mesh.ep * world // case.world])
        found = taken(case, (), [*meshes, wider], world)
        if found and fits(found[0], case.card):
            yield shown(case, [f"gpus={world}"], *found)
            return


def taken(
    case: Case, words: Sequence[str], meshes: Sequence[MeshConfig], world: int
) -> tuple[Memory, MeshConfig] | None:
    """Return the changed config's memory and mapping: the first mapping that fits, or the one of least memory.

    Return None if the changes are not possible on any mapping."""
    try:
        config = changed(case.config, words)
        spec = case.spec_of(config) if any(word.startswith("model.upcycle.") for word in words) else case.spec
    except ValueError:
        return None
    model, found = Model(spec, config, case.teacher, case.whole), list[tuple[Memory, MeshConfig]]()
    for mesh in meshes:
        if (
            problem(mesh, world, spec, config.data.sequence)
            or refusal(config, mesh, world)
            or not goes_with(config, mesh)
        ):
            continue
        found.append((memory(spec, replace(config, mesh=mesh), world, model), mesh))
        if fits(found[-1][0], case.card):
            return found[-1]
    return min(found, key=lambda each: each[0].total, default=None)


def shown(case: Case, words: Sequence[str], size: Memory, mesh: MeshConfig) -> str:
    """Return a set of changes as text, with the axes that differ from the config's mapping and the memory it takes."""
    own = case.config.mesh
    other = [f"mesh.{axis}={getattr(mesh, axis)}" for axis in AXES if getattr(mesh, axis) != getattr(own, axis)]
    return f"{' '.join([*words, *other])} ({size.total / 1e9:.3g} GB a GPU)"
