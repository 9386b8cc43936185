"""Every dispatcher against `local` on the tokens of all ranks: output, and gradients of all that has one.

Each rank has other tokens, experts are real and all different, so a row that comes to the wrong expert, the wrong
token or the wrong rank shows. DeepEP and Hybrid-EP run here on stand-ins that move data over gloo (fakes.py).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import fakes
import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import Tensor

from tests.sweeps import swept
from training import dispatch
from training.dispatch import Dispatcher
from training.dispatch.local import Local
from training.dispatch.nvlink import NVLink, check_nodes
from training.experts import ExpertWeights
from training.experts.reference import experts
from training.parallel.mesh import MeshConfig, ParallelMesh
from upcycle import plugin

EXPERTS, HIDDEN, NEURONS, K = 8, 12, 16, 3
# as many tokens on every rank
EVEN = ("random", "dropped", "one_rank", "one_expert", "one_token", "all_dropped_on_rank_0", "whole_chunk")
UNEVEN = ("uneven", "none_on_rank_0", "one_on_rank_0")
CASES = (*EVEN, *UNEVEN)
ADAPTERS = ("deepep", "hybridep")  # on CUDA alone; here on stand-ins
WAITLESS = ("alltoall", "deepep on 1.x", "hybridep on hybrid", "hybridep on old hybrid")  # where there is room
# whose ranks agree on sizes before they send
ALIKE = ("deepep on 2.x", "hybridep on hybrid", "hybridep on old hybrid", "nvlink")
WALKED = [name for name in plugin.names("training.dispatch") if name not in ("local", *ADAPTERS)]


@dataclass
class Data:
    """Of one rank, or of all of them."""

    x_TD: Tensor
    weight_TK: Tensor
    expert_TK: Tensor
    target_TD: Tensor

    def leaves(self) -> list[Tensor]:
        return [self.x_TD, self.weight_TK]


def data_of(rank: int, case: str) -> Data:
    draw = torch.Generator().manual_seed(1000 + rank)
    tokens = {
        "one_token": 1,
        "whole_chunk": 64,
        "uneven": 5 + 4 * rank,
        "none_on_rank_0": 0 if rank == 0 else 9,
        "one_on_rank_0": 1 if rank == 0 else 70,
    }.get(case, 10)
    expert = torch.rand(tokens, EXPERTS, generator=draw).argsort(1)[:, :K]
    if case == "one_rank":
        expert = torch.arange(EXPERTS - K, EXPERTS).expand(tokens, K)
    weight = (torch.rand(tokens, K, generator=draw) + 0.1).double()  # float32 can hold them, as DeepEP must
    if case == "one_expert":
        expert = torch.tensor([5, 0, 1]).expand(tokens, K)
        weight = weight * torch.tensor([1, 0, 0])
    if case == "dropped":
        weight = weight * (torch.rand(tokens, K, generator=draw) > 0.4)
    if case == "all_dropped_on_rank_0" and rank == 0:
        weight = weight * 0
    x, target = torch.randn(2, tokens, HIDDEN, generator=draw, dtype=torch.float64)
    return Data(x.requires_grad_(), weight.requires_grad_(), expert, target)


def together(parts: list[Data]) -> Data:
    x, weight = (torch.cat([part.leaves()[i].detach() for part in parts]).requires_grad_() for i in (0, 1))
    return Data(x, weight, torch.cat([p.expert_TK for p in parts]), torch.cat([p.target_TD for p in parts]))


def weights_of() -> list[Tensor]:
    """up (N, 2, F, D), down, and their biases."""
    draw = torch.Generator().manual_seed(7)
    shapes = [(EXPERTS, 2, NEURONS, HIDDEN), (EXPERTS, HIDDEN, NEURONS), (EXPERTS, 2, NEURONS), (EXPERTS, HIDDEN)]
    return [(torch.randn(s, generator=draw, dtype=torch.float64) / 3).requires_grad_() for s in shapes]


def part(weights: list[Tensor], mesh: ParallelMesh) -> list[Tensor]:
    """This rank's experts, and its slice of their neurons."""
    own = [w.detach().chunk(mesh.size("ep"))[mesh.index("ep")] for w in weights]
    dims = (2, 2, 2, None)
    own = [
        w if dim is None else w.chunk(mesh.size("etp"), dim)[mesh.index("etp")]
        for w, dim in zip(own, dims, strict=True)
    ]
    return [w.contiguous().requires_grad_() for w in own]


