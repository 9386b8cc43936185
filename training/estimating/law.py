"""Does upcycling pay? The published law of its loss, which is shown only within the range that it was fitted for.

"Scaling laws for upcycling" (arXiv 2502.03009, Table 2), of a dense model of N parameters that learned from D1 tokens,
made to eight copies with top-2, that go on for D2:

    L = A * D1^-a1 * D2^(-a2 + a3 * ln D1) + B * N^-b + 0.165        upcycled
    L = A * D^-a + B * N^-b + 0.165                                  dense, and a MoE from scratch

In nats a token of its authors' text: differences between arms mean something elsewhere, the numbers do not. The three
curves were fitted apart. The dense model that goes on has no curve of its own there: it is read off the dense one at
D1 + D2 tokens. Virtual groups have none at all. Held to 36 small runs of ours (docs/scaling.md) it is 8 % too low as
it stands. A form of as many constants, fitted to those (`continued`), is at most 2 % off on 12 others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SOURCE = "arXiv 2502.03009"
FLOOR = 0.165
# (A, B, exponent of D or of D1, exponent of N)
DENSE, SCRATCH, UPCYCLED = (8.83, 12.3, 0.088, 0.116), (32.0, 7.05, 0.161, 0.080), (16.3, 8.53, 0.043, 0.112)
SECOND, TOGETHER = 0.085, 7.98e-4  # a2 and a3
# Where it may be read: small models, and no D1 as OLMoE's 2 T, where the fit never crosses from scratch
# and OLMoE saw it cross at 500 to 600 B. Below a billion tokens a power law says nothing: it begins at infinity; and
# FLOPs or GPU-hours of a small model are soon trillions of tokens, more than anybody fitted.
PARAMETERS, TOKENS, COPIES, TOP_K = (1e8, 1.1e9), (1e9, 3e11), 8, 2
# `continued`: the share of D2; the constants of 1, ln N, ln D, their product and (ln D)^2, N and D over those of MIDDLE
CONTINUED, MIDDLE = (0.96, 1.4787, -0.017066, -0.178439, -0.0264344, -0.0195051), (1.8e7, 1.5e7)
# of what runs: parameters, D1, D2; eight copies with top-2
RUNS = ((7.1e6, 4.3e7), (4.1e6, 1.7e7), (1.5e6, 1.3e7))
OVERTRAINED = 100  # tokens a parameter; 20 are Chinchilla's
DROP_NEEDS = 500e9


def dense(parameters: float, tokens: float) -> float:
    a, b, of_tokens, of_parameters = DENSE
    return a * math.pow(tokens, -of_tokens) + b * math.pow(parameters, -of_parameters) + FLOOR


def scratch(parameters: float, tokens: float) -> float:
    """A MoE of this dense model's shape, from random weights."""
    a, b, of_tokens, of_parameters = SCRATCH
    return a * math.pow(tokens, -of_tokens) + b * math.pow(parameters, -of_parameters) + FLOOR


def upcycled(parameters: float, first: float, more: float) -> float:
    a, b, of_first, of_parameters = UPCYCLED
    return (
        a * math.pow(first, -of_first) * math.pow(more, -second(first))
        + b * math.pow(parameters, -of_parameters)
        + FLOOR
    )


def continued(parameters: float, first: float, more: float) -> float:
    """Loss of small upcycled models on the text of our own runs, by another form: what is upcycled goes on along a
    dense curve, as if D1 had been longer by a share of D2; ln(L - floor) is quadratic in the logarithm of those tokens,
    and larger models fall faster."""
    share, *constants = CONTINUED
    size, tokens = math.log(parameters / MIDDLE[0]), math.log((first + share * more) / MIDDLE[1])
    terms = (1.0, size, tokens, size * tokens, tokens * tokens)
    return math.exp(sum(c * term for c, term in zip(constants, terms, strict=True))) + FLOOR


def second(first: float) -> float:
    """The exponent of the tokens that come after: it falls with the logarithm of those before."""
    return SECOND - TOGETHER * math.log(first)


def overtaken(parameters: float, first: float) -> float | None:
    """After how many tokens more a MoE from scratch, with those alone, is first as good as the upcycled one; None:
    never, as the fit has it (its curves cross twice or not at all: they were fitted apart)."""

    def behind(more: float) -> bool:
        return scratch(parameters, more) <= upcycled(parameters, first, more)

    grid = [10 ** (number / 20) for number in range(120, 301)]  # 1e6 to 1e15
    after = next((more for more in grid if behind(more)), None)
    if after is None:
        return None
    low, high = after / 10 ** (1 / 20), after
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if behind(middle) else (middle, high)
    return high


