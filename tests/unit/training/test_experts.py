"""Expert backends against the loop that specifies them, and the fused activation's kernels against torch.

The Triton kernels run here in Triton's interpreter, in a process of their own (it is chosen by the environment, before
triton is imported): `TRITON_INTERPRET=1 python tests/unit/training/test_experts.py`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from training import kernels
from training.dispatch.local import Local
from training.experts import (
    ExpertWeights,
    LowRank,
    capabilities,
    common,
    grouped,
    grouped_gemm,
    quack,
    reference,
    transformer_engine,
)
from training.kernels import permute, swiglu
from upcycle import plugin
from upcycle.arch.ffn import ACTIVATIONS, CLAMPED
from upcycle.planning.rng import generator

HERE = [name for name in plugin.names("training.experts") if not plugin.load("training.experts", name).available()]
EDGES = [(0, 0, 0), (1, 0, 0), (0, 0, 1), (0, 7, 0), (3, 0, 4), (2, 2, 2)]
Case = tuple[Tensor, Tensor, Tensor, ExpertWeights]
Experts = Callable[[Tensor, Tensor, Tensor, ExpertWeights, str], Tensor]


def case(
    counts: tuple[int, ...], tail: int = 0, *, hidden: int = 8, width: int = 16, gated: bool = True, bias: bool = False,
    dtype: torch.dtype = torch.float64, device: str = "cpu",
) -> Case:  # fmt: skip
    """Random rows and weights; the rows behind the last expert's are NaN, so that reading one shows."""
    rows, e, up = sum(counts), len(counts), width * (2 if gated else 1)

    def normal(*shape: int, key: str) -> Tensor:
        return torch.randn(shape, generator=generator(0, key), dtype=torch.float64).to(device, dtype).requires_grad_()

    x, weight = normal(rows + tail, hidden, key="x"), normal(rows + tail, key="weight")
    with torch.no_grad():
        x[rows:], weight[rows:] = torch.nan, torch.nan
    biases = (normal(e, up, key="up bias"), normal(e, hidden, key="down bias")) if bias else (None, None)
    w = ExpertWeights(normal(e, up, hidden, key="up"), normal(e, hidden, width, key="down"), gated, *biases)
    return x, weight, torch.tensor(counts, dtype=torch.int32, device=device), w


def tensors(x: Tensor, weight: Tensor, w: ExpertWeights) -> dict[str, Tensor]:
    named = {"x": x, "weight": weight} | {f.name: getattr(w, f.name) for f in fields(w)}
    return {name: t for name, t in named.items() if isinstance(t, Tensor)}


def run(experts: Experts, case: Case, activation: str) -> dict[str, Tensor]:
    """The output and all gradients, for one random direction of the output; of rows that no expert has, nothing."""
    x, weight, count, w = case
    y = experts(x, weight, count, w, activation)
    inputs = tensors(x, weight, w)
    direction = torch.randn(y.shape, generator=generator(0, "direction"), dtype=torch.float64).to(y)
    rows = int(count.sum())
    direction[rows:] = torch.nan  # what a buffer holds where nobody wrote
    grads = torch.autograd.grad(y, list(inputs.values()), direction)
    found = {"y": y.detach()} | {f"d_{name}": g for name, g in zip(inputs, grads, strict=True)}
    return found | {name: found[name][:rows] for name in ("y", "d_x")}


def worst(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The largest error of any output or gradient, relative to that tensor's largest element. NaN counts as infinite."""
    errors = [0.0]
    for name, w in want.items():
        assert got[name].shape == w.shape and got[name].dtype == w.dtype, name
        if w.numel():
            error = (got[name].double() - w.double()).abs().max() / w.double().abs().max().clamp(min=1.0)
            errors.append(float(error.nan_to_num(nan=torch.inf)))
    return max(errors)


def specification(case: Case, activation: str) -> dict[str, Tensor]:
    want, rows = run(reference.experts, case, activation), int(case[2].sum())
    assert not want["d_weight"][rows:].any()
    return want


# ---- every backend that runs here


counts = st.one_of(st.sampled_from(EDGES), st.lists(st.integers(0, 6), min_size=1, max_size=5).map(tuple))


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=str)
@settings(max_examples=40, deadline=None)
@given(
    counts=counts,
    tail=st.integers(0, 3),
    gated=st.booleans(),
    bias=st.booleans(),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    sizes=st.sampled_from([(8, 16), (4, 4), (5, 3)]),  # the last is one that grouped_mm refuses
)
def test_equals_the_reference(
    name: str, dtype: torch.dtype, close: float, counts: tuple[int, ...], tail: int, gated: bool, bias: bool,
    activation: str, sizes: tuple[int, int],
) -> None:  # fmt: skip
    made = case(counts, tail, hidden=sizes[0], width=sizes[1], gated=gated, bias=bias, dtype=dtype)
    backend = plugin.load("training.experts", name).experts
    assert worst(run(backend, made, activation), specification(made, activation)) < close


