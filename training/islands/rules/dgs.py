"""Send the largest numbers in both directions: dual-way gradient sparsification (Yan et al., ICPP 2020).

Each island has its own optimiser. The paper's SAMomentum keeps u, and at each exchange

    u~ = m u + eta g;   sends u~ where |u~| is large;   u = u~ there, u~ / m elsewhere.

With r = m / (1 - m) * u and d = eta g / (1 - m), this is u~ = (1 - m) (r + d), and r becomes m (r + d) where it was
sent
and r + d elsewhere. So SAMomentum is error feedback that sends the share 1 - m of the residual and keeps the rest:

    r += d;   sent = (1 - m) r at the largest;   r -= sent

This is exact for every choice of places (sent + r = sum of d), and r also holds the rounding errors of bfloat16. At
m = 0 it is plain error feedback.

The gain multiplies what is sent: with K islands a delta counts 1 / K in the model. r holds what the island itself
learned (sent + gain r = gain sum of d), and the island continues with all of r. If it kept only gain r, every exchange
would throw away most of what was learned, the islands would learn it again, and their sums would be several times too
large.

The server answers with the difference between the model and the island's copy: all of it, or the largest (secondary).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from training.islands.places import NUMBERS
from training.islands.sparse import Sparse, largest, rounded

SHARE: float | None = None
KEEPS = True
PART = NUMBERS  # numbers of an answer that are made together
Round = Callable[[Tensor], Tensor]


def gain(islands: int) -> float:
    return 1 / islands


class Push:
    """Choose what an island sends. `residual`: of the segments (S, N), changed in place and saved by its owner."""

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
    """Keep the model and each island's copy. `secondary`: finds the places of a difference (P,) to answer with; None:
    all places.

    `worth`: a place waits while its difference is at most this share of the weight. Without it the rounding errors of
    every answer would make another answer as long as the first."""

    LINEAR: tuple[str, ...] = ("model",)  # tensors (P,) that are sums over all pushes

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
        """Subtract a part of a push from the model."""
        self.model[sent.index] -= sent.value

    def done(self, island: int) -> None:
        """Finish a push after its last part."""

    def pull(self, island: int, all: bool = False) -> Sparse | None:
        told = self.told(island, all)
        if told is None:
            return None
        parts = [(sparse.index, sparse.value) for sparse, _ in told]
        return Sparse(*(torch.cat(tables) for tables in zip(*parts, strict=True)))

    def told(self, island: int, all: bool = False) -> Iterator[tuple[Sparse, int]] | None:
        """Return an answer in parts, each with its end; the caller must take all of them. None: not yet."""
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

    def undo(self, change: Tensor) -> None:
        """Take back a change of each tensor in LINEAR (L, P)."""
        for name, x in zip(self.LINEAR, change, strict=True):
            getattr(self, name).sub_(x)

    def state(self) -> dict[str, Tensor]:
        return {"model": self.model, **{f"has.{island}": has for island, has in self.has.items()}}

    def restore(self, state: dict[str, Tensor]) -> None:
        self.model = state["model"]
        self.has = {int(name[4:]): tensor for name, tensor in state.items() if name.startswith("has.")}
