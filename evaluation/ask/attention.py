"""Replace a layer's attention (training/model/attention.py) by attention over packed rows and remembered keys.

The model sees one long sequence of tokens without padding, so it computes, routes and counts no padding. Only this
file, between the projections, lays tokens out as rows. A row attends to the keys of the group's prefix, which are
computed once, and to the keys of its own that packing.py's rule allows.

Shapes: T packed tokens, B rows, S queries of the longest row, C keys of a row, P keys of the prefix; H query heads,
G key heads, A dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from evaluation.ask.packing import FOREVER, Row
from training.kernels.attention import plain_capped
from training.model.attention import Seen


@dataclass(frozen=True)
class Rows:
    """Say where each packed token belongs, and which keys it may see."""

    tokens_T: Tensor
    positions_T: Tensor
    queries: tuple[int, int]  # B, S
    query_T: Tensor  # place of each token among B * S
    key_T: Tensor  # place of its key among B * C; for tokens written later, among B * (P + C)
    slot_BS: Tensor  # column of each query among the C
    at_BS: Tensor  # position of each query
    end_BC: Tensor  # where the subtree of each key ends (packing.py)
    at_BC: Tensor  # position of each key
    prefix: int  # P
    length: int  # length of the longest sequence, tokens written later included: some rotary frequencies depend on it
    chains: bool  # all rows are plain sequences, and there is no prefix

    @cached_property
    def masks(self) -> dict[int | None, Tensor | None]:
        return {}

    def mask(self, window: int | None) -> Tensor | None:
        """Return the mask [B, 1, S, P + C], made once for all layers with one window; None if a causal mask is
        enough."""
        if window not in self.masks:
            self.masks[window] = self.make_mask(window)
        return self.masks[window]

    def make_mask(self, window: int | None) -> Tensor | None:
        if self.chains and window is None and self.queries[1] == self.end_BC.shape[1]:
            return None  # the padding is at the end, and no token attends to it
        slot = torch.arange(self.end_BC.shape[1], device=self.end_BC.device)
        seen = (slot <= self.slot_BS[:, :, None]) & (self.slot_BS[:, :, None] < self.end_BC[:, None])
        before = seen.new_ones(*self.queries, self.prefix)
        if window is not None:
            seen &= self.at_BS[:, :, None] - self.at_BC[:, None] < window
            before &= self.at_BS[:, :, None] - torch.arange(self.prefix, device=seen.device) < window
        return torch.cat([before, seen], 2)[:, None]


def laid_out(rows: Sequence[Row], prefix: int, length: int, room: int, device: torch.device) -> Rows:
    """Lay out rows for one forward, with `room` columns of keys for tokens that are written later."""
    longest = max(map(len, rows))
    width = longest + room
    sizes = [len(row) for row in rows]
    row_T = np.repeat(np.arange(len(rows)), sizes)
    column_T = np.concatenate([np.arange(n) for n in sizes])

    def grid(values: list[list[int]], columns: int) -> NDArray[np.int32]:
        out = np.zeros((len(rows), columns), np.int32)
        out[row_T, column_T] = np.concatenate(values)
        return out

    def tensor(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device)

    at = grid([row.positions for row in rows], width)
    end = grid([row.ends for row in rows], width)
    return Rows(
        tokens_T=tensor(np.concatenate([row.tokens for row in rows])),
        positions_T=tensor(np.concatenate([row.positions for row in rows])),
        queries=(len(rows), longest),
        query_T=tensor(row_T * longest + column_T),
        key_T=tensor(row_T * width + column_T),
        slot_BS=tensor(grid([list(range(n)) for n in sizes], longest)),
        at_BS=tensor(at[:, :longest].copy()),
        end_BC=tensor(end),
        at_BC=tensor(at),
        prefix=prefix,
        length=length,
        chains=prefix == 0 and all(end == FOREVER for row in rows for end in row.ends),
    )


def next_tokens(rows: Rows, alive: Sequence[int], tokens: Sequence[int], positions: Sequence[int], slot: int) -> Rows:
    """Return rows with one more token for each of `alive`, in column `slot`; `rows` gets that column too."""
    count, width = rows.end_BC.shape
    device = rows.end_BC.device
    index = torch.tensor(alive, device=device)
    at = torch.tensor(positions, device=device)
    rows.end_BC[:, slot] = FOREVER
    rows.at_BC[index, slot] = at.int()
    at_BS = torch.zeros(count, 1, dtype=torch.int32, device=device)
    at_BS[index, 0] = at.int()
    return Rows(
        tokens_T=torch.tensor(tokens, device=device),
        positions_T=at,
        queries=(count, 1),
        query_T=index,
        key_T=index * (rows.prefix + width) + rows.prefix + slot,
        slot_BS=torch.full_like(at_BS, slot),
        at_BS=at_BS,
        end_BC=rows.end_BC,
        at_BC=rows.at_BC,
        prefix=rows.prefix,
        length=rows.length,
        chains=False,
    )


@dataclass
class Memory:
    """Hold the rows that all layers of a forward share, and each layer's keys and values."""

    rows: Rows | None = None  # the rows of this forward
    keep: str = ""  # this forward's keys become: prefix (for later forwards), own (for the same rows), or nothing
    prefix: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # layer -> keys, values [1, P, G, A]
    own: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # [B, P + C, G, A]

    def forget(self) -> None:
        self.rows = None
        self.prefix.clear()
        self.own.clear()