def test_the_reference_is_the_formula() -> None:
    """Row by row, in the words of the contract, so that the specification has something to answer to as well."""
    x, weight, count, w = case((2, 0, 3), 2, bias=True)
    assert w.up_bias_EF is not None and w.down_bias_ED is not None
    y = reference.experts(x, weight, count, w, "silu")
    for row, e in enumerate([0, 0, 2, 2, 2]):
        gate, up = (w.up_EFD[e] @ x[row] + w.up_bias_EF[e]).chunk(2)
        want = w.down_EDF[e] @ (gate * gate.sigmoid() * up * weight[row]) + weight[row] * w.down_bias_ED[e]
        torch.testing.assert_close(y[row], want, rtol=1e-10, atol=1e-10)
    assert torch.equal(y[5:], torch.zeros_like(y[5:]))


def with_adapters(made: Case, dtype: torch.dtype) -> Case:
    x, weight, count, w = made
    (e, up, hidden), width, rank = w.up_EFD.shape, w.down_EDF.shape[2], 2

    def normal(*shape: int, key: str) -> Tensor:
        return torch.randn(shape, generator=generator(0, key), dtype=torch.float64).to(dtype)

    low = LowRank(
        normal(e, hidden, rank, key="a"), normal(e, up, rank, key="b"),
        normal(e, width, rank, key="c"), normal(e, hidden, rank, key="d"), 0.5,
    )  # fmt: skip
    return x, weight, count, replace(w, low=low)


@pytest.mark.parametrize("name", HERE)
def test_adapters_are_computed_where_a_backend_says_so(name: str) -> None:
    if not capabilities(name).adapters:
        pytest.skip("it says that it has none")
    made = with_adapters(case((2, 0, 3), 1), torch.float64)
    assert worst(specification(made, "silu"), specification((*made[:3], replace(made[3], low=None)), "silu")) > 1e-2
    assert worst(run(plugin.load("training.experts", name).experts, made, "silu"), specification(made, "silu")) < 1e-10


def waits(experts: Experts) -> bool:
    """Whether forward or backward reads a number from memory, which on the meta device there is not."""
    try:
        x, weight, count, w = case((2, 0, 3), 1, dtype=torch.bfloat16, device="meta")
        experts(x, weight, count, w, "silu").sum().backward()
    except (NotImplementedError, RuntimeError) as error:
        assert "meta" in str(error), error
        return True
    return False


@pytest.mark.parametrize("name", HERE)
def test_a_backend_waits_for_the_device_unless_it_says_that_it_does_not(name: str) -> None:
    assert waits(plugin.load("training.experts", name).experts) == (not capabilities(name).waitless)


@pytest.mark.parametrize("name", HERE)
def test_an_expert_without_rows_learns_nothing(name: str) -> None:
    out = run(plugin.load("training.experts", name).experts, case((3, 0, 2), 1, bias=True), "silu")
    for tensor in ("d_up_EFD", "d_down_EDF", "d_up_bias_EF", "d_down_bias_ED"):
        assert not out[tensor][1].any() and out[tensor][0].any() and out[tensor][2].any()


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu2", "gelu"])
def test_gradcheck(activation: str, gated: bool, bias: bool) -> None:
    x, weight, count, w = case((2, 0, 3), 0, hidden=3, width=2, gated=gated, bias=bias)
    named = tensors(x, weight, w)

    def function(*given: Tensor) -> Tensor:
        now = dict(zip(named, given, strict=True))
        weights = replace(w, **{name: t for name, t in now.items() if name not in ("x", "weight")})
        return grouped.experts(now["x"], now["weight"], count, weights, activation)

    assert torch.autograd.gradcheck(function, tuple(named.values()))


