"""Find the held-out documents that training text holds too.

A token is seen if it lies in 13 tokens in a row that the training text has. A document is left out if more than a fifth
of its tokens are seen; Llama 2 calls a sample clean below that share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from training.data.shards import Ids, TokenShards
from upcycle.io import strict

GRAM = 13  # tokens in a row
MOST = 0.2  # share of a document's tokens that may be seen
PIECE = 1 << 22  # training tokens that are compared at once
BITS = 24  # of a hash, for a table that answers most questions
FACTOR = np.uint64(0x9E3779B97F4A7C15)
Hashes = NDArray[np.uint64]


class Numbered(Protocol):
    @property
    def number(self) -> int: ...  # of its document in the source, from 1


P = TypeVar("P", bound=Numbered)


@dataclass(frozen=True)
class Overlap:
    left_out: frozenset[tuple[int, int]]  # source and number of each document
    documents: int
    seen: float  # share of tokens, of all documents
    seen_after: float  # the same, of those that stay

    @property
    def counts(self) -> dict[str, float]:
        """Return the numbers that meta.json keeps."""
        shares = {"seen": self.seen, "seen_after": self.seen_after}
        return {"documents": self.documents, "left_out": len(self.left_out), **shares}


def part_of(take: str) -> tuple[int, int]:
    """Return (K, N) for "K/N"."""
    if not take:
        return 1, 1
    first, _, count = take.partition("/")
    if not (first.isdecimal() and count.isdecimal() and 1 <= int(first) <= int(count) <= 1000):
        raise ValueError(
            f"take is {strict.short(take)}; write K/N with K from 1 to N and N up to 1000, such as take=1/2"
        )
    return int(first), int(count)


@dataclass(frozen=True)
class Wanted:
    """The documents that are kept."""

    first: int
    count: int
    left_out: frozenset[tuple[int, int]] = frozenset()

    def pieces(self, index: int, pieces: Iterable[P]) -> Iterator[P]:
        """Yield the pieces of a source's documents that are kept."""
        for piece in pieces:
            if (piece.number - self.first) % self.count == 0 and (index, piece.number) not in self.left_out:
                yield piece


def grams(ids: Ids) -> Hashes:
    """Return a hash of each 13 tokens in a row."""
    count = max(0, len(ids) - GRAM + 1)
    found = np.zeros(count, np.uint64)
    for place in range(GRAM):
        found = found * FACTOR + ids[place : place + count].astype(np.uint64) + np.uint64(1)
    return (found ^ (found >> np.uint64(32))) * FACTOR


def overlap(documents: Iterable[tuple[tuple[int, int], Ids]], training: Sequence[TokenShards]) -> Overlap:
    """Compare documents, each with its source and number, with the training text."""
    names, hashes, lengths = [], [], []
    for name, ids in documents:
        names.append(name)
        hashes.append(grams(ids))
        lengths.append(len(ids))
    known, place = np.unique(np.concatenate([np.empty(0, np.uint64), *hashes]), return_inverse=True)
    hit, covered, at = in_training(known, training)[place], [], 0
    for each, length in zip(hashes, lengths, strict=True):
        covered.append(int(cover(hit[at : at + len(each)], length)))
        at += len(each)
    out = [part > MOST * length for part, length in zip(covered, lengths, strict=True)]
    kept = [(part, length) for part, length, gone in zip(covered, lengths, out, strict=True) if not gone]
    return Overlap(
        frozenset(name for name, gone in zip(names, out, strict=True) if gone),
        len(names),
        sum(covered) / max(1, sum(lengths)),
        sum(part for part, _ in kept) / max(1, sum(length for _, length in kept)),
    )


def cover(hit: NDArray[np.bool_], length: int) -> int:
    """Return how many tokens of a document lie in a run of 13 that was hit."""
    change = np.zeros(length + 1, np.int64)
    change[: len(hit)] += hit
    change[GRAM : GRAM + len(hit)] -= hit
    return int((change.cumsum() > 0).sum())


def in_training(known: Hashes, training: Sequence[TokenShards]) -> NDArray[np.bool_]:
    """Return which of these sorted hashes the training text has."""
    found, table = np.zeros(len(known), bool), np.zeros(1 << BITS, bool)
    shift = np.uint64(64 - BITS)
    table[known >> shift] = True
    total = sum(shards.tokens for shards in training)
    with tqdm(total=total, unit="tok", unit_scale=True, desc="compare", delay=2) as bar:
        for shard in (shard for shards in training for shard in shards.shards):
            for start in range(0, len(shard.tokens), PIECE):
                piece = grams(shard.tokens[start : start + PIECE + GRAM - 1])
                piece = piece[table[piece >> shift]]
                index = np.searchsorted(known, piece)
                index[index == len(known)] = 0
                if len(known):
                    found[index[known[index] == piece]] = True
                bar.update(min(PIECE, len(shard.tokens) - start))
    return found
