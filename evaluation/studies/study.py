"""Train every arm with every seed, on one device or several, and judge them over seeds on one page.

Each arm is a training config: `base` has the keys of all arms, `arms` each arm's own. Arms of one seed read the same
samples in the same order; another seed has another order. Each run is `upcycle train` on a config next to its folder.
The same command continues a study that was stopped: it skips finished runs and resumes begun ones.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path

from evaluation.judge.compare import plain
from evaluation.show.page import MARK, rendered
from evaluation.show.study import page, sentences, suite_lines
from evaluation.studies import facts, lengths, sample
from evaluation.studies.judging import Judged, is_finished, judge
from evaluation.studies.plan import Plan, Trial, facts_config, sample_config, trials
from evaluation.studies.running import Job, Workers, alone, device, stopping
from evaluation.studies.suites import Suite, before_folder, starts, suites_of
from training.observe import metrics
from upcycle import __version__
from upcycle.cli.frame import printable
from upcycle.io.disk import check_own, write_atomic


def perform(plan: Plan, command: str = "") -> Mapping[str, str]:
    """Train the rest of a study, judge its runs, and write the page; return one sentence for each job that failed.

    `command` is the command that the page shows.
    """
    for path, mark in ((plan.folder / "study.html", MARK), (plan.folder / "study.json", rb'\A\{\n "title": ')):
        check_own(path, mark, "upcycle study")
    if plan.config.judge:
        show(plan, command, {})
        return {}
    with alone(plan.folder):
        workers, jobs = prepared(plan)
        try:
            return workers.run(jobs)
        finally:
            show(plan, command, workers.failures)


def prepared(plan: Plan) -> tuple[Workers, list[Job]]:
    """Check everything before training, write each run's config, and list the jobs."""
    suites = suites_of(plan)
    if plan.config.sample:
        make_sample(plan)
    if plan.config.facts:
        plan = plan.lasting(facts.make(facts_config(plan.config), plan.config.source))
    costs = lengths.flops(plan)
    lengths.check_inputs(plan)
    every = trials(plan, lengths.steps(plan, costs, timings(plan)))
    for trial in every:
        trial.write()
    print(printable(lengths.described(plan, every, costs), keep="\n"), flush=True)
    jobs = [*before(plan, suites), *(job_of(trial, suites, plan.config.keep) for trial in every)]
    return workers_of(plan, plan.config.workers), jobs


def make_sample(plan: Plan) -> None:
    """Make the sample if the arms begin with its model."""
    config = sample_config(plan.config)
    if Path(plan.config.source) != Path(config.output) / "dense":
        return
    try:
        with stopping():
            sample.dense_model(sample.Stages(Path(config.output), config), config)
    except sample.Stopped:
        raise KeyboardInterrupt from None


# ---- jobs


def job_of(trial: Trial, suites: Sequence[Suite], keep: bool) -> Job:
    todo, done = partial(left, trial, suites, keep), partial(reached, trial.folder)
    return Job(trial.name, trial.folder, todo, trial.config.steps, done)


def left(trial: Trial, suites: Sequence[Suite], keep: bool) -> list[str] | None:
    """Return the next command of a trial: training to its end, then each suite."""
    pending = [command for suite in suites if (command := suite.left(str(trial.folder), trial.folder / "suites"))]
    trained = (trial.folder / metrics.FILE).is_file() and is_finished(trial.config, metrics.read(trial.folder))
    weights = trial.folder / "checkpoints" / f"step-{trial.config.steps:08d}"
    if not trained or (pending and not weights.is_dir()):
        return ["upcycle", "train", str(trial.file)]
    if pending:
        return pending[0]
    if not keep:
        shutil.rmtree(trial.folder / "checkpoints", ignore_errors=True)
    return None


def reached(folder: Path) -> int:
    """Return the last step that a run has logged."""
    rows = metrics.read(folder) if (folder / metrics.FILE).is_file() else []
    return int(rows[-1]["step"]) if rows else 0


