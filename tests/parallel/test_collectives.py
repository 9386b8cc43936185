"""What ranks tell each other: JSON and tensors as bytes, to all, to one, and within a group of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.parallel.ranks import run
from training.parallel.collectives import broadcast, broadcast_tensors, gather


def said(rank: int) -> dict[str, Any]:
    """Other lengths on every rank, and what text is easily broken by: letters of several bytes, a float's last bit."""
    return {"rank": rank, "words": "ä→" * 7 * rank, "numbers": [0.1 + 0.2, 1e-300, None, rank / 3]}


def talk(rank: int, world: int) -> tuple[Any, Any, Any]:
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]  # every rank makes every group
    return gather(said(rank)), gather(said(rank), halves[rank % 2]), broadcast(said(rank), source=3)


def test_what_ranks_say_arrives_in_their_order() -> None:
    for rank, (all_of_them, half, third) in enumerate(run(4, talk)):
        assert all_of_them == [said(r) for r in range(4)]
        assert half == [said(r) for r in range(rank % 2, 4, 2)]
        assert third == said(3)


def held(rank: int) -> dict[str, torch.Tensor]:
    return {"order": torch.arange(rank + 2), "mass": torch.tensor(rank / 3).double(), "rows": torch.ones(rank, 2)}


def hear(rank: int, world: int) -> dict[str, torch.Tensor]:
    return broadcast_tensors(held(rank) if rank == 1 else {}, source=1)


def test_tensors_of_one_rank_arrive_on_all() -> None:
    for heard in run(2, hear):
        assert heard.keys() == held(1).keys()
        for name, tensor in held(1).items():
            assert heard[name].dtype == tensor.dtype and torch.equal(heard[name], tensor)


def test_alone_one_hears_oneself() -> None:
    assert gather(said(1)) == [said(1)] and broadcast(said(1)) == said(1)


def test_our_code_sends_no_pickles() -> None:
    """torch's *_object collectives pickle what they send, and unpickle what arrives."""
    root = Path(__file__).parents[2]
    files = [path for package in ("upcycle", "training", "evaluation") for path in (root / package).rglob("*.py")]
    assert len(files) > 100
    pickling = re.compile(r"(gather|broadcast|scatter|send|recv)_object(_list)?\b")
    assert pickling.search("dist.all_gather_object(values, value)")
    assert [path for path in files if pickling.search(path.read_text())] == []
