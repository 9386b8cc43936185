"""Evaluation for notebooks and scripts: what its commands do, with values in place of words. docs/api.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from evaluation.judge import compare as judging
from evaluation.judge import logged
from evaluation.judge.compare import Comparison, Losses
from evaluation.judge.results import Evaluation
from training.observe.metrics import FILE as METRICS
from upcycle.config.reading import config_of
from upcycle.config.ready import EVAL, STUDY
from upcycle.io import strict

Name = str | PathLike[str]
PICTURES = (".png", ".pdf", ".svg")


@dataclass(frozen=True)
class Compared:
    """What came of a comparison: of answers to suites, and of losses of trainings. It prints as its tables."""

    comparisons: list[Comparison]
    losses: Losses | None

    def __str__(self) -> str:
        tables = [judging.table(each) for each in self.comparisons]
        return "\n\n".join([*tables, *([judging.loss_table(self.losses)] if self.losses else [])])


def evaluate(suite: str, checkpoint: Name, /, **keys: Any) -> Evaluation | None:
    """Ask a model the items of a suite, write the folder `output`, and return the scores (None in later ranks)."""
    from evaluation.ask import run  # imports lm-eval

    asked = config_of(run.RunConfig, {"suite": suite, "checkpoint": fspath(checkpoint)}, keys, EVAL)
    return run.evaluate(asked, f"evaluation.evaluate({suite!r}, {fspath(checkpoint)!r})")


def compare(*groups: Name | Sequence[Name], cluster: str = "") -> Compared:
    """Judge the later groups by the first one; a group is a folder, or several seeds' folders, of one arm.

    Folders are those of `evaluate`, of lm-eval, or of training runs.
    """
    names = [[fspath(each)] if isinstance(each, str | PathLike) else [fspath(name) for name in each] for each in groups]
    folders = [folder for group in names for folder in group]
    if len(names) < 2:
        raise ValueError(
            "compare needs two runs or more, the first is what the others are compared with: compare A B, or "
            "compare A1,A2,A3 -- B1,B2,B3"
        )
    if missing := [folder for folder in folders if not Path(folder).exists()]:
        raise ValueError(
            f"{', '.join(missing)}: there is no such folder; give folders of `upcycle eval`, of lm-eval, or of "
            "training runs"
        )
    asked = all(logged.is_run(folder) for folder in folders)
    trained = all((Path(folder) / METRICS).is_file() for folder in folders)
    if not asked and not trained:
        raise ValueError(
            f"{', '.join(folders)} are not all of one kind; give folders of `upcycle eval`, of lm-eval, or of "
            "training runs"
        )
    return Compared(
        judging.compare(names, cluster) if asked else [], judging.compare_losses(names) if trained else None
    )


def routing(checkpoint: Name, texts: Sequence[Name], /, **keys: Any) -> dict[str, Any]:
    """Measure how a model uses its experts on texts, each a domain, layer by layer."""
    from evaluation.show.routing import RoutingConfig, analyse

    named = {"checkpoint": fspath(checkpoint), "texts": [fspath(text) for text in texts]}
    return analyse(config_of(RoutingConfig, named, keys))


def report(*groups: Name | Sequence[Name], output: Name = "report.html", title: str = "Upcycling report") -> list[str]:
    """Write one page of runs, results and models, or a picture of training runs; return what the page says first.

    `output` ends in .html, or in .png, .pdf or .svg for the picture.
    """
    names = [[fspath(each)] if isinstance(each, str | PathLike) else [fspath(name) for name in each] for each in groups]
    target = Path(output)
    if target.suffix in PICTURES:
        from training.observe.plots import plot

        plot([Path(name) for group in names for name in group], target)
        return []
    if target.suffix != ".html":
        raise ValueError(f"output={target} must end in .html, or in {', '.join(PICTURES)} for a picture of trainings")
    from evaluation.show.facts import gather, opening, verdicts
    from evaluation.show.report import write

    facts = gather(names, title)
    write(target, facts)
    return [opening(facts), *verdicts(facts)]


def study(study: str | Mapping[str, Any], /, **keys: Any) -> dict[str, Any]:
    """Train and judge arms x seeds, and return what study.json says: verdicts, figures, failures."""
    from evaluation.studies.plan import StudyConfig, planned
    from evaluation.studies.study import perform

    plan = planned(config_of(StudyConfig, study, keys, STUDY))
    perform(plan, "evaluation.study(...)")
    return strict.read_object(plan.folder / "study.json")
