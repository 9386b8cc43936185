"""Kernels' mathematics on a CPU: the split product, and (with triton, interpreted) every Triton kernel against its torch lines."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys

import pytest
import torch

from training.kernels import cross_entropy, permute, rotary, router, swiglu, updates
from training.optim.config import OptimConfig
from training.optim.optimizer import Optimizer
from upcycle.arch.ffn import gated_product
from upcycle.planning import rng

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in a process with TRITON_INTERPRET=1")


@pytest.mark.skipif(INTERPRETED or importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_interpreted() -> None:
    """Triton reads TRITON_INTERPRET once, at import: the tests below need a process of their own."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", __file__],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_three_bf16_products_are_a_float32_one(dtype: torch.dtype) -> None:
    x = rng.normal((200, 512), 0, "x").to(torch.bfloat16).requires_grad_()
    weight = rng.normal((24, 512), 0, "w").to(dtype).requires_grad_()
    d_y = rng.normal((200, 24), 0, "d")
    y = router.SplitLinear.apply(x, weight)
    d_x, d_w = torch.autograd.grad(y, (x, weight), d_y)
    wide_x, wide_w = x.detach().double(), weight.detach().double()
    truth = wide_x @ wide_w.T
    error = (y.double() - truth).abs().max()
    float32 = (wide_x.float() @ wide_w.float().T - truth).abs().max()
    assert y.dtype == torch.float32 and error <= 3 * float32 + 1e-6
    if dtype == torch.float32:  # and it can fail: one part is a thousand times worse
        assert (x.float() @ weight.to(torch.bfloat16).float().T - truth).abs().max() > 100 * error
    want_x, want_w = d_y.double() @ wide_w, d_y.double().T @ wide_x
    # rounded to bf16 once: half a unit in the last place of 8 bits; the sum behind it is exact to 16
    assert ((d_x.double() - want_x).abs() <= 2**-8 * want_x.abs() + 2**-14 * want_x.abs().max()).all()
    unit = 2**-8 if dtype == torch.bfloat16 else 2**-20
    assert ((d_w.double() - want_w).abs() <= unit * want_w.abs() + 2**-20 * want_w.abs().max()).all()


def test_split_is_exact_in_three_parts() -> None:
    x = rng.normal((1000,), 0, "split") * torch.logspace(-12, 12, 1000)
    assert torch.equal(sum(part.double() for part in router.split(x, 3)), x.double())
    assert not torch.equal(sum(part.double() for part in router.split(x, 2)), x.double())


def scores(tokens: int, experts: int) -> torch.Tensor:
    """With ties within a row, and rows of one value."""
    found = (rng.normal((tokens, experts), 0, "scores") * 3).round()
    found[0] = 1.0
    return found


