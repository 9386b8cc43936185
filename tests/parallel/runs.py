"""Training on a rank, apart from the tests because their imports would take a rank longer than its training."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

from training import train as module
from training.config import read_config


def on_rank(rank: int, world: int, arguments: list[str]) -> Path:
    return module.train(read_config("", arguments))


class Stopped(BaseException):
    pass


def stopped_on_rank(rank: int, world: int, arguments: list[str], before: int) -> None:
    """Trains as on_rank does, but dies without an orderly end before step number `before`."""
    real, count = module.train_step, [0]

    def step(*inputs: Any) -> Any:
        count[0] += 1
        if count[0] == before:
            raise Stopped
        return real(*inputs)

    with mock.patch.object(module, "train_step", step):
        try:
            on_rank(rank, world, arguments)
        except Stopped:
            return
    raise AssertionError("nothing stopped it")
