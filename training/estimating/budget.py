"""Convert a budget into tokens, hours, money, and losses by the law of upcycling (training/estimating/law.py)."""

from __future__ import annotations

import re

from training.checkpoint.layout import Origin
from training.estimating import law
from training.observe.flops import model_flops
from upcycle.planning.size import dense_flops, dense_parameters

AMOUNT = re.compile(r"([\d.]+(?:e[+-]?\d+)?) ?([KMBT]?) ?(tokens|FLOPs|GPU-hours|)", re.IGNORECASE)
TOKENS_ALONE = ("seen", "tokens")  # keys whose only unit is tokens
ABSURD = 1e30  # a budget of so many FLOPs, tokens or GPU-hours is a mistake
# every page has this sentence: docs/scaling.md, benchmarks/results/2026-11-planning.md; a test counts the rows
ACCURACY = "85 of 88 measured steps were predicted within 13 %, and the other three were off by 19, 21 and 255 %"
UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def amount(key: str, text: str) -> tuple[float, str]:
    """Read the text of a key such as budget; return the number, and the unit in small letters."""
    found = AMOUNT.fullmatch(text.strip())
    try:
        number = float(found[1]) * UNITS[found[2].lower()] if found else 0.0
    except ValueError:
        number = 0.0
    if not 0 < number < ABSURD or not found or (key in TOKENS_ALONE and found[3].lower() not in ("", "tokens")):
        units = "" if key in TOKENS_ALONE else ', "1e22 FLOPs" or "5000 GPU-hours"'
        raise ValueError(f'{key} is {text!r}; write for instance {key}="100B tokens"{units}')
    return number, found[3].lower() or "tokens"


def budgeted(budget: str, flops: float, rate: float) -> float:
    """Return the tokens that a budget buys; `flops` are those of a token, and `rate` is tokens/s of a GPU."""
    number, unit = amount("budget", budget)
    return number / flops if unit == "flops" else number * 3600 * rate if unit == "gpu-hours" else number


def bill(budget: str, price: float, gpus: int, tokens: int, flops: float, seconds: float) -> str:
    """Return a sentence with the tokens, hours and money of a budget.

    `price` is the price of a GPU-hour. `tokens` and `seconds` are those of a step, and `flops` those of a token."""
    count = budgeted(budget, flops, tokens / seconds / gpus)
    hours = count / tokens * seconds / 3600
    of_all = hours * gpus
    money = f", {few(of_all * price)} at {price:g} a GPU-hour" if price else ""
    said = f"{law.short(count)} tokens in {few(hours, 1)} hours, {few(of_all)} GPU-hours{money}"
    return f"{said} (training alone; {ACCURACY}: docs/scaling.md)"


def few(number: float, digits: int = 0) -> str:
    """Write a number with `digits` digits after the point, or with two significant ones if it is below 10."""
    return f"{number:,.{digits}f}" if number >= 10 else f"{number:.2g}"


def advised(origin: Origin, sequence: int, budget: str, seen: str, rate: float) -> str:
    """Return the losses that the law of upcycling expects of the budget; `rate` is tokens/s of a GPU."""
    plan = origin.plan
    if plan is None:
        return "The law of upcycling covers only upcycled models, and model.upcycle is not set."
    if plan.grown:
        return "The law of upcycling covers dense models that are upcycled; it says nothing about a grown mixture."
    # use the plan's spec: a target's config may give one width for all, and reads the dense width back as an expert's
    dense, spec, method = plan.dense, plan.moe, plan.config.method
    flops = model_flops(origin.spec, sequence)
    case = law.Case(
        parameters=dense_parameters(dense), first=amount("seen", seen)[0],
        more=budgeted(budget, flops, rate), copies=spec.copies, top_k=max(1, spec.top_k // spec.granularity),
        granularity=spec.granularity, choice=spec.choice, cost=flops / dense_flops(dense, sequence),
        method=method if isinstance(method, str) else method["name"],
    )  # fmt: skip
    return law.advice(case)