def needed(parts: list[Data]) -> int:
    """The most rows that an expert gets from a rank."""
    counts = [(part.expert_TK[part.weight_TK != 0]).bincount(minlength=EXPERTS).max() for part in parts]
    return int(max(counts))


def compute(
    dispatcher: Dispatcher, data: Data, weights: list[Tensor], etp: int = 1, room: int | None = None, waits: bool = True
) -> Tensor:
    up, down, up_bias, down_bias = weights
    # the bias is in every etp rank's summand: an equal part of it
    w = ExpertWeights(up.flatten(1, 2), down, True, up_bias.flatten(1, 2), down_bias / etp)
    x_TD = data.x_TD
    for _ in range(2):  # layers: the first one's plan is still needed when the second's is made
        sent = dispatcher.dispatch(x_TD, data.weight_TK, data.expert_TK, room)
        assert waits or room is None or len(sent.x_RD) == etp * EXPERTS * room, (
            "a size that the counts are not asked for"
        )
        # rows of no expert are NaN on the way back, in both directions: nothing may come of them
        tail = torch.arange(int(sent.count_E.sum()), len(sent.x_RD))
        for rows in (sent.x_RD, sent.weight_R):
            if rows.requires_grad:
                rows.register_hook(lambda grad, tail=tail: grad.index_fill(0, tail, torch.nan))
        y_RD = experts(sent.x_RD, sent.weight_R, sent.count_E, w, "silu").index_fill(0, tail, torch.nan)
        x_TD = x_TD + dispatcher.combine(y_RD, sent.handle)
    return x_TD


def gradients(y_TD: Tensor, data: Data, weights: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad((y_TD * data.target_TD).sum(), [*data.leaves(), *weights]))


class Misdelivering:
    """The negative control: two tokens change places on the way home, on one rank."""

    def __init__(self, inner: Dispatcher) -> None:
        self.inner = inner

    def dispatch(
        self, x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, room: int | None = None
    ) -> dispatch.Dispatched:
        return self.inner.dispatch(x_TD, weight_TK, expert_TK, room)

    def combine(self, y_RD: Tensor, handle: Any) -> Tensor:
        y_TD = self.inner.combine(y_RD, handle)
        return y_TD if dist.get_rank() else torch.cat([y_TD[1:2], y_TD[:1], y_TD[2:]])


