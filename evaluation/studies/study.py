"""Train and judge arms x seeds, and write the page; what is done already stays."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from evaluation.show.study import page, sentences, table
from evaluation.studies import plan as planning
from evaluation.studies import sample
from evaluation.studies.judging import Contrast, Judged, judge
from evaluation.studies.outcome import finished
from evaluation.studies.plan import Plan, Trial, sample_config
from evaluation.studies.running import ROOT, Job, Workers, alone, device, stopping
from evaluation.studies.suites import Suite, before_folder, starts, suites_of
from training.observe import metrics
from upcycle import __version__
from upcycle.io.disk import write_atomic


def perform(plan: Plan, command: str) -> dict[str, str]:
    """Do what is left of a study, or with judge=true show what is there; return the failures, a sentence a job."""
    if plan.config.judge:
        show(plan, command, {})
        return {}
    with alone(plan.folder):
        return study(plan, command)


def study(plan: Plan, command: str) -> dict[str, str]:
    """Does all of it and writes the page. Returns the failures, by name of the job a sentence."""
    suites = suites_of(plan)
    if plan.config.sample:
        make_sample(plan)
    costs = planning.flops(plan)
    planning.check_inputs(plan)
    trials = planning.trials(plan, planning.steps(plan, costs, timings(plan)))
    for trial in trials:
        trial.write()
    print(lengths(plan, trials, costs), flush=True)
    jobs = [*before(plan, suites), *(job_of(trial, suites, plan.config.keep) for trial in trials)]
    workers = workers_of(plan, plan.config.workers)
    try:
        return workers.run(jobs)
    finally:
        show(plan, command, workers.failures)


def make_sample(plan: Plan) -> None:
    """Make the sample, if the arms begin with its model."""
    config = sample_config(plan.config)
    if Path(plan.config.source) != Path(config.output) / "dense":
        return
    try:
        with stopping():
            sample.dense_model(sample.Stages(Path(config.output), config), config)
    except sample.Stopped:
        raise KeyboardInterrupt from None


# ---- what there is to do


def job_of(trial: Trial, suites: Sequence[Suite], keep: bool) -> Job:
    return Job(
        trial.name, trial.folder, partial(left, trial, suites, keep), trial.config.steps, partial(reached, trial.folder)
    )


def left(trial: Trial, suites: Sequence[Suite], keep: bool) -> list[str] | None:
    """The next command of a trial: training to its end, then each suite."""
    pending = [command for suite in suites if (command := suite.left(str(trial.folder), trial.folder / "suites"))]
    if not trained(trial) or (pending and not has_weights(trial)):
        return ["upcycle", "train", str(trial.file)]
    if pending:
        return pending[0]
    if not keep:
        shutil.rmtree(trial.folder / "checkpoints", ignore_errors=True)
    return None


def trained(trial: Trial) -> bool:
    return (trial.folder / metrics.FILE).is_file() and finished(trial.config, metrics.read(trial.folder))


def has_weights(trial: Trial) -> bool:
    return (trial.folder / "checkpoints" / f"step-{trial.config.steps:08d}").is_dir()


def reached(folder: Path) -> int:
    """The last step that a run has logged."""
    rows = metrics.read(folder) if (folder / metrics.FILE).is_file() else []
    return int(rows[-1]["step"]) if rows else 0


def before(plan: Plan, suites: Sequence[Suite]) -> list[Job]:
    """Jobs that ask the suites of what the arms begin with. They come first, to find in minutes what a suite lacks."""
    jobs = []
    for checkpoint in dict.fromkeys(starts(plan).values()) if suites else ():
        folder = before_folder(plan, checkpoint)

        def ask(checkpoint: str = checkpoint, folder: Path = folder) -> list[str] | None:
            return next((command for suite in suites if (command := suite.left(checkpoint, folder))), None)

        jobs.append(Job(f"{Path(checkpoint).name}, before", folder, ask))
    return jobs


def timings(plan: Plan) -> dict[str, float]:
    """Seconds of a step by arm, where `match: seconds` needs them; measured one after the other with nothing beside."""
    matched = [arm for arm in plan.arms.values() if arm.match == "seconds"]
    found = {}
    for name in dict.fromkeys(name for arm in matched for name in (arm.of, arm.name)):
        trial = planning.timed(plan, name)
        trial.write()
        workers = workers_of(plan, 1)
        if failures := workers.run([job_of(trial, (), keep=False)]):
            raise ValueError(next(iter(failures.values())))
        rows = [row for row in metrics.read(trial.folder) if "seconds_per_step" in row]
        later = [row["seconds_per_step"] for row in rows[1:] or rows]  # the first line has the warm-up in it
        found[name] = sum(later) / len(later)
    return found


def workers_of(plan: Plan, count: int) -> Workers:
    import torch

    return Workers(count, plan.config.devices, max(1, torch.get_num_threads() // count))


def lengths(plan: Plan, trials: Sequence[Trial], costs: Mapping[str, float]) -> str:
    """What will be run, as text: steps, tokens and FLOPs of each arm."""
    first = {trial.arm: trial.config for trial in reversed(trials)}
    width = max(map(len, plan.arms))
    lines = [f"{len(trials)} runs: {len(plan.arms)} arms, seeds {', '.join(map(str, plan.config.seeds))}"]
    for name, arm in plan.arms.items():
        steps, per_step = first[name].steps, planning.tokens_of_step(first[name])
        matched = f", as many {arm.match} as {arm.of}" if arm.match else ""
        whole = f"{steps * per_step:,} tokens, {costs[name] * steps * per_step:.3g} FLOPs"
        lines.append(f"  {name:{width}}  {steps:,} steps, {whole}{matched}{' (control)' * (name == plan.control)}")
    return "\n".join(lines)


# ---- what came of it


def show(plan: Plan, command: str, failures: Mapping[str, str]) -> Judged:
    """Judges what is there, writes study.html and study.json, and prints the table."""
    judged, title = judge(plan), plan.config.title or plan.folder.name
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    texts, tools = commands(plan, command), versions()
    failed = list(failures.values())
    figures = {
        "title": title, "made": made, "verdicts": list(sentences(judged)), "failures": failed, "commands": texts,
        "versions": dict(tools), "config": as_json(plan.config), **as_json(judged),
    }  # fmt: skip
    plan.folder.mkdir(parents=True, exist_ok=True)
    write_atomic(plan.folder / "study.json", (json.dumps(figures, indent=1, allow_nan=False) + "\n").encode())
    write_atomic(plan.folder / "study.html", page(title, made, judged, texts, tools, failed).encode())
    print(f"\n{table(judged)}\n\n{plan.folder / 'study.html'}", flush=True)
    return judged


def commands(plan: Plan, command: str) -> dict[str, str]:
    """Title -> text: the study's command, each run's, each suite's, and an arm's config."""
    runs, folders = [], [plan.run_folder(arm, seed) for seed in plan.config.seeds for arm in plan.arms]
    for number, folder in enumerate(folders):
        where = "".join(f"{k}={v} " for k, v in device(plan.config.devices, number % plan.config.workers).items())
        runs.append(f"{where}upcycle train {shlex.quote(str(folder))}.yaml")
    texts = {"The study": command, "Each run by itself": "\n".join(runs)}
    if suites := suites_of(plan):
        asked = [(checkpoint, before_folder(plan, checkpoint)) for checkpoint in dict.fromkeys(starts(plan).values())]
        asked += [(str(folder), folder / "suites") for folder in folders]
        lines = [shlex.join(suite.command(*where)) for where in asked for suite in suites]
        texts["What they are asked"] = "\n".join(lines)
    for arm in plan.arms:
        file = plan.run_folder(arm, plan.config.seeds[0]).with_suffix(".yaml")
        if file.is_file():
            texts[f"{arm}: {file}"] = file.read_text()
    return texts


def versions() -> list[tuple[str, str]]:
    import torch

    has_cuda = torch.cuda.is_available()
    found = [
        ("python", platform.python_version()),
        ("upcycle", __version__),
        ("torch", version("torch")),
        ("device", torch.cuda.get_device_name() if has_cuda else f"CPU, {os.cpu_count()} cores ({platform.machine()})"),
    ]
    try:
        git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        found.append(("commit", subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()))
    except (OSError, subprocess.CalledProcessError):
        pass
    return found


def as_json(value: Any) -> Any:
    """The value as strict JSON: nan and infinity are null; a contrast gets its verdict."""
    if is_dataclass(value) and not isinstance(value, type):
        named = {name: getattr(value, name) for name in value.__dataclass_fields__}
        return as_json(named | ({"verdict": value.verdict} if isinstance(value, Contrast) else {}))
    if isinstance(value, Mapping):
        return {str(key): as_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
