"""Compare a difference without a verdict to the noise between seeds that our own studies measured.

The noise is the standard deviation over three seeds of the difference of two trainings that read the same samples in
the same order. docs/science.md has the values of the seeds, or an interval over three; half of such an interval is 2.48
standard deviations.
"""

from __future__ import annotations

import math

from evaluation.judge.seeds import LEAST, student
from evaluation.judge.words import number

LOSS = (
    0.0006,
    0.0027,
)  # on sets of the training's domains: the least is chat (answers), the most a base of 51 M parameters (in)
OTHER = 0.0154  # on a set of another domain: law, from that base
ACCURACY = (0.0016, 0.01)  # chat, on lm-eval's tasks: HellaSwag; ARC-Easy, which has the fewest items
ACCURACIES = ("acc", "acc_norm")
ITEMS = 1188  # items of ARC-Easy there
POWER = 0.8  # share of studies that must show a real difference
MOST = 100  # the most seeds that we suggest

ABOUT = "Another model, text or length may have more noise, and so have runs that did not read the same samples."
ABOUT_LOSS = (
    "Noise between runs: the difference of two recipes had a standard deviation over three seeds of "
    f"{LOSS[0]} to {LOSS[1]} nats a token on sets trained on, and up to {OTHER} on others (SmolLM2-135M and a model of "
    f"51 M parameters, 1.6 to 63 M tokens; docs/science.md). {ABOUT}"
)
ABOUT_ACCURACY = (
    "Noise between runs: the difference of two recipes had a standard deviation over three seeds of "
    f"{number(ACCURACY[0], 'acc')} to {number(ACCURACY[1], 'acc')} points on 1,188 to 2,009 items; fewer items have "
    f"more, by the root of their number (SmolLM2-135M-Instruct; docs/science.md). {ABOUT}"
)


def of_items(items: int) -> float:
    """Return the largest likely noise of an accuracy over this many items."""
    return ACCURACY[1] * math.sqrt(max(1.0, ITEMS / items))


def beside(difference: float, noise: float, metric: str = "") -> str:
    """Say how large a difference is next to the noise, and how many seeds would show one of that size."""
    ratio = abs(difference) / noise
    wanted = seeds(ratio) or f"more than {MOST}"
    return (
        f"{ratio:,.{1 if ratio >= 1 else 2}f} times the largest noise measured "
        f"({number(noise, metric)}); showing a difference of that size takes {wanted} seeds of each"
    )


def seeds(ratio: float) -> int:
    """Return the seeds that show a difference of `ratio` times the noise in POWER of all studies; 0: more than MOST."""
    for count in range(LEAST, MOST + 1):
        reach = student(count - 1) + student(count - 1, 2 * POWER - 1)
        if reach <= ratio * math.sqrt(count):
            return count
    return 0