def compare(
    rank: int, world: int, name: str, config: MeshConfig, cases: tuple[str, ...], broken: bool = False,
    spare: int | None = None,
) -> None:  # fmt: skip
    """`spare`: there is room for so many rows more than come; None: for as many as come, whatever that is."""
    mesh = ParallelMesh(config)
    torch.use_deterministic_algorithms(True)  # memory where nobody wrote is NaN
    if mesh.size("etp") > 1 and name != "alltoall":  # which slices of experts may be sent to; others may refuse them
        try:
            dispatcher = made(name, mesh)
        except ValueError as refusal:
            assert str(refusal).endswith("use mesh.etp=1 or dispatcher=alltoall")
            return
    dispatcher = made(name, mesh)
    if broken:
        dispatcher = Misdelivering(dispatcher)
    for case in cases:
        parts = [data_of(r, case) for r in range(world)]
        whole, mine, weights = together(parts), parts[rank], weights_of()
        want_y = compute(Local(EXPERTS), whole, weights)
        want = gradients(want_y, whole, weights)
        own = part(weights, mesh)
        room = None if spare is None else needed(parts) + spare
        waits = name not in WAITLESS or world == 1
        start = sum(len(p.x_TD) for p in parts[:rank])
        rows = slice(start, start + len(mine.x_TD))
        if case in UNEVEN and name in ALIKE:  # uneven tokens come without gradients only
            with torch.no_grad():
                close(compute(dispatcher, mine, own), want_y[rows], "output", case)
            continue
        y = compute(dispatcher, mine, own, mesh.size("etp"), room, waits)
        got = gradients(y, mine, own)
        assert not fakes.waits or waits or room is None, "nothing is to wait for the device"
        close(y, want_y[rows], "output", case)
        close(got[0], want[0][rows], "gradient of x", case)
        kept = mine.weight_TK.detach() != 0  # of a dropped choice, capacity masks the gradient
        # DeepEP carries them in float32, whatever the rest is
        tolerance = 1e-4 if name.startswith(ADAPTERS) else 1e-10
        close(got[1] * kept, want[1][rows] * kept, "gradient of the routing weights", case, tolerance)
        for found, wanted, what in zip(
            got[2:], part(want[2:], mesh), ("up", "down", "up_bias", "down_bias"), strict=True
        ):
            if mesh.group("edp") is not None:
                dist.all_reduce(found, group=mesh.group("edp"))
            if what == "down_bias" and mesh.group("etp") is not None:
                dist.all_reduce(found, group=mesh.group("etp"))
            close(found, wanted.detach(), f"gradient of {what}", case)


def made(name: str, mesh: ParallelMesh) -> Dispatcher:
    if not name.startswith(ADAPTERS):
        room = mesh.size("ep")  # for all rows that can come
        return dispatch.create(name, EXPERTS, mesh.group("ep"), mesh.group("etp"), arrivals=room)
    name, _, generation = name.partition(" on ")
    sys.modules["deep_ep"] = fakes.package(generation)
    found = plugin.load("training.dispatch", name).dispatcher(EXPERTS, mesh.group("ep"), mesh.group("etp"))
    return found


def close(got: Tensor, want: Tensor, what: str, case: str, tolerance: float = 1e-10) -> None:
    assert got.shape == want.shape, (what, case, got.shape, want.shape)
    worst = float((got - want).detach().abs().max()) if got.numel() else 0.0
    assert worst < tolerance, f"{what} differs by {worst} ({case})"


@pytest.mark.parametrize(
    ("world", "ep", "etp"),
    swept([(1, 1, 1), (2, 2, 1), (2, 1, 2), (4, 4, 1), (4, 2, 2), (4, 2, 1)], [(4, 1, 4), (8, 4, 2), (8, 8, 1)]),
)
@pytest.mark.parametrize("name", WALKED)
def test_a_dispatcher_is_local_on_the_tokens_of_all_ranks(name: str, world: int, ep: int, etp: int) -> None:
    run(world, compare, name, MeshConfig(ep=ep, etp=etp), CASES)


@pytest.mark.parametrize(
    ("world", "ep", "etp"), swept([(1, 1, 1), (2, 2, 1), (4, 2, 2), (4, 2, 1)], [(2, 1, 2), (8, 4, 2)])
)
@pytest.mark.parametrize("name", WALKED)
def test_with_room_for_more_rows_than_come(name: str, world: int, ep: int, etp: int) -> None:
    run(world, compare, name, MeshConfig(ep=ep, etp=etp), CASES, False, 0)
    run(world, compare, name, MeshConfig(ep=ep, etp=etp), CASES, False, 3)


@pytest.mark.parametrize(("world", "spare"), swept([(4, 0), (2, 3)], [(4, 3)]))
@pytest.mark.parametrize("name", ["deepep on 1.x", "deepep on 2.x", "hybridep on hybrid", "hybridep on old hybrid"])
def test_adapters_with_room_for_more_rows_than_come(name: str, world: int, spare: int) -> None:
    run(world, compare, name, MeshConfig(ep=world), EVEN, False, spare)


