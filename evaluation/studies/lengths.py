"""Compute how long each arm of a study trains (equal tokens, FLOPs or seconds), and check its inputs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from evaluation.studies.plan import Plan, Trial, tokens_of_step
from training.data.shards import META
from training.observe.metrics import FILE as METRICS
from training.optim.schedule import schedule
from training.run.parts import source
from training.run.stages import flops_a_token
from upcycle.io import strict
from upcycle.io.checkpoint import Checkpoint
from upcycle.io.disk import write_atomic

INPUTS = "inputs.json"  # in the study's folder


def flops(plan: Plan) -> dict[str, float]:
    """Return the FLOPs of a token, forward and backward, by arm; open each arm's data and model, so that a missing one
    shows."""
    costs = {}
    for name, arm in plan.arms.items():
        config = arm.config
        for kind, parts in (("train", config.data.train), ("valid", config.data.valid)):
            for part in parts:
                if not (Path(part.path) / META).is_file():
                    raise ValueError(
                        f"data.{kind}: {part.path} is not a folder of token shards; make it with `upcycle prepare`, or "
                        "write data=FOLDER where the config says ${data}"
                    )
        try:
            with source(config) as origin:
                costs[name] = flops_a_token(config, origin.spec)
        except (ValueError, OSError) as error:
            raise ValueError(f"arm {name}: {error}") from None
    return costs


def check_inputs(plan: Plan) -> None:
    """Write digests of the models and data; raise a ValueError if runs have begun with others."""
    file, found = plan.folder / INPUTS, {}
    for arm in plan.arms.values():
        config, made = arm.config, arm.config.model.upcycle or {}
        for part in (*config.data.train, *config.data.valid):
            found[part.path] = hashlib.sha256((Path(part.path) / META).read_bytes()).hexdigest()
        models = {config.model.source, config.teacher.source, made.get("source", ""), *made.get("donors", ())}
        for name in models - {"", *found}:
            with Checkpoint.open(name) as checkpoint:
                found[name] = checkpoint.fingerprint()
    known: dict[str, str] = {}
    if file.is_file() and any(plan.folder.glob(f"runs/*/*/{METRICS}")):
        known = strict.held(strict.read_json(file), dict[str, str], str(file))
    for name, now in found.items():
        if known.get(name, now) != now:
            raise ValueError(
                f"{name} differs from the one that the runs in {plan.folder} began with, so they cannot be compared "
                "with runs "
                "from now on; put it back, or write output=ANOTHER-FOLDER"
            )
    write_atomic(file, (json.dumps(known | found, indent=1) + "\n").encode())


def steps(plan: Plan, costs: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, int]:
    """Return the steps of each arm; `costs` has the FLOPs of a token, `seconds` those of a step for arms matched by
    time."""
    out = {}
    for name, arm in plan.arms.items():
        config, other = arm.config, plan.arms[arm.of or name].config
        ours = theirs = 1.0
        if arm.match == "flops":
            ours, theirs = (costs[n] * tokens_of_step(c) for n, c in ((name, config), (arm.of, other)))
        elif arm.match:
            ours, theirs = seconds[name], seconds[arm.of]
        out[name] = max(1, round(other.steps * theirs / ours))
        try:
            schedule(config.schedule, out[name])
        except ValueError as error:
            raise ValueError(f"arm {name}: {error}") from None
    return out


def timed(plan: Plan, arm: str) -> Trial:
    """Return a short run that measures how fast an arm is, without validation, checkpoints and suites."""
    trial, folder, least = plan.trial(arm, 0), plan.folder / "timing" / arm, plan.config.timing
    data = {**trial.values["data"], "valid": []}
    rate = {**trial.values.get("schedule", {}), "warmup": 0}
    short = {"steps": least, "log_every": -(-least // 3), "valid_every": 0, "checkpoint": {"every": 0}, "eval": {}}
    values = {**trial.values, "output": str(folder), "data": data, "schedule": rate, **short}
    return Trial(f"timing of {arm}", trial.seed, folder, values)


def described(plan: Plan, trials: Sequence[Trial], costs: Mapping[str, float]) -> str:
    """Describe the runs to come: steps, tokens and FLOPs of each arm."""
    first = {trial.arm: trial.config for trial in reversed(trials)}
    width = max(map(len, plan.arms))
    lines = [f"{len(trials)} runs: {len(plan.arms)} arms, seeds {', '.join(map(str, plan.config.seeds))}"]
    for name, arm in plan.arms.items():
        steps, per_step = first[name].steps, tokens_of_step(first[name])
        matched = f", as many {arm.match} as {arm.of}" if arm.match else ""
        whole = f"{steps * per_step:,} tokens, {costs[name] * steps * per_step:.3g} FLOPs"
        lines.append(f"  {name:{width}}  {steps:,} steps, {whole}{matched}{' (control)' * (name == plan.control)}")
    return "\n".join(lines)
