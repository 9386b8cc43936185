"""The processes that evaluate one model together, and what they tell each other: numbers and JSON, never a pickle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from training.parallel.collectives import gather


@dataclass(frozen=True)
class Ranks:
    """`index` of `count` shares of the work. Ranks of one share (tensor parallel) do the same."""

    index: int = 0
    count: int = 1

    def any(self, mine: bool) -> bool:
        """Whether one of all processes says yes."""
        if not dist.is_initialized():
            return mine
        flag = torch.tensor(int(mine), dtype=torch.int32)  # host memory: over gloo, also where there is NCCL
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def gather(self, value: Any) -> list[Any]:
        """What each process says, in order of ranks."""
        return gather(value)
