"""experts=grouped_fp8 with its product written out: the same rounding, and gradients that follow from it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.unit.training.test_experts import case, run
from training.experts import grouped_fp8, reference


def written_out(x_RK: Tensor, w_ENK: Tensor, ends_E: Tensor) -> Tensor:
    (x, x_scale_R), (w, w_scale_EN) = grouped_fp8.rounded(x_RK), grouped_fp8.rounded(w_ENK)
    x_RK, w_ENK = x.float() * x_scale_R[:, None], w.float() * w_scale_EN[..., None]
    y_RN = x_RK.new_zeros(len(x_RK), w_ENK.shape[1])
    start = 0
    for matrix, end in zip(w_ENK, ends_E.tolist(), strict=True):
        y_RN[start:end] = x_RK[start:end] @ matrix.T
        start = end
    return y_RN.to(torch.bfloat16)


@pytest.mark.parametrize("tail", [0, 5])
@pytest.mark.parametrize("gated", [True, False])
def test_a_few_percent_of_each_gradient(monkeypatch: pytest.MonkeyPatch, gated: bool, tail: int) -> None:
    monkeypatch.setattr(grouped_fp8, "in_fp8", written_out)
    monkeypatch.setattr(grouped_fp8, "only_bfloat16", lambda *_: None)
    made = case((40, 0, 77, 1), tail, hidden=64, width=96, gated=gated, dtype=torch.bfloat16, bias=False)
    with torch.no_grad():
        made[3].up_EFD.mul_(64**-0.5)
        made[3].down_EDF.mul_(96**-0.5)
    got, want = run(grouped_fp8.experts, made, "silu"), run(reference.experts, made, "silu")
    for name, right in want.items():
        far = float((got[name].double() - right.double()).norm() / right.double().norm())
        assert 0.01 < far < 0.12, (name, far)


def test_rows_have_their_own_scales() -> None:
    x = torch.tensor([[1e-3, 5e-4], [300.0, 150.0], [0.0, 0.0]])
    found, scale = grouped_fp8.rounded(x)
    assert torch.allclose(found.float() * scale[:, None], x, rtol=2**-4) and found.float().abs().max() == 448


def test_sizes_that_hopper_cannot_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_fp8, "only_bfloat16", lambda *_: None)
    with pytest.raises(ValueError, match="multiples of 16, and got 64 and 24; use experts=grouped"):
        run(
            grouped_fp8.experts,
            case((4,), 0, hidden=64, width=24, gated=True, bias=False, dtype=torch.bfloat16),
            "silu",
        )
