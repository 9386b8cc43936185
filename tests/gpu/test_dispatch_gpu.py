"""On a GPU: the row kernels against their torch lines, and the local dispatcher's gradients against autograd's own."""

from __future__ import annotations

import pytest
import torch

from training.dispatch.local import Local
from training.kernels import permute

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("tokens", "k", "experts", "hidden"), [(1, 1, 1, 8), (257, 8, 128, 2048), (64, 2, 8, 4096), (33, 3, 7, 100)]
)
def test_row_kernels_are_their_torch_lines(tokens: int, k: int, experts: int, hidden: int, dtype: torch.dtype) -> None:
    x = torch.randn(tokens, hidden, device="cuda", dtype=dtype)
    expert = torch.rand(tokens, experts, device="cuda").topk(k).indices
    order = torch.argsort(expert.flatten(), stable=True)
    back, count = permute.places(expert, experts)
    assert torch.equal(back, torch.argsort(order))
    assert torch.equal(count, torch.bincount(expert.flatten(), minlength=experts).int())
    rows = permute.spread(x, back, k)
    assert torch.equal(rows, x[order // k])
    want = rows[back].view(tokens, k, hidden).float().sum(1)
    got = permute.gather(rows, back, k)
    assert torch.allclose(got.float(), want, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-5)
    assert not torch.allclose(permute.gather(rows, order, k).float(), want, rtol=0.1, atol=0.1) or tokens == 1


def test_local_dispatch_gives_autograds_gradients_and_waits_for_nothing() -> None:
    tokens, k, experts, hidden = 500, 4, 16, 256
    x = torch.randn(tokens, hidden, device="cuda", requires_grad=True)
    weight = torch.rand(tokens, k, device="cuda", requires_grad=True)
    expert = torch.rand(tokens, experts, device="cuda").topk(k).indices
    local = Local(experts)
    local.dispatch(x, weight, expert)  # compiles the kernels, which may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        sent = local.dispatch(x, weight, expert)
        y = local.combine(sent.x_RD.sin() * sent.weight_R[:, None], sent.handle)
        ours = torch.autograd.grad(y.square().sum(), (x, weight))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    plain = x.sin() * weight.sum(1, keepdim=True)
    theirs = torch.autograd.grad(plain.square().sum(), (x, weight))
    assert torch.allclose(y, plain, rtol=1e-5, atol=1e-5)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(ours, theirs, strict=True))
    assert torch.equal(sent.count_E, torch.bincount(expert.flatten(), minlength=experts).int())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_beyond_the_last_are_not_made_and_count_as_zero(dtype: torch.dtype) -> None:
    """What is sent to other ranks: dropped choices are sorted behind the rows that leave."""
    tokens, k, experts, hidden = 257, 4, 16, 2048
    x = torch.randn(tokens, hidden, device="cuda", dtype=dtype)
    expert = torch.rand(tokens, experts, device="cuda").topk(k).indices
    expert = expert.where(torch.rand(tokens, k, device="cuda") > 0.3, experts)
    back, count = permute.places(expert, experts + 1)
    rows = int(count[:-1].sum())
    made = permute.spread(x, back, k, rows)
    assert made.shape == (rows, hidden)
    for row, choice in enumerate(back.argsort()[:rows].tolist()):
        assert torch.equal(made[row], x[choice // k])
    kept = (expert < experts).sum(1, keepdim=True)
    assert torch.allclose(permute.gather(made, back, k).float(), x.float() * kept, rtol=2**-7, atol=1e-5)
    for none in (0, 1):  # no row at all reads nothing
        assert not permute.gather(made[:0], back[: none * k] + rows, k).any()
