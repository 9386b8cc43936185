"""The loss's backward in bfloat16 keeps the factor that it is given."""

from __future__ import annotations

import pytest
import torch

from training.model.loss import linear_cross_entropy


@pytest.mark.parametrize("scored", [1021, 3001])
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16])
def test_one_over_the_number_of_tokens_is_not_rounded(scored: int, weight: torch.dtype) -> None:
    """Each element is rounded once, up or down alike; 1 / scored in bfloat16 would move all of them the same way."""
    draw = torch.Generator().manual_seed(scored)
    x = torch.randn(64, 32, generator=draw).bfloat16().requires_grad_()
    w = torch.randn(100, 32, generator=draw).to(weight).requires_grad_()
    label = torch.randint(100, (64,), generator=draw)
    whole = torch.autograd.grad(linear_cross_entropy(x, w, label), (x, w))
    shares = torch.autograd.grad(linear_cross_entropy(x, w, label) / scored, (x, w))
    for one, share in zip(whole, shares, strict=True):
        assert share.dtype == one.dtype
        size = (share.double() * one.double()).sum() * scored / one.double().square().sum()
        assert abs(float(size) - 1) < 3e-4
        assert float((share.double() * scored - one.double()).abs().max() / one.double().abs().max()) < 2**-8
