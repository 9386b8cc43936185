"""FLOPs of an MoE."""

from __future__ import annotations

from pathlib import Path

from tests.unit.upcycle.plans import load
from upcycle.planning import size


def test_a_gate_that_equals_up_counts_in_the_flops(arcee: Path) -> None:
    gated, plain = load(f"source={arcee}", "target=mixtral")[0], load(f"source={arcee}", "target=upcycled")[0]
    flops = [size.moe_flops(p.moe, 128, gated=p.gated) for p in (gated, plain)]
    assert flops[0] - flops[1] == 6 * 2 * (2 * 96) * 64  # layers, top_k * neurons, hidden
