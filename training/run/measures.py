"""Measure a run between its steps: validation, and a suite that evaluates the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from training.config.suite import suite_of
from training.data.open import open_validation
from training.observe.metrics import Metrics
from training.observe.metrics import read as read_metrics
from training.parallel.collectives import broadcast
from training.parallel.shard import reshard
from training.run.build import Run
from training.run.saving import due
from training.run.step import validate
from training.run.stop import Stopped

Ask = Callable[[], Mapping[str, float]]  # all ranks call it together and get the numbers
Poll = Callable[[], object]  # all ranks call it before each forward; raises Stopped if the run should end
Measures = dict[str, tuple[int, Ask]]  # prefix of the names in the log -> (steps between, function)


def evaluation_of(run: Run, enter: Callable[[str], object], poll: Poll) -> Measures:
    """Return the run's evaluation suite as measures, if it has one."""
    suite = suite_of(run.whole)
    if suite is None:
        return {}
    ask: Ask = suite.live(run.whole.eval, run.model, run.origin, run.mesh, poll)

    def evaluate() -> Mapping[str, float]:
        enter("evaluation")
        return ask()

    return {"eval/": (run.whole.eval.every, evaluate)}


def validation_of(run: Run, poll: Poll) -> Measures:
    """Return the validation of the current stage as measures."""
    valid = open_validation(run.config.data, run.origin.dense.vocab)
    return {"valid/": (run.config.valid_every, partial(validate, run, valid, poll))}


def at(measures: Measures, step: int, last: int) -> Measures:
    """Return the measures that are due after a step."""
    return {name: (every, make) for name, (every, make) in measures.items() if due(step, every, last)}


def missing(run: Run, step: int, measures: Measures) -> Measures:
    """Return the measures of a step that the log lacks, because the run ended after its checkpoint."""
    row = next((row for row in read_metrics(run.folder) if row["step"] == step), {}) if run.leads else {}
    names = broadcast([name for name in measures if not any(key.startswith(name) for key in row)])
    return {name: measures[name] for name in names}


@contextmanager
def viewed(run: Run) -> Iterator[None]:
    """Show the run's weights as an export has them, and free what was gathered of them afterwards."""
    with run.optimizer.viewed():
        try:
            yield
        finally:
            for part in run.parts:
                reshard(part)


def measured(metrics: Metrics, step: int, measures: Measures) -> bool:
    """Compute and log measures; return False if the run was asked to stop before the end."""
    try:
        for _, make in measures.values():
            metrics.log(step, **make())
    except Stopped:
        return False
    return True
