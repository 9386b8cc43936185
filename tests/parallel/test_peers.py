"""dispatch/nvlink.py's own kernels, in Triton's interpreter: ranks are processes that map each other's file, and meet in
it. Against the same dispatcher over gloo, which test_dispatch.py holds to `local`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run
from test_dispatch import EXPERTS, UNEVEN, close, data_of, needed
from torch import Tensor

from training.dispatch import nvlink
from training.dispatch.nvlink import NVLink

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in a process with TRITON_INTERPRET=1")


@pytest.mark.skipif(INTERPRETED or importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_in_the_interpreter() -> None:
    """Triton reads TRITON_INTERPRET once, at import: the tests below need processes of their own."""
    command = [sys.executable, "-m", "pytest", "-q", __file__]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def mapped(folder: Path, rank: int, world: int, unwritten: int = 255) -> None:
    """Has this process's dispatchers run their kernels, on memory that all processes map; nan where nobody wrote."""
    made = iter(range(100))

    def reached(size: int, device: torch.device, group: dist.ProcessGroup) -> tuple[list[Tensor], list[int]]:
        number = next(made)
        files = [folder / f"{number}.{peer}" for peer in range(world)]
        own = torch.from_file(str(files[rank]), shared=True, size=size, dtype=torch.uint8)
        own.fill_(unwritten)
        own[: nvlink.HEAD].zero_()
        dist.barrier(group)
        memory = [torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8) for file in files]
        return memory, [each.data_ptr() for each in memory]

    torch.cuda.synchronize = lambda: None
    nvlink.reached, nvlink.kernels_run = reached, lambda rows: rows.element_size() <= 4


def layers(dispatcher: NVLink, x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, room: int | None) -> Tensor:
    """Two, with experts that are told apart by what they multiply with, and that depend on a row's weight."""
    scale_E = torch.arange(1, dispatcher.local + 1) / 3 + dispatcher.group.rank()
    for _ in range(2):
        sent = dispatcher.dispatch(x_TD, weight_TK, expert_TK, room)
        came = int(sent.count_E.sum())
        scale_R = scale_E.to(x_TD.dtype).repeat_interleave(sent.count_E)
        tail = torch.full((len(sent.x_RD) - came, x_TD.shape[1]), torch.nan, dtype=x_TD.dtype)
        y_RD = torch.cat([sent.x_RD[:came].sin() * (scale_R * sent.weight_R[:came])[:, None], tail])
        x_TD = x_TD + dispatcher.combine(y_RD, sent.handle)
    return x_TD


