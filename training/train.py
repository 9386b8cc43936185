"""A training run, top to bottom: build, loop, done. The loop is the table of contents."""

from __future__ import annotations

import importlib.util
import random
from contextlib import nullcontext
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch

from training.build import begin, checkpoints_of, loader_of, start
from training.checkpoint import layout
from training.checkpoint.state import Stop
from training.config import TrainConfig, settings
from training.data.open import open_training, open_validation
from training.evaluate import Ask, Suite
from training.observe.flops import model_flops
from training.observe.metrics import Metrics
from training.observe.profiling import Trace, memory_snapshot, steps_to_trace
from training.parallel.processes import processes
from training.parallel.watch import guarded
from training.schedule import schedule
from training.step import balance_numbers, train_step, validate


def train(config: TrainConfig, suite: Suite | None = None) -> Path:
    """Run to config.steps, or to a signal; the same call goes on where it stopped. Returns the run's folder.

    suite: makes the evaluation that config.eval wants (evaluation.run.live); needed where eval.every is not 0."""
    assert suite is not None or not config.eval.every, "a suite is to be asked, and none is given"
    torch.manual_seed(config.seed)  # nothing draws from these two generators; if a module ever does, it is reproducible
    random.seed(config.seed)
    patience = timedelta(minutes=config.patience)
    with (
        processes(config.device, patience, settings(config)) as device,
        guarded(patience) as watch,
        start(config, device) as run,
    ):
        state, rate, run.phases.tell = run.state, schedule(config.schedule, config.steps), watch.enter
        with (
            checkpoints_of(run) as checkpoints,
            Stop() as stop,
            Trace(run.folder, steps_to_trace(config.profile if run.leads else "")) as trace,
            memory_snapshot(run.folder / "memory.pickle") if config.memory_snapshot and run.leads else nullcontext(),
        ):
            first = checkpoints.load(state)
            if not first:
                begin(run)
            exported = bool(config.export) and Path(config.export).exists()
            if exported and first < config.steps:  # refused before the training, not after it
                raise ValueError(f"export={config.export} exists already; remove it or choose another folder")
            samples = run.place.samples = open_training(config.data, run.origin.dense.vocab, run.place.saved)
            valid = open_validation(config.data, run.origin.dense.vocab)
            ask: Ask = dict
            if suite is not None and config.eval.every:
                ask = suite(config.eval, run.model, run.origin, run.mesh)
            flops = model_flops(run.origin.spec, config.data.sequence)
            metrics = Metrics(
                run.folder,
                first,
                steps=config.steps,
                flops=flops,
                gpus=run.mesh.world,
                config=asdict(config),
                **asdict(config.log),
            )
            with metrics, loader_of(run, samples) as loader:
                if first == 0:
                    metrics.log(0, **validate(run, valid), **ask())
                stopped = False
                while state.step < config.steps and not stopped:
                    watch.doing(f"step {state.step + 1}")
                    trace.before(state.step + 1)
                    with run.phases("data"):
                        batches = [next(loader) for _ in range(run.micro_batches)]
                    learned = train_step(run, [batch for batch, _ in batches], rate(state.step))
                    state.step, run.place.cursor = state.step + 1, batches[-1][1]
                    tokens = config.batch * config.data.sequence
                    metrics.step(state.step, tokens=tokens, lr=rate(state.step - 1), **learned)
                    stopped = stop.requested(run.control)
                    if due(state.step, config.log_every, config.steps) or stopped:
                        metrics.log(state.step, **balance_numbers(run), **run.phases.fetch(max(metrics.taken, 1)))
                    if due(state.step, config.valid_every, config.steps):
                        metrics.log(state.step, **validate(run, valid))
                    if config.eval.every and due(state.step, config.eval.every, config.steps):
                        watch.enter("evaluation")
                        metrics.log(state.step, **ask())
                    if due(state.step, config.checkpoint.every, config.steps) or stopped:
                        watch.enter("checkpoint")
                        checkpoints.save(state.step, state)
        if run.leads:
            draw(run.folder)
        if config.export and state.step == config.steps and not exported:
            watch.enter("export")
            layout.export(run.model, run.origin, config.export, mesh=run.mesh)
    return run.folder


def draw(folder: Path) -> None:
    """plots.png, where matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is not None:
        from training.observe.plots import plot

        plot([folder], folder / "plots.png")


def due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)
