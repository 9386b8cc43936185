"""On a GPU: the router's and the heads' kernels against their torch lines, eager and compiled."""

from __future__ import annotations

import pytest
import torch

from tests.unit.training.test_kernels import NARROW, assert_updates_agree, ready
from training.dispatch.local import Local
from training.experts import ExpertWeights, grouped
from training.experts import _narrow as narrow
from training.kernels import cross_entropy, norm, rotary, router, updates
from training.model.loss import linear_cross_entropy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "experts", "hidden"), [(1, 8, 2048), (1000, 128, 2048), (64, 100, 512), (33, 3, 64)]
)
def test_router_products_have_float32s_accuracy(
    tokens: int, experts: int, hidden: int, dtype: torch.dtype, compiled: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(experts, hidden, device="cuda").to(dtype).requires_grad_()
    d_y = torch.randn(tokens, experts, device="cuda")
    # a compiler may take a rounding to bf16 for nothing, and with it all but the first of the three products
    y = (torch.compile(router.logits, dynamic=False) if compiled else router.logits)(x, weight)
    d_x, d_w = torch.autograd.grad(y, (x, weight), d_y)
    wide_x, wide_w, wide_d = x.detach().double(), weight.detach().double(), d_y.double()
    scale = hidden**0.5
    assert y.dtype == torch.float32 and (y - wide_x @ wide_w.T).abs().max() < 3e-5 * scale
    assert (
        x.float() @ weight.to(torch.bfloat16).float().T - wide_x @ wide_w.T
    ).abs().max() > 1e-3 * scale or dtype == torch.bfloat16
    want = wide_d @ wide_w
    assert ((d_x - want).abs() <= 2**-8 * want.abs() + 1e-4 * want.abs().max()).all()
    want = wide_d.T @ wide_x
    unit = 2**-8 if dtype == torch.bfloat16 else 1e-5
    assert ((d_w - want).abs() <= unit * want.abs() + 3e-5 * want.abs().max()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("copies", "granularity"), [(8, 8), (16, 8), (8, 4), (3, 7), (32, 16)])
def test_groups_stay_whole(copies: int, granularity: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for tokens in (1, 7, 20_000):
        x = torch.randn(tokens, 2048, device="cuda", dtype=torch.bfloat16)
        weight = (0.01 * torch.randn(copies, 2048, device="cuda")).repeat_interleave(granularity, 0).to(dtype)
        y = router.logits(x, weight)
        grouped = y.view(tokens, copies, granularity)
        assert torch.equal(grouped, grouped[:, :, :1].expand_as(grouped))
        chosen = router.choose(y, granularity)
        assert torch.equal(chosen, torch.sort(y, dim=-1, descending=True, stable=True).indices[:, :granularity])
        assert (chosen // granularity == chosen[:, :1] // granularity).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    ("heads", "width", "half", "batch"),
    [((32, 4, 4), 128, 64, 1), ((4, 4, 4), 128, 64, 2), ((8, 2, 2), 96, 12, 1), ((5, 1, 1), 80, 40, 2)],
)
def test_norm_rotate(
    heads: tuple[int, ...], width: int, half: int, batch: int, normed: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 300, sum(heads) * width, device="cuda", dtype=dtype, requires_grad=True)
    gains = [(1 + torch.randn(width, device="cuda")).requires_grad_() if normed else None for _ in range(2)]
    angle = torch.randn(batch, 300, 1, half, device="cuda")
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    inputs = [x, *(gain for gain in gains if gain is not None)]
    wide_inputs = [t.detach().double().requires_grad_() for t in inputs]
    wide_gains = wide_inputs[1:] if normed else gains
    want = ready(wide_inputs[0], list(heads), wide_gains, 1e-5, cos.double(), sin.double())
    d_y = [torch.randn_like(part, dtype=dtype) for part in want]
    want_grads = torch.autograd.grad(want, wide_inputs, [d.double() for d in d_y])
    for function in (rotary.norm_rotate, torch.compile(rotary.norm_rotate)):
        got = function(x, heads, gains, 1e-5, cos, sin)
        grads = torch.autograd.grad(got, inputs, d_y)
        unit = 2**-8 if dtype == torch.bfloat16 else 1e-5
        for mine, right in zip(got, want, strict=True):
            assert ((mine - right).abs() <= unit * right.abs() + unit / 8).all()
        assert (
            (grads[0] - want_grads[0]).abs() <= unit * want_grads[0].abs() + unit / 8 * want_grads[0].abs().max()
        ).all()
        for mine, right in zip(grads[1:], want_grads[1:], strict=True):
            assert ((mine - right).abs() <= 1e-4 * right.abs().max()).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (5000, 2048), (9001, 576), (300, 5000), (64, 8192), (7, 16384)])
