"""Training on a rank, apart from the tests because their imports would take a rank longer than its training."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from training.config.reading import read_config
from training.run import step as step_module
from training.run.loop import train
from training.run.stop import Stopped as AskedToStop


def on_rank(rank: int, world: int, arguments: list[str]) -> Path:
    return train(read_config("", arguments))


class Stopped(BaseException):
    pass


def stopped_on_rank(rank: int, world: int, arguments: list[str], before: int) -> None:
    """Trains as on_rank does, but dies without an orderly end before step number `before`."""
    real, count = step_module.train_step, [0]

    def step(*inputs: Any) -> Any:
        count[0] += 1
        if count[0] == before:
            raise Stopped
        return real(*inputs)

    with mock.patch.object(step_module, "train_step", step):
        try:
            on_rank(rank, world, arguments)
        except Stopped:
            return
    raise AssertionError("nothing stopped it")


def stopped_in_validation(rank: int, world: int, arguments: list[str], step: int) -> tuple[int, bool]:
    """Rank 1 alone gets a SIGTERM in the first batch of the validation after `step`. Returns the step that the run says it
    has saved, and whether at most one batch was computed after that."""
    steps, batches = [0], [0]
    real_step, real_nll = step_module.train_step, step_module.nll

    def train_step(*inputs: Any) -> Any:
        steps[0] += 1
        return real_step(*inputs)

    def nll(*inputs: Any) -> Any:
        if steps[0] == step and not torch.is_grad_enabled():
            batches[0] += 1
            if rank == 1 and batches[0] == 1:
                os.kill(os.getpid(), signal.SIGTERM)
        return real_nll(*inputs)

    with mock.patch.object(step_module, "train_step", train_step), mock.patch.object(step_module, "nll", nll):
        try:
            on_rank(rank, world, arguments)
        except AskedToStop as stopped:
            return stopped.step, batches[0] <= 2
    raise AssertionError("nothing stopped it")
