"""Pack requests into forwards: a beginning that inputs share is computed once, and nothing is padded.

Inputs are sorted, so that inputs with the same beginning are neighbours. Then

    a group   shares a long beginning (the few-shot examples of a subject), which the model reads once; every row of
              the group attends to its keys and values
    a row     is a tree of inputs that share a large part (a question and its endings), which is there once
    a batch   is several rows of one group, of similar length, one after the other without padding

A row lists the tokens of its tree depth first. Token i sees token j if j <= i < end[j], where the subtree of j ends at
end[j]; so a token sees its ancestors and itself. In a plain sequence every end is infinity, and a padded place ends at
0, so this one rule gives every mask.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

FILL = 256  # tokens that a group must save, to pay for the small extra forward of its prefix
LONGEST = (
    512  # a row grows to this many tokens, or to twice its last input: attention costs the square of a row's length
)
WORTH = 4  # an input joins a row if it shares a fourth of its tokens: less does not pay for the mask of a tree
FOREVER = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Input:
    """Hold the tokens to read, and the first position whose next token is asked for."""

    tokens: Ids
    scored: int


@dataclass
class Row:
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    # number of an input -> places of its tokens in the row, from the first scored one
    places: dict[int, list[int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Batch:
    group: int
    rows: tuple[Row, ...]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.rows))


@dataclass(frozen=True)
class Plan:
    prefixes: tuple[Ids, ...]  # the prefix of each group; empty: its rows share nothing
    batches: tuple[Batch, ...]  # batches of a group are neighbours

    @property
    def tokens(self) -> int:
        used = {batch.group for batch in self.batches}
        return sum(len(self.prefixes[g]) for g in used) + sum(batch.tokens for batch in self.batches)


def plan(inputs: Sequence[Input], budget: int, *, trees: bool = True) -> Plan:
    """Return batches of at most `budget` tokens, or of one longer row; without trees a row is one input, which can
    grow."""
    if not inputs:
        return Plan((), ())
    # big-endian bytes sort in the order of the numbers, and much faster than lists
    order = sorted(range(len(inputs)), key=lambda i: inputs[i].tokens.astype(">u4").tobytes())
    shared = [common(inputs[a].tokens, inputs[b].tokens) for a, b in itertools.pairwise(order)]
    scored = [inputs[i].scored for i in order]
    apart = (not (trees and scored[i] == scored[i + 1] <= length) for i, length in enumerate(shared))
    starts = [0, *(i + 1 for i, differ in enumerate(apart) if differ)]
    units = list(
        zip(starts, [*starts[1:], len(order)], strict=True)
    )  # (first, last + 1) in `order`: each has one context
    free = [min(scored[a:b]) for a, b in units]  # tokens before the first scored one
    between = [min(shared[b - 1], free[u], free[u + 1]) for u, (_, b) in enumerate(units[:-1])]
    prefixes: list[Ids] = []
    batches: list[Batch] = []
    loose: list[Row] = []  # of no group
    for first, last, length in grouped(between):
        among = range(units[first][0], units[last - 1][1])
        rows = tree_rows(inputs, order, shared, among, length, trees)
        if length == 0:
            loose += rows
            continue
        prefixes.append(inputs[order[units[first][0]]].tokens[:length])
        batches += batched(rows, len(prefixes) - 1, budget)
    if loose:
        prefixes.append(np.empty(0, np.int64))
        batches += batched(loose, len(prefixes) - 1, budget)
    return Plan(tuple(prefixes), tuple(batches))


def common(a: Ids, b: Ids) -> int:
    """Return the length of the common beginning."""
    size = min(len(a), len(b))
    differ = a[:size] != b[:size]
    at = int(differ.argmax()) if size else 0
    return at if size and differ[at] else size


def grouped(between: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (first, last, shared prefix) of groups of neighbours.

    between[i] counts the tokens that units i and i + 1 share, which is their depth. The longest intervals of at least a
    given depth form a tree. From its leaves upwards, an interval becomes one group if that saves more than its parts
    do: depth * (size - 1), less the cost of the prefix's own forward.
    """
    # (depth, first, saved, groups) of intervals still open, each deeper than the one before
    Open = list[tuple[int, int, int]]
    stack: list[tuple[int, int, int, Open]] = [(0, 0, 0, [])]
    for i, depth in enumerate([*between, 0]):
        first, saved, groups = i, 0, [(i, i + 1, 0)]
        while stack[-1][0] > depth:
            top, first, more, before = stack.pop()
            saved, groups = saved + more, before + groups
            whole = top * (i - first) - FILL
            if whole > saved:
                saved, groups = whole, [(first, i + 1, top)]
        if stack[-1][0] == depth:
            top, start, more, before = stack.pop()
            before.extend(groups)
            stack.append((top, start, more + saved, before))
        else:
            stack.append((depth, first, saved, groups))
    # units without a group form one without a prefix: neighbours still share tokens inside a row's tree
    for no_prefix, part in itertools.groupby(stack[0][3], key=lambda group: group[2] == 0):
        if no_prefix:
            ungrouped = list(part)
            yield ungrouped[0][0], ungrouped[-1][1], 0
        else:
            yield from part


def tree_rows(
    inputs: Sequence[Input], order: Sequence[int], shared: Sequence[int], among: range, prefix: int, trees: bool
) -> list[Row]:
    rows: list[Row] = []
    path: list[int] = []  # place in the row of each token from the root to the last input's end
    for i in among:
        tokens, scored = inputs[order[i]].tokens[prefix:], inputs[order[i]].scored - prefix
        same = shared[i - 1] - prefix if rows else 0
        room = max(LONGEST, 2 * len(tokens)) - len(rows[-1]) if rows else 0
        if not (trees and same * WORTH >= len(tokens) and len(tokens) - same <= room):
            rows.append(Row())
            path, same = [], 0
        row = rows[-1]
        for place in path[same:]:
            row.ends[place] = len(row)
        path = path[:same] + list(range(len(row), len(row) + len(tokens) - same))
        row.tokens.extend(tokens[same:].tolist())
        row.positions.extend(range(prefix + same, prefix + len(tokens)))
        row.ends.extend([FOREVER] * (len(tokens) - same))
        row.places[order[i]] = path[scored:]
    return rows


def batched(rows: Sequence[Row], group: int, budget: int) -> Iterator[Batch]:
    """Yield batches of rows, the longest first, so that a lack of memory shows at once."""
    batch: list[Row] = []
    size = 0
    for row in sorted(rows, key=len, reverse=True):
        if batch and size + len(row) > budget:
            yield Batch(group, tuple(batch))
            batch, size = [], 0
        batch.append(row)
        size += len(row)
    if batch:
        yield Batch(group, tuple(batch))


def share(batches: Sequence[Batch], prefixes: Sequence[Ids], rank: int, ranks: int) -> list[Batch]:
    """Return one rank's batches: neighbours, so that few ranks compute the same prefix, and an equal share of the
    tokens."""
    cost = [batch.tokens + 0.1 * len(prefixes[batch.group]) for batch in batches]
    middle = np.cumsum(cost) - np.array(cost) / 2 if batches else np.empty(0)
    return [b for b, at in zip(batches, middle, strict=True) if int(at * ranks / sum(cost)) == rank]