def test_rms_norm(tokens: int, width: int, added: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    stream, delta = (torch.randn(tokens, width, device="cuda", dtype=dtype).requires_grad_() for _ in range(2))
    gain = (1 + torch.randn(width, device="cuda")).requires_grad_()
    d_x, d_y = torch.randn_like(stream), torch.randn_like(stream)
    wide = [t.detach().double().requires_grad_() for t in (stream, delta, gain)]
    right_x = (stream + delta).detach().double().requires_grad_() if added else wide[0]
    right_y = right_x * torch.rsqrt(right_x.square().mean(-1, keepdim=True) + 1e-5) * wide[2]
    want = torch.autograd.grad([right_x * 1, right_y], [right_x, wide[2]], [d_x.double(), d_y.double()])
    inputs = [stream, gain, delta] if added else [stream, gain]
    for function in (norm.rms_norm, torch.compile(norm.rms_norm, dynamic=False)):
        x, y = function(stream, delta if added else None, gain, 1e-5)
        grads = torch.autograd.grad([x, y], inputs, [d_x, d_y])
        unit = 2**-8 if dtype == torch.bfloat16 else 1e-5
        assert torch.equal(x.double(), right_x.detach())
        assert ((y - right_y).abs() <= unit * right_y.abs() + unit / 8).all()
        assert ((grads[0] - want[0]).abs() <= unit * want[0].abs() + unit).all()
        assert ((grads[1] - want[1]).abs() <= 1e-4 * want[1].abs().max()).all()
        assert not added or torch.equal(grads[0], grads[2])
        unused = torch.autograd.grad(function(stream, delta if added else None, gain, 1e-5)[1], stream, d_y)[0]
        alone = want[0] - d_x.double()
        assert ((unused - alone).abs() <= unit * alone.abs() + unit).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("tokens", "vocab"), [(300, 151936), (7, 32000), (64, 500)])
