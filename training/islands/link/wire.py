"""Encode a few numbers of a model as bytes: 4 for each where they are few, 2 to 3 where they are many.

    chunks u32 | count u16 a chunk | place in its chunk u16 ... | bitmaps, 512 bytes each | value bfloat16 ...

The model is cut into chunks of 4,096 numbers. A chunk with more than 256 sent numbers has a bitmap, which is shorter
than their places. Everything is little-endian and in order of place. A GPU encodes its own numbers.

`decode` reads bytes that a stranger may have written. It compares every size with the length of the message before it
uses the size, and its memory is bounded by the message and by the model. A whole model as tables would take forty bytes
for each number, so `Writer` and `pieces` work on one part at a time and the rest stays bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from training.islands.places import NUMBERS
from training.islands.sparse import Sparse

CHUNK = 4096
FEW = 256  # this many places in a chunk take as many bytes as its bitmap
BITMAP = CHUNK // 8
PIECE = NUMBERS // CHUNK  # chunks that are read together
GATHER = (
    0x0102040810204080  # a product with it packs eight bytes of one bit each into the highest byte, first bit lowest
)


def chunks_of(size: int) -> int:
    return -(-size // CHUNK)


def most(size: int) -> int:
    """Return the bytes of the longest message about a model of `size` numbers."""
    return 4 + chunks_of(size) * (2 + BITMAP) + 2 * size


class Writer:
    """Make a message from parts in order of place, so that only one part at a time is held as numbers."""

    def __init__(self, size: int) -> None:
        self.size, self.at = size, 0  # at: chunks that are written
        self.late = Sparse(torch.zeros(0, dtype=torch.int64), torch.zeros(0))  # numbers of a chunk that is not complete
        self.sections: tuple[list[bytes], ...] = ([], [], [], [])

    def add(self, sparse: Sparse, upto: int) -> None:
        """Add the next numbers, with places below `upto`."""
        index, value = sparse.index, sparse.value
        if len(self.late.index):
            index, value = torch.cat([self.late.index.to(index), index]), torch.cat([self.late.value.to(value), value])
        end = chunks_of(self.size) if upto >= self.size else upto // CHUNK
        ready = int(torch.searchsorted(index, end * CHUNK))
        self.late = Sparse(index[ready:].clone(), value[ready:].clone())  # a view would keep the whole storage
        if end > self.at:
            found = sections(Sparse(index[:ready] - self.at * CHUNK, value[:ready]), end - self.at)
            for table, data in zip(self.sections, found, strict=True):
                table.append(data)
            self.at = end

    def parts(self) -> list[bytes]:
        """Return the message as pieces that the caller joins."""
        assert self.at == chunks_of(self.size), "the last parts of the model are missing"
        return [self.at.to_bytes(4, "little"), *(data for table in self.sections for data in table)]


def encode(sparse: Sparse, size: int) -> bytes:
    writer = Writer(size)
    writer.add(sparse, size)
    return b"".join(writer.parts())


def sections(sparse: Sparse, chunks: int) -> tuple[bytes, ...]:
    """Return the counts, places, bitmaps and values of so many chunks as bytes."""
    index = sparse.index
    count = torch.searchsorted(index, torch.arange(chunks + 1, device=index.device) << 12).diff()
    dense = count > FEW
    bits = torch.zeros(0, dtype=torch.uint8, device=index.device)
    number = int(dense.sum())
    if number:
        at, index = index, index[:0]
        if number < chunks:
            many = torch.repeat_interleave(dense, count)
            rows = torch.arange(number, device=at.device) - dense.nonzero().view(-1)
            at, index = at[many] + torch.repeat_interleave(rows << 12, count[dense]), at[~many]
        bitmap = torch.zeros(number * CHUNK, dtype=torch.uint8, device=at.device)
        bitmap[at] = 1
        bits = (bitmap.view(torch.int64) * GATHER >> 56).to(torch.uint8)
    place = index.to(torch.int16) & (CHUNK - 1)
    values = sparse.value.to(torch.bfloat16)
    tables = (count.to(torch.int16), place, bits, values)
    return tuple(table.view(torch.uint8).cpu().numpy().tobytes() for table in tables)


def decode(data: bytes | memoryview, size: int, device: torch.device | str = "cpu") -> Sparse:
    """Return a message's numbers in float32; raise a ValueError for bytes that `encode` cannot have written."""
    found = list(pieces(data, size, device))
    return Sparse(*(torch.cat(parts) for parts in zip(*((each.index, each.value) for each in found), strict=True)))


