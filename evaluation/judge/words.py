"""Write figures and verdicts as text."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

from evaluation.judge.seeds import LEAST, LEVEL, Paired, outside

WIDTH = 60  # characters that are shown of an answer
Form = Callable[[float], str]


def is_share(metric: str) -> bool:
    """Return whether a metric is a share, which is shown in per cent."""
    return bool(re.match(r"acc|exact_match|f1", metric))


def number(value: float, metric: str) -> str:
    return f"{100 * value:.2f}" if is_share(metric) else f"{value:.4f}"


def signed(value: float, metric: str = "") -> str:
    return f"{round(100 * value, 2) + 0.0:+.2f}" if is_share(metric) else f"{round(value, 4) + 0.0:+.4f}"


def unit(metric: str) -> str:
    """Return the unit of a metric's difference."""
    return "points" if is_share(metric) else metric.replace("_", " ")


def p_text(p: float | None) -> str:
    return "" if p is None or math.isnan(p) else "< 0.001" if p < 1e-3 else f"{p:.3f}"


def interval(found: Paired, form: Form = signed) -> str:
    """Write the 95 % interval over seeds; nothing if there are too few seeds."""
    if found.low is None or found.high is None:
        return ""
    return f"95 % interval over {found.seeds} seeds {form(found.low)} to {form(found.high)}"


def sureness(found: Paired) -> str:
    """Write the p behind a verdict, and its correction."""
    if found.p_holm is None:
        return f"p {p_text(found.p)}, named beforehand, so not corrected"
    return f"p {p_text(found.p_holm)}" + f", corrected by Holm for {found.family} comparisons" * (found.family > 1)


def judgement(found: Paired, form: Form = signed, higher_is_better: bool = False) -> str:
    """Write the interval over seeds, its p, and the verdict."""
    verdict = found.verdict(higher_is_better)
    return f"{interval(found, form)}, {sureness(found)}: {verdict}" if found.low is not None else verdict


def equivalence(found: Paired, margin: float) -> str:
    """Say whether a difference is shown to be smaller than a margin that was named beforehand."""
    p = outside(found, margin)
    if p is None:
        return f"equivalent within {margin:g}: no verdict, that needs {LEAST} seeds"
    said = "equivalent" if p <= 1 - LEVEL else "not shown to be equivalent"
    return f"{said} within {margin:g} (p {p_text(p)}, two one-sided tests)"


def midway(names: Sequence[str]) -> str:
    """Explain that these runs' losses were read before the end of their schedules."""
    return (
        f"Interpolated: {', '.join(names)} is read before the end of its schedule, where its learning rate is high; "
        "a run with a schedule that ends there would be lower (upcycle study, match: flops)."
    )


def apart(texts: Sequence[str]) -> list[str]:
    """Cut each text to WIDTH characters, starting near the first difference."""
    shared = next((i for i, letters in enumerate(zip(*texts, strict=False)) if len(set(letters)) > 1), 0)
    start = max(shared - WIDTH // 3, 0) if max(map(len, texts)) > WIDTH else 0
    start = texts[0].find(" ", start, shared) + 1 if start else 0  # at a word
    cut = ("…" * (start > 0) + text[start:] for text in texts)
    return [text if len(text) <= WIDTH else text[: WIDTH - 1] + "…" for text in cut]
