"""Map ranks to axes: the only place that knows ranks.

Two grids over the same ranks, with the pipeline outermost in both ("folding"):

    attention and dense parts:  reshape(pp, dp_replicate, dp_shard, cp, tp)
    routed experts:             reshape(pp, edp, ep, etp)

ep does not depend on tp or dp, except that both grids have the same pipeline stages. Changing the grid needs no
communication: every rank brings its own tokens, [sequence / (cp * tp)] of each of its sequences, to the dispatcher.

Example, 8 ranks, tp=2 cp=2 ep=8: tp [0,1] [2,3] .., cp [0,2] [1,3] .., dp_shard [0,4] .., ep [0..7].
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from training.parallel.placement import FSDP, Kind
from upcycle.arch.spec import DenseSpec, MoESpec
from upcycle.config.values import COUNT, Rule, at_least, check_values, one_of

CONTEXTS = ("ring", "ulysses")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")
ARRIVALS = 1e6  # rows for which a rank has memory, as a multiple of balanced routing
AXES = ("tp", "cp", "pp", "dp_replicate", "ep", "etp")


@dataclass(frozen=True)
class MeshConfig:
    """The sizes of the mesh's axes; dp_shard and edp follow from the number of ranks."""

    tp: int = 1  # tensor parallel: divides heads and neurons, and the sequence in between
    cp: int = 1  # context parallel: a sequence is cut into 2 * cp pieces, and a rank holds an early and a late one
    pp: int = 1  # pipeline stages
    # copies of the sharded model (HSDP): gathers stay inside a copy, gradients cross copies
    dp_replicate: int = 1
    ep: int = 1  # expert parallel: whole experts
    etp: int = 1  # experts' tensor parallel: a slice of every expert's neurons
    context: str = "ring"  # attention of cp: ring | ulysses (training/parallel/context.py)
    # schedule of the pipeline: gpipe | 1f1b | interleaved | zero_bubble | zbv (pipeline.py)
    schedule: str = "1f1b"
    dispatcher: str = "alltoall"  # how tokens travel to experts: the name of a file of training/dispatch
    # with dispatcher=nvlink: room for the rows of a rank's experts, as a multiple of balanced routing; the host never
    # asks how many come, and more end the run
    arrivals: float = 2.0
    # true: free gathered weights after each use and sum gradients after each micro-batch, which needs the least memory;
    # false: once a step, as stages of a pipeline always do
    reshard: bool = True

    def __post_init__(self) -> None:
        rules = {
            " ".join(AXES): Rule(lambda size: not isinstance(size, bool) and size >= 1, "it must be at least 1", COUNT),
            "arrivals": at_least(1, ", the rows of balanced routing", most=ARRIVALS),
            "context": one_of(CONTEXTS),
            "schedule": one_of(SCHEDULES),
        }
        check_values(self, "mesh.", rules)


Sizes = dict[str, int]


