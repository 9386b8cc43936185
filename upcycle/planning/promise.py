"""The promise of a plan (`make_promise`): whether the MoE is exact, the reasons if not, and the expected error.

The expected error is computed: the plan's own method, router and scale run on a small Gaussian FFN in float64, whose
router logits have the same standard deviation as in the real model. No tensor of the source is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from upcycle.arch.abilities import relu2_as_gated
from upcycle.arch.ffn import FFN
from upcycle.arch.registry import AnyTarget
from upcycle.arch.spec import BYTES, MoESpec
from upcycle.config.schema import UpcycleConfig
from upcycle.converting import grow
from upcycle.io.checkpoint import Checkpoint
from upcycle.planning import rng, routers, scale
from upcycle.planning.methods import Method, Place

TOLERANCE = 1e-9
HIDDEN, TOKENS, PART = 64, 256, 16  # the small FFN: hidden size, tokens, neurons per part


@dataclass(frozen=True)
class Estimate:
    """The difference between the outputs of one MoE block and of the dense FFN, on the same tokens."""

    error: float  # root mean square of the difference, divided by that of the dense output
    gain: float  # size of the output along the dense output's direction; 1: the same size
    cosine: float


@dataclass(frozen=True)
class Promise:
    exact: bool
    reasons: tuple[str, ...]  # why the plan is not exact; for an exact plan, remarks
    estimate: Estimate | None  # None: the error depends on the donors
    # the bound of verify in float64: largest logit difference / largest logit, with the dense weights rounded as the
    # MoE's are
    tolerance: float


def compare(y: Tensor, want: Tensor) -> Estimate:
    dot = float((y * want).sum())
    square = max(float((want * want).sum()), 1e-300)
    return Estimate(
        error=math.sqrt(float((y - want).square().sum()) / square),
        gain=dot / square,
        cosine=dot / math.sqrt(square * max(float((y * y).sum()), 1e-300)),
    )


def moe_output(
    x_TD: Tensor, moe: MoESpec, rows_ND: Tensor, experts: list[FFN], activation: str, bias_N: Tensor | None = None
) -> Tensor:
    """Compute the reference MoE block without shared expert: the sum of weight * expert(x) over the chosen experts."""
    weight_TK, expert_TK = routers.weights(x_TD, rows_ND, moe, bias_N)
    y_TD = torch.zeros_like(x_TD)
    for index, ffn in enumerate(experts):
        token, slot = (expert_TK == index).nonzero(as_tuple=True)
        if token.numel():
            y_TD[token] += weight_TK[token, slot, None] * ffn(x_TD[token], activation)
    return y_TD * moe.output_scale


def estimate(
    moe: MoESpec,
    make: Callable[[FFN, MoESpec, int], FFN],
    kind: str | float,
    init: str,
    std: float,
    seed: int,
    gated: bool,
) -> Estimate:
    """Return the Estimate of a plan. `make(ffn, moe, index)` returns expert `index` of the small FFN."""
    parts = moe.experts if moe.disjoint else moe.granularity
    part = PART if parts < 64 else 4
    shared = math.ceil(part * parts * moe.cut_shared / max(moe.dense.ffn - moe.cut_shared, 1)) if moe.shared else 0
    small = replace(
        moe,
        dense=replace(moe.dense, hidden=HIDDEN, ffn=part * parts + shared, ffn_bias=False),
        widths=(part,) * moe.experts,
        shared=shared,
        padding=0,
        shared_padding=0,
    )

    def draw(name: str, *shape: int) -> Tensor:
        return rng.normal(shape, seed, "estimate", name).double() / (shape[1] ** 0.5 if name != "tokens" else 1)

    x, f = draw("tokens", TOKENS, HIDDEN), small.dense.ffn
    gate = {"gate": draw("gate", f, HIDDEN)} if gated else {}
    if gated and not moe.dense.gated:
        gate["gate"] = draw("up", f, HIDDEN)  # relu2_as_gated
    dense = FFN.of(**gate, up=draw("up", f, HIDDEN), down=draw("down", HIDDEN, f))
    activation = "relu" if gated and not moe.dense.gated else moe.dense.activation
    independent = moe.disjoint or init == "independent"
    rows = routers.normal(
        moe.experts if independent else moe.copies, HIDDEN, std * (moe.dense.hidden / HIDDEN) ** 0.5, seed, 0
    )
    rows = routers.repeated(rows.double(), moe.experts)
    mass = float(routers.weights(x, rows, small)[0].sum(-1).mean()) if kind == "calibrated" else None
    c = scale.gain(small, kind, mass)
    assert c is not None
    factors = scale.weight_factors(small, kind, c, gated=gated)
    routed = dense.neurons(slice(shared, None))
    experts = [make(routed, small, i).scaled(factors) for i in range(moe.experts)]
    experts = [FFN.of(**{m: e[m].double() for m in e.matrices}) for e in experts]
    y = moe_output(x, small, rows, experts, activation)
    if shared:
        y = y + dense.neurons(slice(shared))(x, activation)
    return compare(y, dense(x, activation))


def make_promise(
    config: UpcycleConfig, moe: MoESpec, method: Method, kind: str | float, chosen: AnyTarget, stored: Collection[str]
) -> Promise:
    """Return the Promise of a plan for the target `chosen`. `stored`: the dtypes of the source's tensors."""
    gated = moe.dense.gated or relu2_as_gated(moe, chosen.can)
    why_not = [*inexact_method(config, moe, method), *inexact_scale(moe, method, kind)]
    expected = None if method.needs.mixes else expect(config, moe, method, kind, gated)
    if why_not:
        return Promise(False, tuple(why_not), expected, TOLERANCE)
    assert expected is None or expected.error < 1e-9, f"a plan called exact has an error of {expected.error}"
    return Promise(True, tuple(remarks(moe, kind, gated, chosen, stored)), expected, TOLERANCE)