@needs_interpreter
@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 2, 2), (37, 8, 2), (65, 130, 8), (33, 40, 10), (5, 7, 7)])
def test_choose(tokens: int, experts: int, k: int) -> None:
    from training.kernels.triton import router as router_triton

    score = scores(tokens, experts)
    for slices in (s for s in (2, 5, 7) if experts % s == k % s == 0):
        found = router_triton.choose(score, k, slices)
        assert torch.equal(found, router.choose(score, k, slices))
        assert all((found % slices == slice_).sum() == tokens * k // slices for slice_ in range(slices))
    assert torch.equal(router_triton.choose(score, k), router.choose(score, k))
    score[0] = float("-inf")
    assert router_triton.choose(score, k)[0].tolist() == list(range(k))
    score[0, :] = float("nan")
    assert router_triton.choose(score, k)[0].tolist() == list(range(k))


@needs_interpreter
@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 1, 1), (33, 3, 2), (200, 128, 8)])
def test_places_spread_gather(tokens: int, experts: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from training.kernels.triton import permute as permute_triton

    expert = router.choose(scores(tokens, experts), k)
    back, count = permute.places(expert, experts)
    found, found_count = permute_triton.places(expert.contiguous(), experts)
    assert torch.equal(back, found) and torch.equal(count, found_count) and found_count.dtype == count.dtype
    total = permute.count_(torch.ones(experts, dtype=torch.int64), expert)
    assert torch.equal(permute_triton.counts(expert.contiguous(), experts).sum(1) + 1, total)
    assert torch.equal(count.long() + 1, total)
    x = rng.normal((tokens, 20), 0, "rows")
    rows = permute.spread(x, back, k)
    assert torch.equal(rows, permute_triton.spread(x, back, k, len(back)))
    assert torch.allclose(permute.gather(rows * 2, back, k), permute_triton.gather(rows * 2, back, k), rtol=1e-6)
    assert torch.allclose(permute.gather(rows, back, k), x * k, rtol=1e-6)
    for gather in (permute.gather, permute_triton.gather):
        assert torch.allclose(gather(rows, back, k, 10 * x), x * (k + 10), rtol=1e-6)
        weight = rng.normal((tokens, k), 0, "weights")
        whole = gather(rows, back, k, 10 * x, weight)
        assert torch.allclose(whole, x * (weight.sum(1, keepdim=True) + 10), rtol=1e-5, atol=1e-5)
        marked = torch.zeros_like(rows)
        marked[back[k - 1 :: k]] = x  # the last choice's rows alone
        assert torch.allclose(gather(marked, back, k, None, weight), x * weight[:, -1:], rtol=1e-6)
    monkeypatch.setattr(permute, "kernels_run", lambda _: True)
    apart = torch.cat([10 * x, x], 1)[:, : x.shape[1]]  # rows that do not follow each other in memory
    assert torch.allclose(permute.gather(rows, back, k, apart), x * (k + 10), rtol=1e-6)


def ready(x: torch.Tensor, heads: list[int], gains: list, eps: float, cos: torch.Tensor, sin: torch.Tensor) -> list:
    """What rotary.norm_rotate does, in torch's lines."""
    width = x.shape[2] // sum(heads)
    parts = [part.unflatten(2, (-1, width)) for part in x.split([count * width for count in heads], dim=2)]
    for index, gain in enumerate(gains):
        part = parts[index]
        normed = part if gain is None else part * torch.rsqrt(part.square().mean(-1, keepdim=True) + eps) * gain
        parts[index] = rotary.rotate(normed, cos, sin)
    return parts


@needs_interpreter
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("width", "half", "batch"), [(8, 4, 1), (12, 6, 3), (20, 4, 3)])
def test_norm_rotate(width: int, half: int, batch: int, normed: bool) -> None:
    heads = [5, 2, 2]
    x = rng.normal((3, 11, sum(heads) * width), 0, "x").requires_grad_()
    gains = [(1 + rng.normal((width,), 0, name)).requires_grad_() if normed else None for name in ("q", "k")]
    angle = rng.normal((batch, 11, 1, half), 0, "angle")
    cos, sin, eps = angle.cos(), angle.sin(), 1e-3
    want = ready(x, heads, gains, eps, cos, sin)
    got = rotary.norm_rotate(x, heads, gains, eps, cos, sin)
    d_y = [rng.normal(tuple(part.shape), 0, "d", index) for index, part in enumerate(want)]
    for mine, right in zip(got, want, strict=True):
        assert torch.allclose(mine, right, rtol=1e-5, atol=1e-5) and mine.is_contiguous()
    inputs = [x, *(gain for gain in gains if gain is not None)]
    for mine, right in zip(torch.autograd.grad(got, inputs, d_y), torch.autograd.grad(want, inputs, d_y), strict=True):
        assert torch.allclose(mine, right, rtol=1e-4, atol=1e-4)


