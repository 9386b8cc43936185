"""Predict the loss of upcycled models by a published law, but only within the range that it was fitted for.

"Scaling laws for upcycling" (arXiv 2502.03009, Table 2) describes a dense model of N parameters that learned from D1
tokens, became eight copies with top-2, and then learned from D2 tokens:

    L = A * D1^-a1 * D2^(-a2 + a3 * ln D1) + B * N^-b + 0.165        upcycled
    L = A * D^-a + B * N^-b + 0.165                                  dense, and a MoE from scratch

L is in nats a token on its authors' text. On other text differences between arms carry over, and the numbers do not.
The three curves were fitted separately. The paper has no curve for a dense model that continues on D2: we read it off
the dense curve at D1 + D2 tokens. It has none for virtual groups either. Against 36 small runs of ours
(docs/scaling.md) the unchanged law is 8 % too low. A form with as many constants that we fitted to those runs
(`continued`) is at most 2 % off on 12 others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SOURCE = "arXiv 2502.03009"
FLOOR = 0.165
# (A, B, exponent of D or D1, exponent of N)
DENSE, SCRATCH, UPCYCLED = (8.83, 12.3, 0.088, 0.116), (32.0, 7.05, 0.161, 0.080), (16.3, 8.53, 0.043, 0.112)
SECOND, TOGETHER = 0.085, 7.98e-4  # a2 and a3
# The range of the law: small models, and a D1 below OLMoE's 2 T, where the fit never crosses a MoE from scratch
# although OLMoE saw it cross after 500 to 600 B. Below a billion tokens a power law means nothing, because it starts at
# infinity. A budget of FLOPs or GPU-hours for a small model easily becomes trillions of tokens, far outside of the fit.
PARAMETERS, TOKENS, COPIES, TOP_K = (1e8, 1.1e9), (1e9, 3e11), 8, 2
# `continued`: the share of D2, then the constants of 1, ln N, ln D, their product and (ln D)^2; N and D are divided by
# MIDDLE
CONTINUED, MIDDLE = (0.96, 1.4787, -0.017066, -0.178439, -0.0264344, -0.0195051), (1.8e7, 1.5e7)
# the runs that `continued` was fitted to: their ranges of parameters, of D1 and of D2, with eight copies and top-2
RUNS = ((7.1e6, 4.3e7), (4.1e6, 1.7e7), (1.5e6, 1.3e7))
OVERTRAINED = 100  # tokens for each parameter; Chinchilla has 20
DROP_NEEDS = 500e9


def dense(parameters: float, tokens: float) -> float:
    a, b, of_tokens, of_parameters = DENSE
    return a * math.pow(tokens, -of_tokens) + b * math.pow(parameters, -of_parameters) + FLOOR


def scratch(parameters: float, tokens: float) -> float:
    """Return the loss of a MoE with this dense model's shape that is trained from random weights."""
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
    """Return the loss of small upcycled models on the text of our own runs.

    In this form an upcycled model follows a dense curve as if D1 had been longer by a share of D2. ln(L - floor) is
    quadratic in the logarithm of those tokens, and larger models improve faster."""
    share, *constants = CONTINUED
    size, tokens = math.log(parameters / MIDDLE[0]), math.log((first + share * more) / MIDDLE[1])
    terms = (1.0, size, tokens, size * tokens, tokens * tokens)
    return math.exp(sum(c * term for c, term in zip(constants, terms, strict=True))) + FLOOR


def second(first: float) -> float:
    """Return the exponent of D2, which falls with the logarithm of D1."""
    return SECOND - TOGETHER * math.log(first)


def overtaken(parameters: float, first: float) -> float | None:
    """Return the tokens after which a MoE from scratch is first as good as the upcycled one, or None for never.

    The curves cross twice or never, because they were fitted separately."""

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
    """Describe an upcycling and its budget."""

    parameters: float  # of the dense model
    first: float  # D1: tokens that the dense model was trained on
    more: float  # D2: tokens that the MoE will get
    copies: int
    top_k: int  # whole FFNs that a token takes
    granularity: int = 1
    choice: str = "any"
    method: str = "copy"
    cost: float = 1.0  # FLOPs of a token in the MoE, divided by those in the dense model