def pieces(data: bytes | memoryview, size: int, device: torch.device | str = "cpu") -> Iterator[Sparse]:
    """Yield what `decode` returns in parts of the model; raise at or before the first wrong part."""
    chunks, view = chunks_of(size), memoryview(data)
    if len(data) < 4 + 2 * chunks or int.from_bytes(view[:4], "little") != chunks:
        raise ValueError(
            f"a message of {len(data)} bytes does not fit a model of {size} numbers; start both with the same config"
        )
    count = copied(view[4 : 4 + 2 * chunks]).view(torch.int16).long() & 0xFFFF
    dense = count > FEW
    total, few, number = torch.stack([count.sum(), count[~dense].sum(), dense.sum()]).tolist()
    at_places = 4 + 2 * chunks
    at_bits = at_places + 2 * few
    at_values = at_bits + BITMAP * number
    if len(data) != at_values + 2 * total:
        raise ValueError(
            f"a message has {len(data)} bytes, and the {total} numbers that it announces take {at_values + 2 * total}"
        )
    for first in range(0, chunks, PIECE):
        here, thick = count[first : first + PIECE], dense[first : first + PIECE]
        total, few, number = torch.stack([here.sum(), here[~thick].sum(), thick.sum()]).tolist()
        ends = at_places + 2 * few, at_bits + BITMAP * number, at_values + 2 * total
        places, bits, values = (
            copied(view[a:b]).to(device) for a, b in zip((at_places, at_bits, at_values), ends, strict=True)
        )
        found = piece(here.to(device), thick.to(device), places, bits, values, size - first * CHUNK)
        yield Sparse(found.index + first * CHUNK, found.value)
        at_places, at_bits, at_values = ends


def copied(data: memoryview) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)


def piece(count: Tensor, dense: Tensor, places: Tensor, bits: Tensor, values: Tensor, size: int) -> Sparse:
    """Return the numbers of chunks with these counts; places count from the first chunk and are below `size`."""
    chunks, few, number, total = len(count), len(places) // 2, len(bits) // BITMAP, len(values) // 2
    place = places.view(torch.int16)
    bases = torch.arange(chunks, device=count.device) << 12
    index = torch.repeat_interleave(bases[~dense], count[~dense], output_size=few)
    index += place
    ordered = bool(((place >= 0) & (place < CHUNK)).all() & (index[1:] > index[:-1]).all())
    if number:
        shifts = torch.arange(8, dtype=torch.uint8, device=count.device)
        there = (bits[:, None] >> shifts & 1).view(-1).nonzero().view(-1)
        rows = torch.arange(number + 1, device=count.device) << 12
        if bool((torch.searchsorted(there, rows).diff() != count[dense]).any()):
            raise ValueError("a message's bitmaps do not hold the counts that it announces")
        if number < chunks:
            there += torch.repeat_interleave(bases[dense] - rows[:-1], count[dense], output_size=total - few)
        index = mixed(torch.repeat_interleave(dense, count, output_size=total), there, index) if few else there
    if not ordered or (total and int(index[-1]) >= size):
        raise ValueError("a message's places are not in order, or lie beyond the model")
    value = values.view(torch.bfloat16).float()
    if not bool(value.isfinite().all()):
        raise ValueError("a message holds numbers that are not finite")
    return Sparse(index, value)


def mixed(which: Tensor, there: Tensor, elsewhere: Tensor) -> Tensor:
    """Merge in order of place: `there` where `which` is true, `elsewhere` in between."""
    found = there.new_empty(len(which))
    found[which], found[~which] = there, elsewhere
    return found
