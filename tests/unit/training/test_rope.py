"""Rotary frequencies that are remembered are those that would be made anew, whatever was asked before."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from upcycle.arch import rope
from upcycle.arch.spec import DenseSpec

SPEC = DenseSpec(family="llama", layers=1, hidden=16, ffn=8, heads=1, kv_heads=1, head_dim=16, vocab=8, context=32, tied=True)  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 8, "long_factor": [3.0] * 8,
}  # fmt: skip


@pytest.mark.parametrize("most", [256, 4])  # with 4, some are forgotten again
@pytest.mark.parametrize("kind", [DYNAMIC, LONG], ids=["dynamic", "longrope"])
def test_what_is_remembered_is_what_would_be_made(
    kind: dict[str, object], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rope, "MOST", most)
    monkeypatch.setattr(rope, "KNOWN", {})
    one = replace(SPEC, rope=kind)
    specs = [one, replace(one, head_dim=8, rope=SPEC.rope), replace(one, context=64), replace(one, rope=SPEC.rope)]
    positions_BS = torch.arange(5)[None]
    for spec in (*specs, *reversed(specs)):
        for length in (5, 100, 200, 5):
            got = rope.angles(spec, positions_BS, torch.float64, length)
            plain, factor = rope.frequencies(spec, length, spec.rope)
            angle_BS1n = (positions_BS[..., None].float() * plain)[:, :, None]
            assert torch.equal(got[0], (angle_BS1n.cos() * factor).double())
            assert torch.equal(got[1], (angle_BS1n.sin() * factor).double())
    assert 0 < len(rope.KNOWN) <= most
