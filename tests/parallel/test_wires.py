"""What upcycle estimate measure=FILE learns of the wires between ranks, on two of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.parallel.ranks import run
from training.estimating import hardware, measure
from training.estimating.hardware import Hardware


def of_two(rank: int, world: int) -> Hardware:
    return measure.measured(torch.device("cpu"), hardware.read("h200"), (1.0, 2.0))


def test_wires_between_two_ranks() -> None:
    """All ranks know the same, that of the slowest; dispatchers that are not here keep their ratio to alltoall."""
    first, second = run(2, of_two)
    like = hardware.read("h200")
    assert asdict(first)["link"] == asdict(second)["link"] and first.rows == second.rows
    assert first.link.latency > 0 and 1e-6 < first.link.rate < 1e3 and first.rows["alltoall"][0] > 0
    ratio = like.rows["hybridep"][0] / like.rows["alltoall"][0]
    rate, more = first.rows["hybridep"]
    assert rate == pytest.approx(ratio * first.rows["alltoall"][0], rel=1e-3) and more == like.rows["hybridep"][1]
    assert not {"link", "rows"} & set(first.sheet) and "network" in first.sheet


def of_a_busy_machine(rank: int, world: int) -> tuple[float, float, list[int], str]:
    """What `linked` finds where 1 ms is noise until a rank sends 4 MiB, and what it says where that never ends."""
    sent: list[int] = []

    def seconds(work: Callable[[], None], device: torch.device) -> float:
        work()
        return 1e-3 if sent[-1] < 1 << 22 else 1e-3 + sent[-1] / 1e9

    def gathered(whole: torch.Tensor, own: torch.Tensor) -> None:
        sent.append(own.numel())

    with mock.patch.object(measure, "seconds", seconds), mock.patch.object(dist, "all_gather_into_tensor", gathered):
        found = measure.linked(torch.device("cpu"))
    with mock.patch.object(measure, "seconds", lambda *_: 2e-3), pytest.raises(ValueError) as refused:
        measure.travelled(torch.device("cpu"), 1e-4)
    return found.latency, found.rate, sent, str(refused.value)


def test_noise_does_not_pass_for_wires_that_take_no_time() -> None:
    for latency, rate, sent, refused in run(2, of_a_busy_machine):
        assert latency == 1000 and rate == pytest.approx(1, rel=1e-3), "of two ranks a rate of 1 GB/s"
        assert sent == [1 << 10, 1 << 20, 1 << 10, 1 << 21, 1 << 10, 1 << 22]
        assert refused.startswith("the rate of rows to other ranks cannot be measured: ") and "is idle" in refused