@needs_interpreter
@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize(("tokens", "width"), [(1, 16), (700, 20)])
def test_rms_norm(tokens: int, width: int, added: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from training.kernels.triton import norm as norm_triton

    monkeypatch.setattr(norm_triton, "PROGRAMS", 50)  # each walks several times, and some once less than others
    stream, delta = (rng.normal((tokens, width), 0, name).requires_grad_() for name in ("stream", "delta"))
    gain, eps = (1 + rng.normal((width,), 0, "gain")).requires_grad_(), 1e-3
    x = stream + delta if added else stream
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain
    d_x, d_y = rng.normal((tokens, width), 0, "d_x"), rng.normal((tokens, width), 0, "d_y")
    want = torch.autograd.grad([x * 1, y], [stream, gain], [d_x, d_y])
    with torch.no_grad():
        got_x, got_y = norm_triton.forward(stream, delta if added else None, gain, eps)
        total, d_gain = norm_triton.backward(d_y, d_x, got_x, gain, eps)
        alone, _ = norm_triton.backward(d_y, None, got_x, gain, eps)
    assert torch.allclose(alone + d_x, total, rtol=1e-5, atol=1e-5)
    for got, right in ((got_x, x), (got_y, y), (total, want[0]), (d_gain, want[1])):
        assert torch.allclose(got, right, rtol=1e-4, atol=1e-4)


@needs_interpreter
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu"])
@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 3000)])
def test_gated(shape: tuple[int, ...], activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swiglu, "on_kernel", lambda tensor: True)
    gate, up = ((4 * rng.normal(shape, 0, name)).requires_grad_() for name in ("gate", "up"))
    wide = [x.detach().double().requires_grad_() for x in (gate, up)]
    d_a, want = rng.normal(shape, 0, "d"), gated_product(activation, *wide)
    got = swiglu.gated(gate, up, activation)
    assert "Gated" in type(got.grad_fn).__name__  # not torch's lines
    gradients = torch.autograd.grad(got, (gate, up), d_a), torch.autograd.grad(want, wide, d_a.double())
    for mine, right in ((got, want), *zip(*gradients, strict=True)):
        assert (mine - right).abs().max() <= 2e-6 * right.abs().max()


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.125])
@pytest.mark.parametrize(("tokens", "vocab"), [(5, 20), (3, 9000), (1, 16384)])
def test_cross_entropy(tokens: int, vocab: int, scale: float, dtype: torch.dtype) -> None:
    from training.kernels.triton import cross_entropy as cross_entropy_triton

    logits = (30 * rng.normal((tokens, vocab), 0, "logits")).to(dtype)
    logits[0, :7] = -float("inf")
    label = (rng.normal((tokens,), 0, "label").abs() * 1e6).long() % vocab
    label[0] = vocab - 1
    if tokens > 1:
        label[1] = -100
    want_grad, grad = logits.clone(), logits.clone()
    want = cross_entropy.nats_(want_grad, label, scale, True)
    got = cross_entropy_triton.nats_(grad, label, scale, True)
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)
    assert torch.allclose(grad.float(), want_grad.float(), rtol=2**-7 if dtype == torch.bfloat16 else 1e-4, atol=1e-6)
    assert torch.equal(cross_entropy_triton.nats_(logits, label, scale, False), got)


NARROW = [  # dtypes of parameter, gradient, moments
    (torch.float32, torch.bfloat16, "float32"),
    (torch.float32, torch.bfloat16, "bfloat16"),
    (torch.float32, torch.float32, "bfloat16"),
    (torch.bfloat16, torch.bfloat16, "float32"),
]