@dataclass(frozen=True)
class Case:
    """What somebody wants to do."""

    parameters: float  # of the dense model
    first: float  # tokens that it was trained on
    more: float  # tokens that the MoE will get
    copies: int
    top_k: int  # of whole FFNs
    granularity: int = 1
    choice: str = "any"
    method: str = "copy"
    cost: float = 1.0  # FLOPs a token of the MoE, of the dense model's


def outside(case: Case) -> list[str]:
    """Return the reasons why the law would have to be extrapolated for this case; none if it was fitted for it."""
    found = []
    few, many = TOKENS
    if case.parameters > PARAMETERS[1]:
        found.append(f"{short(case.parameters)} parameters, fitted up to about 1 B")
    if case.parameters < PARAMETERS[0]:
        found.append(f"{short(case.parameters)} parameters, fewer than it may be read for")
    if case.first > many:
        found.append(f"{short(case.first)} tokens before, and at 2 T it misses what was seen (arXiv 2409.02060)")
    found += [
        f"{short(tokens)} tokens {when}, too few for a power law"
        for tokens, when in ((case.first, "before"), (case.more, "more"))
        if tokens < few
    ]
    if case.more > many:
        found.append(f"{short(case.more)} tokens more, more than it may be read for")
    if case.granularity > 1 or case.method not in ("copy", "virtual_group"):
        found.append(f"granularity {case.granularity} by method {case.method}, fitted for copies of whole FFNs")
    elif (case.copies, case.top_k) != (COPIES, TOP_K):
        found.append(f"{case.copies} copies, top-{case.top_k}, fitted for {COPIES}, top-{TOP_K}")
    return found


def advice(case: Case) -> str:
    """Return a table of the law's losses where it was fitted, else the reasons why it is not shown; and warnings."""
    why, n, first, more = outside(case), case.parameters, case.first, case.more
    lines = [f"The published law of upcycling ({SOURCE}) is not shown, because it was not fitted for this case:"]
    lines += [f"  {reason}" for reason in why]
    if not why:
        arms = [
            ("dense, same tokens", dense(n, first + more), "at best: read off its one-stage curve at D1 + D2"),
            ("dense, same FLOPs", dense(n, first + more * case.cost), "the same, for as many FLOPs as the copies take"),
            (f"{case.copies} copies, top-{case.top_k}", upcycled(n, first, more), "upcycled"),
            ("MoE from scratch", scratch(n, more), "none of D1"),
        ]
        lines = [f"Expected loss after {short(more)} tokens more ({SOURCE}; differences count, not the numbers):"]
        lines += [f"  {name:22}{loss:7.3f}   {note}" for name, loss, note in arms]
    inside = all(low <= at <= high for (low, high), at in zip(RUNS, (n, first, more), strict=True))
    if inside and case.granularity == 1 and (case.copies, case.top_k) == (COPIES, TOP_K):
        lines.append(f"  {'of our own runs':22}{continued(n, first, more):7.3f}   upcycled, docs/scaling.md")
    lines.append("What our own runs gained, and at which sizes: upcycle recommend, and docs/science.md")
    return "\n".join([*lines, *(f"! {text}" for text in warnings(case))])


def warnings(case: Case) -> Sequence[str]:
    found = []
    crossing = overtaken(case.parameters, case.first)
    if crossing is None:
        found.append(
            "by the fit a MoE from scratch never overtakes this one; of OLMo 1B at 2 T it did after 500 to 600 B "
            "tokens (OLMoE, arXiv 2409.02060)"
        )
    elif case.more > crossing / 2:
        found.append(
            f"a MoE from scratch is as good after {short(crossing)} tokens, by the fit ({SOURCE}): "
            + ("train one" if case.more > crossing else "not far from here")
        )
    if case.first > OVERTRAINED * case.parameters:
        found.append(
            f"{case.first / case.parameters:,.0f} tokens a parameter: what more tokens bring falls with the logarithm "
            f"of those before (exponent {second(case.first):.4f} against {second(20 * case.parameters):.4f} at 20 a "
            "parameter; arXiv 2502.03009 and 2510.06548)"
        )
    if case.method == "drop" and case.more < DROP_NEEDS:
        found.append(
            "method drop won at 500 B tokens (arXiv 2502.19261), and redrawing half won nothing at 100 B on a 2 B "
            f"model (arXiv 2410.07524); here are {short(case.more)}"
        )
    if case.granularity > 1 and case.choice == "any":
        found.append(
            "a free top-k takes groups apart: on SmolLM2-135M that ended 0.30 nats behind dense (docs/science.md); "
            "write router.choice=each-slice"
        )
    return found


def short(number: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"
