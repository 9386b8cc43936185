"""Compare trainings by their validation losses, at equal tokens and at equal FLOPs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from evaluation.judge import words
from evaluation.judge.runs import Arms, Run, mean
from evaluation.judge.seeds import Paired, paired, together

SAME = 0.01  # a point this share of the tokens before a run's end still counts as the end


@dataclass(frozen=True)
class Loss:
    """Hold the losses of two groups on a validation set, as means over seeds, at a point that all runs reached."""

    domain: str
    a: float
    b: float
    difference: float
    by_seed: tuple[float, ...]  # differences


@dataclass(frozen=True)
class Losses:
    runs: tuple[str, ...]  # names of groups
    flops_per_token: tuple[float | None, ...]
    tokens: float  # the point of comparison
    flops: float | None
    at_equal_tokens: Mapping[str, tuple[Loss, ...]] = field(default_factory=dict)  # by group, except the first
    at_equal_flops: Mapping[str, tuple[Loss, ...]] = field(default_factory=dict)
    # tokens | FLOPs -> runs that are read before their end
    midway: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def sides(self) -> dict[str, Mapping[str, tuple[Loss, ...]]]:
        """Return the losses by the quantity that is held equal."""
        return {"tokens": self.at_equal_tokens, "FLOPs": self.at_equal_flops}

    def equal(self, what: str) -> str:
        """Say which quantity is equal, tokens or FLOPs, and whether a loss is interpolated for it."""
        return f"equal {what}, interpolated" if self.midway.get(what) else f"equal {what}"

    @cached_property
    def over_sets(self) -> dict[tuple[str, str], Paired]:
        """Return the difference of the mean over sets, judged over seeds and corrected by Holm, by (tokens | FLOPs,
        group). If a token costs the same in both, equal FLOPs and equal tokens are one comparison."""
        rows = {(what, name): of_sets(found) for what, by_run in self.sides.items() for name, found in by_run.items()}
        marks = [tuple(round(difference, 9) for difference in found) for found in rows.values()]
        first = dict(zip(reversed(marks), reversed(rows.values()), strict=True))
        judged = together([paired(first[mark]) for mark in marks], marks)
        return dict(zip(rows, judged, strict=True))

    def verdict(self, what: str, name: str) -> str:
        """Say how far a group's mean over the sets is from the first group's, at equal tokens or FLOPs."""
        found = self.over_sets[what, name]
        return f"{words.signed(found.mean)}, {words.judgement(found)}"


def of_sets(rows: Sequence[Loss]) -> list[float]:
    """Return each seed's difference of the mean over validation sets."""
    return [math.fsum(apart) / len(rows) for apart in zip(*(row.by_seed for row in rows), strict=True)]


def compare_losses(arms: Arms) -> Losses:
    """Compare every other arm of trainings with the first, seed by seed."""
    runs = [run for group in arms.values() for run in group]
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        raise ValueError(f"two runs are called {max(names, key=names.count)}; rename the folder of one")
    domains = sorted(set.intersection(*(set(run.losses) for run in runs)))
    if not domains:
        raise ValueError(
            f"{' and '.join(names)} share no validation set ("
            f"{'; '.join(', '.join(sorted(run.losses)) or 'none' for run in runs)}); name the same sets under "
            "data.valid"
        )
    reached = {run.name: max(run.losses[domain][-1][0].tokens for domain in domains) for run in runs}
    rates = {run.name: run.flops_per_token for run in runs}
    at, flops = {"tokens": dict.fromkeys(reached, min(reached.values()))}, None
    if all(rates.values()):
        flops = min(rates[name] * last for name, last in reached.items())
        at["FLOPs"] = {name: flops / rate for name, rate in rates.items()}
    ends = {run.name: reached[run.name] if run.finished else math.inf for run in runs}
    midway = {
        what: tuple(name for name, tokens in places.items() if tokens < (1 - SAME) * ends[name])
        for what, places in at.items()
    }
    found = {what: losses_at(arms, domains, places) for what, places in at.items()}
    by_arm = [[rates[run.name] for run in group] for group in arms.values()]
    means = tuple(mean(mine) if all(mine) else None for mine in by_arm)
    return Losses(tuple(arms), means, min(reached.values()), flops, found["tokens"], found.get("FLOPs", {}), midway)


def losses_at(arms: Arms, domains: Sequence[str], tokens: Mapping[str, float]) -> dict[str, tuple[Loss, ...]]:
    """Return the losses of each arm and of the first at each run's `tokens`, interpolated between validations."""

    def loss(run: Run, domain: str) -> float:
        spent, values = zip(*run.losses[domain], strict=True)
        return float(np.interp(tokens[run.name], [at.tokens for at in spent], values))

    first, *others = arms
    found = {}
    for arm in others:
        rows = []
        for domain in domains:
            a, b = ([loss(run, domain) for run in arms[side]] for side in (first, arm))
            apart = tuple(y - x for x, y in zip(a, b, strict=True))
            rows.append(Loss(domain, mean(a), mean(b), mean(apart), apart))
        found[arm] = tuple(rows)
    return found
