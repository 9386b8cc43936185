"""Compute the learning rate as a pure function of the step, so that there is nothing to save or restore.

    rate = schedule(config, steps)        rate(0) is for the first update, rate(steps - 1) for the last

Upcycling needs a fresh schedule: experts differ only by new updates, so a new warm-up to about the peak of pre-training
and a new decay beat the small rate at which the dense model ended (arXiv 2410.07524: 1e-4 or 2e-4 with a cosine to 2e-5
beat a constant 2e-5). The defaults are that recipe, counted from step 0 of this run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from upcycle.config.values import COUNT, Rule, above_zero, check_values, one_of

SHAPES = ("constant", "linear", "cosine", "wsd")
DECAYS = ("sqrt", "linear")
PEAK = 100.0  # no optimiser learns at a larger rate


@dataclass(frozen=True)
class ScheduleConfig:
    ELSEWHERE: ClassVar = {"lr": "schedule.peak", "learning_rate": "schedule.peak", "min_lr": "schedule.final"}

    shape: str = "cosine"  # constant | linear | cosine | wsd: warm-up, stable, decay
    peak: float = 2e-4  # learning rate after the warm-up: near the peak of pre-training, not where pre-training ended
    final: float = 2e-5  # learning rate of the last step; constant ignores it
    warmup: int = 100  # steps of warm-up; the first is already above 0
    decay: float = 0.2  # wsd: share of all steps that decay
    decay_shape: str = "sqrt"  # wsd: sqrt (1 - sqrt(t), arXiv 2405.18392) | linear

    def __post_init__(self) -> None:
        rules = {
            "shape": one_of(SHAPES),
            "decay_shape": one_of(DECAYS),
            "peak": above_zero("it must be above 0, for instance 2e-4", most=PEAK),
            "final": Rule(lambda value: 0 <= value <= self.peak, f"it must be between 0 and peak={self.peak}"),
            "warmup": Rule(lambda value: value >= 0, "it must be a number of steps, 0 for none", COUNT),
            "decay": Rule(lambda value: 0 < value <= 1, "it must be a share of the steps above 0, up to 1"),
        }
        check_values(self, "schedule.", rules)


def schedule(config: ScheduleConfig, steps: int) -> Callable[[int], float]:
    """Return a function from an update's number, counted from 0, to its learning rate."""
    if config.warmup >= max(steps, 1):
        raise ValueError(f"schedule.warmup={config.warmup} is not below steps={steps}; set a smaller warmup")
    start = config.warmup  # the last step at the peak
    if config.shape == "wsd":
        start = max(start, steps - 1 - max(round(config.decay * steps), 1))

    def rate(step: int) -> float:
        if step < config.warmup:
            return config.peak * (step + 1) / config.warmup
        done = min(max((step - start) / max(steps - 1 - start, 1), 0.0), 1.0)
        return config.final + (config.peak - config.final) * remaining(config, done)

    return rate


def remaining(config: ScheduleConfig, done: float) -> float:
    """Return the remaining share of the way from peak to final after a share `done` (0 ... 1) of the decay."""
    if config.shape == "constant":
        return 1.0
    if config.shape == "cosine":
        return (1 + math.cos(math.pi * done)) / 2
    return 1 - math.sqrt(done) if config.shape == "wsd" and config.decay_shape == "sqrt" else 1 - done
