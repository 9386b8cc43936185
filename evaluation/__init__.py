"""Evaluate dense and upcycled models: lm-eval's tasks and scores, paired comparisons, studies, and a report page."""

from typing import TYPE_CHECKING

from upcycle.plugin import lazy

if TYPE_CHECKING:
    from evaluation.api import compare, evaluate, report, routing, study

__all__ = ["compare", "evaluate", "report", "routing", "study"]
__getattr__ = lazy(__name__, __all__)
