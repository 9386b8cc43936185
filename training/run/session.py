"""Hold a run's open resources and implement each step of the loop. All ranks call every method together."""

from __future__ import annotations

import importlib.util
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch

from training.checkpoint import peft
from training.checkpoint.export import Weights, export, exported, facts_of, folder_for, send
from training.checkpoint.mirror import Mirror, mirrored
from training.config.reading import settings
from training.config.resume import flat
from training.config.schema import TrainConfig
from training.config.stages import Stage, stage_of, tokens_by
from training.data.batch import Batch
from training.data.mixture import Loader
from training.islands.island import Island
from training.observe.metrics import Metrics, Value
from training.observe.profiling import Trace, memory_snapshot, steps_to_trace
from training.optim.schedule import schedule
from training.optim.teacher import weights
from training.parallel.collectives import broadcast, local
from training.parallel.processes import alone, processes
from training.parallel.watch import Watch, guarded
from training.run import measures, saving, stages, step
from training.run.build import Run, begin, loader_of, start
from training.run.parts import say
from training.run.preflight import check_export
from training.run.record import Recorded, Step, stepping
from training.run.saving import due
from training.run.stop import Stop, Stopped, anywhere
from upcycle.io import hub, publish
from upcycle.io.checkpoint import Checkpoint
from upcycle.io.remote import holds, is_url


@contextmanager
def opened(config: TrainConfig) -> Iterator[Session]:
    """Open a run's processes, their watch, its folder and its model; yield the session, and close what it opened."""
    torch.manual_seed(config.seed)  # no code uses these two generators; if a module ever does, it is reproducible
    random.seed(config.seed)
    patience = timedelta(minutes=config.patience)
    with (
        mirrored(config.checkpoint, Path(config.output)) as mirror,  # the first, because others need not wait for it
        processes(config.device, patience, settings(config)) as device,
        guarded(patience, folder=Path(config.output)) as watch,
        alone(Path(config.output)),
        start(config, device) as run,
        ExitStack() as stack,
    ):
        run.phases.tell = watch.enter
        yield Session(run, watch, stack, mirror)


