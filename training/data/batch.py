"""Batches: rows of documents laid end to end, as token ids.

Shapes: B samples, S sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IGNORE = -100  # a label that is not scored; torch's cross_entropy ignores it
Longs = NDArray[np.int64]
Row = tuple[Longs, Longs, Longs, Longs]  # tokens, labels, documents, positions; [S] each
Span = tuple[NDArray[Any], int, int, bool]  # ids, begin, end, whether `begin` is inside a document
Whole = tuple[NDArray[Any], NDArray[np.uint8]]  # ids of a conversation, and which are learned


@dataclass(frozen=True)
class Batch:
    tokens: Tensor  # int64 [B, S]
    labels: Tensor  # int64 [B, S]; IGNORE where nothing is scored
    documents: Tensor  # int32 [B, S]: 0, 1, ... in each sample; attention stays within one
    positions: Tensor  # int64 [B, S]: from 0 in each document

    @property
    def scored(self) -> Tensor:
        return self.labels >= 0

    def to(self, device: torch.device | str) -> Batch:
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> Batch:
        return self.each(Tensor.pin_memory)

    def each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(*(change(getattr(self, field.name)) for field in fields(self)))


class Samples(Protocol):
    def batch(self, sample: int, size: int) -> Batch:
        """Return samples number `sample` ... `sample + size` of the run."""
        ...

    def state(self, cursor: int) -> dict[str, Any]:
        """Return the state that finds sample `cursor` again: empty, except for a stream (stream.py)."""
        ...

    def epochs(self, cursor: int) -> dict[str, float]:
        """Return how often each source has been read before sample `cursor`."""
        ...


def lay(spans: Iterable[Span], length: int, start: int, mask_documents: bool) -> Row:
    """Lay parts of documents end to end in a row. `start` is the input before a document's first token."""
    tokens: Longs = np.full(length, start, np.int64)
    labels: Longs = np.full(length, IGNORE, np.int64)
    documents: Longs = np.zeros(length, np.int64)
    positions: Longs = np.arange(length)
    filled = 0
    for number, (ids, begin, end, inner) in enumerate(spans):
        size = end - begin
        part = slice(filled, filled + size)
        labels[part] = ids[begin:end]
        if inner:
            tokens[part] = ids[begin - 1 : end - 1]
        else:
            tokens[filled + 1 : filled + size] = ids[begin : end - 1]
        if mask_documents:
            documents[part] = number
            positions[part] = np.arange(size)
        filled += size
    if filled < length:  # all text together is shorter than one sequence
        documents[filled:] = documents[filled - 1] + 1
        positions[filled:] = np.arange(length - filled)
    return tokens, labels, documents, positions


def lay_whole(talks: Iterable[Whole], length: int, start: int, mask_documents: bool) -> Row:
    """Lay conversations end to end in a row. Each token is an input; its label is the next token of its conversation if
    that is learned. The rest of the row is `start`, as a separate document."""
    tokens: Longs = np.full(length, start, np.int64)
    labels: Longs = np.full(length, IGNORE, np.int64)
    documents: Longs = np.zeros(length, np.int64)
    positions: Longs = np.arange(length)
    filled = number = 0
    for number, (ids, scored) in enumerate(talks, 1):
        end = filled + len(ids)
        tokens[filled:end] = ids
        labels[filled : end - 1] = np.where(scored[1:] > 0, ids[1:].astype(np.int64), IGNORE)
        if mask_documents:
            documents[filled:end] = number - 1
            positions[filled:end] = np.arange(len(ids))
        filled = end
    documents[filled:] = number
    positions[filled:] = np.arange(length - filled)
    return tokens, labels, documents, positions


def stack(rows: Sequence[Row]) -> Batch:
    tokens, labels, documents, positions = (torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True))
    return Batch(tokens, labels, documents.int(), positions)