def test_bfloat16_is_as_close_as_the_reference_in_bfloat16() -> None:
    made = case((5, 0, 11, 1), 3, dtype=torch.bfloat16)
    # weights in float32 beside rows in bfloat16: what a router gives
    made = (made[0], made[1].detach().float().requires_grad_(), *made[2:])
    wide = tuple(t.detach().double().requires_grad_() for t in tensors(*made[:2], made[3]).values())
    exact = specification((wide[0], wide[1], made[2], replace(made[3], up_EFD=wide[2], down_EDF=wide[3])), "silu")

    def error(got: dict[str, Tensor]) -> float:
        return worst({k: v.double().nan_to_num() for k, v in got.items()}, exact)

    ours, plain = error(run(grouped.experts, made, "silu")), error(run(reference.experts, made, "silu"))
    assert 0 < ours < 1.5 * plain < 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_grouped_experts_compile_in_any_dtype(dtype: torch.dtype) -> None:
    torch.compiler.reset()
    made = case((5, 0, 11, 1), dtype=dtype)

    def compiled(x: Tensor, weight: Tensor, count: Tensor, w: ExpertWeights, activation: str) -> Tensor:
        return torch.compile(grouped.experts, backend="aot_eager")(x, weight, count, w, activation)

    assert worst(run(compiled, made, "silu"), run(grouped.experts, made, "silu")) == 0


def test_frozen_weights_get_no_gradient() -> None:
    x, weight, count, w = case((2, 3))
    w.up_EFD.requires_grad_(False)
    x.requires_grad_(False)
    grouped.experts(x, weight, count, w, "silu").sum().backward()
    assert w.up_EFD.grad is None and x.grad is None
    assert w.down_EDF.grad is not None and weight.grad is not None


def test_backward_may_be_run_twice() -> None:
    """It writes over buffers, which must not be the saved ones or the caller's."""
    x, weight, count, w = case((4, 2))
    y = grouped.experts(x, weight, count, w, "silu")
    d_y = torch.ones_like(y)
    first = torch.autograd.grad(y, (x, weight), d_y, retain_graph=True)
    second = torch.autograd.grad(y, (x, weight), d_y)
    assert (
        torch.equal(first[0], second[0]) and torch.equal(first[1], second[1]) and torch.equal(d_y, torch.ones_like(y))
    )


# ---- twins: what a wrong backend would do, which the comparison must see


def rows_of_the_wrong_expert(x: Tensor, weight: Tensor, count: Tensor, w: ExpertWeights, activation: str) -> Tensor:
    return grouped.experts(x, weight, count.roll(1), w, activation)


def bias_without_weight(x: Tensor, weight: Tensor, count: Tensor, w: ExpertWeights, activation: str) -> Tensor:
    assert w.down_bias_ED is not None
    y = grouped.experts(x, weight, count, replace(w, down_bias_ED=None), activation)
    return y + grouped.of_rows(w.down_bias_ED, count.cumsum(0), len(x))


def weight_before_the_activation(x: Tensor, weight: Tensor, count: Tensor, w: ExpertWeights, activation: str) -> Tensor:
    return grouped.experts(x * weight[:, None], torch.ones_like(weight) + 0 * weight, count, w, activation)


def gate_and_up_swapped(x: Tensor, weight: Tensor, count: Tensor, w: ExpertWeights, activation: str) -> Tensor:
    half = w.up_EFD.shape[1] // 2
    return grouped.experts(x, weight, count, replace(w, up_EFD=w.up_EFD.roll(half, 1)), activation)


def no_gradient_for_the_weight(x: Tensor, weight: Tensor, count: Tensor, w: ExpertWeights, activation: str) -> Tensor:
    return grouped.experts(x, weight.detach() + 0 * weight, count, w, activation)


WRONG = [
    rows_of_the_wrong_expert,
    bias_without_weight,
    weight_before_the_activation,
    gate_and_up_swapped,
    no_gradient_for_the_weight,
]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_backend_is_seen(wrong: Experts) -> None:
    made = case((2, 0, 3), bias=True)
    right = specification(made, "silu")
    assert worst(run(grouped.experts, made, "silu"), right) < 1e-10
    assert worst(run(wrong, made, "silu"), right) > 1e-2