def values_asked_for(rank: int, world: int, room: int | None) -> list[str]:
    """How often the plan of a dispatch takes a tensor's values to the host, which on a GPU is a wait."""
    mesh, asked = ParallelMesh(MeshConfig(ep=2, etp=2)), []
    plan = made("alltoall", mesh).plan  # type: ignore[attr-defined]
    data = data_of(rank, "dropped")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("tolist", "item", "__int__", "__bool__", "__index__"):
            plain = getattr(Tensor, name)
            patch.setattr(Tensor, name, lambda self, name=name, plain=plain: (asked.append(name), plain(self))[1])
        made_plan = plan(data.weight_TK.detach(), data.expert_TK, room)
    kept = int((data.weight_TK != 0).sum())
    assert 0 < kept < data.weight_TK.numel() and made_plan.rows == (kept if room is None else EXPERTS * room)
    return asked


def test_a_plan_asks_the_device_once_and_with_room_not_at_all() -> None:
    assert run(4, values_asked_for, None) == [["tolist"]] * 4
    assert run(4, values_asked_for, 10) == [[]] * 4


def nvlink_alone(rank: int, world: int) -> tuple[tuple[int, int], int, Tensor, list[str]]:
    """Of a training dispatch, forward and backward, which asks the device nothing, how many of this rank's choices were kept
    and how many rows came; of one with memory for too few rows how many were computed and which tokens are nan; and
    what it says of that, asked twice."""
    dispatcher, asked = made("nvlink", ParallelMesh(MeshConfig(ep=2))), []
    assert isinstance(dispatcher, NVLink)
    data, narrow = data_of(rank, "dropped"), data_of(rank, "one_rank")

    def there_and_back(data: Data) -> tuple[dispatch.Dispatched, Tensor]:
        sent = dispatcher.dispatch(data.x_TD, data.weight_TK, data.expert_TK)
        y_TD = dispatcher.combine(sent.x_RD * sent.weight_R[:, None], sent.handle)
        y_TD.sum().backward()
        return sent, y_TD

    with pytest.MonkeyPatch.context() as patch:
        for name in ("tolist", "item", "__int__", "__bool__", "__index__"):
            plain = getattr(Tensor, name)
            patch.setattr(Tensor, name, lambda self, name=name, plain=plain: (asked.append(name), plain(self))[1])
        came = there_and_back(data)[0].count_E
    assert dispatcher.trouble() == "" and not asked
    kept = int((data.weight_TK != 0).sum()), int(came.sum())
    dispatcher.arrivals = 1.5  # and all rows go to one rank: 2 times as many
    sent, y_TD = there_and_back(narrow)
    return kept, int(sent.count_E.sum()), y_TD.isnan().any(1), [dispatcher.trouble(), dispatcher.trouble()]


def test_nvlink_asks_the_device_nothing_and_says_what_found_no_memory() -> None:
    (first, none, lost, nothing), (second, rows, also_lost, said) = run(2, nvlink_alone)
    assert first[0] + second[0] == first[1] + second[1], "dropped choices do not travel"
    assert none == 0 and rows == 45 and nothing == ["", ""]
    # the last 15 of 60 rows, which are the last expert's: five of the first rank's tokens, and all of the second's
    assert lost.tolist() == [False] * 5 + [True] * 5 and also_lost.all()
    assert said[0].startswith("60 rows came to a rank's experts, 2.00 times as many as balanced routing sends")
    assert "mesh.arrivals=1.5 " in said[0] and "with mesh.arrivals=2.2, or" in said[0] and said[1] == ""


@pytest.mark.parametrize("world", swept([4], [2]))
@pytest.mark.parametrize(
    ("name", "cases"),
    [
        ("deepep on 1.x", CASES),
        # the first, which makes the buffer, from no token; then one that fits on rank 0 and on no other
        ("deepep on 2.x", ("none_on_rank_0", *EVEN, "one_on_rank_0", "uneven", "random")),
        ("hybridep on hybrid", ("none_on_rank_0", *EVEN, "one_on_rank_0", "uneven", "random")),
        ("hybridep on old hybrid", ("uneven", "random", "one_on_rank_0", "none_on_rank_0", "random")),
        ("deepep on hybrid", EVEN),
    ],
)
def test_adapters_are_local_on_the_tokens_of_all_ranks(name: str, cases: tuple[str, ...], world: int) -> None:
    run(world, compare, name, MeshConfig(ep=world), cases)