class Session:
    """An open run."""

    loader: Loader
    metrics: Metrics
    lr: float  # learning rate of the last step
    make_step: Step | None = None  # of the current stage

    def __init__(self, run: Run, watch: Watch, stack: ExitStack, mirror: Mirror | None) -> None:
        self.run, self.watch, self.stack, self.reading = run, watch, stack, ExitStack()
        self.config, self.folder, self.state = run.whole, run.folder, run.state
        self.stop, self.stopped, self.again = Stop(), False, False
        self.island = Island(run) if self.config.islands.asked else None
        if self.island is not None:
            self.state.parts["island"] = self.island
        self.checkpoints = stack.enter_context(saving.checkpoints_of(run, mirror))
        self.trace = stack.enter_context(Trace(run.folder, steps_to_trace(self.config.profile if run.leads else "")))
        if self.config.memory_snapshot and run.leads:
            stack.enter_context(memory_snapshot(run.folder / "memory.pickle"))

    def begin(self) -> None:
        """Load the newest checkpoint or the weights of step 0, open the log, and make measures that it lacks for this
        step.
        """
        run, config = self.run, self.config
        self.first = self.saved = self.checkpoints.load(self.state)
        if self.first < config.steps:
            if self.state.light and run.leads:
                warnings.warn(
                    f"the checkpoint of step {self.first} was the last of a run with checkpoint.last=weights, so "
                    "moments start at zero",
                    stacklevel=2,
                )
            self.checkpoints.check_room(self.state, saving.saves_left(run, self.first))
        if not self.first:
            begin(run)
        self.model = folder_for(config.export, self.folder, config.steps)
        self.exported = bool(config.export) and exported(self.model)
        if is_url(config.export):
            self.exported |= broadcast(run.leads and holds(config.export, publish.MANIFEST))
        self.adapted = bool(config.lora.export) and exported(Path(config.lora.export))
        check_export(config, self.first)  # again: a damaged checkpoint may have been skipped
        if self.island is not None and (self.first < config.steps or self.island.pending is not None):
            self.saved = self.saved if self.island.pending is None else 0  # joining finishes what was saved
            self.island.join()
        self.poll = partial(self.stop.poll, run.control)
        self.evaluation = measures.evaluation_of(run, self.watch.enter, self.poll)
        order = self.island.order if self.island else lambda data: data
        self.samples = stages.enter(run, stage_of(run.stages, self.first), order)
        saving.describe(run)
        self.checkpoints.mirror_again()
        self.flops = [stages.flops_a_token(stage.config, run.origin.spec) for stage in run.stages]
        self.metrics = Metrics(
            run.folder,
            self.first,
            steps=config.steps,
            planned=partial(tokens_by, run.stages),
            gpus=run.mesh.world,
            config=flat(saving.plain(config)),
            **asdict(config.log),
        )
        for part in (self.metrics, self.stop, self.reading):
            self.stack.enter_context(part)
        self.announce()
        self.measure(measures.missing(run, self.first, self.due_measures()) if self.first else self.measures)

    def announce(self) -> None:
        """Log the current stage, and open its validation."""
        stages.announce(self.metrics, self.run.stage, self.run.stages, self.flops)
        self.measures = measures.validation_of(self.run, self.poll) | self.evaluation

    def stages_left(self) -> Iterator[Stage]:
        """Yield the remaining stages until something stops the run."""
        for stage in self.run.stages:
            if stage.last > self.first and not self.stopped:
                yield stage

    def begin_stage(self, stage: Stage) -> None:
        """Enter a stage: its data, its rates, and its step function."""
        run, config = self.run, stage.config
        self.reading.close()
        if stage is not run.stage:
            self.samples = stages.enter(run, stage)
            self.announce()
        stages.warn_of_readings(run)
        self.rate, self.teaching = schedule(config.schedule, config.steps), weights(config.teacher, config.steps)
        self.make_step = stepping(run, step.train_step)
        self.loader = self.reading.enter_context(loader_of(run, self.samples))

    def goes_on(self) -> bool:
        """Return whether the stage has a step left and the run should not stop."""
        return self.state.step < self.run.stage.last and not self.stopped

    def next_batches(self) -> list[Batch]:
        """Return the micro-batches of the next step."""
        number = self.state.step + 1
        self.watch.doing(f"step {number}")
        self.trace.before(number)
        with self.run.phases("data"):
            found = [next(self.loader) for _ in range(self.run.micro_batches)]
        self.cursor = found[-1][1]
        return [batch for batch, _ in found]

    def learn(self, batches: Sequence[Batch]) -> dict[str, Value]:
        """Take a step and return its metrics, which are on the device."""
        run, done = self.run, self.state.step - self.run.stage.first
        self.lr = self.rate(done)
        if run.teacher is not None:
            run.teacher.begin(self.teaching(done))
        assert self.make_step is not None
        learned = self.make_step(batches, self.lr)
        self.state.step, run.place.cursor = self.state.step + 1, self.cursor
        run.optimizer.finish(done + 1, run.stage.config.steps, run.stage is run.stages[-1])
        return dict(learned)

    def exchange(self) -> dict[str, Value]:
        """Exchange with the other islands if due, and return the metrics."""
        if self.island is None:
            return {}
        return dict(self.island.after(self.state.step, self.lr, lambda: self.stop.signal is not None))

    def count(self, figures: Mapping[str, Value]) -> None:
        """Store a step's metrics for the log."""
        tokens = self.run.config.batch * self.run.config.data.sequence
        self.metrics.step(self.state.step, tokens=tokens, lr=self.lr, **figures)

    def heed_signals(self) -> None:
        """Check whether any rank was asked to stop or could not write the last checkpoint."""
        asked = [self.stop.signal is not None, self.checkpoints.failed]
        self.stopped, self.again = anywhere(asked, self.run.control)

    def log_if_due(self) -> None:
        """Write a line of the log."""
        run = self.run
        if due(self.state.step, self.config.log_every, run.stage.last) or self.stopped:
            seconds = run.phases.fetch(max(self.metrics.taken, 1))
            self.metrics.log(self.state.step, **step.balance_numbers(run), **seconds, **stages.epochs(run))
            saving.check_arrived(run)

    def check_alive(self) -> None:
        """End a run that no longer learns."""
        saving.check_alive(self.run)

    def save_if_due(self) -> None:
        """Save if due, before long measures: a run that is stopped in a validation has no time left to save.

        Raise a ValueError after saving if the server of islands did not answer."""
        problem = "" if self.island is None else self.island.problem
        if saving.worth_saving(self.run) or self.stopped or self.again or problem:
            self.save()
        if problem:
            raise ValueError(f"{problem}; the run is saved at step {self.state.step}")

    def save(self) -> None:
        """Save the run after the log is on disk."""
        self.watch.enter("checkpoint")
        self.metrics.sync()
        shown = [local(slot.master.detach()) for slot in self.run.optimizer.pulled]  # validations pull them together
        self.checkpoints.save(self.state.step, self.state, last=self.state.step == self.config.steps, shown=shown)
        self.saved = self.state.step

    def due_measures(self) -> measures.Measures:
        """Return the measures that are due after this step."""
        return measures.at(self.measures, self.state.step, self.run.stage.last)

    def validate_if_due(self) -> None:
        """Validate and evaluate if due, unless the run should stop."""
        if not self.stopped:
            self.measure(self.due_measures())

    def measure(self, wanted: measures.Measures) -> None:
        """Compute and log measures; a signal during them stops the run."""
        if wanted and isinstance(self.make_step, Recorded):
            self.make_step.make_room()
        with measures.viewed(self.run) if wanted else nullcontext():
            self.stopped = not measures.measured(self.metrics, self.state.step, wanted)

    def finish(self) -> None:
        """Save, close the log, and at the run's end draw the picture and write the exports."""
        self.reading.close()
        if self.saved < self.state.step:
            self.save()
        if self.run.leads and (self.state.step > self.first or not self.stopped):  # otherwise it may have no loss yet
            draw(self.folder)  # while the last checkpoint is written
        self.checkpoints.settle(self.state)
        self.stack.close()
        if not self.stopped:
            saving.check_learned(self.run)  # again: an older version may have saved the last step
            self.export()

    def export(self) -> None:
        """Write the model and its adapters to the config's folders, if they are missing."""
        run, config = self.run, self.config
        facts = facts_of(run.folder, run.state.step) if run.leads else {}
        if config.export and not self.exported:
            self.watch.enter("export")
            model, newest = saving.whole_of(run)
            with run.optimizer.viewed() if newest is None else nullcontext():  # the checkpoint says it itself
                export(model, run.origin, self.model, saved=newest, facts=facts)
        if config.lora.export and not self.adapted:
            self.watch.enter("export")
            peft.write(Weights(*saving.whole_of(run)), run.origin, config.lora, facts)

    def push(self) -> None:
        """Upload the export to the Hub and to its store. Rank 0 does it alone, after the others have ended."""
        if self.stopped or not self.run.leads:
            return
        if self.config.push:
            there = self.model if self.model.is_dir() else Checkpoint.open(self.config.export).folder
            say(f"uploaded to {hub.push(there, self.config.push)}")
        send(self.model, self.config.export)

    def say_if_stopped(self) -> None:
        """Raise Stopped if the run is not at its end."""
        if self.stopped:
            raise Stopped(self.state.step)


def draw(folder: Path) -> None:
    """Draw plots.png, if matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is not None:
        from training.observe.plots import plot

        plot([folder], folder / "plots.png")