def test_a_row_left_unwritten_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    made = case((2, 3), 4, dtype=torch.float32)
    right = specification(made, "silu")
    clean = grouped.products  # leaves in the rows of no expert what the memory held, which might be zeros
    monkeypatch.setattr(grouped, "products", lambda a, b, ends: stained(clean(a, b, ends), b, int(ends[-1])))
    assert worst(run(grouped.experts, made, "silu"), right) < 1e-5
    monkeypatch.setattr(grouped, "products", lambda a, b, ends: stained(clean(a, b, ends), b, int(ends[-1]) - 1))
    assert worst(run(grouped.experts, made, "silu"), right) == torch.inf


def stained(out: Tensor, b: Tensor, rows: int) -> Tensor:
    if b.dim() == 3:
        out[rows:] = torch.nan
    return out


# ---- refusals


def test_what_cannot_run_is_refused_in_one_sentence() -> None:
    for name in plugin.names("training.experts"):
        why = plugin.load("training.experts", name).available()
        assert why == "" or (
            why.startswith(f"expert_backend={name} needs ")
            and "use grouped" in why.partition("; ")[2]
            and "\n" not in why
        )
    absent = common.missing("x", "no_such_package_of_ours.ops")
    assert absent == "expert_backend=x needs the no_such_package_of_ours package, which is not installed; use grouped"


def test_a_package_that_does_not_import_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_one.py").write_text("raise OSError('libcudart.so.12: cannot open\\nsecond line')")
    (tmp_path / "broken_two.py").write_text("import no_such_package_of_ours")
    (tmp_path / "broken_three.py").write_text("raise TypeError('no semantic key')")  # as QuACK 0.6 does
    assert "does not import (libcudart.so.12: cannot open); use" in common.missing("x", "broken_one")
    assert "does not import (no semantic key); use" in common.missing("x", "broken_three")
    assert "needs the package no_such_package_of_ours, which is not installed" in common.missing("x", "broken_two")


@pytest.mark.parametrize("backend", [grouped_gemm, transformer_engine])
def test_packages_refuse_what_they_cannot_compute(backend: types.ModuleType) -> None:
    with pytest.raises(ValueError, match="computes in bfloat16 on CUDA, and got float64 on cpu; use grouped"):
        backend.experts(*case((2, 1)), "silu")


def test_counts_beyond_the_rows_are_a_bug() -> None:
    x, weight, _, w = case((2, 1))
    with pytest.raises(AssertionError, match="more rows than there are"):
        grouped.experts(x, weight, torch.tensor([2, 2], dtype=torch.int32), w, "silu")


# ---- the packages' files, against stand-ins that keep the packages' documented contracts


def gmm_stand_in(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool = False) -> Tensor:
    assert batch_sizes.device.type == "cpu" and batch_sizes.dtype == torch.int64 and batch_sizes.any()
    assert a.is_contiguous() and b.is_contiguous() and int(batch_sizes.sum()) == len(a)
    parts = a.split(batch_sizes.tolist())
    return torch.cat([part @ (m.t() if trans_b else m) for part, m in zip(parts, b, strict=True)])


class GroupedLinearStandIn(nn.Module):
    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, bias: bool, params_dtype: torch.dtype, device: str
    ) -> None:
        super().__init__()
        assert not bias and device == "meta"
        self.num_gemms = num_gemms
        for i in range(num_gemms):
            weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=params_dtype))
            self.register_parameter(f"weight{i}", weight)

    def forward(self, inp: Tensor, m_splits: list[int]) -> Tensor:
        weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
        return torch.cat([x @ w.t() for x, w in zip(inp.split(m_splits), weights, strict=True)])


