"""A few numbers of a model as bytes: 4 each where they are few, 2 to 3 where they are many.

    chunks u32 | count u16 a chunk | place in its chunk u16 ... | bitmaps, 512 bytes each | value bfloat16 ...

The model is cut into chunks of 4,096 numbers. A chunk with more than 256 of them has a bitmap, which is shorter than
their places. Everything is little-endian and in order of place. A GPU's numbers leave it as bytes.

`decode` reads what a stranger may have written: sizes are compared with the bytes that are there before anything is
made of them, and what is made is bounded by those bytes and by the model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from training.islands.sparse import Sparse

CHUNK = 4096
FEW = 256  # as many places in a chunk take as many bytes as its bitmap
BITMAP = CHUNK // 8
GATHER = 0x0102040810204080  # times eight bytes of one bit each: its highest byte has these bits, the first one lowest


def chunks_of(size: int) -> int:
    return -(-size // CHUNK)


def most(size: int) -> int:
    """Bytes of the longest message about a model of `size` numbers."""
    return 4 + chunks_of(size) * (2 + BITMAP) + 2 * size


def encode(sparse: Sparse, size: int) -> bytes:
    index, chunks = sparse.index, chunks_of(size)
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
    halves = [part.view(torch.uint8) for part in (count.to(torch.int16), place)]
    values = sparse.value.to(torch.bfloat16).view(torch.uint8)
    head = chunks.to_bytes(4, "little")
    return head + torch.cat([*halves, bits, values]).cpu().numpy().tobytes()


def decode(data: bytes | memoryview, size: int, device: torch.device | str = "cpu") -> Sparse:
    """The numbers, in float32. Raises a ValueError for bytes that `encode` does not write about a model of `size`."""
    chunks = chunks_of(size)
    if len(data) < 4 + 2 * chunks or int.from_bytes(data[:4], "little") != chunks:
        raise ValueError(f"a message of {len(data)} bytes is not about a model of {size} numbers; are both the same?")
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    count = raw[4 : 4 + 2 * chunks].view(torch.int16).long() & 0xFFFF
    dense = count > FEW
    total, few, number = torch.stack([count.sum(), count[~dense].sum(), dense.sum()]).tolist()
    at_bits = 4 + 2 * chunks + 2 * few
    at_values = at_bits + BITMAP * number
    if len(data) != at_values + 2 * total:
        raise ValueError(f"a message of {len(data)} bytes says that it has {total} numbers, which take other bytes")
    place = raw[4 + 2 * chunks : at_bits].view(torch.int16)
    bases = torch.arange(chunks, device=raw.device) << 12
    index = torch.repeat_interleave(bases[~dense], count[~dense], output_size=few)
    index += place
    ordered = bool(((place >= 0) & (place < CHUNK)).all() & (index[1:] > index[:-1]).all())
    if number:
        shifts = torch.arange(8, dtype=torch.uint8, device=raw.device)
        there = (raw[at_bits:at_values, None] >> shifts & 1).view(-1).nonzero().view(-1)
        rows = torch.arange(number + 1, device=raw.device) << 12
        if bool((torch.searchsorted(there, rows).diff() != count[dense]).any()):
            raise ValueError("a message's bitmaps hold other counts than it says")
        if number < chunks:
            there += torch.repeat_interleave(bases[dense] - rows[:-1], count[dense], output_size=total - few)
        index = mixed(torch.repeat_interleave(dense, count, output_size=total), there, index) if few else there
    if not ordered or (total and int(index[-1]) >= size):
        raise ValueError("a message's places are not in order, or beyond the model")
    value = raw[at_values:].view(torch.bfloat16).float()
    if not bool(value.isfinite().all()):
        raise ValueError("a message has numbers that are not finite")
    return Sparse(index, value)


def mixed(which: Tensor, there: Tensor, elsewhere: Tensor) -> Tensor:
    """In order of place: `there` where `which` is true, and what is elsewhere in between."""
    found = there.new_empty(len(which))
    found[which], found[~which] = there, elsewhere
    return found
