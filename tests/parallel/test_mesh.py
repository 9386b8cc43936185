"""The two grids: arithmetic for many mappings, refusals, and the process groups of a few."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from training.parallel.collectives import broadcast
from training.parallel.mesh import AXES, MeshConfig, ParallelMesh, check, grids, groups, problem
from upcycle.arch.spec import DenseSpec, MoESpec

DENSE = DenseSpec("llama", layers=4, hidden=64, ffn=96, heads=8, kv_heads=4, head_dim=8, vocab=128, context=256)
MOE = MoESpec(DENSE, layers=(1, 2, 3), widths=(48,) * 8, top_k=2, copies=4, shared=32)
SIZES = st.sampled_from([1, 2, 3, 4, 6, 8, 16])
MAPPINGS = st.builds(MeshConfig, **dict.fromkeys(AXES, SIZES))
WORLDS = st.sampled_from([1, 2, 4, 6, 8, 12, 16, 24, 64])


@given(MAPPINGS, WORLDS)
@settings(max_examples=300, deadline=None)
def test_groups_partition_the_ranks_and_stages_are_the_same_in_both_grids(config: MeshConfig, world: int) -> None:
    dense, routed = config.tp * config.cp * config.pp * config.dp_replicate, config.ep * config.etp * config.pp
    config = config if world % dense == 0 and world % routed == 0 else replace(config, tp=1, cp=1, dp_replicate=1, ep=1)
    if world % (config.pp * config.etp):
        config = MeshConfig()
    attention, experts = grids(config, world)
    for sizes in (attention, experts):
        assert math.prod(sizes.values()) == world
        for axis, size in sizes.items():
            found = groups(sizes, (axis,))
            assert sorted(rank for group in found for rank in group) == list(range(world)) and {
                len(g) for g in found
            } == {size}
    assert groups(attention, ("pp",)) == groups(experts, ("pp",))
    stages = {tuple(g) for g in groups(attention, ("dp_replicate", "dp_shard", "cp", "tp"))}
    assert stages == {tuple(g) for g in groups(experts, ("edp_replicate", "edp_shard", "ep", "etp"))}
    # gathers of a replicated expert stay inside a copy
    copies = [set(g) for g in groups(attention, ("dp_shard", "cp", "tp"))]
    if experts["edp_replicate"] > 1:
        assert all(any(set(g) <= c for c in copies) for g in groups(experts, ("edp_shard", "ep", "etp")))


def test_experts_are_copied_where_the_model_is() -> None:
    """Gathers stay inside a copy, unless an ep group spans several: then one set of experts serves them all."""
    _, inside = grids(MeshConfig(dp_replicate=2, ep=2), 8)
    assert (inside["edp_replicate"], inside["edp_shard"]) == (2, 2)
    _, across = grids(MeshConfig(dp_replicate=2, ep=8), 8)
    assert (across["edp_replicate"], across["edp_shard"]) == (1, 1)


@pytest.mark.parametrize("world", [8, 24])
def test_a_rank_knows_its_place(world: int) -> None:
    config = MeshConfig(tp=2, dp_replicate=2, ep=2)
    mesh = ParallelMesh(config, world=world)
    attention, experts = grids(config, world)
    for rank in range(world):
        mesh.rank = rank
        for sizes, axes in ((attention, ("tp", "cp", "dp_shard", "pp")), (experts, ("ep", "etp", "edp_shard"))):
            for axis in axes:
                mine = next(g for g in groups(sizes, (axis,)) if rank in g)
                assert mesh.index(axis) == mine.index(rank)
        mine = next(g for g in groups(experts, ("edp_replicate", "edp_shard")) if rank in g)
        assert mesh.index("edp") == mine.index(rank) and mesh.size("edp") == len(mine) == mesh.edp
    assert mesh.dp == 2 * mesh.dp_shard == world // 2


def test_one_process_is_a_mesh_of_one() -> None:
    mesh = ParallelMesh(MeshConfig())
    assert mesh.group("dp_shard", "cp", "tp") is None and mesh.tokens_group() is None and mesh.group("ep") is None
    assert [mesh.size(a) for a in (*AXES, "dp_shard", "edp")] == [1] * 8 and mesh.index("edp") == 0


# ---- refusals


@given(
    MAPPINGS,
    WORLDS,
    st.sampled_from([DENSE, MOE, replace(MOE, layers=(0, 1, 2, 3), shared=0), replace(DENSE, heads=6, kv_heads=3)]),
    st.sampled_from([16, 24, 60, 64]),
)
@settings(max_examples=150, deadline=None)
def test_the_nearest_possible_mapping_is_possible(
    config: MeshConfig, world: int, spec: DenseSpec | MoESpec, sequence: int
) -> None:
    if not problem(config, world, spec, sequence):
        check(config, world, spec, sequence)
        return
    with pytest.raises(ValueError) as error:
        check(config, world, spec, sequence)
    advice = str(error.value).split("; try ")[1]
    change = {key: int(value) for key, value in re.findall(r"mesh\.(\w+)=(\d+)", advice)}
    assert change and "\n" not in str(error.value)
    check(replace(config, **change), world, spec, sequence)
    if len(change) > 1:  # then no single key helps
        one = (replace(config, **{axis: n}) for axis in AXES for n in range(1, world + 1))
        assert all(problem(other, world, spec, sequence) for other in one)


@pytest.mark.parametrize(
    ("change", "world", "message"),
    [
        (
            {"tp": 2, "cp": 3},
            8,
            "mesh.tp * cp * pp * dp_replicate is 6, which does not divide the 8 ranks; try mesh.cp=4",
        ),
        ({"ep": 3}, 8, "mesh.ep * etp * pp is 3, which does not divide the 8 ranks; try mesh.ep=4"),
        ({"ep": 16}, 16, "mesh.ep=16 does not divide the 8 experts; try mesh.ep=8"),
        ({"tp": 8}, 8, "mesh.tp=8 does not divide the 4 key/value heads; try mesh.tp=4"),
        ({"etp": 32}, 32, "mesh.etp=32 does not divide the 48 neurons of an expert; try mesh.etp=16"),
        ({"pp": 8}, 8, "mesh.pp=8 stages need as many layers, and this model has 4; try mesh.pp=4"),
        ({"cp": 64}, 64, "a sequence of 64 tokens cannot be cut into 2 * mesh.cp * tp = 128 pieces; try mesh.cp=32"),
    ],
)
def test_refusals(change: dict[str, int], world: int, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message) + "$"):
        check(MeshConfig(**change), world, MOE, 64)


def test_experts_that_fsdp_cannot_cut_evenly_are_refused() -> None:
    """It raised NotImplementedError on all ranks, when the model was made: of 8 experts and a hidden size of 2,880 on
    1,024 ranks, for instance."""
    hidden = replace(MOE, dense=replace(MOE.dense, hidden=2880))
    with pytest.raises(ValueError, match="FSDP cannot cut 8 experts of hidden size 2880 evenly over the 1024") as said:
        check(MeshConfig(), 1024, hidden, 64)
    change = dict(re.findall(r"mesh\.(\w+)=(\d+)", str(said.value)))
    check(MeshConfig(**{axis: int(size) for axis, size in change.items()}), 1024, hidden, 64)
    check(MeshConfig(), 64, hidden, 64)
    check(MeshConfig(dp_replicate=128), 1024, hidden, 64)
    check(MeshConfig(), 1024, hidden.dense, 64)


def test_a_dense_model_has_no_experts_to_spread() -> None:
    with pytest.raises(ValueError, match=r"this model is dense; try mesh\.ep=1$"):
        check(MeshConfig(ep=2), 2, DENSE, 64)


def test_sizes_are_at_least_one() -> None:
    with pytest.raises(ValueError, match=r"mesh\.cp is 0; it must be at least 1"):
        MeshConfig(cp=0)


# ---- with processes


def place(rank: int, world: int, config: MeshConfig) -> None:
    mesh = ParallelMesh(config)
    attention, experts = grids(config, world)
    asked = [
        ("tp",),
        ("cp", "tp"),
        ("dp_shard", "cp"),
        ("dp_shard", "cp", "tp"),
        ("pp",),
        ("edp",),
        ("ep", "etp"),
        ("ep",),
    ]
    for axes in asked:
        sizes = attention if set(axes) <= set(attention) else experts
        names = ("edp_replicate", "edp_shard") if axes == ("edp",) else axes
        want = next(g for g in groups(sizes, names) if rank in g)
        group = mesh.group(*axes)
        assert ([rank] if group is None else dist.get_process_group_ranks(group)) == want, axes
        if group is not None:
            total = torch.tensor(float(rank))
            dist.all_reduce(total, group=group)
            assert total == sum(want)
    shards(mesh)


def shards(mesh: ParallelMesh) -> None:
    """Each kind of parameter goes through FSDP2 on its mesh, and comes back whole."""
    full = torch.arange(16 * 8, dtype=torch.float32).view(16, 8)
    inner = {"tokens": None, "tensor": mesh.attention["tp"], "experts": mesh.experts["ep", "etp"]}
    for kind, on in inner.items():
        linear = nn.Linear(8, 16, bias=False)
        whole = full if on is None else distribute_tensor(full, on, [Shard(0)] * on.ndim)
        linear.weight = nn.Parameter(whole)
        fully_shard(linear, mesh=mesh.fsdp(kind))  # type: ignore[arg-type]
        weight = linear.weight
        assert isinstance(weight, DTensor) and torch.equal(weight.full_tensor(), full), kind
        copies = mesh.size("edp_replicate" if kind == "experts" else "dp_replicate") * mesh.size("pp")
        assert weight.to_local().numel() == full.numel() * copies // mesh.world, kind


@pytest.mark.parametrize(
    ("world", "config"),
    [
        (4, MeshConfig(tp=2, cp=2, ep=4)),
        (4, MeshConfig(tp=2, pp=2, etp=2)),
        (8, MeshConfig(tp=2, dp_replicate=2, ep=2, etp=2)),
        (8, MeshConfig(cp=2, dp_replicate=2, ep=8)),
    ],
)
def test_groups_sum_and_shard_as_they_say(world: int, config: MeshConfig) -> None:
    run(world, place, config)


def told(rank: int, world: int) -> None:
    for source, value in ((0, {"step": 3, "words": ["\u00e4", None, 1.5]}), (world - 1, ""), (1, list(range(1000)))):
        assert broadcast(value if rank == source else "something else", source) == value


def test_everybody_hears_the_same() -> None:
    run(3, told)
    assert broadcast([1]) == [1]
