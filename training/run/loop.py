"""A training run, top to bottom: build, loop, done. The loop is the table of contents."""

from __future__ import annotations

import importlib.util
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch

from training.checkpoint import layout, peft
from training.checkpoint.state import Stop, Stopped, anywhere, found, step_of
from training.config.reading import settings
from training.config.schema import TrainConfig
from training.config.stages import Stage, stage_of, tokens_by
from training.data.open import open_validation
from training.islands.island import Island
from training.observe.metrics import Metrics
from training.observe.metrics import read as read_metrics
from training.observe.profiling import Trace, memory_snapshot, steps_to_trace
from training.optim.schedule import schedule
from training.optim.teacher import weights
from training.parallel.collectives import broadcast
from training.parallel.processes import alone, processes
from training.parallel.shard import trouble
from training.parallel.watch import guarded
from training.run.build import CHECKPOINTS, Run, begin, checkpoints_of, enter, flops_a_token, loader_of, record, start
from training.run.preflight import check_export, preflight
from training.run.record import stepping
from training.run.step import balance_numbers, train_step, validate
from training.run.suite import Ask, Poll, Suite

OFTEN = 1.5  # readings of a text from which on an upcycled model fell behind the dense one (docs/study.md)


def train(config: TrainConfig, suite: Suite | None = None) -> Path:
    """Run to config.steps; the same call goes on where it stopped. Returns the run's folder; raises Stopped, after the
    checkpoint is written, where a signal ended it.

    suite: makes the evaluation that config.eval wants (the module evaluation.ask.run); needed where eval.every is not
    0."""
    assert suite is not None or not config.eval.every, "a suite is to be asked, and none is given"
    preflight(config, suite)
    torch.manual_seed(config.seed)  # nothing draws from these two generators; if a module ever does, it is reproducible
    random.seed(config.seed)
    patience = timedelta(minutes=config.patience)
    with (
        processes(config.device, patience, settings(config)) as device,
        guarded(patience, folder=Path(config.output)) as watch,
        alone(Path(config.output)),
        start(config, device) as run,
    ):
        optimizer = run.optimizer
        assert optimizer is not None
        state, stages, run.phases.tell = run.state, run.stages, watch.enter
        island = Island(run) if config.islands.asked else None
        if island is not None:
            state.parts["island"] = island
        stop = Stop()
        poll = partial(stop.poll, run.control)
        with (
            checkpoints_of(run) as checkpoints,
            Trace(run.folder, steps_to_trace(config.profile if run.leads else "")) as trace,
            memory_snapshot(run.folder / "memory.pickle") if config.memory_snapshot and run.leads else nullcontext(),
        ):
            first = saved = checkpoints.load(state)
            if first < config.steps:
                saves = -(-(config.steps - first) // (config.checkpoint.every or config.steps)) + len(stages) - 1
                checkpoints.check_room(state, saves)
            if not first:
                begin(run)
            exported = bool(config.export) and layout.exported(Path(config.export))
            check_export(config, first)  # once more: a damaged checkpoint may have been passed over
            if island is not None and first < config.steps:
                island.join()
            ask: Ask | None = None
            if suite is not None and config.eval.every:
                asked = suite.live(config.eval, run.model, run.origin, run.mesh, poll)
                ask = partial(evaluated, asked, watch.enter)
            order = None if island is None else island.order
            samples = enter(run, stage_of(stages, first), order)
            record(run)
            flops = [flops_a_token(stage.config, run.origin.spec) for stage in stages]
            metrics = Metrics(
                run.folder,
                first,
                steps=config.steps,
                planned=partial(tokens_by, stages),
                gpus=run.mesh.world,
                config=asdict(config),
                **asdict(config.log),
            )
            with metrics, stop:
                tell(metrics, run.stage, stages, flops)
                measures = measures_of(run, ask, poll)
                wanted = measures if first == 0 else missing(run, first, at(measures, first, run.stage.last))
                stopped = not measured(metrics, first, wanted)
                for stage in (stage for stage in stages if stage.last > first):
                    if stopped:
                        break
                    if stage is not run.stage:
                        samples = enter(run, stage)
                        tell(metrics, stage, stages, flops)
                        measures = measures_of(run, ask, poll)
                    warn_of_readings(run)
                    rate = schedule(stage.config.schedule, stage.config.steps)
                    teaching = weights(stage.config.teacher, stage.config.steps)
                    tokens = stage.config.batch * stage.config.data.sequence
                    make_step = stepping(run, train_step)
                    with loader_of(run, samples) as loader:
                        while state.step < stage.last and not stopped:
                            done = state.step - stage.first
                            watch.doing(f"step {state.step + 1}")
                            trace.before(state.step + 1)
                            with run.phases("data"):
                                batches = [next(loader) for _ in range(run.micro_batches)]
                            if run.teacher is not None:
                                run.teacher.begin(teaching(done))
                            learned = make_step([batch for batch, _ in batches], rate(done))
                            state.step, run.place.cursor = state.step + 1, batches[-1][1]
                            if stage is stages[-1]:
                                optimizer.finish(done + 1, stage.config.steps)
                            told = {} if island is None else island.after(state.step, rate(done))
                            metrics.step(state.step, tokens=tokens, lr=rate(done), **learned, **told)
                            stopped, again = anywhere([stop.signal is not None, checkpoints.failed], run.control)
                            if due(state.step, config.log_every, stage.last) or stopped:
                                seconds = run.phases.fetch(max(metrics.taken, 1))
                                metrics.log(state.step, **balance_numbers(run), **seconds, **epochs(run))
                                check_arrived(run)
                            check_alive(run)
                            # before what takes minutes: a run that is stopped in a validation has no time left to save
                            if worth_saving(run) or stopped or again:
                                watch.enter("checkpoint")
                                metrics.sync()
                                checkpoints.save(state.step, state)
                                saved = state.step
                            if not stopped:
                                stopped = not measured(metrics, state.step, at(measures, state.step, stage.last))
                if saved < state.step:
                    watch.enter("checkpoint")
                    metrics.sync()
                    checkpoints.save(state.step, state)
                checkpoints.settle(state)
        if run.leads and (state.step > first or not stopped):  # before its first step it may have no loss
            draw(run.folder)
        if config.export and not stopped and not exported:
            watch.enter("export")
            layout.export(run.model, run.origin, config.export, mesh=run.mesh)
        if config.lora.export and not stopped and not broadcast(Path(config.lora.export).exists()):
            watch.enter("export")
            peft.write(run.model, run.origin, config.lora, config.model.source, run.mesh)
    if stopped:
        raise Stopped(state.step)
    return run.folder


def check_alive(run: Run) -> None:
    """Ends a run that has skipped optim.skips steps in a row: none of them learned, and none of the next will. Asked as
    seldom as it can be, because the host waits for the device to count."""
    limit, step = run.config.optim.skips, run.state.step
    if not limit or not due(step, limit, run.stage.last):
        return
    assert run.optimizer is not None
    longest = int(run.optimizer.longest)
    if longest >= limit:
        good = next((path for path in found(run.folder / CHECKPOINTS) if step_of(path) <= step - longest), None)
        last = f"the last checkpoint from before them is {good}" if good else "there is no checkpoint from before them"
        raise ValueError(
            f"{longest} steps in a row were skipped by step {step}, because their loss or gradient was not finite or a "
            f"spike; {last}; start it in a new folder or go on from there with a lower schedule.peak (it is "
            f"{run.config.schedule.peak:g}), or set optim.skips"
        )


def check_arrived(run: Run) -> None:
    """Ends a run whose dispatcher lost rows on any rank. Steps with such were skipped, so no weight knows of them."""
    if run.config.mesh.dispatcher != "nvlink":  # the others lose none, and ranks need not ask each other
        return
    said = trouble(run.parts)
    if anywhere([bool(said)], run.control)[0]:
        raise ValueError(said or "the dispatcher of another rank lost rows, and that rank says why; look at its output")


def worth_saving(run: Run) -> bool:
    """Whether a checkpoint is due. None is while steps are skipped in a row: they would push out those from before."""
    if not due(run.state.step, run.config.checkpoint.every, run.stage.last):
        return False
    assert run.optimizer is not None
    return run.state.step == run.whole.steps or int(run.optimizer.in_a_row) < 2


Measures = dict[str, tuple[int, Ask]]  # prefix of their names in the log: (steps between them, what makes them)


def measures_of(run: Run, ask: Ask | None, poll: Poll) -> Measures:
    """Those of the stage that the run is in; at its end too."""
    valid = open_validation(run.config.data, run.origin.dense.vocab)
    found: Measures = {"valid/": (run.config.valid_every, partial(validate, run, valid, poll))}
    return found if ask is None else found | {"eval/": (run.config.eval.every, ask)}


def tell(metrics: Metrics, stage: Stage, stages: Sequence[Stage], flops: Sequence[float]) -> None:
    """Says to the log which stage begins, or goes on. flops: of a token in each stage."""
    work, alone = 0.0, len(stages) == 1
    for before, cost in zip(stages[: stage.number - 1], flops, strict=False):
        work += cost * before.config.steps * before.config.batch * before.config.data.sequence
    say = f"stage {stage.number}/{len(stages)}  {stage.name}: steps {stage.first + 1} to {stage.last}"
    number = 0 if alone else stage.number
    metrics.enter(number, flops[stage.number - 1], tokens_by(stages, stage.first), work, "" if alone else say)


def epochs(run: Run) -> dict[str, float]:
    """How often each source of this stage is read so far, since the run began."""
    assert run.place.samples is not None
    return {f"epochs/{name}": number for name, number in run.place.samples.epochs(run.place.cursor).items()}


def warn_of_readings(run: Run) -> None:
    """Says what of this stage's data an upcycled model will read too often."""
    if not run.config.model.upcycle or not run.leads:
        return
    assert run.place.samples is not None
    left = (run.stage.last - run.state.step) * run.stage.config.batch
    by_then = run.place.samples.epochs(run.place.cursor + left)
    often = {name: number for name, number in by_then.items() if number > OFTEN}
    if often:
        times = ", ".join(f"{name} {number:.1f} times" for name, number in often.items())
        warnings.warn(
            f"by step {run.stage.last} this run reads {times}: experts learn by heart what they read again, and on "
            "SmolLM2-135M fell behind their dense control so (docs/study.md); give it more text, or fewer steps",
            stacklevel=2,
        )


def at(measures: Measures, step: int, last: int) -> Measures:
    """Those that are to be made after a step."""
    return {name: (every, make) for name, (every, make) in measures.items() if due(step, every, last)}


def missing(run: Run, step: int, measures: Measures) -> Measures:
    """Those that the log does not have, because the run ended after the step's checkpoint and before they were made."""
    row = next((row for row in read_metrics(run.folder) if row["step"] == step), {}) if run.leads else {}
    names = broadcast([name for name in measures if not any(key.startswith(name) for key in row)])
    return {name: measures[name] for name in names}


def measured(metrics: Metrics, step: int, measures: Measures) -> bool:
    """Makes and logs them; False if the run was asked to stop before all were made."""
    try:
        for _, make in measures.values():
            metrics.log(step, **make())
    except Stopped:
        return False
    return True


def evaluated(ask: Ask, enter: Callable[[str], object]) -> Mapping[str, float]:
    enter("evaluation")
    return ask()


def draw(folder: Path) -> None:
    """plots.png, where matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is not None:
        from training.observe.plots import plot

        plot([folder], folder / "plots.png")


def due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)
