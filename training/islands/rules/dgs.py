"""Dual-way gradient sparsification (Yan et al., ICPP 2020), around optimisers of the islands' own.

The paper's SAMomentum keeps u, and per exchange

    u~ = m u + eta g;   sends u~ where |u~| is large;   u = u~ there, u~ / m elsewhere.

With r = m / (1 - m) * u and d = eta g / (1 - m) that is u~ = (1 - m) (r + d), and r becomes m (r + d) where it was sent
and r + d elsewhere. So it is error feedback that sends the share 1 - m of what it has gathered and keeps the rest:

    r += d;   sent = (1 - m) r at the largest;   r -= sent

which is exact for every choice of places (sent + r = sum of d), holds what the wire rounds, and at m = 0 is plain error
feedback. An error of bfloat16 stays in r like everything that was not sent.

A delta of one of K islands counts 1 / K in the model: its gain, which multiplies what is sent. r is what the island has
learned itself, sent + gain r = gain sum of d, and it goes on with all of that. Were only gain r kept, every exchange
would throw away most of what was learned, islands would learn it again, and their sums be several times too much.

The server answers with the difference between the model and what the island has: all of it, or the largest (secondary).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from training.islands.places import NUMBERS
from training.islands.sparse import Sparse, largest, rounded

SHARE: float | None = None
KEEPS = True
PART = NUMBERS  # of an answer that are told together
Round = Callable[[Tensor], Tensor]


def gain(islands: int) -> float:
    return 1 / islands


class Push:
    """`residual`: of segments (S, N), changed in place; its owner saves it. `gain`: of what is sent."""

    def __init__(self, residual: Tensor, momentum: float = 0.0, wire: Round = rounded, gain: float = 1.0) -> None:
        self.residual, self.momentum, self.wire, self.gain = residual, momentum, wire, gain

    def push(self, delta: Tensor, counts: Sequence[int]) -> Sparse:
        self.residual += delta
        index = largest(self.residual, counts)
        flat = self.residual.view(-1)
        value = self.wire((1 - self.momentum) * self.gain * flat[index])
        flat[index] -= value / self.gain
        return Sparse(index, value)


class Pull:
    """secondary: of a difference (P,), the places to answer with; None: every one.
    worth: places whose difference is no more than this share of the weight wait until they differ by more. Without it
    what bfloat16 leaves of every answer would be an answer of its own, as long as the first one."""

    def __init__(
        self,
        model: Tensor,
        secondary: Callable[[Tensor], Tensor] | None = None,
        worth: float = 0.0,
        wire: Round = rounded,
    ) -> None:
        self.model, self.secondary, self.worth, self.wire = model, secondary, worth, wire
        self.has: dict[int, Tensor] = {}

    def join(self, island: int) -> None:
        self.has[island] = self.model.clone()

    def leave(self, island: int) -> None:
        self.has.pop(island, None)

    def push(self, island: int, sent: Sparse) -> None:
        self.take(island, sent)
        self.done(island)

    def take(self, island: int, sent: Sparse) -> None:
        """A part of a push."""
        self.model[sent.index] -= sent.value

    def done(self, island: int) -> None:
        """All parts of a push are there."""

    def pull(self, island: int, all: bool = False) -> Sparse | None:
        told = self.told(island, all)
        if told is None:
            return None
        parts = [(sparse.index, sparse.value) for sparse, _ in told]
        return Sparse(*(torch.cat(tables) for tables in zip(*parts, strict=True)))

    def told(self, island: int, all: bool = False) -> Iterator[tuple[Sparse, int]] | None:
        """An answer in parts, each with where it ends; all of them are to be taken."""
        few = None if all else self.secondary
        width = len(self.model) if few else PART
        return (self.part(island, at, at + width, few, all) for at in range(0, len(self.model), width))

    def part(
        self, island: int, first: int, last: int, few: Callable[[Tensor], Tensor] | None, all: bool
    ) -> tuple[Sparse, int]:
        model, has = self.model[first:last], self.has[island][first:last]
        difference = model - has
        if self.worth and not all:
            difference[difference.abs() <= self.worth * model.abs()] = 0
        index = difference.nonzero().flatten() if few is None else few(difference)
        value = self.wire(difference[index])
        has[index] += value
        return Sparse(index + first, value), first + len(model)

    def state(self) -> dict[str, Tensor]:
        return {"model": self.model, **{f"has.{island}": has for island, has in self.has.items()}}

    def restore(self, state: dict[str, Tensor]) -> None:
        self.model = state["model"]
        self.has = {int(name[4:]): tensor for name, tensor in state.items() if name.startswith("has.")}
