"""Ask a study's runs and their starting models the suites, and read the answers."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluation.judge import logged, results
from evaluation.judge.suites import PREFERRED, is_inner
from evaluation.judge.words import is_share
from evaluation.studies.plan import Plan, facts_config


@dataclass(frozen=True)
class Suite:
    name: str
    begin: tuple[str, ...]  # words of the command before the checkpoint: eval SUITE, or facts score
    words: tuple[str, ...]  # keys after the checkpoint, except the output

    def command(self, checkpoint: str, folder: Path) -> list[str]:
        """Return the command that asks a checkpoint this suite and writes the answers into `folder`/NAME."""
        return ["upcycle", *self.begin, checkpoint, *self.words, f"output={folder / self.name}"]

    def left(self, checkpoint: str, folder: Path) -> list[str] | None:
        """Return the command, or None if its answers exist."""
        command = self.command(checkpoint, folder)
        answered_by = logged.is_run(folder / self.name) and logged.load(folder / self.name).command
        return None if answered_by == shlex.join(command) else command


@dataclass(frozen=True)
class Score:
    suite: str
    task: str
    metric: str
    higher_is_better: bool
    value: float
    grain: float  # the smallest step between two values, an item of a test; 0 if there is none


def suites_of(plan: Plan) -> list[Suite]:
    made = [suite_of(given) for given in plan.config.suites]
    if plan.config.facts:
        made.append(Suite("facts", ("facts", "score"), (f"suite={facts_config(plan.config).output}",)))
    names = [suite.name for suite in made]
    if len(set(names)) < len(names):
        raise ValueError(f"suites has two named {max(names, key=names.count)!r}; their answers would be in one folder")
    return made


def suite_of(given: Any) -> Suite:
    keys = dict(given) if isinstance(given, Mapping) else {"suite": given}
    taken = sorted({"checkpoint", "output", "name"} & keys.keys())
    if not keys.get("suite") or taken:
        got = f"the key {taken[0]}, which the study sets" if taken else "no key `suite`"
        raise ValueError(f"suites has {given!r} with {got}; write a name, or {{suite: core, data: FOLDER, limit: 500}}")
    from evaluation.ask.run import read_config  # imports lm-eval, which takes seconds

    words = [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in keys.items() if k != "suite"]
    read_config([str(keys["suite"]), "the run", *words])
    return Suite(Path(str(keys["suite"])).stem, ("eval", str(keys["suite"])), tuple(words))


def starts(plan: Plan) -> dict[str, str]:
    """Return the checkpoint that each arm begins with; for an upcycled model the dense one, which is the same
    function."""
    models = {name: arm.config.model for name, arm in plan.arms.items()}
    return {
        name: str(model.upcycle["source"] or model.upcycle["donors"][0]) if model.upcycle else model.source
        for name, model in models.items()
    }


def before_folder(plan: Plan, checkpoint: str) -> Path:
    every = list(dict.fromkeys(starts(plan).values()))
    return plan.folder / "before" / f"{every.index(checkpoint)}-{Path(checkpoint).name}"


def scores(folder: Path, suites: Iterable[Suite]) -> dict[tuple[str, str], Score]:
    """Return the scores of whole groups and of tasks without a group, one metric each, for suites with answers."""
    out = {}
    for suite in suites:
        if not logged.is_run(folder / suite.name):
            continue
        run = logged.load(folder / suite.name)
        parts: list[tuple[results.Group | results.Task, str]] = [
            *((group, group.tasks[0]) for group in run.groups.values() if not is_inner(group, run)),
            *((task, task.name) for task in run.tasks.values() if not task.groups),
        ]
        for part, first in parts:
            if metric := next((name for name in (*PREFERRED, *part.metrics) if name in part.metrics), None):
                higher = run.tasks[first].higher_is_better.get(metric, True)
                value, grain = part.metrics[metric], is_share(metric) / max(part.items, 1)
                out[suite.name, part.name] = Score(suite.name, part.title, metric, higher, value, grain)
    return out
