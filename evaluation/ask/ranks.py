"""The processes that evaluate one model together, and what they tell each other: numbers and JSON, never a pickle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from training.parallel.collectives import gather


@dataclass(frozen=True)
class Ranks:
    """This process's share of the work: `index` of `count`. Ranks of tensor parallelism have the same share."""

    index: int = 0
    count: int = 1

    def any(self, mine: bool) -> bool:
        """Returns whether any process brings True. All processes call it together."""
        if not dist.is_initialized():
            return mine
        flag = torch.tensor(int(mine), dtype=torch.int32)  # on the host: over gloo, also where there is NCCL
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def gather(self, value: Any) -> list[Any]:
        """Returns each process's value, in order of ranks."""
        return gather(value)
