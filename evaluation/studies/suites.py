"""lm-eval's suites of a study: what is asked of a run's end and of the model that it began with, and the answers."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluation.judge import logged
from evaluation.judge.compare import PREFERRED, is_inner, is_share
from evaluation.studies.plan import Plan


@dataclass(frozen=True)
class Suite:
    name: str
    words: tuple[str, ...]  # of `upcycle eval`, without the checkpoint and the output

    def command(self, checkpoint: str, folder: Path) -> list[str]:
        """The command that asks a checkpoint this suite; the answers lie in `folder`/NAME."""
        return ["upcycle", "eval", self.words[0], checkpoint, *self.words[1:], f"output={folder / self.name}"]

    def left(self, checkpoint: str, folder: Path) -> list[str] | None:
        """The command, or None if its answers are there."""
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
    grain: float  # the least that two values can be apart: an item of a test; 0 where that is as little as one likes


def suites_of(plan: Plan) -> list[Suite]:
    made = [suite_of(given) for given in plan.config.suites]
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
    return Suite(Path(str(keys["suite"])).stem, (str(keys["suite"]), *words))


def starts(plan: Plan) -> dict[str, str]:
    """The checkpoint that each arm begins with; for an upcycled model the dense one, which is the same function."""
    models = {name: arm.config.model for name, arm in plan.arms.items()}
    return {
        name: str(model.upcycle["source"] or model.upcycle["donors"][0]) if model.upcycle else model.source
        for name, model in models.items()
    }


def before_folder(plan: Plan, checkpoint: str) -> Path:
    every = list(dict.fromkeys(starts(plan).values()))
    return plan.folder / "before" / f"{every.index(checkpoint)}-{Path(checkpoint).name}"


def scores(folder: Path, suites: Iterable[Suite]) -> dict[tuple[str, str], Score]:
    """By suite and task: whole groups, and tasks of no group, each by one metric. Only suites with answers."""
    out = {}
    for suite in suites:
        if not logged.is_run(folder / suite.name):
            continue
        run = logged.load(folder / suite.name)
        parts = [(g, run.tasks[g.tasks[0]].higher_is_better) for g in run.groups.values() if not is_inner(g, run)]
        parts += [(t, t.higher_is_better) for t in run.tasks.values() if not t.groups]  # type: ignore[misc]
        for part, higher in parts:
            if metric := next((name for name in (*PREFERRED, *part.metrics) if name in part.metrics), None):
                value, grain = part.metrics[metric], is_share(metric) / max(part.items, 1)
                found = Score(suite.name, part.title, metric, higher.get(metric, True), value, grain)
                out[suite.name, part.name] = found
    return out
