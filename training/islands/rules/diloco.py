"""Move the model by the mean of all islands with Nesterov's momentum: DiLoCo (arXiv 2311.08105).

The server answers when the slowest island has pushed, and all islands continue from the same model.

    u = 0.9 u + mean;   model -= 0.7 (mean + 0.9 u)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from training.islands.rules import dgs
from training.islands.rules.dgs import Push, Round
from training.islands.sparse import Sparse, rounded

__all__ = ["KEEPS", "SHARE", "Pull", "Push", "gain"]

SHARE: float | None = 1.0
KEEPS = False
RATE, MOMENTUM = 0.7, 0.9


def gain(islands: int) -> float:
    return 1.0  # the server takes the mean


class Pull(dgs.Pull):
    LINEAR = ("model", "outer", "sum")

    def __init__(
        self,
        model: Tensor,
        secondary: Callable[[Tensor], Tensor] | None = None,
        worth: float = 0.0,
        wire: Round = rounded,
    ) -> None:
        super().__init__(model, None, worth, wire)
        self.outer = torch.zeros_like(model)
        self.sum = torch.zeros_like(model)
        self.pushed: set[int] = set()  # islands that are here and have pushed in this round
        self.count = 0  # pushes in this round

    def leave(self, island: int) -> None:
        super().leave(island)
        self.pushed.discard(island)  # its push still counts
        self.finish()

    def take(self, island: int, sent: Sparse) -> None:
        assert island not in self.pushed, "the island waits for an answer"
        self.sum[sent.index] += sent.value

    def done(self, island: int) -> None:
        self.pushed.add(island)
        self.count += 1
        self.finish()

    def finish(self) -> None:
        """End the round if every island that is here has pushed."""
        if not self.count or not self.has.keys() <= self.pushed:
            return
        mean = self.sum / self.count
        self.outer.mul_(MOMENTUM).add_(mean)
        self.model -= RATE * (mean + MOMENTUM * self.outer)
        self.sum.zero_()
        self.pushed.clear()
        self.count = 0

    def told(self, island: int, all: bool = False) -> Iterator[tuple[Sparse, int]] | None:
        return None if island in self.pushed else super().told(island, all)

    def state(self) -> dict[str, Tensor]:
        pushed = torch.tensor([self.count, *sorted(self.pushed)], dtype=torch.int64)
        return super().state() | {"outer": self.outer, "sum": self.sum, "pushed": pushed}

    def restore(self, state: dict[str, Tensor]) -> None:
        super().restore(state)
        self.outer, self.sum = state["outer"], state["sum"]
        self.count, *pushed = state["pushed"].tolist()
        self.pushed = set(pushed)
