"""Judge the runs of a study: figures of each run, differences paired by seed, curves over seeds.

A study answers three questions, each with an arm that ran its own whole schedule:

    tokens    an arm next to the control, on as many tokens
    flops     an arm next to one that spent as many FLOPs: `match: flops`, or the control if a token costs the same
    seconds   an arm next to one that trained for as long: `match: seconds`

Seconds are measured training steps without validation. Differences need finished runs; curves show all runs. Verdicts
are those of `compare`: by p over seeds, corrected by Holm, except for the one contrast that the study named
(`primary`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from evaluation.judge import logged
from evaluation.judge.runs import Band, Row, Run, by_layer, difference_bands, loss_bands, mean, overall, run_of
from evaluation.judge.seeds import Paired, paired, together
from evaluation.judge.suites import compared
from evaluation.studies.plan import Plan, tokens_of_step
from evaluation.studies.suites import Score, before_folder, scores, starts, suites_of
from training.config.schema import TrainConfig
from training.observe import metrics
from upcycle.config.reading import build
from upcycle.io import strict

SAME = 0.01  # the equal quantity may differ by this share, for instance a token's FLOPs by the router's
LOSS = "nats a token"


@dataclass(frozen=True)
class Contrast:
    """Hold the difference of a figure between two arms, arm - against, seed by seed."""

    question: str
    what: str  # a mean of validation sets, a set, or a suite's task
    unit: str
    headline: bool
    higher_is_better: bool
    arm: str
    against: str
    seeds: tuple[int, ...]
    value: float  # mean over these seeds
    other: float  # the same for `against`
    difference: Paired
    ratio: float  # ratio of the equal quantity: the arm's to the other's
    margin: float | None = None  # the study asks whether the arms are equivalent within this margin
    over_items: str = ""  # a suite's 95 % interval over documents or questions, for these runs' models alone

    @property
    def verdict(self) -> str:
        return self.difference.verdict(self.higher_is_better)

    @property
    def mark(self) -> Hashable:
        """Return a mark of the comparison; equal FLOPs and equal tokens may be the same comparison."""
        return self.what, self.arm, self.against


@dataclass(frozen=True)
class Kept:
    """Hold the scores of a suite's task before and after training."""

    suite: str
    task: str
    metric: str
    higher_is_better: bool
    before: Mapping[str, float]  # by arm, for the model that it began with
    after: Mapping[str, tuple[float, ...]]  # by arm, one for each seed
    change: Mapping[str, Paired]  # by arm


@dataclass(frozen=True)
class Judged:
    control: str
    means: Mapping[str, tuple[str, ...]]
    seeds: tuple[int, ...]
    outcomes: tuple[Run, ...] = ()
    contrasts: tuple[Contrast, ...] = ()
    curves: Mapping[str, tuple[Band, ...]] = field(default_factory=dict)  # by mean or set
    # differences to the control at equal tokens
    differences: Mapping[str, tuple[Band, ...]] = field(default_factory=dict)
    layers: Mapping[str, Mapping[str, Mapping[int, float]]] = field(default_factory=dict)  # by measure, by arm
    overall: Mapping[str, tuple[Band, ...]] = field(default_factory=dict)  # by what
    kept: tuple[Kept, ...] = ()

    @property
    def arms(self) -> dict[str, list[Run]]:
        """Return the runs of each arm that has begun."""
        names = dict.fromkeys(run.arm for run in self.outcomes)
        return {arm: [run for run in self.outcomes if run.arm == arm] for arm in names}