def test_cross_entropy(tokens: int, vocab: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (5 * torch.randn(tokens, vocab, device="cuda")).to(dtype)
    label = torch.randint(vocab, (tokens,), device="cuda")
    label[::5] = -100
    wide = logits.double().requires_grad_()
    want = torch.nn.functional.cross_entropy(0.5 * wide, label, ignore_index=-100, reduction="none")
    (want_grad,) = torch.autograd.grad(want.sum(), wide)
    unit = 2**-8 if dtype == torch.bfloat16 else 1e-5
    nats = cross_entropy.nats_(logits, label, 0.5, True)
    assert ((nats - want).abs() <= 1e-5 * want.abs() + 1e-5).all()
    assert ((logits - want_grad).abs() <= unit * want_grad.abs() + 1e-9).all()


def test_linear_cross_entropy_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    from training.model import loss

    torch.manual_seed(0)
    monkeypatch.setattr(loss, "LOGITS", 100 * 5000)
    x = torch.randn(333, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (0.1 * torch.randn(5000, 256, device="cuda")).requires_grad_()
    label = torch.randint(5000, (333,), device="cuda")
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    want = torch.nn.functional.cross_entropy(wide[0] @ wide[1].T, label, reduction="sum")
    got = linear_cross_entropy(x, weight, label)
    assert abs(got - want) < 1e-3 * want
    for mine, right in zip(torch.autograd.grad(got, (x, weight)), torch.autograd.grad(want, wide), strict=True):
        assert (mine - right).norm() < 0.01 * right.norm()


@pytest.mark.parametrize("dtypes", NARROW, ids=str)
def test_adamw_of_mixed_dtypes(dtypes: tuple[torch.dtype, torch.dtype, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert_updates_agree(dtypes, monkeypatch, "cuda")


@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16], ids=str)
def test_totals(first: torch.dtype) -> None:
    a, b = torch.randn(300, 5001, device="cuda").to(first), torch.randn(300, 5001, device="cuda").bfloat16()
    got = updates.total(a.clone(), b, torch.float32)
    assert torch.equal(got, a.float() + b.float())
    apart = updates.total(a.clone().t(), b.t(), torch.float32)  # not one piece of memory: torch's lines
    assert torch.equal(apart, (a.float() + b.float()).t())


@pytest.mark.parametrize("favoured", [False, True])
@pytest.mark.parametrize(
    ("tokens", "copies", "hidden", "width"),
    [(9000, 8, 576, 384), (65_536, 16, 576, 384), (9000, 8, 576, 768), (9000, 2, 576, 1536), (8192, 2, 64, 128)],
)
def test_narrow_experts(tokens: int, copies: int, hidden: int, width: int, favoured: bool) -> None:
    """From tokens to tokens against dispatch=local and experts=grouped, and both against float64."""
    torch.manual_seed(0)
    slices, experts = 4, 4 * copies
    expert = torch.randint(copies, (tokens, slices), device="cuda") * slices + torch.arange(slices, device="cuda")
    if favoured:
        expert[:, 0] = 0
    shapes = (tokens, hidden), (experts, 2 * width, hidden), (experts, hidden, width)
    x, up, down = (torch.randn(shape, device="cuda").to(torch.bfloat16) for shape in shapes)
    given = [x, torch.rand(tokens, slices, device="cuda"), up / hidden**0.5, down / width**0.5]
    given = [tensor.requires_grad_() for tensor in given]
    wide = [tensor.detach().double().requires_grad_() for tensor in given]
    d_y = torch.randn(tokens, hidden, device="cuda").to(torch.bfloat16)
    assert narrow.fits(x, given[2].unflatten(1, (2, -1)), given[3])

    def rows(x: torch.Tensor, weight: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        sent = Local(experts).dispatch(x, weight, expert)
        y = grouped.experts(sent.x_RD, sent.weight_R, sent.count_E, ExpertWeights(up, down, True), "silu")
        return Local(experts).combine(y, sent.handle)

    x, weight, up, down = given
    y = narrow.ffn(x, weight, expert, ExpertWeights(up, down, True), "silu")
    found = y, *torch.autograd.grad(y, given, d_y)
    again = narrow.ffn(x, weight, expert, ExpertWeights(up, down, True), "silu")
    assert all(torch.equal(a, b) for a, b in zip(found, (again, *torch.autograd.grad(again, given, d_y)), strict=True))
    y = rows(*given)
    plain = y, *torch.autograd.grad(y, given, d_y)
    y = rows(*wide)
    for ours, theirs, truth in zip(found, plain, (y, *torch.autograd.grad(y, wide, d_y.double())), strict=True):
        error, allowed = ((each.double() - truth).norm() for each in (ours, theirs))
        assert ours.dtype == theirs.dtype and error <= 1.1 * allowed + 1e-6 * truth.norm()


@pytest.mark.parametrize(("experts", "normalize"), [(32, True), (64, False), (16, True)])
def test_route(experts: int, normalize: bool) -> None:
    """A router's choice in one pass each way: as accurate as by torch's lines, and of the same experts but for ties."""
    torch.manual_seed(0)
    x = torch.randn(5000, 576, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (0.02 * torch.randn(experts, 576, device="cuda")).requires_grad_()
    assert router.fused(x, weight, 4, 4)
    logits, score, expert, chosen, again = router.route(x, weight, 4, normalize, 1.5)
    assert torch.equal(expert, router.choose(logits, 4, 4))
    wide = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    truth = wide[0] @ wide[1].T
    softmax = truth.softmax(-1)
    taken = softmax.gather(1, expert)
    want = 1.5 * (taken / taken.sum(1, keepdim=True) if normalize else taken)
    assert (
        (logits - truth).abs().max() < 1e-5
        and (score - softmax).abs().max() < 1e-5
        and (chosen - want).abs().max() < 3e-5
    )
    d_chosen, d_score = torch.randn_like(chosen), torch.randn(1, experts, device="cuda").expand_as(score)
    d_again = torch.randn_like(again)
    assert torch.equal(again, x)
    d_x, d_w = torch.autograd.grad(
        (want, softmax, wide[0] * 1), wide, (d_chosen.double(), d_score.double(), d_again.double())
    )
    got = torch.autograd.grad((chosen, score, again * 1), (x, weight), (d_chosen, d_score, d_again))
    assert ((got[0] - d_x).abs() <= 2**-8 * d_x.abs() + 1e-4 * d_x.abs().max()).all()
    assert (got[1] - d_w).abs().max() < 3e-5 * d_w.abs().max()
    means = router.summed(logits, expert, 4)
    assert means is not None and (means[:experts] - softmax.mean(0)).abs().max() < 1e-5
    assert means[-3:].tolist() == [1.0, 0.0, 0.0]  # whole