def compare(rank: int, world: int, folder: Path, cases: tuple[str, ...]) -> None:
    mapped(folder, rank, world)
    if rank == 1 and world == 3:  # reads what others have put long after they have gone on
        for name in ("pull", "summed"):
            plain = getattr(nvlink.kernels(), name)
            late = lambda *inputs, plain=plain: (time.sleep(0.2), plain(*inputs))[1]  # noqa: E731
            setattr(nvlink.kernels(), name, late)
    assert dist.group.WORLD is not None
    experts = -(-EXPERTS // world) * world  # on three ranks one that nobody chooses
    ours, theirs = (NVLink(experts, dist.group.WORLD, arrivals=world) for _ in range(2))
    for case in cases:
        parts = [data_of(r, case) for r in range(world)]
        mine = parts[rank]
        for room in (None,) if case in UNEVEN else (None, needed(parts) + 2):
            narrow = [leaf.detach().float().requires_grad_() for leaf in mine.leaves()]
            if case == "dropped":
                came = (
                    ours.dispatch(*narrow, mine.expert_TK, room),
                    theirs.dispatch(*mine.leaves(), mine.expert_TK, room),
                )
                assert torch.equal(came[0].count_E, came[1].count_E), "dropped choices are not sent"
            with torch.set_grad_enabled(case not in UNEVEN):
                want = layers(theirs, mine.x_TD, mine.weight_TK, mine.expert_TK, room)
                got = layers(ours, narrow[0], narrow[1], mine.expert_TK, room)
            close(got.double(), want, "output", case, 1e-5)
            if case in UNEVEN:
                continue
            wanted = torch.autograd.grad((want * mine.target_TD).sum(), mine.leaves())
            found = torch.autograd.grad((got * mine.target_TD.float()).sum(), narrow)
            kept = mine.weight_TK.detach() != 0
            close(found[0].double(), wanted[0], "gradient of x", case, 2e-5)
            assert not found[1][~kept].any(), "of a dropped choice"
            close(found[1].double() * kept, wanted[1] * kept, "gradient of the weights", case, 2e-5)
    assert ours.peers is not None and theirs.peers is None
    assert ours.trouble() == "" == theirs.trouble()


@interpreted
def test_rows_begin_where_the_ones_before_end() -> None:
    """In blocks of pieces, which only more choices have than the other tests' ranks make."""
    from training.kernels.triton import peers as peers_triton

    count_EP = torch.randint(0, 5, (3, 10), dtype=torch.int32)
    end_E, flat = count_EP.sum(1).cumsum(0).int(), count_EP.flatten()
    want, rows = (flat.cumsum(0) - flat).view(3, 10), int(end_E[1]) - 1
    state, here_E, total_E = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), count_EP.sum(1).int()
    peers_triton.first_kernel[(3,)](count_EP, total_E, state, here_E, 3, 10, rows, 4, 4)
    assert torch.equal(count_EP, want.int()) and state.tolist() == [0, 0, int(end_E[2])]
    assert here_E.tolist() == [int(end_E[0]), int(total_E[1]) - 1, 0]


@interpreted
def test_who_is_only_late_is_not_blamed_for_who_stayed_away() -> None:
    """Rank 0 of three: rank 1 never comes, rank 2 once. Nobody is waited for any more, so that it may well be late."""
    from training.kernels.triton import peers as peers_triton

    here, state = torch.tensor([0, 0, 1], dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    there = [torch.zeros(3, dtype=torch.int32) for _ in range(2)]
    pads = torch.tensor([each.data_ptr() for each in (here, *there)])
    for meeting in (1, 2):
        peers_triton.meet_kernel[(1,)](pads, state, 0, 50, 3)
        assert state.tolist() == [meeting, 1 + 1, 0] and [int(each[0]) for each in there] == [meeting, meeting]


def alone(rank: int, world: int, folder: Path) -> tuple[bool, str]:
    """Rank 0's tokens and what it says, once rank 1 has stopped coming."""
    mapped(folder, rank, world, unwritten=0)
    assert dist.group.WORLD is not None
    dispatcher, data = NVLink(EXPERTS, dist.group.WORLD), data_of(rank, "random")
    narrow = [leaf.detach().float().requires_grad_() for leaf in data.leaves()]
    sent = dispatcher.dispatch(*narrow, data.expert_TK)
    if rank:
        return False, dispatcher.trouble()
    nvlink.PATIENCE = 50
    lost = dispatcher.combine(sent.x_RD, sent.handle).isnan().all()
    nvlink.PATIENCE = 2**31 - 1  # a step has hundreds of meetings, and whoever stayed away from one comes to none
    lost &= dispatcher.combine(sent.x_RD, sent.handle).isnan().all()
    return bool(lost), dispatcher.trouble()


@interpreted
def test_who_does_not_come_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    (lost, said), (_, nothing) = run(2, alone, tmp_path)
    assert lost and said.startswith("dispatcher=nvlink waited for rank 1 of mesh.ep=2 in vain") and nothing == ""


@interpreted
@pytest.mark.parametrize("world", [2, 3])
def test_kernels_are_the_collectives(world: int, tmp_path: Path) -> None:
    # 9 tokens, then 10: larger buffers are made
    run(
        world, compare, tmp_path, ("none_on_rank_0", "dropped", "one_rank", "one_expert") if world == 2 else ("random",)
    )
