"""Decide when a checkpoint is due and which settings it stores, and end runs that are not worth saving."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from typing import Any

from training.checkpoint import standalone
from training.checkpoint.state import CHECKPOINTS, Checkpoints, Mirror, found, step_of
from training.checkpoint.storage import Shards, read_manifest
from training.config.resume import compared
from training.config.schema import TrainConfig
from training.config.stages import stage_of, stages_of
from training.dispatch import capabilities
from training.model.decoder import Decoder
from training.parallel.shard import trouble
from training.run.build import Run
from training.run.parts import whole_on_meta
from training.run.stop import anywhere
from upcycle.io import disk, publish


def due(step: int, every: int, last: int) -> bool:
    """Return whether something is due that happens every `every` steps and after the last one; 0: only then."""
    return step == last or (every > 0 and step % every == 0)


def checkpoints_of(run: Run, mirror: Mirror | None = None) -> Checkpoints:
    """Return the run's checkpoints."""
    keep = run.config.checkpoint
    return Checkpoints(
        run.folder / CHECKPOINTS,
        keep=keep.keep,
        keep_every=keep.keep_every,
        light=keep.last == "weights",
        asynchronous=keep.asynchronous,
        settings=partial(settings_at, run.whole),
        allow=run.config.resume.allow,
        mirror=mirror,
    )


def whole_of(run: Run) -> tuple[Decoder, Shards | None]:
    """Return the whole model to export: the model itself on one process, else its names and the newest checkpoint."""
    if run.mesh.world == 1:
        return run.model, None
    newest = found(run.folder / CHECKPOINTS)[0]
    return whole_on_meta(run.origin.spec, run.whole), Shards(newest, read_manifest(newest))


def saves_left(run: Run, first: int) -> int:
    """Return the largest number of checkpoints that are due after a step."""
    return -(-(run.whole.steps - first) // (run.whole.checkpoint.every or run.whole.steps)) + len(run.stages) - 1


def settings_of(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that a checkpoint stores, with a ready config's contents instead of its name."""
    settings: dict[str, Any] = json.loads(json.dumps(asdict(config), default=str))
    settings["model"]["upcycle"] = standalone.named(config.model)["upcycle"]
    del settings["stages"]  # see settings_at
    return compared(settings)


def settings_at(config: TrainConfig, step: int) -> dict[str, Any]:
    """Return the settings that a checkpoint after a step stores: those of the step's stage and where it began, so that
    later stages may be added, removed or changed."""
    stage = stage_of(stages_of(config), min(step, config.steps))
    return settings_of(stage.config) | ({"stages": f"{stage.name}, after step {stage.first}"} if stage.first else {})


def describe(run: Run) -> None:
    """Write run.json and the run's copy of its model's config, on rank 0, after a resume is accepted."""
    if run.leads:
        disk.make_folder(run.folder)
        if not (found(run.folder / CHECKPOINTS) and standalone.keeps(run.folder, run.config.model)):
            standalone.keep(run.folder, run.origin, run.config.model)
        disk.write_atomic(run.folder / standalone.RUN, publish.signed(plain(run.whole)))


def plain(config: TrainConfig) -> dict[str, Any]:
    """Return a config as JSON values."""
    found: dict[str, Any] = json.loads(json.dumps(asdict(config), default=str))
    return found


def worth_saving(run: Run) -> bool:
    """Return whether the state is worth a checkpoint: not while steps are skipped, which would push out older ones."""
    if not due(run.state.step, run.config.checkpoint.every, run.stage.last):
        return False
    return run.state.step == run.whole.steps or int(run.optimizer.in_a_row) < 2


def check_alive(run: Run) -> None:
    """End a run that has skipped optim.skips steps in a row, since it no longer learns. Call this rarely: the host
    waits for the device."""
    limit, step = run.config.optim.skips, run.state.step
    if step == run.whole.steps:
        check_learned(run)
    if not limit or not due(step, limit, run.stage.last):
        return
    longest = int(run.optimizer.longest)
    if longest >= limit:
        good = next((path for path in found(run.folder / CHECKPOINTS) if step_of(path) <= step - longest), None)
        last = f"the last checkpoint from before them is {good}" if good else "there is no checkpoint from before them"
        raise ValueError(
            f"{longest} steps in a row were skipped by step {step}, because their loss or gradient was not finite or a "
            f"spike; {last}; start in a new folder, or continue from there with a lower schedule.peak (it is "
            f"{run.config.schedule.peak:g}), or set optim.skips"
        )


def check_learned(run: Run) -> None:
    """End a finished run that skipped all its steps, which would look like one that learned."""
    if run.state.step and int(run.optimizer.skipped) >= run.state.step:
        raise ValueError(
            f"all {run.state.step} steps were skipped, because their loss or gradient was not finite or a spike, so "
            "the model has learned nothing and is not exported; start in a new folder with a lower schedule.peak, "
            "balance.z_weight or teacher.weight"
        )


def check_arrived(run: Run) -> None:
    """End a run whose dispatcher lost rows on any rank. Steps with lost rows were skipped, so weights are intact."""
    if not capabilities(run.config.mesh.dispatcher).loses:  # it cannot lose rows
        return
    said = trouble(run.parts)
    if anywhere([bool(said)], run.control)[0]:
        raise ValueError(said or "the dispatcher of another rank lost rows; look at that rank's output for the reason")