def outside(case: Case) -> list[str]:
    """List the reasons why this case lies outside of the range that the law was fitted for."""
    found = []
    few, many = TOKENS
    if case.parameters > PARAMETERS[1]:
        found.append(f"{short(case.parameters)} parameters, fitted up to about 1 B")
    if case.parameters < PARAMETERS[0]:
        found.append(f"{short(case.parameters)} parameters, fewer than the law covers")
    if case.first > many:
        found.append(f"{short(case.first)} tokens before; at 2 T the law contradicts a real run (arXiv 2409.02060)")
    found += [
        f"{short(tokens)} tokens {when}, too few for a power law"
        for tokens, when in ((case.first, "before"), (case.more, "more"))
        if tokens < few
    ]
    if case.more > many:
        found.append(f"{short(case.more)} tokens more, which is more than the law covers")
    if case.granularity > 1 or case.method not in ("copy", "virtual_group"):
        found.append(f"granularity {case.granularity} by method {case.method}, fitted for copies of whole FFNs")
    elif (case.copies, case.top_k) != (COPIES, TOP_K):
        found.append(f"{case.copies} copies, top-{case.top_k}, fitted for {COPIES}, top-{TOP_K}")
    return found


def advice(case: Case) -> str:
    """Return a table of the law's losses, or the reasons why it does not apply, and warnings."""
    why, n, first, more = outside(case), case.parameters, case.first, case.more
    lines = [f"The published law of upcycling ({SOURCE}) is not shown because it was not fitted for this case:"]
    lines += [f"  {reason}" for reason in why]
    if not why:
        arms = [
            ("dense, same tokens", dense(n, first + more), "at best: from its one-stage curve at D1 + D2"),
            ("dense, same FLOPs", dense(n, first + more * case.cost), "at best: with as many FLOPs as the copies take"),
            (f"{case.copies} copies, top-{case.top_k}", upcycled(n, first, more), "upcycled"),
            ("MoE from scratch", scratch(n, more), "none of D1"),
        ]
        lines = [f"Expected loss after {short(more)} tokens more ({SOURCE}; only the differences carry over):"]
        lines += [f"  {name:22}{loss:7.3f}   {note}" for name, loss, note in arms]
    inside = all(low <= at <= high for (low, high), at in zip(RUNS, (n, first, more), strict=True))
    if inside and case.granularity == 1 and (case.copies, case.top_k) == (COPIES, TOP_K):
        lines.append(f"  {'of our own runs':22}{continued(n, first, more):7.3f}   upcycled, docs/scaling.md")
    lines.append("`upcycle recommend` and docs/science.md say how much our own runs gained, and at which sizes")
    return "\n".join([*lines, *(f"! {text}" for text in warnings(case))])


def warnings(case: Case) -> Sequence[str]:
    found = []
    crossing = overtaken(case.parameters, case.first)
    if crossing is None:
        found.append(
            "by the fit a MoE from scratch never overtakes this one; against an upcycled OLMo 1B (2 T tokens) it did "
            "after 500 to 600 B tokens (OLMoE, arXiv 2409.02060)"
        )
    elif case.more > crossing / 2:
        found.append(
            f"a MoE from scratch is as good after {short(crossing)} tokens, by the fit ({SOURCE}): "
            + ("train one instead" if case.more > crossing else "your budget is more than half of that")
        )
    if case.first > OVERTRAINED * case.parameters:
        found.append(
            f"the dense model saw {case.first / case.parameters:,.0f} tokens a parameter: the gain of further tokens "
            f"falls with the logarithm of those (exponent {second(case.first):.4f} against "
            f"{second(20 * case.parameters):.4f} at 20 a parameter; arXiv 2502.03009 and 2510.06548)"
        )
    if case.method == "drop" and case.more < DROP_NEEDS:
        found.append(
            "method drop gained at 500 B tokens (arXiv 2502.19261), and redrawing half gained nothing at 100 B on a "
            f"2 B model (arXiv 2410.07524); this budget has {short(case.more)}"
        )
    if case.granularity > 1 and case.choice == "any":
        found.append(
            "a free top-k mixes slices of different copies: on SmolLM2-135M it ended 0.26 nats behind dense "
            "(docs/science.md); write router.choice=each-slice"
        )
    return found


def short(number: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"
