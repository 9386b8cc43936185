"""The processes that evaluate one model together, and what they tell each other: numbers and JSON, never a pickle."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


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
        if not dist.is_initialized():
            return [value]
        said = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(lengths, torch.tensor([len(said)]))
        letters = [torch.zeros(int(max(lengths)), dtype=torch.uint8) for _ in lengths]
        dist.all_gather(letters, torch.cat([said, torch.zeros(len(letters[0]) - len(said), dtype=torch.uint8)]))
        return [json.loads(bytes(text[: int(n)].tolist())) for text, n in zip(letters, lengths, strict=True)]
