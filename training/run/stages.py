"""Enter a stage of a run, and log what it reads and costs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from training.config.schema import TrainConfig
from training.config.stages import Stage, tokens_by
from training.data.batch import Samples
from training.data.mixture import DataConfig
from training.data.open import open_training
from training.observe.flops import model_flops, spared_flops
from training.observe.metrics import Metrics
from training.optim.slots import freeze
from training.parallel.shard import learns_anew
from training.run.build import Run
from training.run.parts import taught_by, whole_on_meta
from upcycle.arch.spec import DenseSpec, MoESpec

OFTEN = 1.5  # readings of a text after which an upcycled model fell behind the dense one (docs/science.md)


def enter(run: Run, stage: Stage, order: Callable[[DataConfig], DataConfig] = lambda data: data) -> Samples:
    """Enter a stage where the last one ended or a checkpoint was made, and return its data from the current position
    on. `order` gives an island its own order."""
    if run.follow(stage):
        for part in run.parts:
            learns_anew(part)
    place = run.place
    if place.samples is not None:
        place.saved = place.samples.state(place.cursor)
    place.samples = open_training(order(stage.config.data), run.origin.dense.vocab, place.saved)
    return place.samples


def announce(metrics: Metrics, stage: Stage, stages: Sequence[Stage], flops: Sequence[float]) -> None:
    """Log which stage begins or continues. `flops`: FLOPs per token in each stage."""
    work, alone = 0.0, len(stages) == 1
    for before, cost in zip(stages[: stage.number - 1], flops, strict=False):
        work += cost * before.config.steps * before.config.batch * before.config.data.sequence
    say = f"stage {stage.number}/{len(stages)}  {stage.name}: steps {stage.first + 1} to {stage.last}"
    number = 0 if alone else stage.number
    metrics.enter(number, flops[stage.number - 1], tokens_by(stages, stage.first), work, "" if alone else say)


def flops_a_token(config: TrainConfig, spec: DenseSpec | MoESpec) -> float:
    """Return the training FLOPs per token: the model's without unused gradients, plus the teacher's forward."""
    whole = whole_on_meta(spec, config)
    freeze(whole, config.optim)
    flops = model_flops(spec, config.data.sequence) - spared_flops(whole, spec, config.data.sequence)
    if config.teacher.asked:
        with taught_by(config) as teacher:
            flops += model_flops(teacher.spec, config.data.sequence) / 3
    return flops


def epochs(run: Run) -> dict[str, float]:
    """Return how often each source of this stage has been read since the run began."""
    assert run.place.samples is not None
    return {f"epochs/{name}": number for name, number in run.place.samples.epochs(run.place.cursor).items()}


def warn_of_readings(run: Run) -> None:
    """Warn about texts that an upcycled model will read too often in this stage."""
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
            "SmolLM2-135M fell behind their dense control so (docs/science.md); give it more text, or fewer steps",
            stacklevel=2,
        )