@dataclass(frozen=True)
class Remembering:
    """Compute attention over packed rows for one layer."""

    layer: int
    window: int | None
    scale: float
    cap: float  # soft cap of the logits; 0: none
    memory: Memory
    # values are this many first numbers of a key, and are not stored twice; 0: values are stored by themselves
    latent: int = 0

    def __call__(
        self, q_BSHA: Tensor, k_BSGA: Tensor, v_BSGA: Tensor, seen: Seen, sink_H: Tensor | None = None
    ) -> Tensor:
        rows, memory = self.memory.rows, self.memory
        assert rows is not None and seen.documents_BS is None
        count, longest = rows.queries
        real = len(rows.tokens_T)  # tensor parallelism may add a few tokens, to divide them evenly
        q_THA = q_BSHA[0, :real]
        q_BHSA = scattered(q_THA, rows.query_T, count * longest).view(count, longest, *q_THA.shape[1:]).transpose(1, 2)
        kinds = (k_BSGA,) if self.latent else (k_BSGA, v_BSGA)
        held = tuple(self.keys(rows, i, new[0, :real]) for i, new in enumerate(kinds))
        held += (held[0][..., : self.latent],) if self.latent else ()
        if memory.keep:
            store = memory.prefix if memory.keep == "prefix" else memory.own
            store[self.layer] = (held[0], held[1])
        k_BGCA, v_BGCA = (each.transpose(1, 2) for each in held)
        mask = rows.mask(self.window)
        if self.cap or sink_H is not None:
            y_BHSA = plain_capped(q_BHSA, k_BGCA, v_BGCA, mask, self.scale, self.cap, sink_H)
        else:
            y_BHSA = functional.scaled_dot_product_attention(
                q_BHSA, k_BGCA, v_BGCA, mask, is_causal=mask is None, scale=self.scale,
                enable_gqa=q_BHSA.shape[1] != k_BGCA.shape[1],
            )  # fmt: skip
        y_THA = y_BHSA.transpose(1, 2).flatten(0, 1)[rows.query_T]
        return functional.pad(y_THA, (0, 0, 0, 0, 0, q_BSHA.shape[1] - real))[None]

    def keys(self, rows: Rows, which: int, new_TGA: Tensor) -> Tensor:
        """Return all keys (or values) of the rows, [B, P + C, G, A]."""
        count, width = rows.end_BC.shape
        if self.layer in self.memory.own:
            held = self.memory.own[self.layer][which]
            held.flatten(0, 1).index_copy_(0, rows.key_T, new_TGA)
            return held
        own = scattered(new_TGA, rows.key_T, count * width).view(count, width, *new_TGA.shape[1:])
        if not rows.prefix:
            return own
        return torch.cat([self.memory.prefix[self.layer][which].expand(count, -1, -1, -1), own], 1)


def scattered(x_TNA: Tensor, place_T: Tensor, size: int) -> Tensor:
    if len(x_TNA) == size:
        return x_TNA  # all rows have the same length: the places are 0, 1, 2, ...
    return x_TNA.new_zeros(size, *x_TNA.shape[1:]).index_copy_(0, place_T, x_TNA)