def before(plan: Plan, suites: Sequence[Suite]) -> list[Job]:
    """List the jobs that ask the starting models the suites; they come first, so that a missing file shows in
    minutes."""

    def ask(checkpoint: str, folder: Path) -> list[str] | None:
        return next((command for suite in suites if (command := suite.left(checkpoint, folder))), None)

    begins = {name: before_folder(plan, name) for name in starts(plan).values()} if suites else {}
    return [Job(f"{Path(name).name}, before", folder, partial(ask, name, folder)) for name, folder in begins.items()]


def timings(plan: Plan) -> dict[str, float]:
    """Measure the seconds of a step of the arms that `match: seconds` needs, one after the other."""
    matched = [arm for arm in plan.arms.values() if arm.match == "seconds"]
    found = {}
    for name in dict.fromkeys(name for arm in matched for name in (arm.of, arm.name)):
        trial = lengths.timed(plan, name)
        trial.write()
        if failures := workers_of(plan, 1).run([job_of(trial, (), keep=False)]):
            raise ValueError(next(iter(failures.values())))
        rows = [row["seconds_per_step"] for row in metrics.read(trial.folder) if "seconds_per_step" in row]
        later = rows[1:] or rows  # the first line includes the warm-up
        found[name] = sum(later) / len(later)
    return found


def workers_of(plan: Plan, count: int) -> Workers:
    import torch

    return Workers(count, plan.config.devices, max(1, torch.get_num_threads() // count))


# ---- results


def show(plan: Plan, command: str, failures: Mapping[str, str]) -> Judged:
    """Judge the runs so far, write study.html and study.json, and print the result."""
    judged, title = judge(plan), plan.config.title or plan.folder.name
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    texts, tools, failed = commands(plan, command), versions(), list(failures.values())
    figures = plain(asdict(judged))
    for row in figures["outcomes"]:
        del row["rows"]
    for row, contrast in zip(figures["contrasts"], judged.contrasts, strict=True):
        row["verdict"] = contrast.verdict
    about = {
        "title": title, "made": made, "verdicts": list(sentences(judged)), "failures": failed, "commands": texts,
        "versions": tools, "config": plain(asdict(plan.config)),
    }  # fmt: skip
    plan.folder.mkdir(parents=True, exist_ok=True)
    write_atomic(plan.folder / "study.json", (json.dumps(about | figures, indent=1, allow_nan=False) + "\n").encode())
    html = rendered(page(title, made, judged, texts, tools, failed))
    write_atomic(plan.folder / "study.html", html.encode())
    said = [*about["verdicts"], "", *suite_lines(judged)]
    print("", *map(printable, said), "", printable(str(plan.folder / "study.html")), sep="\n", flush=True)
    return judged


def commands(plan: Plan, command: str) -> dict[str, str]:
    """Return title -> text: the study's command, each run's, each suite's, and an arm's config."""
    runs, folders = [], [plan.run_folder(arm, seed) for seed in plan.config.seeds for arm in plan.arms]
    for number, folder in enumerate(folders):
        where = "".join(f"{k}={v} " for k, v in device(plan.config.devices, number % plan.config.workers).items())
        runs.append(f"{where}upcycle train {shlex.quote(str(folder))}.yaml")
    texts = {"The study": command, "Each run by itself": "\n".join(runs)}
    if suites := suites_of(plan):
        asked = [(checkpoint, before_folder(plan, checkpoint)) for checkpoint in dict.fromkeys(starts(plan).values())]
        asked += [(str(folder), folder / "suites") for folder in folders]
        lines = [shlex.join(suite.command(*where)) for where in asked for suite in suites]
        texts["The suites"] = "\n".join(lines)
    files = {arm: plan.run_folder(arm, plan.config.seeds[0]).with_suffix(".yaml") for arm in plan.arms}
    return texts | {f"{arm}: {file}": file.read_text() for arm, file in files.items() if file.is_file()}


def versions() -> dict[str, str]:
    """Return the versions and devices of the study."""
    import torch

    has_cuda = torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "upcycle": __version__,
        "torch": version("torch"),
        "device": torch.cuda.get_device_name() if has_cuda else f"CPU, {os.cpu_count()} cores ({platform.machine()})",
    }
