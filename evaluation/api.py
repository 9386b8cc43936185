"""Evaluate from notebooks and scripts: functions that do what the commands do (docs/api.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from typing import Any

from evaluation.judge.compare import Report
from evaluation.judge.compare import compare as judge
from evaluation.judge.results import Evaluation
from upcycle.config.reading import config_of
from upcycle.config.ready import EVAL, STUDY
from upcycle.io import strict

Name = str | PathLike[str]


def evaluate(suite: str, checkpoint: Name, /, **keys: Any) -> Evaluation | None:
    """Ask a model the items of a suite, write the folder `output`, and return the scores (None in all ranks except
    0)."""
    from evaluation.ask import run  # imports lm-eval

    asked = config_of(run.RunConfig, {"suite": suite, "checkpoint": fspath(checkpoint)}, keys, EVAL)
    return run.evaluate(asked, f"evaluation.evaluate({suite!r}, {fspath(checkpoint)!r})")


def compare(*groups: Name | Sequence[Name], cluster: str = "", equivalent: Mapping[str, float] | None = None) -> Report:
    """Compare each group with the first one; a group is one folder, or one folder for each seed.

    The folders come from `evaluate`, from lm-eval, or from training runs. print(report) shows the tables.
    """
    return judge(paths(groups), cluster, equivalent)


def routing(checkpoint: Name, texts: Sequence[Name], /, **keys: Any) -> dict[str, Any]:
    """Measure in each layer how a model uses its experts; each text is a domain."""
    from evaluation.judge.experts.routing import RoutingConfig, measure

    named = {"checkpoint": fspath(checkpoint), "texts": [fspath(text) for text in texts]}
    return measure(config_of(RoutingConfig, named, keys))


def report(*groups: Name | Sequence[Name], output: Name = "report.html", title: str = "Upcycling report") -> list[str]:
    """Write a page about runs, results and models, or a picture of training runs; return the page's first sentence.

    `output` ends in .html, or in .png, .pdf or .svg for the picture.
    """
    from evaluation.show.report import report as show

    return show(paths(groups), fspath(output), title)


def paths(groups: Sequence[Name | Sequence[Name]]) -> list[list[str]]:
    """Return the folders of each group as text; a single folder is a group with one member."""
    return [[fspath(each)] if isinstance(each, str | PathLike) else [fspath(name) for name in each] for each in groups]


def study(study: str | Mapping[str, Any], /, **keys: Any) -> dict[str, Any]:
    """Train and judge every arm with every seed; return the content of study.json: verdicts, figures, failures."""
    from evaluation.studies.plan import StudyConfig, planned
    from evaluation.studies.study import perform

    plan = planned(config_of(StudyConfig, study, keys, STUDY))
    perform(plan, "evaluation.study(...)")
    return strict.read_object(plan.folder / "study.json")
