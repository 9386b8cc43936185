"""What the runs of a study say: figures of each run, differences paired by seed, curves over seeds.

Three questions, each answered by an arm that ran a whole schedule of its own:

    tokens    an arm beside the control, on as many tokens
    flops     an arm beside one that spent as many FLOPs: `match: flops`, or the control where a token costs the same
    seconds   an arm beside one that trained for as long: `match: seconds`

Seconds are those of training steps as measured, without validation. Differences are of finished runs; a curve
shows what is there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from evaluation.judge.curves import Band, Curve, band, difference_band, mean
from evaluation.judge.seeds import Paired, paired
from evaluation.studies.outcome import Outcome, outcome
from evaluation.studies.plan import Plan
from evaluation.studies.suites import Score, before_folder, scores, starts, suites_of

QUESTIONS = {"tokens": "equal tokens", "flops": "equal FLOPs", "seconds": "equal seconds"}
SAME = 0.01  # share by which what is held equal may differ: a token's FLOPs by the router's, say


@dataclass(frozen=True)
class Contrast:
    """The difference of a figure between two arms: arm - against, seed by seed."""

    question: str
    what: str  # a mean of validation sets, a set, or a suite's task
    unit: str
    headline: bool
    higher_is_better: bool
    arm: str
    against: str
    seeds: tuple[int, ...]
    value: float  # mean over these seeds
    other: float  # the same of `against`
    difference: Paired
    ratio: float  # of what is held equal: the arm's to the other's

    @property
    def verdict(self) -> str:
        return self.difference.verdict(self.higher_is_better)


@dataclass(frozen=True)
class Kept:
    """Scores of a suite's task before and after training."""

    suite: str
    task: str
    metric: str
    higher_is_better: bool
    before: Mapping[str, float]  # by arm, of the model that it began with
    after: Mapping[str, tuple[float, ...]]  # by arm, a seed each
    change: Mapping[str, Paired]  # by arm


@dataclass(frozen=True)
class Judged:
    control: str
    means: Mapping[str, tuple[str, ...]]
    seeds: tuple[int, ...]
    outcomes: tuple[Outcome, ...] = ()
    contrasts: tuple[Contrast, ...] = ()
    curves: Mapping[str, tuple[Band, ...]] = field(default_factory=dict)  # by mean or set
    differences: Mapping[str, tuple[Band, ...]] = field(default_factory=dict)  # to the control at equal tokens
    layers: Mapping[str, Mapping[str, Mapping[int, float]]] = field(default_factory=dict)  # by what, by arm
    overall: Mapping[str, tuple[Band, ...]] = field(default_factory=dict)  # by what
    kept: tuple[Kept, ...] = ()

    def of(self, arm: str) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.arm == arm]

    def drawn(self, arm: str) -> list[Outcome]:
        """The finished runs, or all if none is: a curve ends where its shortest run does."""
        return [run for run in self.of(arm) if run.finished] or self.of(arm)

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(outcome.arm for outcome in self.outcomes))


def judge(plan: Plan) -> Judged:
    pairs = [(arm, seed) for seed in plan.config.seeds for arm in plan.arms]
    outcomes = [run for arm, seed in pairs if (run := outcome(arm, seed, plan.run_folder(arm, seed)))]
    order = list(plan.arms)
    outcomes.sort(key=lambda run: (order.index(run.arm), run.seed))
    judged = Judged(plan.control, plan.means, plan.config.seeds, tuple(outcomes))
    if not outcomes:
        return judged
    sets = list(dict.fromkeys(name for run in outcomes for name in run.losses))
    groups = {**plan.means, **{name: (name,) for name in sets if (name,) not in plan.means.values()}}
    contrasts = [
        contrast
        for name, inside in groups.items()
        for contrast in loss_contrasts(plan, judged, name, inside, headline=name in plan.means)
    ]
    after, kept = answers(plan, judged)
    measured = {what for run in outcomes for what in run.overall}
    return replace(
        judged,
        contrasts=(*contrasts, *score_contrasts(plan, judged, after)),
        curves={name: bands(judged, partial(Outcome.mean, sets=inside)) for name, inside in groups.items()},
        differences={name: difference_bands(plan, judged, inside) for name, inside in groups.items()},
        layers=by_layer(judged),
        overall={what: bands(judged, partial(Outcome.routing, what=what)) for what in sorted(measured)},
        kept=kept,
    )


# ---- differences


def questions(plan: Plan, found: Judged) -> Iterator[tuple[str, str, str]]:
    """(question, arm, the arm that it is compared with), of arms that have begun."""
    first = {arm: found.of(arm)[0] for arm in found.arms}
    control = first.get(plan.control)
    for name, run in first.items():
        if plan.arms[name].match:
            continue
        if control and name != plan.control and run.whole_tokens == control.whole_tokens:
            yield "tokens", name, plan.control
            if control.flops_per_token and abs(run.flops_per_token / control.flops_per_token - 1) <= SAME:
                yield "flops", name, plan.control
    for name in first:
        arm = plan.arms[name]
        if arm.match and arm.of in first:
            yield arm.match, arm.of, name