def judge(plan: Plan) -> Judged:
    """Judge the runs that a study has so far."""
    found = (outcome(arm, seed, plan.run_folder(arm, seed)) for arm in plan.arms for seed in sorted(plan.config.seeds))
    judged = Judged(plan.control, plan.means, plan.config.seeds, tuple(run for run in found if run))
    arms = judged.arms
    # a curve ends with its shortest run, so unfinished runs are left out if others are finished
    drawn = {arm: [run for run in runs if run.finished] or runs for arm, runs in arms.items()}
    asked = list(questions(plan, arms))
    at_tokens = {plan.control, *(arm for question, arm, _ in asked if question == "tokens")}
    beside = {arm: runs for arm, runs in drawn.items() if arm in at_tokens}
    sets = list(dict.fromkeys(name for run in judged.outcomes for name in run.losses))
    groups = {**plan.means, **{name: (name,) for name in sets if (name,) not in plan.means.values()}}
    after, kept = answers(plan, arms)
    return replace(
        judged,
        contrasts=tuple(corrected([*loss_contrasts(plan, arms, groups), *score_contrasts(plan, arms, after)], plan)),
        curves={name: loss_bands(drawn, inside) for name, inside in groups.items()},
        differences={name: difference_bands(beside, plan.control, inside) for name, inside in groups.items()},
        layers=by_layer(arms),
        overall=overall(drawn),
        kept=kept,
    )


def outcome(arm: str, seed: int, folder: Path) -> Run | None:
    """Read the run in `folder` and the config next to it; None before its first line."""
    file = folder.with_suffix(".yaml")
    if not (folder / metrics.FILE).is_file() or not file.is_file():
        return None
    config, rows = build(TrainConfig, strict.read_yaml(file)), metrics.read(folder)
    if not rows:
        return None
    sets = list(dict.fromkeys(source.name for source in config.data.valid))
    return run_of(
        arm, seed, str(folder), rows, sets,
        finished=is_finished(config, rows), steps=config.steps, tokens_a_step=tokens_of_step(config),
    )  # fmt: skip


def is_finished(config: TrainConfig, rows: Sequence[Row]) -> bool:
    """Return whether all steps are done and the last validation is logged."""
    last = rows[-1] if rows else {"step": -1}
    return last["step"] >= config.steps and all(f"valid/{s.name}/loss" in last for s in config.data.valid)


# ---- differences

Arms = Mapping[str, Sequence[Run]]
Values = Mapping[int, float | None]  # of an arm, by seed


def questions(plan: Plan, arms: Arms) -> Iterator[tuple[str, str, str]]:
    """Yield (question, arm, the arm that it is compared with) for arms that have begun."""
    control = arms[plan.control][0] if plan.control in arms else None
    for name, (run, *_) in arms.items():
        if control and name != plan.control and not plan.arms[name].match and run.whole_tokens == control.whole_tokens:
            yield "tokens", name, plan.control
            if control.flops_per_token and abs(run.flops_per_token / control.flops_per_token - 1) <= SAME:
                yield "flops", name, plan.control
    for name in arms:
        arm = plan.arms[name]
        if arm.match and arm.of in arms:
            yield arm.match, arm.of, name


@dataclass(frozen=True)
class Figure:
    """Hold a figure that two arms are compared by."""

    what: str
    unit: str
    headline: bool
    higher_is_better: bool
    grain: float = 0.0  # the smallest step between two values


def loss_contrasts(plan: Plan, arms: Arms, groups: Mapping[str, Sequence[str]]) -> Iterator[Contrast]:
    for name, sets in groups.items():
        values = {arm: {run.seed: run.last(sets) for run in runs} for arm, runs in arms.items()}
        yield from contrasts(plan, arms, Figure(name, LOSS, name in plan.means, False), values)


