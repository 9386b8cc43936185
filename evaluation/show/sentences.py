"""Write the conclusions of a report as sentences."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from evaluation.judge import words
from evaluation.judge.losses import Losses
from evaluation.judge.runs import mean
from evaluation.judge.seeds import LEAST
from evaluation.judge.suites import Comparison, Difference
from evaluation.judge.words import is_share, number, p_text, signed
from evaluation.show.facts import Facts
from training.observe.metrics import duration

HEADLINES = 3  # up to this many headlines get a sentence each; more share one sentence that counts verdicts
SAYS = {"better": "is better than", "worse": "is worse than", "no difference shown": "is not shown to differ from"}


def opening(facts: Facts) -> str:
    """Say the effect, its interval over seeds and its cost in one sentence."""
    every = list(effects(facts))
    if not every:
        return "Nothing is compared here: a comparison needs two models with the same suite, or two trainings."
    clauses = [f"{b} {SAYS.get(kind, 'next to')} {a}: {said}, {cost(facts, b, a)}" for b, a, _, kind, said in every]
    more, seeds = len(clauses) - HEADLINES, every[0][2]
    clauses = [*clauses[:HEADLINES], *([f"{more} more below"] if more > 0 else [])]
    if seeds < LEAST:
        clauses.append(f"{'one run' if seeds == 1 else f'{seeds} runs'} a side cannot call anything better")
    return "; ".join(clauses) + "."


def effects(facts: Facts) -> Iterator[tuple[str, str, int, str, str]]:
    """Yield (model, the first, seeds, verdict, difference in words) for losses, or else for the first suite's first
    headline."""
    if losses := facts.losses:
        for name in losses.at_equal_tokens:
            d = losses.over_sets["tokens", name]
            over = "".join(f", {interval}" for interval in [words.interval(d)] if interval)
            said = f"validation loss {signed(d.mean)} nats a token at {equal(facts, 'tokens', name)}{over}"
            yield name, losses.runs[0], d.seeds, d.verdict(), said
        return
    for found in facts.comparisons:
        head = next((d for d in found.differences if d.headline), None)
        if head and found.suite == facts.comparisons[0].suite:
            said = f"{head.title} {signed(head.difference, head.metric)} {words.unit(head.metric)}, {head.interval}"
            yield found.b.name, found.a.name, head.seeds, head.verdict, said


def cost(facts: Facts, b: str, a: str) -> str:
    """Write the training cost of b next to that of a, up to the point where their losses are compared."""
    if not {a, b} <= facts.arms.keys():
        return "at a cost that is not known here (give the folders of the trainings too)"
    ours, theirs = facts.arms[b], facts.arms[a]
    spent = (
        ("FLOPs", ours.compared.flops, theirs.compared.flops, lambda v: f"{v:.3g}"),
        ("seconds", ours.compared.seconds, theirs.compared.seconds, duration),
        ("memory", ours.memory_gb, theirs.memory_gb, lambda v: f"{v:.2f} GB"),
    )
    times = [
        f"{x / y:.2f} times the {what} ({form(x)})" if x and y else f"{what} not logged" for what, x, y, form in spent
    ]
    return f"for {times[0]}, {times[1]} and {times[2]}"


def equal(facts: Facts, what: str, name: str) -> str:
    """Say which quantity is equal in both arms, tokens or FLOPs, and whether a loss is interpolated for it."""
    assert facts.losses is not None
    runs = {run for arm in (facts.losses.runs[0], name) for run in facts.arms[arm].runs}
    return f"equal {what}" + ", interpolated" * bool(runs & {*facts.losses.midway.get(what, ())})


def verdicts(facts: Facts) -> list[str]:
    """List a sentence about each headline and each loss."""
    several = len({found.suite for found in facts.comparisons}) > 1
    said = [f"{found.suite}: " * several + words for found in facts.comparisons for words in of_suite(found)]
    return said + (list(of_losses(facts, facts.losses)) if facts.losses else [])


def of_suite(found: Comparison) -> Iterator[str]:
    headlines, (a, b) = [d for d in found.differences if d.headline], (found.a.name, found.b.name)
    if len(headlines) <= HEADLINES:
        yield from (sentence(found, d) for d in headlines)
    else:
        kinds = {"better": "better on", "worse": "worse on", "no difference shown": "not shown to differ on"}
        kinds |= {d.verdict: f"without a verdict ({d.verdict}) on" for d in headlines if d.verdict not in kinds}
        titles = {words: [d.title for d in headlines if d.verdict == kind] for kind, words in kinds.items()}
        said = (f"{words} {len(names)} ({', '.join(names)})" for words, names in titles.items() if names)
        yield f"Of {len(headlines)} headlines, {b} next to {a} is {'; '.join(said)}."
    if found.flips:
        gained = sum(f.gained for f in found.flips)
        yield f"{gained:,} items that {a} had wrong are right, {len(found.flips) - gained:,} the other way round."
    elif any(d.only_a is not None for d in found.differences):
        yield f"No item flipped between {a} and {b}."


def sentence(found: Comparison, d: Difference) -> str:
    write = partial(number, metric=d.metric)
    unit = " %" if is_share(d.metric) else f" {d.metric.replace('_', ' ')}"
    values = f"{write(d.a)} to {write(d.b)}{unit} ({signed(d.difference, d.metric)}, {d.interval})"
    sure = f"p {p_text(d.p_holm)}" if d.verdict in SAYS else d.verdict
    return f"{found.b.name} {SAYS.get(d.verdict, 'next to')} {found.a.name} on {d.title}: {values}; {sure}."


def of_losses(facts: Facts, losses: Losses) -> Iterator[str]:
    for what, by_run in losses.sides.items():
        for name, rows in by_run.items():
            lower = sum(row.difference < 0 for row in rows)
            means = f"{mean(r.a for r in rows):.4f} to {mean(r.b for r in rows):.4f}"
            yield (
                f"At {equal(facts, what, name)}, the validation loss of {name} is lower than that of {losses.runs[0]} "
                f"on {lower} of {len(rows)} sets; mean {means} nats a token; difference {losses.verdict(what, name)}."
            )