@pytest.mark.parametrize("counts", EDGES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("backend", [grouped_gemm, transformer_engine])
def test_packages_files_around_stand_ins(
    backend: types.ModuleType, gated: bool, counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    ops, te = types.ModuleType("grouped_gemm.ops"), types.ModuleType("transformer_engine.pytorch")
    ops.gmm, te.GroupedLinear = gmm_stand_in, GroupedLinearStandIn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "grouped_gemm.ops", ops)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", te)
    monkeypatch.setattr(backend, "only_bfloat16", lambda *_: None)
    transformer_engine.template.cache_clear()
    try:
        made = case(counts, 2, gated=gated)
        assert worst(run(backend.experts, made, "silu"), specification(made, "silu")) < 1e-10
    finally:
        transformer_engine.template.cache_clear()


# ---- quack, around stand-ins of its three products


def each(a: Tensor, b: Tensor, begins: Tensor, index: Tensor | None) -> Tensor:
    """Rows of a, or those that `index` names, each with the matrix (K, N) of its expert; NaN in rows of none."""
    assert begins.dtype == torch.int32 and a.stride(1) == 1 and (index is None or index.dtype == torch.int32)
    a = a if index is None else a[index.long()]
    out = a.new_full((len(a), b.shape[2]), torch.nan)
    for e, (start, end) in enumerate(itertools.pairwise(begins.tolist())):
        out[start:end] = a[start:end] @ b[e]
    return out


def mixed(two: Tensor, dim: int) -> Tensor:
    """[first half | second half] of a dimension -> in turn."""
    first, second = two.chunk(2, dim)
    return torch.stack([first, second], dim + 1).flatten(dim, dim + 1)


def quack_stand_in() -> types.ModuleType:
    """The package's contract: it gathers rows for one tile along columns alone; where `concat_layout` names an operand, its gates all come before its ups; h and its
    gradient always have them in turn."""

    def gathers(config: types.SimpleNamespace, index: Tensor | None) -> bool:
        return index is None or config.cluster_n == 1

    def gated(
        a: Tensor, b: Tensor, *, preact_out: Tensor, postact_out: Tensor, activation: str, cu_seqlens_m: Tensor,
        A_idx: Tensor | None, config: types.SimpleNamespace, concat_layout: tuple[str, ...],
    ) -> None:  # fmt: skip
        assert concat_layout == ("B",) and b.stride(1) == 1 and gathers(config, A_idx)
        h = preact_out.copy_(each(a, mixed(b, 2), cu_seqlens_m, A_idx))
        postact_out.copy_(THEIRS[activation](h[:, 0::2]) * h[:, 1::2])

    def dgated(
        a: Tensor, b: Tensor, h: Tensor, *, dx_out: Tensor, postact_out: Tensor, colvec_scale: Tensor, activation: str,
        colvec_reduce: bool, cu_seqlens_m: Tensor, A_idx: Tensor | None, dynamic_scheduler: bool, config: types.SimpleNamespace,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        assert colvec_reduce and not dynamic_scheduler and gathers(config, A_idx)
        assert colvec_scale.is_contiguous() and colvec_scale.dtype == torch.promote_types(a.dtype, torch.float32)
        d_a = each(a, b, cu_seqlens_m, A_idx)
        with torch.enable_grad():
            leaf = h.detach().clone().requires_grad_()
            plain = THEIRS[activation](leaf[:, 0::2]) * leaf[:, 1::2]
            (found,) = torch.autograd.grad(plain, leaf, d_a * colvec_scale[:, None])
        dx_out.copy_(found)
        postact_out.copy_(plain.detach() * colvec_scale[:, None])
        return dx_out, postact_out, (plain.detach() * d_a).sum(1)

    def gemm(
        a: Tensor, b: Tensor, out: Tensor, *, config: object, cu_seqlens_m: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None, concat_layout: tuple[str, ...] | None = None,
    ) -> None:  # fmt: skip
        assert config is not None
        if cu_seqlens_m is not None:
            out.copy_(each(a, mixed(b, 1) if concat_layout else b, cu_seqlens_m, None))
            return
        assert cu_seqlens_k is not None and a.stride(0) == 1 and b.stride(1) == 1
        for e, (start, end) in enumerate(itertools.pairwise(cu_seqlens_k.tolist())):
            found = a[:, start:end] @ b[start:end]
            out[e] = torch.cat([found[:, 0::2], found[:, 1::2]], 1) if concat_layout == ("out",) else found

    module = types.ModuleType("quack.gemm_interface")
    for name, function in (
        ("gemm_tuned", types.SimpleNamespace(fn=gemm)),
        ("gemm_gated", gated),
        ("gemm_dgated", dgated),
    ):
        setattr(module, name, function)
    return module


THEIRS = {"swiglu": ACTIVATIONS["silu"], "geglu": ACTIVATIONS["gelu_tanh"]}


@pytest.fixture
def with_quack(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    config = types.ModuleType("quack.gemm_config")
    config.GemmConfig = types.SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", quack_stand_in())
    monkeypatch.setitem(sys.modules, "quack.gemm_config", config)
    monkeypatch.setattr(quack, "narrow", lambda *_: "")
    quack.tile.cache_clear()
    yield
    quack.tile.cache_clear()


@pytest.mark.usefixtures("with_quack")
@pytest.mark.parametrize("activation", sorted(quack.GATED))
@pytest.mark.parametrize("counts", EDGES)
@pytest.mark.parametrize("tail", [0, 2])
def test_quack_around_stand_ins(
    tail: int, counts: tuple[int, ...], activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tensor, "new_empty", lambda self, *shape: self.new_full(shape, torch.nan))
    x, weight, count, w = case(counts, tail)
    apart = torch.stack([weight.detach()] * 2, 1)[:, 0].requires_grad_()  # weights that do not lie side by side
    made = x, apart, count, w
    assert worst(run(quack.experts, made, activation), specification(made, activation)) < 1e-10


@pytest.mark.usefixtures("with_quack")
@pytest.mark.parametrize(("long", "copied"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("chosen", [(3, 2), (1, 1), (4, 4)], ids=lambda c: f"{c[1]} of {c[0]}")
def test_quack_from_tokens(chosen: tuple[int, int], long: bool, copied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ffn` against dispatch, reference and combine, with a stream to add to, in float64; one expert is never chosen."""

    def sums(
        a: Tensor, b: Tensor, token: Tensor, ends: Tensor, pieces: object, size: int, turned: bool, paired: bool = False
    ) -> Tensor:
        assert not (turned and paired)
        parts = itertools.pairwise([0, *ends.tolist()])
        found = torch.stack([a[i:j].T @ b[token.long()][i:j] for i, j in parts])
        found = torch.cat([found[:, 0::2], found[:, 1::2]], 1) if paired else found
        return found.mT.contiguous() if turned else found

    ours = types.ModuleType("training.kernels.triton.narrow")
    ours.sums, ours.long_piece, ours.cut = sums, lambda rows: 1, lambda *_: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "training.kernels.triton.narrow", ours)
    monkeypatch.setattr(kernels, "narrow_triton", ours, raising=False)
    monkeypatch.setattr(quack, "of_long_sums", lambda *_: long)
    # the column of tiles: the third where tokens are copied first, the second, which is there for long sums too
    monkeypatch.setattr(quack, "LIMITS", (0, 0) if copied else (0, 4096) if long else (1024, 4096))
    experts, k = chosen
    made = generator(0, "tokens")
    x, onto, d_y = (torch.randn(7, 8, generator=made, dtype=torch.float64) for _ in range(3))
    expert_TK = torch.rand(7, experts, generator=made).topk(k).indices
    weight = torch.rand(7, k, generator=made, dtype=torch.float64)
    w = case((1,) * (experts + 1))[3]
    leaves = [t.detach().requires_grad_() for t in (x, weight, onto, w.up_EFD, w.down_EDF)]
    found = []
    for ours in (True, False):
        x, weight, onto = leaves[:3]
        given = replace(w, up_EFD=leaves[3], down_EDF=leaves[4])
        if ours:
            y = quack.ffn(x, weight, expert_TK, given, "silu", onto)
        else:
            local = Local(experts + 1)
            sent = local.dispatch(x, weight, expert_TK)
            rows = sent.x_RD, sent.weight_R, sent.count_E
            y = onto + local.combine(reference.experts(*rows, given, "silu"), sent.handle)
        found.append([y, *torch.autograd.grad(y, leaves, d_y)])
    for name, got, want in zip(("y", "x", "weight", "onto", "up", "down"), *found, strict=True):
        assert torch.allclose(got, want, rtol=1e-10, atol=1e-10), name
    names = ("x", "weight", "onto", "up", "down")
    for name, leaf, want in zip(names, leaves, found[0][1:], strict=True):  # where nothing else learns
        alone = [t if t is leaf else t.detach() for t in leaves]
        w = replace(w, up_EFD=alone[3], down_EDF=alone[4])
        y = quack.ffn(alone[0], alone[1], expert_TK, w, "silu", alone[2])
        assert torch.equal(torch.autograd.grad(y, leaf, d_y)[0], want), name

    class Left:
        def give(self, *rows: object) -> None:
            self.rows = rows

    left = Left()
    y = quack.ffn(leaves[0], leaves[1].detach(), expert_TK, w, "silu", None, left)  # type: ignore[arg-type]
    assert torch.autograd.grad(y, leaves[0], d_y, allow_unused=True)[0] is None
    assert torch.equal(permute.gather(*left.rows), found[0][1])  # type: ignore[arg-type]


@pytest.mark.usefixtures("with_quack")
def test_quack_refuses_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="computes gated silu and gelu_tanh, and got relu; use grouped"):
        quack.experts(*case((2, 1)), "relu")
    with pytest.raises(ValueError, match="and got experts without a gate, with silu"):
        quack.experts(*case((2, 1), gated=False), "silu")
    with pytest.raises(ValueError, match="multiples of 8, and got 4 and 12; use reference"):
        quack.experts(*case((2, 1), hidden=4, width=12), "silu")
    monkeypatch.setattr(quack, "missing", lambda *_: "")
    for version, allowed in (("0.6.2", True), ("0.6.5", True), ("0.7.0", False), ("0.3.11", False)):
        found = [types.SimpleNamespace(version=version)]
        monkeypatch.setattr(importlib.metadata, "distributions", lambda found=found, **_: found)
        why = quack.available()
        assert (why == "") == allowed and (allowed or f"before 0.7, and {version} is installed; use " in why)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert "needs a Hopper GPU" in quack.available()


# ---- the Triton kernels


def test_triton_kernels_in_the_interpreter() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    root = Path(__file__).parents[3]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kernels equal their references" in done.stdout


def compare_kernels(
    device: str, dtype: torch.dtype, close: float, shapes: list[tuple[tuple[int, ...], int, int]]
) -> int:
    """Each kernel against its reference over (counts, tail, width); how many comparisons were made."""
    from training.kernels.triton import swiglu as swiglu_triton

    made = 0
    for counts, tail, width in shapes:
        for gated in (True, False):
            for activation in (*ACTIVATIONS, CLAMPED) if gated else ACTIVATIONS:
                rows = sum(counts)

                def normal(*shape: int, key: str, rows: int = rows) -> Tensor:
                    values = torch.randn(shape, generator=generator(0, key))
                    values[rows:] = torch.nan
                    return values.to(device)

                reach = 4 if activation == CLAMPED else 1  # past its limit on both sides
                h = (reach * normal(rows + tail, width * (2 if gated else 1), key="h")).to(dtype)
                weight, d_a = normal(rows + tail, key="w"), normal(rows + tail, width, key="d").to(dtype)
                ends = torch.tensor(counts, dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
                options = (h, weight, ends, activation, gated)
                wants = [swiglu.forward_reference(*options), *swiglu.backward_reference(d_a, *options)]
                gots = [swiglu_triton.forward(*options), *swiglu_triton.backward(d_a.clone(), *options)]
                for got, want in zip(gots, wants, strict=True):
                    assert got.shape == want.shape and got.dtype == want.dtype
                    # a and d_h of the rows of no expert may hold anything
                    torch.testing.assert_close(got[:rows], want[:rows], rtol=close, atol=close)
                    made += 1
                assert not gots[2][rows:].any()
                y = normal(rows + tail, width, key="y").to(dtype)
                want = torch.where(swiglu.live(ends, len(y))[:, None], y, 0)
                assert torch.equal(swiglu_triton.zero_tail(y, ends), want)
    return made


if __name__ == "__main__":
    SHAPES = [((2, 0, 3), 0, 5), ((0, 7), 3, 24), ((0,), 4, 8), ((1,), 0, 300), ((7, 3), 2, 384)]
    done = compare_kernels("cpu", torch.float32, 1e-5, SHAPES)
    done += compare_kernels("cpu", torch.bfloat16, 2**-7, SHAPES[-1:])  # one rounding of bfloat16
    # the twin: a kernel that reads the other half of h must not pass
    right = swiglu.forward_reference
    swiglu.forward_reference = lambda h, *rest: right(h.roll(h.shape[1] // 2, 1), *rest)
    try:
        compare_kernels("cpu", torch.float32, 1e-5, SHAPES)
    except AssertionError:
        print(f"{done} comparisons: kernels equal their references, and a wrong one is seen")
    else:
        sys.exit("a wrong kernel was not seen")