def inexact_method(config: UpcycleConfig, moe: MoESpec, method: Method) -> Iterator[str]:
    """Yield the reasons why experts and router do not add up to the dense FFN."""
    g = moe.granularity
    if method.needs.mixes:
        yield "the donors are mixed"
    elif not method.exact:
        yield f"method {method.name} changes the experts"
    if not moe.weights_sum_to_one:
        yield "the router's weights are not normalised over the chosen"
    elif method.exact and g > 1 and moe.top_k % g:
        yield f"top_k={moe.top_k} is not a multiple of granularity={g}, so no choice is whole copies"
    elif method.exact and g > 1 and config.router.init.name == "independent":
        yield "experts of one copy have router rows of their own (router.init.name=independent)"


def inexact_scale(moe: MoESpec, method: Method, kind: str | float) -> Iterator[str]:
    """Yield the reasons why the scale does not make the sum over experts equal to the dense output."""
    if not method.exact or not moe.weights_sum_to_one or kind == "calibrated":
        return
    c, d = scale.gain(moe, kind, None), moe.dense
    if kind == "published" and c != 1 and d.activation != "relu2":
        yield (
            "scale=published multiplies "
            f"{'gate, up and down by the cube' if d.gated else 'up and down by the square'} root of {c:g}, "
            f"under which {'SwiGLU' if d.gated else d.activation} is not homogeneous"
        )
    elif c != scale.whole(moe):
        yield f"scale is {c:g}, exact is {scale.whole(moe):g}"


def remarks(moe: MoESpec, kind: str | float, gated: bool, chosen: AnyTarget, stored: Collection[str]) -> Iterator[str]:
    """Yield remarks on an exact plan: rounding, and ties in a half-precision router."""
    rounded = rounding(moe, kind, gated, chosen, stored)
    if rounded:
        yield rounded
    if moe.dtype in ("bfloat16", "float16") and moe.granularity > 1 and not chosen.can.router_fp32:
        yield (
            f"computed in {moe.dtype} on a CPU, router logits tie and about 0.5 % of tokens a layer split a virtual "
            "group; CUDA's topk keeps groups whole, and so do targets that route in float32"
        )


