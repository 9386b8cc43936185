"""Attention over sequences cut across ranks: loss and every gradient as in one process, exact in float64."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.parallel import ranks, tiny
from training.model.attention import Seen, visible
from training.parallel.context import Box, Coming, Ring, attach, chunks, own, split
from upcycle.arch.spec import DenseSpec

LENGTH = 24
WINDOW = {"window": 5, "window_layers": (1,)}
SPECS: dict[str, DenseSpec] = {
    "grouped": tiny.dense(),
    "one key head": tiny.dense(kv_heads=1),
    "window": tiny.dense(**WINDOW),
    "wide window": tiny.dense(window=11, window_layers=(0, 1)),
    "capped": tiny.dense(attention_cap=0.3, **WINDOW),
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


LONG = 64  # 16 chunks of 4 on 8 ranks, of which each computes in one process here


def boxes(documents: Tensor | None, cp: int, window: int | None = None) -> dict[tuple[int, int], Box | None]:
    """By (rank, source). What a rank decides needs no other rank."""
    found, share = {}, LONG // cp
    for rank in range(cp):
        ring = Ring(window, 1.0, SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: cp))  # type: ignore[arg-type]
        joined = ring.joined(Seen(documents), share)
        found.update({(rank, source): ring.box(source, share, joined) for source in range(cp)})
    return found


@pytest.mark.parametrize("window", [None, 9, 30])
@pytest.mark.parametrize("lengths", [[64], [20, 44], [4] * 16, [3, 1, 40, 20], [1] * 64, [33, 31]], ids=str)
def test_a_block_is_what_is_seen_of_it(lengths: list[int], window: int | None) -> None:
    """Nothing seen is left out; of several sequences all count; and a block without a bias hides nothing."""
    number = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    several = torch.stack([number, torch.zeros_like(number)])  # the other sequence is one document
    for documents, cp in itertools.product((number[None], several, (7 - number)[None]), (2, 4)):
        mask = visible(LONG, window, documents, torch.device("cpu"))
        mask = torch.ones(LONG, LONG).tril().bool()[None, None] if mask is None else mask
        place = torch.arange(LONG)[None]
        for (rank, source), box in boxes(documents, cp, window).items():
            sees = mask[:, 0][:, own(place, rank, cp)[0]][:, :, own(place, source, cp)[0]]
            if box is None:
                assert not sees.any()
                continue
            outside = sees.clone()
            outside[:, box.rows, box.columns] = False
            assert not outside.any()
            if not box.hidden and window is None:  # then a kernel without a bias is called, causal on the diagonal
                inside = sees[:, box.rows, box.columns]
                assert torch.equal(inside, inside.tril() if rank == source else torch.ones_like(inside))
                assert rank != source or inside[0].tril().eq(torch.ones_like(inside[0]).tril()).all()


def test_what_no_document_joins_is_not_computed() -> None:
    cp, half = 4, LONG // 8
    short = torch.arange(8).repeat_interleave(half)[None]  # a document a chunk
    found = boxes(short, cp)
    assert {pair for pair, box in found.items() if box} == {(rank, rank) for rank in range(cp)}
    one = boxes(torch.zeros(1, LONG), cp)
    assert one == boxes(None, cp) and not any(box.hidden for box in one.values() if box)
    # a document over the chunks 2 and 3, which are the early ones of ranks 2 and 3
    joined = boxes(short.where(short != 3, 2), cp)
    assert {pair for pair, box in joined.items() if box and pair[0] != pair[1]} == {(3, 2)}
    assert joined[3, 2] == Box(slice(0, half), slice(0, half), hidden=False)


def biases(rank: int, world: int) -> tuple[int, int]:
    """How many were made in a forward and a backward of three layers, and how many blocks had one."""
    made, had = [], []
    plain, blocks = torch.zeros_like, Ring.blocks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch,
            "zeros_like",
            lambda *a, **k: (made.append(1) if a[0].dtype == torch.bool else None, plain(*a, **k))[1],
        )

        def counted(self: Ring, *given: Any) -> Any:
            for block in blocks(self, *given):
                had.append(block.bias is not None)
                yield block

        patch.setattr(Ring, "blocks", counted)
        loss_and_gradients(rank, world, "ring", "grouped", True)
    return len(made), sum(had)


def test_a_bias_is_made_once_for_all_layers() -> None:
    for made, had in ranks.run(2, biases):
        assert 0 < made <= 2 and had == made * 2 * SPECS["grouped"].layers


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
