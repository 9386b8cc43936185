"""A few numbers of a model as bytes: 4 each where they are few, 2 to 3 where they are many.

    chunks u32 | count u16 a chunk | place in its chunk u16 ... | bitmaps, 512 bytes each | value bfloat16 ...

The model is cut into chunks of 4,096 numbers. A chunk with more than 256 of them has a bitmap, which is shorter than
their places. Everything is little-endian and in order of place.

`decode` reads what a stranger may have written: sizes are compared with the bytes that are there before anything is
made of them, and what is made is bounded by those bytes and by the model.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from training.islands.sparse import Sparse

CHUNK = 4096
FEW = 256  # as many places in a chunk take as many bytes as its bitmap
BITMAP = CHUNK // 8


def chunks_of(size: int) -> int:
    return -(-size // CHUNK)


def most(size: int) -> int:
    """Bytes of the longest message about a model of `size` numbers."""
    return 4 + chunks_of(size) * (2 + BITMAP) + 2 * size


def encode(sparse: Sparse, size: int) -> bytes:
    index = sparse.index.cpu().numpy()
    chunk, place = index >> 12, (index & (CHUNK - 1)).astype("<u2")
    count = np.bincount(chunk, minlength=chunks_of(size))
    dense = count > FEW
    bits = b""
    if dense.any():
        many = dense[chunk]
        bitmap = np.zeros((int(dense.sum()), CHUNK), dtype=np.uint8)
        bitmap[(np.cumsum(dense) - 1)[chunk[many]], place[many]] = 1
        bits, place = np.packbits(bitmap, axis=1, bitorder="little").tobytes(), place[~many]
    value = sparse.value.to(torch.bfloat16).cpu().view(torch.int16).numpy().astype("<i2", copy=False)
    head = np.uint32(len(count)).astype("<u4").tobytes()
    return b"".join([head, count.astype("<u2").tobytes(), place.tobytes(), bits, value.tobytes()])


def decode(data: bytes | memoryview, size: int) -> Sparse:
    """The numbers, in float32. Raises a ValueError for bytes that `encode` does not write about a model of `size`."""
    chunks = chunks_of(size)
    if len(data) < 4 + 2 * chunks or int.from_bytes(data[:4], "little") != chunks:
        raise ValueError(f"a message of {len(data)} bytes is not about a model of {size} numbers; are both the same?")
    count = np.frombuffer(data, "<u2", chunks, 4).astype(np.int64)
    dense = count > FEW
    total, few = int(count.sum()), int(count[~dense].sum())
    at_bits = 4 + 2 * chunks + 2 * few
    at_values = at_bits + BITMAP * int(dense.sum())
    if (count > CHUNK).any() or len(data) != at_values + 2 * total:
        raise ValueError(f"a message of {len(data)} bytes says that it has {total} numbers, which take other bytes")
    base = np.repeat(np.arange(chunks, dtype=np.int64) << 12, count)
    place: NDArray[np.int64] = np.empty(total, dtype=np.int64)
    many = np.repeat(dense, count)
    place[~many] = np.frombuffer(data, "<u2", few, 4 + 2 * chunks)
    if dense.any():
        packed = np.frombuffer(data, np.uint8, at_values - at_bits, at_bits).reshape(-1, BITMAP)
        bitmap = np.unpackbits(packed, axis=1, bitorder="little")
        if (bitmap.sum(1, dtype=np.int64) != count[dense]).any():
            raise ValueError("a message's bitmaps hold other counts than it says")
        place[many] = bitmap.nonzero()[1]
    index = base + place
    if total and ((place >= CHUNK).any() or (np.diff(index) <= 0).any() or index[-1] >= size):
        raise ValueError("a message's places are not in order, or beyond the model")
    raw = np.frombuffer(data, "<i2", total, at_values).astype(np.int16)
    value = torch.from_numpy(raw).view(torch.bfloat16).float()
    if not bool(value.isfinite().all()):
        raise ValueError("a message has numbers that are not finite")
    return Sparse(torch.from_numpy(index), value)
