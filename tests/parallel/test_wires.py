"""What training.plan measure learns of the wires between ranks, on two of them."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from tests.parallel.ranks import run
from training import hardware, measure
from training.hardware import Hardware


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