def trained(
    dtypes: tuple[torch.dtype, torch.dtype, str],
    kernel: bool,
    monkeypatch: pytest.MonkeyPatch,
    device: str = "cpu",
    share: float = 0.0,
) -> tuple[dict[str, torch.Tensor], int]:
    """Weights and states after some steps, one of them skipped, one of them clipped; and how often a kernel ran."""
    parameter, gradient, moments = dtypes
    calls: list[int] = []
    monkeypatch.setattr(updates, "on_kernel", lambda *tensors: kernel)
    plain = updates.adamw_
    monkeypatch.setattr(updates, "adamw_", lambda *a, **k: (calls.append(1), plain(*a, **k))[1])
    shapes = {"layers.0.ffn.experts.up": (6, 2, 33, 40), "layers.0.attn_norm.weight": (33,)}
    weights = {n: torch.nn.Parameter(rng.normal(shape, 0, n).to(parameter).to(device)) for n, shape in shapes.items()}
    optimizer = Optimizer(OptimConfig(clip=1.0, moments=moments, expert_lr=0.5), weights.items())
    optimizer.share, optimizer.slices, optimizer.copies = share, 2, optimizer.slots[:1]
    for step, scale in enumerate((1e-4, 1.0, 1e-3, 1e-3)):
        for n, p in weights.items():
            p.grad_dtype = None
            p.grad = (scale * rng.normal(tuple(p.shape), 1 + step, n)).to(gradient).to(device)
        optimizer.clip()
        optimizer.step(1e-2, torch.tensor(step == 2, device=device))
    monkeypatch.undo()
    states = {f"{key}.{n}": tensor for n, p in weights.items() for key, tensor in optimizer.state[p].items()}
    found = {n: t.detach().clone() for n, t in (weights | states).items()}
    return found, len(calls)


def assert_updates_agree(
    dtypes: tuple[torch.dtype, torch.dtype, str], monkeypatch: pytest.MonkeyPatch, device: str = "cpu"
) -> None:
    (got, ran), (want, never) = (trained(dtypes, kernel, monkeypatch, device) for kernel in (True, False))
    assert ran == 2 * 4 and never == 0 and got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, name
        # what is narrow may round to the other side of where it stood; a moment's rounding is one of a step of 1e-2
        rtol, atol = 2**-7 if tensor.dtype == torch.bfloat16 else 2e-5, 1e-4 if dtypes[2] == "bfloat16" else 1e-7
        torch.testing.assert_close(got[name], tensor, rtol=rtol, atol=atol, msg=name)
    assert int(got["step.layers.0.ffn.experts.up"]) == 3