def test_adapters_serve_several_groups() -> None:
    run(4, compare, "deepep on 2.x", MeshConfig(ep=2), EVEN)


@pytest.mark.parametrize("name", [*WALKED, "deepep on 1.x", "deepep on 2.x", "hybridep on hybrid"])
def test_a_misdelivered_token_is_noticed(name: str) -> None:
    with pytest.raises(RuntimeError, match="differs"):
        run(2, compare, name, MeshConfig(ep=2), ("random",), True)


# ---- refusals


def refused(rank: int, world: int, name: str, generation: str) -> str:
    mesh = ParallelMesh(MeshConfig(ep=2))
    sys.modules.pop("deep_ep", None)
    if generation:
        sys.modules["deep_ep"] = fakes.package(generation)
    with pytest.raises(ValueError) as error:
        dispatch.create(name, EXPERTS, mesh.group("ep"), mesh.group("etp"))
    return str(error.value)


def test_nvlink_does_not_leave_its_machine() -> None:
    for ep, local in ((8, 8), (2, 8), (8, 0), (1, 3)):
        check_nodes(ep, local)
    for ep, local, fits in ((16, 8, 8), (4, 6, 2), (4, 2, 2), (3, 8, 1)):
        with pytest.raises(
            ValueError, match=f"mesh.ep={ep} spans machines of {local} ranks; write mesh.ep={fits}, or mesh"
        ):
            check_nodes(ep, local)


@pytest.mark.parametrize(
    ("name", "generation", "message"),
    [
        (
            "deepep",
            "",
            "dispatcher=deepep needs the package deep_ep, which is not installed; build it as our Dockerfile does, or use dispatcher=alltoall",
        ),
        (
            "hybridep",
            "",
            "dispatcher=hybridep needs the package deep_ep, which is not installed; build it as our Dockerfile does, or use dispatcher=alltoall",
        ),
        (
            "hybridep",
            "1.x",
            "needs a deep_ep with HybridEPBuffer, and the installed one has none; use dispatcher=alltoall",
        ),
        ("deepep", "1.x", "dispatcher=deepep needs a CUDA device, and there is none; use dispatcher=alltoall"),
        (
            "deep",
            "",
            f"'deep' is not one of the dispatch ({', '.join(plugin.names('training.dispatch'))}); did you mean 'deepep'?",
        ),
    ],
)
def test_what_is_absent_is_said_in_one_sentence(name: str, generation: str, message: str) -> None:
    if torch.cuda.is_available() and "CUDA" in message:
        pytest.skip("there is a CUDA device")
    assert message in run(2, refused, name, generation)[0]


def slices(rank: int, world: int) -> list[str]:
    mesh, said = ParallelMesh(MeshConfig(ep=2, etp=2)), []
    for name in ("deepep", "hybridep", "local"):
        with pytest.raises(ValueError) as error:
            plugin.load("training.dispatch", name).dispatcher(EXPERTS, mesh.group("ep"), mesh.group("etp"))
        said.append(str(error.value))
    return said


def test_slices_of_experts_are_refused() -> None:
    deepep, hybridep, local = run(4, slices)[0]
    assert deepep == (
        "dispatcher=deepep sends rows to whole experts, and mesh.etp is 2; use mesh.etp=1 or dispatcher=alltoall"
    )
    assert hybridep.startswith("dispatcher=hybridep sends rows") and "use dispatcher=alltoall" in local


def test_one_rank_is_local() -> None:
    assert isinstance(dispatch.create("alltoall", EXPERTS, None), Local)
