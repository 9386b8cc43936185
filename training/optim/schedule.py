"""Learning rate as a pure function of the step: nothing to save, nothing to restore, nothing to drift.

    rate = schedule(config, steps)        rate(0) is for the first update, rate(steps - 1) for the last

Upcycling needs the learning rate **reset**. The dense model ended its own schedule at a small rate, and its twin
experts differ only by what new updates teach them. Continuing at that small rate starts lower and then flattens out;
a new warm-up to about the peak of pre-training and a new decay wins, although the loss first rises (arXiv 2410.07524:
1e-4 or 2e-4 with a cosine to 2e-5 beat a constant 2e-5; their long run peaked at 3e-4). So every schedule here is a
reset: it counts from step 0 of *this* run, whatever the dense model did, and the defaults are that recipe. What "no
reset" means is also a config: shape=constant, warmup=0, peak=<the rate at which the dense model ended>.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

SHAPES = ("constant", "linear", "cosine", "wsd")
DECAYS = ("sqrt", "linear")


@dataclass(frozen=True)
class ScheduleConfig:
    ELSEWHERE: ClassVar = {"lr": "schedule.peak", "learning_rate": "schedule.peak", "min_lr": "schedule.final"}

    shape: str = "cosine"  # constant | linear | cosine | wsd: warm-up, stable, decay
    peak: float = 2e-4  # learning rate after the warm-up; a reset: near the peak of pre-training, not where it ended
    final: float = 2e-5  # learning rate of the last step; not used by constant
    warmup: int = 100  # steps; the first of them is already above 0
    decay: float = 0.2  # wsd: the share of all steps that decays
    decay_shape: str = "sqrt"  # wsd: sqrt (1 - sqrt(t), arXiv 2405.18392) | linear

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ValueError(f"schedule.shape is {self.shape!r}; it must be one of {', '.join(SHAPES)}")
        if self.decay_shape not in DECAYS:
            raise ValueError(f"schedule.decay_shape is {self.decay_shape!r}; it must be one of {', '.join(DECAYS)}")
        if not (math.isfinite(self.peak) and self.peak > 0):
            raise ValueError(f"schedule.peak is {self.peak}; it must be above 0, for instance 2e-4")
        if not 0 <= self.final <= self.peak:
            raise ValueError(f"schedule.final is {self.final}; it must be between 0 and peak={self.peak}")
        if self.warmup < 0:
            raise ValueError(f"schedule.warmup is {self.warmup}; it must be a number of steps, 0 for none")
        if not 0 < self.decay <= 1:
            raise ValueError(f"schedule.decay is {self.decay}; it must be a share of the steps above 0, up to 1")


def schedule(config: ScheduleConfig, steps: int) -> Callable[[int], float]:
    """The learning rate of each of `steps` updates, counted from 0; from the last step on it stays where it is."""
    if config.warmup >= max(steps, 1):
        raise ValueError(
            f"schedule.warmup={config.warmup} leaves nothing of {steps} steps; set it below the number of steps"
        )
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
    """The share of the way from peak to final that is left (1 ... 0) when `done` (0 ... 1) of the decay is over."""
    if config.shape == "constant":
        return 1.0
    if config.shape == "cosine":
        return (1 + math.cos(math.pi * done)) / 2
    return 1 - math.sqrt(done) if config.shape == "wsd" and config.decay_shape == "sqrt" else 1 - done