def contrasts(plan: Plan, arms: Arms, of: Figure, values: Mapping[str, Values]) -> Iterator[Contrast]:
    """Yield the contrast for each question, over the seeds that both arms have."""
    for question, arm, against in questions(plan, arms):
        both = ((seed, values[arm].get(seed), values[against].get(seed)) for seed in plan.config.seeds)
        pairs = {seed: (a, b) for seed, a, b in both if a is not None and b is not None}
        if not pairs:
            continue
        ours, theirs = (
            sum(getattr(run.spent, question) for run in arms[side] if run.seed in pairs) for side in (arm, against)
        )
        a, b = (mean(pair[side] for pair in pairs.values()) for side in (0, 1))
        difference = paired([a - b for a, b in pairs.values()], of.grain)
        yield Contrast(
            question, of.what, of.unit, of.headline, of.higher_is_better, arm, against, tuple(pairs), a, b, difference,
            ours / theirs if theirs else math.nan, plan.margins.get(of.what),
        )  # fmt: skip


def corrected(found: Sequence[Contrast], plan: Plan) -> Iterator[Contrast]:
    """Correct the contrasts by Holm, except the primary one: means of losses are a family, single sets another, suites
    a third."""
    named = tuple(plan.config.primary.get(key) for key in ("at", "arm", "mean"))
    primary = next((c.mark for c in found if (c.question, c.arm, c.what) == named), None)
    for family in dict.fromkeys((c.unit == LOSS, c.headline) for c in found):
        mine = [c for c in found if (c.unit == LOSS, c.headline) == family]
        judged = together([c.difference for c in mine], [c.mark for c in mine], primary)
        yield from (replace(c, difference=difference) for c, difference in zip(mine, judged, strict=True))


# ---- suites

Answered = Mapping[str, Mapping[int, Mapping[tuple[str, str], Score]]]


def answers(plan: Plan, arms: Arms) -> tuple[Answered, tuple[Kept, ...]]:
    """Return (scores by arm and seed, scores before and after training)."""
    suites = suites_of(plan)
    if not suites:
        return {}, ()
    after = {arm: {run.seed: scores(Path(run.folder) / "suites", suites) for run in runs} for arm, runs in arms.items()}
    start = {arm: scores(before_folder(plan, checkpoint), suites) for arm, checkpoint in starts(plan).items()}
    every = {k: score for arm in arms for tasks in (*after[arm].values(), start[arm]) for k, score in tasks.items()}
    kept = []
    for key, score in every.items():
        before = {arm: start[arm][key].value for arm in arms if key in start[arm]}
        values = {arm: tuple(s[key].value for s in after[arm].values() if key in s) for arm in arms}
        change = {arm: paired([v - before[arm] for v in values[arm]], score.grain) for arm in before if values[arm]}
        kept.append(Kept(score.suite, score.task, score.metric, score.higher_is_better, before, values, change))
    changes = iter(together([change for task in kept for change in task.change.values()]))
    return after, tuple(replace(task, change={arm: next(changes) for arm in task.change}) for task in kept)


def score_contrasts(plan: Plan, arms: Arms, answered: Answered) -> Iterator[Contrast]:
    keys = {key: score for by_seed in answered.values() for tasks in by_seed.values() for key, score in tasks.items()}
    items: dict[Hashable, dict[str, str]] = {}  # by suite and pair of arms, by task or group
    for (suite, part), s in keys.items():
        values: dict[str, Values] = {
            arm: {seed: tasks[suite, part].value for seed, tasks in by_seed.items() if (suite, part) in tasks}
            for arm, by_seed in answered.items()
        }
        figure = Figure(f"{s.task} ({s.suite})", s.metric, False, s.higher_is_better, s.grain)
        for c in contrasts(plan, arms, figure, values):
            pair = suite, c.arm, c.against, c.seeds
            if pair not in items:
                items[pair] = over_items(arms, c, suite)
            yield replace(c, over_items=items[pair].get(part, ""))


def over_items(arms: Arms, c: Contrast, suite: str) -> dict[str, str]:
    """Return the intervals over items of a suite's tasks and groups between the runs of two arms, by name."""
    groups = [
        [logged.load(Path(run.folder) / "suites" / suite) for seed in c.seeds for run in arms[side] if run.seed == seed]
        for side in (c.against, c.arm)
    ]
    return {d.name: d.over_items for d in compared(groups)[0].differences}
