"""Attention over sequences cut across ranks: loss and every gradient as in one process, exact in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.parallel import ranks, tiny
from training.context import Coming, Ring, attach, chunks, own, split
from upcycle.spec import DenseSpec

LENGTH = 24
WINDOW = {"window": 5, "window_layers": (1,)}
SPECS: dict[str, DenseSpec] = {
    "grouped": tiny.dense(),
    "one key head": tiny.dense(kv_heads=1),
    "window": tiny.dense(**WINDOW),
    "wide window": tiny.dense(window=11, window_layers=(0, 1)),
    # frequencies depend on the length of the whole sequence, which is more than this context
    "dynamic rope": tiny.dense(kv_heads=4, context=16, rope={"rope_type": "dynamic", "rope_theta": 1e2, "factor": 2.0}),
}
CASES = [(name, documents) for name in SPECS for documents in (False, True)]


def loss_and_gradients(
    rank: int, world: int, kind: str, name: str, documents: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Summed over the ranks; of one rank it is the plain model on whole sequences."""
    model, batch = tiny.model(SPECS[name]), tiny.batch(3, LENGTH, documents=documents)
    scored = batch.scored.sum()
    if world > 1:
        attach(model, dist.group.WORLD, kind)
    batch = split(batch, rank, world)
    nats = model.loss(
        batch.tokens, batch.labels, batch.positions, batch.documents if documents else None, length=LENGTH
    )
    loss = nats / scored
    loss.backward()
    found = tiny.gradients(model)
    total = loss.detach().clone()
    for tensor in [total, *found.values()] if world > 1 else []:
        dist.all_reduce(tensor)
    return total, found


def worst_by_case(rank: int, world: int, kind: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, documents in CASES:
        loss, gradients = loss_and_gradients(rank, world, kind, name, documents)
        expected_loss, expected = loss_and_gradients(0, 1, kind, name, documents)
        error = max(float((loss - expected_loss).abs()), tiny.worst(gradients, expected))
        found[f"{name}, {documents=}"] = error
    return found


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_a_cut_sequence_has_the_loss_and_gradients_of_a_whole_one(kind: str, cp: int) -> None:
    for found in ranks.run(cp, worst_by_case, kind):
        assert len(found) == len(CASES)
        assert {case: error for case, error in found.items() if not error < 1e-10} == {}


def astray(rank: int, world: int) -> float:
    """The keys come from the wrong neighbour: the blocks are the right ones of another rank."""
    forward = Ring.passed_on

    def backward(self: Ring, tensor: Tensor) -> Coming:
        for _ in range(self.size - 2):  # so many steps on the ring are one step back
            tensor = forward(self, tensor).wait()
        return forward(self, tensor)

    Ring.passed_on = backward  # type: ignore[method-assign]
    try:
        return worst_by_case_one(rank, world)
    finally:
        Ring.passed_on = forward  # type: ignore[method-assign]


def worst_by_case_one(rank: int, world: int) -> float:
    _, gradients = loss_and_gradients(rank, world, "ring", "grouped", False)
    return tiny.worst(gradients, loss_and_gradients(0, 1, "ring", "grouped", False)[1])


def test_a_wrong_order_of_ranks_is_seen() -> None:
    assert min(ranks.run(4, astray)) > 1e-3


def test_every_rank_has_the_same_work() -> None:
    cp = 4
    work = [sum(chunk + 0.5 for chunk in chunks(rank, cp)) for rank in range(cp)]
    assert len(set(work)) == 1
    shares = torch.cat([own(torch.arange(LENGTH)[None], rank, cp)[0] for rank in range(cp)])
    assert sorted(shares.tolist()) == list(range(LENGTH))


def test_a_sequence_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValueError, match=r"20 tokens cannot be cut into 2 \* mesh\.cp = 8"):
        split(tiny.batch(1, 20, documents=False), 0, 4)


def refused(rank: int, world: int) -> str:
    dist.barrier()  # nobody leaves before all are there
    with pytest.raises(ValueError, match=r"use mesh\.context=ring") as caught:
        attach(tiny.model(tiny.dense(heads=3, kv_heads=3)), dist.group.WORLD, "ulysses")
    return str(caught.value)


def test_heads_that_cannot_be_divided_are_refused() -> None:
    results: list[Any] = ranks.run(2, refused)
    assert all("3 heads" in words for words in results)