@needs_interpreter
@pytest.mark.parametrize("dtypes", NARROW, ids=str)
def test_adamw_of_mixed_dtypes(dtypes: tuple[torch.dtype, torch.dtype, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert_updates_agree(dtypes, monkeypatch)


@needs_interpreter
def test_adamw_pulls_gradients_of_copies_as_it_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes = NARROW[2]  # gradients in float32, which the torch lines do not round on the way
    (got, _), (want, _), (alone, _) = (
        trained(dtypes, k, monkeypatch, share=s) for k, s in ((True, 0.4), (False, 0.4), (True, 0))
    )
    for name, tensor in want.items():
        torch.testing.assert_close(
            got[name], tensor, rtol=2**-7 if tensor.dtype == torch.bfloat16 else 2e-5, atol=1e-4, msg=name
        )
    experts = "layers.0.ffn.experts.up"
    assert (got[experts] - alone[experts]).abs().max() > 1e-3  # and it can fail


@needs_interpreter
@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16], ids=str)
def test_totals(first: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = rng.normal((3, 5000), 0, "a").to(first), rng.normal((3, 5000), 0, "b").bfloat16()
    want = updates.total(a.clone(), b, torch.float32)
    monkeypatch.setattr(updates, "on_kernel", lambda *tensors: True)
    given = a.clone()
    got = updates.total(given, b, torch.float32)
    assert got.dtype == torch.float32 and torch.equal(got, want)
    assert (got.data_ptr() == given.data_ptr()) == (first == torch.float32)


@needs_interpreter
def test_sorted_rows_have_their_tokens_and_weights() -> None:
    from training.kernels.triton import permute as permute_triton

    expert, weight = router.choose(scores(200, 24), 3), rng.normal((200, 3), 0, "weights")
    want, count = permute.places(expert, 24)
    for found in (permute_triton.sorted_rows(expert.contiguous(), weight, 24), permute.sorted_rows(expert, weight, 24)):
        back, ends, token, row_weight = found
        assert torch.equal(back, want) and torch.equal(ends, count.cumsum(0, dtype=torch.int32))
        assert ends.dtype == token.dtype == torch.int32
        assert torch.equal(token[back], torch.arange(600, dtype=torch.int32) // 3)
        assert torch.equal(row_weight[back], weight.flatten())


@pytest.fixture
def countable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops over a number that a kernel reads: numpy 2.4 no longer takes an array of one number for one, and the
    interpreter's numbers are such arrays."""
    from triton.runtime import interpreter

    own = interpreter._patch_lang_tensor

    def patch(tensor: type, scope: object) -> None:
        own(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())  # type: ignore[attr-defined]

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)


def test_which_experts_are_narrow() -> None:
    from training.experts._narrow import near

    measured = (65536, 32, 576, 384), (65536, 64, 576, 384), (65536, 32, 576, 768), (65536, 8, 576, 1536)
    assert all(near(*sizes) for sizes in measured)
    beyond = (
        (4096, 8, 576, 384),
        (65536, 65, 576, 384),
        (65536, 33, 576, 768),
        (65536, 9, 576, 1536),
        (65536, 8, 576, 1600),
    )
    odd = (65536, 8, 1088, 384), (65536, 8, 600, 384), (65536, 8, 576, 400)
    assert not any(near(*sizes) for sizes in (*beyond, *odd))


@needs_interpreter
def test_pairs_of_a_sum_taken_apart(countable: None) -> None:
    """Of an expert in one piece, of one in three, of one without rows: the same bits, all first ones of pairs first."""
    from training.kernels.triton import narrow as narrow_triton

    ends = torch.tensor([20, 20, 181], dtype=torch.int32)
    a, b = rng.normal((181, 96), 0, "a"), rng.normal((181, 64), 0, "b")
    pieces = narrow_triton.cut(ends, 181, 64, 1)
    given = a, b, None, ends, pieces, 64, False
    mixed, apart = (narrow_triton.sums(*given, paired=paired, BM=32, BN=64, BK=16) for paired in (False, True))
    assert torch.allclose(mixed[2], a[20:].T @ b[20:], atol=1e-4) and not mixed[1].any()
    assert torch.equal(apart, torch.cat([mixed[:, 0::2], mixed[:, 1::2]], 1)) and not torch.equal(apart, mixed)


@needs_interpreter
def test_rows_of_another_backward_pass_are_not_added(countable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks for the gradients of experts alone leaves rows that no router took; one who asks for a router's gradient
    later gets that alone."""
    from functools import partial

    from training.experts import ExpertWeights
    from training.experts import _narrow as narrow
    from training.kernels.triton import narrow as narrow_triton

    for name in ("up", "back", "products", "sums"):
        monkeypatch.setattr(narrow_triton, name, partial(getattr(narrow_triton, name), BM=32, BN=64, BK=16))
    x, gate = (rng.normal(size, 0, name).requires_grad_() for name, size in (("x", (20, 64)), ("gate", (16, 64))))
    up, down = (
        (rng.normal(size, 0, name) / 8).requires_grad_()
        for name, size in (("up", (16, 128, 64)), ("down", (16, 64, 64)))
    )
    rows = router.Rows()
    logits, _, expert, weight, same = router.route(x, gate, 4, True, 1.0, rows)
    y = narrow.ffn(same, weight, expert, ExpertWeights(up, down, True), "silu", None, rows)
    (alone,) = torch.autograd.grad(logits.square().sum(), x, retain_graph=True)
    (whole,) = torch.autograd.grad(y.sum() + logits.square().sum(), x, retain_graph=True)
    torch.autograd.grad(y.sum(), (up, down), retain_graph=True)
    (after,) = torch.autograd.grad(logits.square().sum(), x, retain_graph=True)
    (again,) = torch.autograd.grad(y.sum() + logits.square().sum(), x)
    assert torch.equal(after, alone) and torch.equal(again, whole) and not torch.allclose(alone, whole)


@needs_interpreter
# the last tile is half full, or full; values that a clamp cuts
@pytest.mark.parametrize(("width", "act"), [(96, "silu"), (128, "silu"), (128, "clamped_swiglu")])
@pytest.mark.parametrize(("favoured", "hidden"), [(False, 64), (True, 192)])  # tiles of one part and of two
def test_narrow_experts(
    favoured: bool, hidden: int, width: int, act: str, countable: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From tokens to tokens, and all gradients, against dispatch=local and the default backend in float64; an expert has no
    row, and a favoured one several pieces."""
    from functools import partial

    from training.dispatch.local import Local
    from training.experts import ExpertWeights, grouped
    from training.experts import _narrow as narrow
    from training.kernels.triton import narrow as narrow_triton

    monkeypatch.setattr(narrow_triton, "ROWS", 32)
    monkeypatch.setattr(narrow_triton, "LONG", 64)
    for name in ("up", "back", "products", "sums"):
        monkeypatch.setattr(narrow_triton, name, partial(getattr(narrow_triton, name), BM=32, BN=64, BK=16))
    tokens, k, experts = 70, 2, 5
    expert = router.choose(scores(tokens, experts), k)
    expert = torch.where(expert == 3, 4, expert)
    if favoured:
        expert[:, 0] = 2
    firsts = (expert.view(-1) == 0).nonzero().flatten()
    expert.view(-1)[firsts[: (len(firsts) - 1) % 16]] = 1  # one row is left of its whole chunks of 16
    assert (expert == 0).sum() % 16 == 1
    sizes = {
        "x": (tokens, hidden),
        "w": (tokens, k),
        "up": (experts, 2 * width, hidden),
        "down": (experts, hidden, width),
    }
    given = [
        (rng.normal(size, 0, name) / (8 if name in ("up", "down") else 1)).requires_grad_()
        for name, size in sizes.items()
    ]
    if act != "silu":
        given[0] = (4 * given[0].detach()).requires_grad_()
    wide = [tensor.detach().double().requires_grad_() for tensor in given]
    d_y = rng.normal((tokens, hidden), 0, "d_y")
    x, weight, up, down = given
    got = narrow.ffn(x, weight, expert, ExpertWeights(up, down, True), act)
    x, weight, up, down = wide
    sent = Local(experts).dispatch(x, weight, expert)
    came = grouped.experts(sent.x_RD, sent.weight_R, sent.count_E, ExpertWeights(up, down, True), act)
    want = Local(experts).combine(came, sent.handle)
    assert (want.grad_fn is not None) and (torch.bincount(expert.flatten(), minlength=experts) == 0).any()
    for found, truth in zip(
        (got, *torch.autograd.grad(got, given, d_y)),
        (want, *torch.autograd.grad(want, wide, d_y.double())),
        strict=True,
    ):
        assert found.shape == truth.shape and (found - truth).abs().max() < 2e-6 * truth.abs().max()


@needs_interpreter
@pytest.mark.parametrize(
    ("shared", "mode", "hooked", "experts"),
    [
        (0, "none", False, 16),
        (8, "none", False, 16),
        (0, "full", False, 16),
        (0, "none", True, 16),
        (0, "none", False, 8),
    ],
)
def test_layers_of_narrow_experts(
    shared: int, mode: str, hooked: bool, experts: int, countable: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoder whose experts add their rows to the stream and leave those of a gradient to the router, against plain
    layers in float64; a shared expert, or a hook, sees what is added without the stream."""
    from functools import partial

    from tests.parallel import tiny
    from training.checkpoint.layout import initialise
    from training.experts import _narrow as narrow
    from training.kernels.triton import narrow as narrow_triton
    from training.kernels.triton import permute as permute_triton
    from training.kernels.triton import router as router_triton
    from training.model.decoder import Decoder
    from training.model.recompute import recompute
    from upcycle.arch.spec import MoESpec

    monkeypatch.setattr(narrow_triton, "ROWS", 32)
    for name in ("up", "back", "products", "sums"):
        monkeypatch.setattr(narrow_triton, name, partial(getattr(narrow_triton, name), BM=32, BN=64, BK=16))
    monkeypatch.setattr(narrow, "fits", lambda x, *_: x.dtype == torch.float32)
    monkeypatch.setattr(router, "fused", lambda x, *_: x.dtype == torch.float32)
    monkeypatch.setattr(permute, "kernels_run", lambda x: x.dtype == torch.float32)
    joined, left, on_the_way = [], [], []
    monkeypatch.setattr(router, "Rows", lambda own=router.Rows: (on_the_way.append(own()), on_the_way[-1])[1])
    gather, gathered = permute_triton.gather, router_triton.gathered
    monkeypatch.setattr(
        permute_triton,
        "gather",
        lambda *given: (joined.append(len(given) > 3 and given[3] is not None), gather(*given))[1],
    )
    monkeypatch.setattr(
        router_triton, "gathered", lambda *given: (left.append(given[5] is not None), gathered(*given))[1]
    )
    spec = MoESpec(tiny.dense(hidden=64), (0, 1), (64,) * experts, 4, experts // 4, 4, shared, choice="each-slice")
    batch, seen, slopes, losses = tiny.batch(2, 9, documents=False), [], [], []
    for dtype in (torch.float64, torch.float32):
        net = initialise(Decoder(spec, experts="grouped", compute=dtype).to(dtype), seed=5)
        recompute(net, mode)
        if hooked:
            net.layers["0"].ffn.register_forward_hook(lambda _, given, out: seen.append((len(given), out.detach())))
        losses.append(net.loss(batch.tokens, batch.labels))
        slopes.append(
            dict(
                zip(dict(net.named_parameters()), torch.autograd.grad(losses[-1], list(net.parameters())), strict=True)
            )
        )
    # of a router's gradient 16 bits of each factor are taken
    assert abs(losses[1] - losses[0]) < 1e-6 * losses[0] and tiny.worst(slopes[1], slopes[0]) < 1e-4
    assert len(on_the_way) >= 2 and not any(rows.given for rows in on_the_way), "rows are held no longer than needed"
    assert joined.count(True) == (0 if shared else 1 if hooked else 2) and left == (
        [] if experts < 16 else [bool(shared)] * 2
    )
    assert not hooked or (
        seen[0][0] == seen[1][0] == 1 and (seen[0][1] - seen[1][1]).abs().max() < 1e-5 * seen[0][1].abs().max()
    )


@needs_interpreter
@pytest.mark.parametrize(("tokens", "experts", "normalize"), [(70, 32, True), (33, 16, False)])
def test_route(tokens: int, experts: int, normalize: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from training.kernels.triton import router as router_triton
    from upcycle.planning.routers import chosen

    monkeypatch.setattr(router_triton, "ROUTED", 32)
    x, weight = rng.normal((tokens, 128), 0, "x"), rng.normal((experts, 128), 0, "w") * 0.3
    weight[4:8] = weight[:4]  # copies tie
    logits, score, expert, chosen_weight, parts = router_triton.route(x, weight, 4, normalize, 2.0)
    wide = x.double() @ weight.double().T
    wide.requires_grad_()
    softmax = wide.softmax(-1)
    taken = softmax.gather(1, expert)
    want = 2 * (taken / taken.sum(1, keepdim=True) if normalize else taken)
    assert (logits - wide).abs().max() < 1e-5 and (score - softmax).abs().max() < 2e-6
    assert torch.equal(logits[:, :4], logits[:, 4:8]) and torch.equal(expert, chosen(logits, 4, 4))
    assert (chosen_weight - want).abs().max() < 4e-6
    first, second = router.split(weight, 2)
    assert torch.equal(parts, torch.cat([first, first, second]).float())
    d_weight, slope, d_logits = (
        rng.normal((tokens, 4), 1, "w"),
        rng.normal((1, experts), 1, "s"),
        rng.normal(logits.shape, 1, "l"),
    )
    for d_score, d_more in (
        (None, None),
        (slope.expand_as(logits), None),
        (rng.normal(logits.shape, 2, "s"), d_logits),
    ):
        given = [
            (out, d.double()) for out, d in ((want, d_weight), (softmax, d_score), (wide, d_more)) if d is not None
        ]
        (truth,) = torch.autograd.grad([out for out, _ in given], wide, [d for _, d in given], retain_graph=True)
        d = router_triton.route_backward(score, expert, d_weight, d_score, d_more, torch.float32, normalize, 2.0)
        third, top, middle, again = d.double().split(experts, 1)
        assert (top + middle + third - truth).abs().max() < 2e-6 * truth.abs().max() and torch.equal(top, again)
    x[0] = float("nan")
    assert router_triton.route(x, weight, 4, normalize, 2.0)[2][0].tolist() == [0, 1, 2, 3]  # such a step is skipped


@needs_interpreter
@pytest.mark.parametrize("read", [True, False])
def test_routed_tokens_have_one_gradient(read: bool) -> None:
    """What reads tokens after the router, and the router itself, against float64; and the router alone."""
    x, weight = rng.normal((40, 64), 0, "x"), rng.normal((16, 64), 0, "w") * 0.3
    d_weight, d_x = rng.normal((40, 4), 1, "w"), rng.normal((40, 64), 1, "x")
    given, wide = [[t.to(dtype).requires_grad_() for t in (x, weight)] for dtype in (torch.float32, torch.float64)]
    *_, expert, chosen_weight, tokens = router.route(*given, 4, True, 2.0)
    taken = (wide[0] @ wide[1].T).softmax(-1).gather(1, expert)
    want = 2 * taken / taken.sum(1, keepdim=True)
    assert torch.equal(tokens, x)
    found = torch.autograd.grad(
        (chosen_weight, tokens * 1) if read else chosen_weight, given, (d_weight, d_x) if read else d_weight
    )
    outputs, slopes = (want, wide[0] * 1), (d_weight.double(), d_x.double())
    truth = torch.autograd.grad(outputs if read else want, wide, slopes if read else slopes[0])
    for ours, theirs in zip(found, truth, strict=True):
        assert (ours - theirs).abs().max() < 2e-4 * theirs.abs().max()


@needs_interpreter
@pytest.mark.parametrize(("tokens", "experts", "k", "slices"), [(70, 32, 4, 4), (300, 24, 6, 4), (9, 8, 2, 1)])
def test_figures_of_a_router(tokens: int, experts: int, k: int, slices: int) -> None:
    from training.kernels.triton import router as router_triton
    from training.optim.balance import z_loss
    from training.optim.loads import coherence, token_entropy

    logits = rng.normal((tokens, experts), 0, "logits") * 3
    expert = router.choose(rng.normal((tokens, experts), 0, "choice"), k)
    expert[:5] = torch.arange(k)
    probability = logits.double().softmax(-1)
    entropy = token_entropy(probability) * math.log(experts)
    want = torch.cat([probability.mean(0), torch.stack([z_loss(logits.double()), entropy]), coherence(expert, slices)])
    found = router_triton.figures(logits, expert, slices).sum(0, dtype=torch.float64) / tokens
    assert (found - want).abs().max() < 1e-5
