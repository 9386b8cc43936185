"""On several GPUs: every dispatcher that is installed against `local` on the tokens of all ranks, and how long it takes.

    torchrun --nproc-per-node 8 -m pytest -s tests/gpu/test_dispatch_ep.py

-s shows the times; they are printed, never asserted. Two layers on one set of tokens, so that two plans are alive.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from training.dispatch import Dispatcher, create, deepep
from training.dispatch.local import Local
from training.experts import ExpertWeights
from training.experts.reference import experts as compute
from training.parallel.mesh import MeshConfig, ParallelMesh
from training.parallel.processes import processes
from upcycle import plugin

RANKS = int(os.environ.get("WORLD_SIZE", "1"))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or RANKS == 1, reason="needs torchrun and a CUDA device a rank"),
]
NAMES = [name for name in plugin.names("training.dispatch") if name != "local"]
HIDDEN, NEURONS, K, PER_RANK, TOKENS = 2048, 256, 4, 4, 512


@pytest.fixture(scope="module")
def mesh() -> Iterator[ParallelMesh]:
    with processes("cuda"):
        yield ParallelMesh(MeshConfig(ep=RANKS), device_type="cuda")


def routed(rank: int, case: str, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weights, experts and the output's gradient of a rank; other ones on each."""
    draw, count = torch.Generator().manual_seed(100 + rank), PER_RANK * RANKS
    expert = torch.rand(tokens, count, generator=draw).topk(K).indices
    if case == "one_rank":
        expert = torch.arange(count - K, count).expand(tokens, K)
    weight = torch.rand(tokens, K, generator=draw) + 0.1
    if case == "dropped":
        weight = weight * (torch.rand(tokens, K, generator=draw) > 0.3)
    x, target = torch.randn(2, tokens, HIDDEN, generator=draw)
    return tuple(t.cuda() for t in (x.bfloat16(), weight, expert, target.bfloat16()))  # type: ignore[return-value]


def weights() -> ExpertWeights:
    draw, count = torch.Generator().manual_seed(7), PER_RANK * RANKS
    up = torch.randn(count, 2 * NEURONS, HIDDEN, generator=draw) / HIDDEN**0.5
    down = torch.randn(count, HIDDEN, NEURONS, generator=draw) / NEURONS**0.5
    return ExpertWeights(up.bfloat16().cuda(), down.bfloat16().cuda(), True)


def needed(parts: list[tuple[Tensor, ...]]) -> int:
    """The most rows that an expert gets from a rank."""
    return max(int(expert[weight != 0].bincount().max()) for _, weight, expert, _ in parts)


def run(
    dispatcher: Dispatcher, parts: tuple[Tensor, ...], w: ExpertWeights, dtype: torch.dtype, room: int | None = None
) -> list[Tensor]:
    """Output, and gradients of tokens, routing weights, up and down."""
    x, weight, expert, target = parts
    leaves = [t.detach().to(dtype).requires_grad_() for t in (x, w.up_EFD, w.down_EDF)]
    chance = weight.detach().clone().requires_grad_()
    own = ExpertWeights(leaves[1], leaves[2], True)
    y = leaves[0]
    for _ in range(2):
        sent = dispatcher.dispatch(y, chance, expert, room)
        rows = compute(sent.x_RD, sent.weight_R, sent.count_E, own, "silu")
        y = y + dispatcher.combine(rows, sent.handle)
    return [y, *torch.autograd.grad(y, (leaves[0], chance, leaves[1], leaves[2]), target.to(dtype))]


def far(got: Tensor, want: Tensor) -> float:
    got, want = got.detach(), want.detach()
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-9))


def made(name: str, mesh: ParallelMesh) -> Dispatcher:
    reason = plugin.load("training.dispatch", name).available()
    if reason:
        pytest.skip(reason)
    return create(name, PER_RANK * RANKS, mesh.group("ep"), arrivals=RANKS)  # memory for all rows that can come


@pytest.mark.parametrize("spare", [None, 0, 21], ids=["waits", "exact", "spare"])
@pytest.mark.parametrize("name", NAMES)
def test_is_local_on_the_tokens_of_all_ranks(name: str, spare: int | None, mesh: ParallelMesh) -> None:
    dispatcher, w = made(name, mesh), weights()
    mine = slice(mesh.rank * PER_RANK, (mesh.rank + 1) * PER_RANK)
    own = ExpertWeights(w.up_EFD[mine], w.down_EDF[mine], True)
    for case in ("random", "dropped", "one_rank", "random"):
        parts = [routed(rank, case) for rank in range(RANKS)]
        whole = tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))
        want = run(Local(PER_RANK * RANKS), whole, w, torch.float32)
        here = slice(mesh.rank * TOKENS, (mesh.rank + 1) * TOKENS)
        want = [want[0][here], want[1][here], want[2][here], want[3][mine], want[4][mine]]
        room = None if spare is None else needed(parts) + spare
        got = run(dispatcher, parts[mesh.rank], own, torch.bfloat16, room)
        kept = parts[mesh.rank][1] != 0
        got[2], want[2] = got[2] * kept, want[2] * kept
        worst = [far(g, w) for g, w in zip(got, want, strict=True)]
        # bf16 rounds each of two layers' four products and sums: 2^-9 each; a row that went astray is 1 off
        assert max(worst) < 0.03, (case, worst)
        assert far(got[0].roll(1, 0), want[0]) > 0.5, "and rows in another order would be noticed"


