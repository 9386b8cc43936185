"""On a GPU: the expert backends in bfloat16, the fused activation's kernels as compiled, and no waiting for the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.unit.training.test_experts import HERE, Case, Experts, case, compare_kernels, run, tensors, worst
from training.dispatch.local import Local
from training.experts import ExpertWeights, grouped, quack, reference
from training.kernels import swiglu
from upcycle import plugin

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
COUNTS = [(0, 0, 0), (0, 0, 1), (0, 300, 0), (40, 0, 77, 1), tuple(range(0, 256, 2))]


def on_gpu(counts: tuple[int, ...], tail: int, *, gated: bool = True, bias: bool = False) -> Case:
    """Rows and experts in bfloat16, routing weights in float32, as a router gives them. Outputs near 1."""
    x, weight, count, w = case(
        counts, tail, hidden=64, width=96, gated=gated, bias=bias, dtype=torch.bfloat16, device="cuda"
    )
    with torch.no_grad():
        w.up_EFD.mul_(64**-0.5)
        w.down_EDF.mul_(96**-0.5)
    return x, weight.detach().float().requires_grad_(), count, w


def in_float64(made: Case) -> Case:
    x, weight, count, w = made
    wide = {name: t.detach().double().requires_grad_() for name, t in tensors(x, weight, w).items()}
    return wide.pop("x"), wide.pop("weight"), count, replace(w, **wide)


def error(backend: str, made: Case, activation: str) -> float:
    """Against float64, on rows that carry something: the rest must be zeros already."""
    rows, got = int(made[2].sum()), run(plugin.load("training.experts", backend).experts, made, activation)
    for name in ("y", "d_x", "d_weight"):
        assert not got[name][rows:].any(), name
    return worst({name: t.double() for name, t in got.items()}, run(reference.experts, in_float64(made), activation))


@pytest.mark.parametrize("tail", [0, 37])
@pytest.mark.parametrize("counts", COUNTS, ids=lambda c: f"{len(c)} experts, {sum(c)} rows")
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("name", [name for name in HERE if name not in ("reference", "quack")])
def test_bfloat16_is_as_close_to_float64_as_the_loop(
    name: str, gated: bool, counts: tuple[int, ...], tail: int
) -> None:
    for activation, bias in [("silu", False), ("gelu_tanh", name == "grouped"), ("relu2", False)]:
        made = on_gpu(counts, tail, gated=gated, bias=bias)
        ours, loop = error(name, made, activation), error("reference", made, activation)
        assert ours <= 2 * loop + 1e-6, (activation, bias)
        assert ours < 0.05


with_quack = pytest.mark.skipif("quack" not in HERE, reason="needs quack-kernels and a Hopper GPU")


@with_quack
@pytest.mark.parametrize("tail", [0, 37])
def test_quack_is_as_close_to_float64_as_the_loop(tail: int) -> None:
    """The worst of all cases: a single row's gradient of its weight is one number, and the loop's may be right by
    chance (0.0042 where the rounding of h alone makes 0.0153)."""
    for activation in quack.GATED:
        made = [on_gpu(counts, tail) for counts in COUNTS]
        ours, loop = (max(error(name, each, activation) for each in made) for name in ("quack", "reference"))
        assert ours <= 2 * loop + 1e-6 and ours < 0.05, (activation, ours, loop)


@with_quack
@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("tokens", "hidden", "width", "experts", "k"),
    [
        (8192, 576, 384, 32, 4),
        (8192, 576, 768, 32, 2),
        (8192, 576, 1536, 8, 2),
        (1024, 2048, 768, 128, 8),
        (100, 1024, 64, 4, 1),
        (512, 4096, 1024, 8, 2),
    ],
)
def test_quack_from_tokens_is_as_close_to_float64_as_the_loop(
    tokens: int, hidden: int, width: int, experts: int, k: int, weights: str
) -> None:
    """Long sums of narrow experts, and sums by the package; the last expert is chosen by nobody."""
    torch.manual_seed(0)
    x, onto, d_y = (torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    up = torch.randn(experts, 2 * width, hidden, device="cuda").mul_(hidden**-0.5).to(torch.bfloat16)
    down = torch.randn(experts, hidden, width, device="cuda").mul_(width**-0.5).to(torch.bfloat16)
    score = torch.rand(tokens, experts, device="cuda")
    score[:, 0] += 0.5  # a favoured one
    score[:, -1] = -1.0
    weight, expert = score.topk(k)
    weight = weight.to(getattr(torch, weights))
    leaves = [t.detach().requires_grad_() for t in (x, weight, up, down, onto)]
    found = {}
    for dtype in (torch.bfloat16, torch.float64):
        local = Local(experts)
        x, weight, up, down, onto = (t.to(torch.promote_types(t.dtype, dtype)) for t in leaves)
        sent = local.dispatch(x, weight, expert)
        rows = sent.x_RD, sent.weight_R, sent.count_E, ExpertWeights(up, down, True)
        y = onto + local.combine(reference.experts(*rows, "silu"), sent.handle).to(onto.dtype)
        found[dtype] = [y, *torch.autograd.grad(y, leaves, d_y.to(y.dtype))]
    x, weight, up, down, onto = leaves
    assert quack.fits(x, up.view(experts, 2, width, hidden), down, "silu")
    y = quack.ffn(x, weight, expert, ExpertWeights(up, down, True), "silu", onto)
    again = quack.ffn(x, weight, expert, ExpertWeights(up, down, True), "silu", onto)
    assert torch.equal(y, again)
    got = [y, *torch.autograd.grad(y, leaves, d_y)]
    assert all(torch.equal(a, b) for a, b in zip(got[1:], torch.autograd.grad(again, leaves, d_y), strict=True))
    assert not got[3][-1].any() and not got[4][-1].any()
    for name, ours, loop, right in zip(("y", "x", "weight", "up", "down", "onto"), got, *found.values(), strict=True):
        far, of_loop = (float((t.double() - right.double()).norm() / right.double().norm()) for t in (ours, loop))
        assert far <= 1.2 * of_loop + 1e-6 and far < 0.02, (name, far, of_loop)


@with_quack
def test_quack_waits_for_nothing() -> None:
    x, weight, count, w = on_gpu((40, 0, 77, 1), 5)
    inputs, d_y = list(tensors(x, weight, w).values()), torch.randn_like(x)
    expert, tokens = torch.randint(4, (64, 2), device="cuda"), torch.randn_like(x[:64]).requires_grad_()

    def step() -> None:
        torch.autograd.grad(quack.experts(x, weight, count, w, "silu"), inputs, d_y)
        y = quack.ffn(tokens, torch.ones(64, 2, device="cuda"), expert, w, "silu")
        torch.autograd.grad(y, (tokens, w.up_EFD, w.down_EDF), d_y[:64])

    step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_wrong_expert_is_seen() -> None:
    x, weight, count, w = on_gpu((40, 0, 77, 1), 3)
    exact = run(reference.experts, in_float64((x, weight, count.roll(1), w)), "silu")
    got = run(grouped.experts, (x, weight, count, w), "silu")
    assert worst({name: t.double() for name, t in got.items()}, exact) > 0.2


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)], ids=str)
def test_kernels_equal_their_references(dtype: torch.dtype, close: float) -> None:
    shapes = [
        ((2, 0, 3), 0, 5),
        ((0, 7), 3, 24),
        ((0,), 4, 8),
        ((1,), 0, 300),
        ((900, 1100), 100, 768),
        ((33,), 9, 14336),
    ]
    # float32 sums 14,336 terms into d_weight in another order than torch
    assert compare_kernels("cuda", dtype, 10 * close if dtype == torch.float32 else close, shapes) > 0


def test_a_wrong_kernel_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = swiglu.forward_reference
    monkeypatch.setattr(swiglu, "forward_reference", lambda h, *rest: right(h.roll(1, 1), *rest))
    with pytest.raises(AssertionError):
        compare_kernels("cuda", torch.float32, 1e-4, [((5, 6), 0, 24)])


@pytest.mark.parametrize("bias", [False, True])
def test_nothing_waits_for_the_device(bias: bool) -> None:
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("torch's grouped_mm waits before Hopper")
    x, weight, count, w = on_gpu((40, 0, 77, 1), 5, bias=bias)
    inputs = list(tensors(x, weight, w).values())
    d_y = torch.randn_like(x)

    def step(experts: Experts = grouped.experts) -> None:
        torch.autograd.grad(experts(x, weight, count, w, "silu"), inputs, d_y)

    step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        with pytest.raises(RuntimeError, match="synchroniz"):  # the alarm works
            step(reference.experts)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_same_bits_every_time() -> None:
    made = on_gpu(tuple(range(0, 256, 2)), 5, bias=True)
    first = run(grouped.experts, made, "silu")
    for _ in range(5):
        again = run(grouped.experts, made, "silu")
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_gradcheck_in_float64() -> None:
    x, weight, count, w = case((2, 0, 3), hidden=4, width=3, bias=True, device="cuda")
    named = tensors(x, weight, w)

    def function(*given: torch.Tensor) -> torch.Tensor:
        now = dict(zip(named, given, strict=True))
        return grouped.experts(now.pop("x"), now.pop("weight"), count, replace(w, **now), "silu")

    assert torch.autograd.gradcheck(function, tuple(named.values()))


def test_unaligned_sizes_are_refused() -> None:
    made = case((2, 1), hidden=12, width=16, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(ValueError, match="multiples of 8 in bfloat16, and got 12 and 16; use reference"):
        grouped.experts(*made, "silu")