def loss_contrasts(plan: Plan, found: Judged, name: str, sets: Sequence[str], *, headline: bool) -> Iterator[Contrast]:
    for question, arm, against in questions(plan, found):
        values = [{run.seed: run.last(sets) for run in found.of(side)} for side in (arm, against)]
        yield from contrast(found, question, name, "nats a token", headline, False, arm, against, values[0], values[1])


def contrast(
    found: Judged, question: str, what: str, unit: str, headline: bool, higher: bool, arm: str, against: str,
    ours: Mapping[int, float | None], theirs: Mapping[int, float | None], grain: float = 0.0,
) -> Iterator[Contrast]:  # fmt: skip
    """Yields the contrast over the seeds that both have, or nothing if there are none."""
    values = {seed: (ours.get(seed), theirs.get(seed)) for seed in found.seeds}
    pairs = {seed: (a, b) for seed, (a, b) in values.items() if a is not None and b is not None}
    if not pairs:
        return
    spent = [
        sum(getattr(run.spent, question) for run in found.of(side) if run.seed in pairs) for side in (arm, against)
    ]
    yield Contrast(
        question,
        what,
        unit,
        headline,
        higher,
        arm,
        against,
        tuple(pairs),
        mean(a for a, _ in pairs.values()),
        mean(b for _, b in pairs.values()),
        paired([a - b for a, b in pairs.values()], grain),
        spent[0] / spent[1] if spent[1] else math.nan,
    )


# ---- curves


def bands(found: Judged, curve: Callable[[Outcome], Curve]) -> tuple[Band, ...]:
    made = (band(arm, [curve(one) for one in found.drawn(arm)]) for arm in found.arms)
    return tuple(one for one in made if one.mean)


def difference_bands(plan: Plan, found: Judged, sets: Sequence[str]) -> tuple[Band, ...]:
    """Differences to the control at equal tokens, of the seeds that both have begun."""
    theirs = {run.seed: run.mean(sets) for run in found.drawn(plan.control)}
    made = (
        difference_band(
            arm,
            [(run.mean(sets), theirs[run.seed]) for run in found.drawn(arm) if run.mean(sets) and theirs.get(run.seed)],
        )
        for question, arm, _ in questions(plan, found)
        if question == "tokens"
    )
    return tuple(one for one in made if one)


def by_layer(found: Judged) -> dict[str, dict[str, dict[int, float]]]:
    """what -> arm -> layer -> mean over seeds of the latest figure."""
    out: dict[str, dict[str, dict[int, float]]] = {}
    for arm in found.arms:
        runs = [run.layers for run in found.of(arm)]
        for what in sorted({what for layers in runs for what in layers}):
            mine = [layers[what] for layers in runs if what in layers]
            numbers = sorted({n for m in mine for n in m})
            out.setdefault(what, {})[arm] = {n: mean(m[n] for m in mine if n in m) for n in numbers}
    return out


# ---- suites

Answered = Mapping[str, Mapping[int, Mapping[tuple[str, str], Score]]]


def answers(plan: Plan, found: Judged) -> tuple[Answered, tuple[Kept, ...]]:
    """(scores by arm and seed, the same beside the scores of the models that the arms began with)."""
    suites = suites_of(plan)
    if not suites:
        return {}, ()
    after = {
        arm: {run.seed: scores(Path(run.folder) / "suites", suites) for run in found.of(arm)} for arm in found.arms
    }
    start = {arm: scores(before_folder(plan, checkpoint), suites) for arm, checkpoint in starts(plan).items()}
    every = {
        key: score
        for arm in found.arms
        for by_seed in (*after[arm].values(), start[arm])
        for key, score in by_seed.items()
    }
    kept = []
    for key, score in every.items():
        before = {arm: start[arm][key].value for arm in found.arms if key in start[arm]}
        values = {arm: tuple(s[key].value for s in after[arm].values() if key in s) for arm in found.arms}
        change = {arm: paired([v - before[arm] for v in values[arm]], score.grain) for arm in before if values[arm]}
        kept.append(Kept(score.suite, score.task, score.metric, score.higher_is_better, before, values, change))
    return after, tuple(kept)


def score_contrasts(plan: Plan, found: Judged, answered: Answered) -> Iterator[Contrast]:
    keys = {key: score for by_seed in answered.values() for tasks in by_seed.values() for key, score in tasks.items()}
    for key, score in keys.items():
        for question, arm, against in questions(plan, found):
            sides = [
                {seed: tasks[key].value if key in tasks else None for seed, tasks in answered[side].items()}
                for side in (arm, against)
            ]
            what, higher = f"{score.task} ({score.suite})", score.higher_is_better
            yield from contrast(
                found, question, what, score.metric, False, higher, arm, against, sides[0], sides[1], score.grain
            )