# tokens of a rank in validation and in suites
UNEVEN = {
    "uneven": lambda rank: 5 + 37 * rank,
    "one token each": lambda rank: 1,
    "one token on rank 0": lambda rank: 1 if rank == 0 else TOKENS + 1,  # more than the buffers were made for
    "no token on rank 0": lambda rank: 0 if rank == 0 else 100,
    "no token but on rank 0": lambda rank: 3 if rank == 0 else 0,
}


@pytest.mark.parametrize("name", NAMES)
def test_ranks_with_other_numbers_of_tokens(name: str, mesh: ParallelMesh) -> None:
    """Without gradients, before and after training's even tokens, on one dispatcher."""
    dispatcher, w = made(name, mesh), weights()
    mine = slice(mesh.rank * PER_RANK, (mesh.rank + 1) * PER_RANK)
    own = ExpertWeights(w.up_EFD[mine], w.down_EDF[mine], True)
    for case, tokens in [*UNEVEN.items(), *reversed(UNEVEN.items())]:
        parts = [routed(rank, "random", tokens(rank)) for rank in range(RANKS)]
        x, weight, expert, _ = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        with torch.no_grad():
            sent = Local(PER_RANK * RANKS).dispatch(x, weight, expert)
            want = Local(PER_RANK * RANKS).combine(
                compute(sent.x_RD, sent.weight_R, sent.count_E, w, "silu"), sent.handle
            )
            x, weight, expert, _ = parts[mesh.rank]
            sent = dispatcher.dispatch(x, weight, expert)
            got = dispatcher.combine(compute(sent.x_RD, sent.weight_R, sent.count_E, own, "silu"), sent.handle)
        first = sum(tokens(rank) for rank in range(mesh.rank))
        assert got.shape == x.shape
        # as above: bf16 rounds a product and a sum; a row that went astray is 1 off
        assert far(got, want[first : first + len(x)]) < 0.03, case
        even = routed(mesh.rank, "random")
        assert all(tensor.isfinite().all() for tensor in run(dispatcher, even, own, torch.bfloat16)), case


@pytest.mark.parametrize("name", NAMES)
def test_with_room_nothing_waits_for_the_device(name: str, mesh: ParallelMesh) -> None:
    dispatcher = made(name, mesh)
    if isinstance(dispatcher, deepep.Second):
        pytest.skip("DeepEP 2.x waits for the number of rows, room or not")
    x, weight, expert, _ = routed(mesh.rank, "random")
    x.requires_grad_()
    for _ in range(2):  # the first time kernels are compiled and buffers made
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        torch.cuda._sleep(2**31)  # a second or more
        sent = dispatcher.dispatch(x, weight, expert, TOKENS)
        dispatcher.combine(sent.x_RD, sent.handle).sum().backward()  # type: ignore[no-untyped-call]
        said = time.perf_counter() - start
        torch.cuda.synchronize()
        slept = time.perf_counter() - start
    assert said < slept / 2, (said, slept)


@pytest.mark.parametrize("spare", [None, 0], ids=["waits", "room"])
@pytest.mark.parametrize("name", NAMES)
def test_times(name: str, spare: int | None, mesh: ParallelMesh) -> None:
    """A Qwen3-30B-A3B layer's tokens: slowest rank's median of 15."""
    dispatcher = made(name, mesh)
    parts = [routed(rank, "random", 8192) for rank in range(RANKS)]
    room, (x, weight, expert, _) = None if spare is None else needed(parts), parts[mesh.rank]
    took: dict[str, list[float]] = {"dispatch": [], "combine": []}
    # as in training: under gradients ranks do not ask each other how many tokens they bring
    for _ in range(19):
        for what in took:
            dist.barrier()
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            if what == "dispatch":
                sent = dispatcher.dispatch(x, weight, expert, room)
            else:
                dispatcher.combine(sent.x_RD, sent.handle)
            end.record()
            torch.cuda.synchronize()
            took[what].append(begin.elapsed_time(end) * 1000)
    median = torch.tensor([sorted(times[4:])[7] for times in took.values()], device="cuda")
    dist.all_reduce(median, dist.ReduceOp.MAX)
    if mesh.rank == 0:
        d, c = median.tolist()
        with_room = "" if room is None else ", with room"
        print(
            f"\n{name}{with_room}: ep={RANKS}, {K} of {PER_RANK * RANKS} experts: dispatch {d:.0f}, combine {c:.0f} us"
        )
