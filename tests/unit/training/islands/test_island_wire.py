"""Bytes of a few numbers: back as they were, as short as said, and nothing else is read as one."""

from __future__ import annotations

import random

import pytest
import torch

from training.islands.link.wire import BITMAP, CHUNK, FEW, chunks_of, decode, encode, most
from training.islands.sparse import Sparse, rounded


def message(size: int, count: int, seed: int = 0) -> Sparse:
    draw = torch.Generator().manual_seed(seed)
    index = torch.randperm(size, generator=draw)[:count].sort().values
    return Sparse(index, rounded(torch.randn(count, generator=draw)))


@pytest.mark.parametrize("size", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
@pytest.mark.parametrize("share", [0, 0.01, FEW / CHUNK, 0.3, 1])
def test_what_is_written_is_read(size: int, share: float) -> None:
    sent = message(size, round(share * size))
    data = encode(sent, size)
    found = decode(data, size)
    assert torch.equal(found.index, sent.index) and torch.equal(found.value, sent.value)
    assert len(data) <= most(size)
    assert (len(encode(message(size, size), size)) == most(size)) == (size % CHUNK not in range(1, FEW + 1))


def test_the_edges_of_chunks() -> None:
    index = torch.tensor([0, CHUNK - 1, CHUNK, 2 * CHUNK - 1, 2 * CHUNK])
    sent = Sparse(index, torch.tensor([1.0, -2.0, 3.0, -4.0, 5.0]))
    found = decode(encode(sent, 2 * CHUNK + 1), 2 * CHUNK + 1)
    assert torch.equal(found.index, index) and torch.equal(found.value, sent.value)


def test_four_bytes_a_number_and_bitmaps_where_they_are_shorter() -> None:
    size = 100 * CHUNK
    assert len(encode(message(size, size // 100), size)) == 4 + 2 * 100 + 4 * (size // 100)
    assert len(encode(message(size, size), size)) == 4 + (2 + BITMAP) * 100 + 2 * size
    assert len(encode(message(size, size // 4), size)) < 2.6 * size // 4


def test_values_are_rounded_to_the_nearest_even() -> None:
    value = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8])
    assert rounded(value).tolist() == [1.0, 1 + 2**-6]


@pytest.mark.parametrize("size", [3 * CHUNK + 5])
def test_other_bytes_are_refused_or_are_another_message(size: int) -> None:
    """No mutation makes an exception of another kind, or places beyond the model, or out of order."""
    draw = random.Random(0)
    whole = [encode(message(size, count), size) for count in (0, 9, 2000, size)]
    refused = 0
    for _ in range(2000):
        data = bytearray(draw.choice(whole))
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(data) if draw.random() < 0.5 else min(len(data), 16))
            data[at] = draw.randrange(256)
        if draw.random() < 0.3:
            data = data[: draw.randrange(len(data))]
        try:
            found = decode(bytes(data), size)
        except ValueError:
            refused += 1
            continue
        assert (found.index.diff() > 0).all() and bool(found.value.isfinite().all())
        assert not len(found.index) or 0 <= int(found.index[0]) <= int(found.index[-1]) < size
    assert refused > 500


def test_a_message_of_another_model_is_refused() -> None:
    data = encode(message(CHUNK, 5), CHUNK)
    with pytest.raises(ValueError, match="does not fit a model of 8192 numbers"):
        decode(data, 2 * CHUNK)
    assert chunks_of(2 * CHUNK) == 2


def test_a_count_that_no_chunk_can_have_is_refused() -> None:
    """Even if there are as many bytes as it says."""
    count = CHUNK + 1
    data = (1).to_bytes(4, "little") + count.to_bytes(2, "little") + b"\xff" * BITMAP + bytes(2 * count)
    with pytest.raises(ValueError, match="bitmaps do not hold the counts"):
        decode(data, CHUNK)