def expect(config: UpcycleConfig, moe: MoESpec, method: Method, kind: str | float, gated: bool) -> Estimate:
    """Return the Estimate of a plan with this method."""

    def small_expert(ffn: FFN, small: MoESpec, index: int) -> FFN:
        if method.needs.order:  # the order is measured later; a random order stands in for it here
            ffn = ffn.neurons(rng.permutation(ffn.width, config.seed, "split", 0))
        place = Place(0, index, small.copies, small.granularity, small.widths, config.seed)
        expert = method.expert([ffn if moe.dense.gated else ffn.without_gate()], place)
        return expert if gated == moe.dense.gated else expert.with_gate_as_up()

    init = config.router.init
    return estimate(moe, small_expert, kind, init.name, init.std, config.seed, gated)


def rounding(moe: MoESpec, kind: str | float, gated: bool, chosen: AnyTarget, stored: Collection[str]) -> str:
    """Return a remark on the weights that are rounded when stored, with the size of the change; '' if none are."""
    for dtype in sorted(stored):
        if rounds(dtype, moe.dtype):
            return rounding_remark(f"{dtype} weights", dtype, moe.dtype)
    if BYTES[moe.dtype] >= 4:
        return ""
    c = scale.gain(moe, kind, None)
    if c is not None:
        factors = scale.weight_factors(moe, kind, c, gated=gated)
        odd = [name for name in moe.dense.ffn_matrices if math.frexp(factors[name])[0] != 0.5]  # not a power of two
        if odd:
            what = f"{', '.join(odd)} x {factors[odd[0]]:.3g}"
            return rounding_remark(what, moe.dtype, moe.dtype, factor=factors[odd[0]])
    adds_one = moe.dense.norm == "rms1p" and "rms1p" not in chosen.can.norms
    return rounding_remark("norm weights + 1", moe.dtype, moe.dtype, spread=0.1, add=1.0) if adds_one else ""


def rounding_remark(
    what: str, stored: str, dtype: str, *, factor: float = 1.0, spread: float = 1.0, add: float = 0.0
) -> str:
    """Return the remark that `what` is rounded, with the root mean square of the change relative to the weights.

    It is measured on normal numbers of standard deviation `spread`, stored in `stored`, times `factor`, plus `add`.
    """
    weights = (spread * rng.normal((1 << 14,), 0, "rounding")).to(getattr(torch, stored)).double() * factor + add
    change = weights.to(getattr(torch, dtype)).double() - weights
    size = math.sqrt(float(change.square().mean() / weights.square().mean()))
    return (
        f"exact except for the rounding of {what} to {dtype}, which changes these weights by about {100 * size:.2g} %"
    )


def rounds(stored: str, dtype: str) -> bool:
    """Return True if `dtype` cannot represent every number of the dtype `stored`."""
    return BYTES[dtype] < BYTES[stored] or {dtype, stored} == {"bfloat16", "float16"}


def grown_promise(
    method: Method, view: MoESpec, dtype: str, base: Checkpoint, observed: Mapping[str, Tensor]
) -> Promise:
    """Return the Promise of a plan that changes the number of experts of the MoE in `base`, described by `view`."""
    stored = sorted({entry.dtype for entry in base.entries.values()})
    rounded = next((d for d in stored if rounds(d, dtype)), "")
    if not method.exact:
        kept = len(next(iter(observed.values())))
        return Promise(False, (grow.cost(view, kept, observed),), None, TOLERANCE)
    reasons = (rounding_remark(f"{rounded} weights", rounded, dtype),) if rounded else ()
    return Promise(True, reasons, None, TOLERANCE)