def grids(config: MeshConfig, world: int) -> tuple[Sizes, Sizes]:
    """Return the axes and sizes of both grids, outermost first. `edp` has two axes, to replicate experts."""
    c = config
    dense, routed = c.tp * c.cp * c.pp * c.dp_replicate, c.ep * c.etp * c.pp
    assert world % dense == 0 and world % routed == 0, "check() first"
    copy = world // (c.pp * c.dp_replicate)  # ranks of one copy of one stage
    # an ep group across several copies spreads one set of experts over them, so no expert is replicated
    replicate = c.dp_replicate if copy % (c.ep * c.etp) == 0 else 1
    attention = {"pp": c.pp, "dp_replicate": c.dp_replicate, "dp_shard": world // dense, "cp": c.cp, "tp": c.tp}
    experts = {
        "pp": c.pp,
        "edp_replicate": replicate,
        "edp_shard": world // (routed * replicate),
        "ep": c.ep,
        "etp": c.etp,
    }
    return attention, experts


def groups(sizes: Sizes, axes: tuple[str, ...]) -> list[list[int]]:
    """List the groups of ranks that differ in `axes` only."""
    ranks = torch.arange(math.prod(sizes.values())).view(*sizes.values())
    dims = [list(sizes).index(axis) for axis in axes]
    last = tuple(range(ranks.dim() - len(dims), ranks.dim()))
    size = math.prod(sizes[axis] for axis in axes)
    found: list[list[int]] = ranks.movedim(dims, last).reshape(-1, size).tolist()
    return found


# ---- what is possible


def check(config: MeshConfig, world: int, spec: DenseSpec | MoESpec, sequence: int) -> None:
    """Raise a ValueError if a mapping cannot run, and name the nearest mapping that can."""
    reason = problem(config, world, spec, sequence)
    if reason:
        near = nearest(config, world, spec, sequence)
        words = (f"mesh.{a}={getattr(near, a)}" for a in AXES if getattr(near, a) != getattr(config, a))
        c = config
        wanted = math.lcm(c.tp * c.cp * c.pp * c.dp_replicate, c.ep * c.etp * c.pp)
        alone = world == 1 and not problem(config, wanted, spec, sequence)
        more = f", or start {wanted} processes: nproc={wanted}" if alone else ""
        raise ValueError(f"{reason}; try {' '.join(words)}{more}")


def problem(config: MeshConfig, world: int, spec: DenseSpec | MoESpec, sequence: int) -> str:
    """Return the first problem of a mapping as a sentence, or ""."""
    said = in_sizes(config, world, spec, sequence)
    if said or not isinstance(spec, MoESpec):
        return said
    experts, ranks = spec.experts // config.ep, grids(config, world)[1]["edp_shard"]
    if experts % ranks and spec.dense.hidden % ranks:  # see placement.sharded_dim
        hidden = spec.dense.hidden
        return f"FSDP cannot cut {experts} experts of hidden size {hidden} evenly over the {ranks} ranks that have them"
    return ""


def in_sizes(config: MeshConfig, world: int, spec: DenseSpec | MoESpec, sequence: int) -> str:
    """Return the first size that is impossible in any mapping, as a sentence, or "": one that is wrong even if every
    other axis is 1."""
    c, moe = config, spec if isinstance(spec, MoESpec) else None
    dense = moe.dense if moe else spec
    assert isinstance(dense, DenseSpec)
    tokens, routed = c.tp * c.cp * c.pp * c.dp_replicate, c.ep * c.etp * c.pp
    if world % tokens:
        return f"mesh.tp * cp * pp * dp_replicate is {tokens}, which does not divide the {world} ranks"
    if moe is None and (c.ep > 1 or c.etp > 1):
        return f"mesh.ep={c.ep} and mesh.etp={c.etp} need routed experts, and this model is dense"
    if world % routed:
        return f"mesh.ep * etp * pp is {routed}, which does not divide the {world} ranks"
    if c.pp > dense.layers:
        return f"mesh.pp={c.pp} stages need as many layers, and this model has {dense.layers}"
    divided = [("tp", dense.heads, "attention heads"), ("tp", dense.kv_heads, "key/value heads")]
    if moe is None or len(moe.layers) < dense.layers:
        divided.append(("tp", dense.ffn, "neurons of the dense FFN"))
    if moe is not None:
        divided.append(("ep", moe.experts, "experts"))
        divided.append(("etp", max(moe.widths), "neurons of an expert"))
        if moe.shared:
            divided.append(("tp", moe.shared, "neurons of the shared expert"))
    for axis, count, what in divided:
        if count % getattr(c, axis):
            return f"mesh.{axis}={getattr(c, axis)} does not divide the {count} {what}"
    pieces = c.tp * (2 * c.cp if c.cp > 1 else 1)
    if sequence % pieces:
        why = f"2 * mesh.cp * tp = {pieces}" if c.cp > 1 else f"mesh.tp={c.tp}"
        return f"a sequence of {sequence} tokens cannot be cut into {why} pieces"
    return ""


def changed_to(config: MeshConfig, axes: Sequence[str], sizes: Sequence[int]) -> MeshConfig:
    changes: dict[str, Any] = dict(zip(axes, sizes, strict=True))
    return replace(config, **changes)


def nearest(config: MeshConfig, world: int, spec: DenseSpec | MoESpec, sequence: int) -> MeshConfig:
    """Return a possible mapping with the fewest and smallest changes. One copy per rank is always possible."""
    alone = {
        axis: [
            n
            for n in range(1, world + 1)
            if not in_sizes(changed_to(MeshConfig(), (axis,), (n,)), world, spec, sequence)
        ]
        for axis in AXES
    }
    must_change = {axis for axis in AXES if getattr(config, axis) not in alone[axis]}

    def distance(other: MeshConfig) -> tuple[float, int]:
        moved = sum(abs(math.log(getattr(other, axis) / getattr(config, axis))) for axis in AXES)
        return moved, -math.prod(getattr(other, axis) for axis in AXES)

    for changed in range(max(len(must_change), 1), len(AXES) + 1):
        possible = [
            other
            for axes in itertools.combinations(AXES, changed)
            if must_change <= set(axes)
            for values in itertools.product(*(alone[axis] for axis in axes))
            if not problem(other := changed_to(config, axes, values), world, spec, sequence)
        ]
        if possible:
            return min(possible, key=distance)
    raise AssertionError("one rank a copy is always possible")


# ---- the ranks themselves


class ParallelMesh:
    """This rank's coordinates in both grids, and the process groups along their axes.

    Without torch.distributed it is a mesh of one: every size is 1 and every group None.
    """

    def __init__(self, config: MeshConfig, *, world: int | None = None, device_type: str = "cpu") -> None:
        alone = not dist.is_initialized()
        self.config, self.rank = config, 0 if alone else dist.get_rank()
        self.world = world or (1 if alone else dist.get_world_size())
        self._attention, self._experts = grids(config, self.world)
        self.sizes = self._attention | self._experts
        self.dp_shard = self._attention["dp_shard"]
        self.dp = config.dp_replicate * self.dp_shard
        self.edp = self._experts["edp_replicate"] * self._experts["edp_shard"]
        self._meshes: tuple[DeviceMesh, DeviceMesh] | None = None
        if not alone:
            # all groups are created here, because every rank must create them in the same order
            ranks = torch.arange(self.world)
            meshes = [
                DeviceMesh(device_type, ranks.view(*sizes.values()), mesh_dim_names=tuple(sizes))
                for sizes in (self._attention, self._experts)
            ]
            self._meshes = (meshes[0], meshes[1])
            self._flat = {
                axes: mesh[axes]._flatten("_".join(axes))
                for sizes, mesh in zip((self._attention, self._experts), meshes, strict=True)
                for axes in runs(sizes)
            }

    @property
    def attention(self) -> DeviceMesh:
        """Return the mesh with axes pp, dp_replicate, dp_shard, cp, tp."""
        assert self._meshes, "one process without torch.distributed has no device mesh"
        return self._meshes[0]

    @property
    def experts(self) -> DeviceMesh:
        """Return the mesh with axes pp, edp_replicate, edp_shard, ep, etp."""
        assert self._meshes, "one process without torch.distributed has no device mesh"
        return self._meshes[1]

    def size(self, axis: str) -> int:
        return self.edp if axis == "edp" else self.sizes[axis]

    def index(self, axis: str) -> int:
        """Return this rank's coordinate along `axis`."""
        sizes, axes = self._grid((axis,))
        index = 0
        for name in axes:
            inner = math.prod(itertools.islice(sizes.values(), list(sizes).index(name) + 1, None))
            index = index * sizes[name] + self.rank // inner % sizes[name]
        return index

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """Return the group of ranks that differ from this one in `axes` only; None if it is this rank alone.

        `axes` must belong to one grid and be neighbours there, not counting axes of size 1.
        """
        sizes, names = self._grid(axes)
        names = tuple(name for name in names if sizes[name] > 1)
        if not names or self._meshes is None:
            return None
        return self._line(names).get_group()

    def tokens_group(self) -> dist.ProcessGroup | None:
        """Return the group of this pipeline stage's ranks, which all have different tokens."""
        return self.group("dp_replicate", "dp_shard", "cp", "tp")

    def fsdp(self, kind: Kind) -> DeviceMesh:
        """Return the mesh for fully_shard: the axis to shard over, after the axis of copies if there are any (HSDP)."""
        over, copies = FSDP[kind]
        sizes, _ = self._grid(over)
        shard = self._line(tuple(name for name in over if sizes[name] > 1) or over[:1])
        return DeviceMesh._concatenate([self._line((copies,)), shard]) if sizes[copies] > 1 else shard

    def _line(self, axes: tuple[str, ...]) -> DeviceMesh:
        """Return the mesh of neighbouring axes, flattened to one axis."""
        if len(axes) > 1:
            return self._flat[axes]
        return (self.attention if axes[0] in self._attention else self.experts)[axes[0]]

    def _grid(self, axes: tuple[str, ...]) -> tuple[Sizes, tuple[str, ...]]:
        """Return the grid that has these axes, and the axes in its order."""
        parts = {part for axis in axes for part in (("edp_replicate", "edp_shard") if axis == "edp" else (axis,))}
        for sizes in (self._attention, self._experts):
            if parts <= set(sizes):
                return sizes, tuple(name for name in sizes if name in parts)
        raise AssertionError(f"{axes} are not axes of one grid")


def runs(sizes: Sizes) -> list[tuple[str, ...]]:
    """List all runs of two or more neighbouring axes, without axes of size 1 and without the pipeline."""
    names = [name for name, size in sizes.items() if size > 1 and name != "pp"]
    return [tuple(names[a:b]) for a in range(len(names)) for b in range(a + 2, len(names) + 1)]
