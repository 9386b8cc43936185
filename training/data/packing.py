"""Pack whole conversations into rows of one length; a cut one would lose its first half.

The fullest row with room takes the next longest conversation (best fit, decreasing). This fills rows to about 99 % if
many conversations fit into a row, and costs about 4 microseconds a conversation when a run begins.

Shapes: N conversations.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from training.data.batch import Longs


def packed(size_N: Longs, room: int) -> tuple[Longs, Longs]:
    """Return (conversations, row after row; where each row begins in them, and where the last ends)."""
    assert not len(size_N) or int(size_N.max()) <= room, "one does not fit into any row"
    left: list[int] = []  # free sizes of rows, ascending
    rows: dict[int, list[int]] = {}  # the rows with that room
    row_N, count = np.empty(len(size_N), np.int64), 0
    for index in np.argsort(-size_N, kind="stable").tolist():
        size = int(size_N[index])
        place = bisect_left(left, size)
        if place == len(left):
            row, space, count = count, room, count + 1
        else:
            space = left[place]
            row = rows[space].pop()
            if not rows[space]:
                del left[place], rows[space]
        row_N[index] = row
        if space > size:
            if space - size not in rows:
                insort(left, space - size)
                rows[space - size] = []
            rows[space - size].append(row)
    return np.argsort(row_N, kind="stable"), np.concatenate([[0], np.cumsum(np.bincount(row_N, minlength=count))])
