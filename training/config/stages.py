"""Split a run into stages, each with its own steps and a complete config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from training.config.schema import STAGED, StageConfig, TrainConfig, merged, of_stage

ALONG = (  # keys of staged parts that hold for the whole run, because checkpoints and memory depend on them
    "data.stream", "data.tokenizer", "data.seed", "optim.name", "optim.moments", "optim.spike_window", "teacher.source",
)  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """A range of steps with its config: `config.steps` steps after the first `first` ones."""

    number: int  # from 1
    name: str
    first: int
    config: TrainConfig

    @property
    def last(self) -> int:
        return self.first + self.config.steps


def stages_of(config: TrainConfig) -> tuple[Stage, ...]:
    """Return a run's stages, each with a complete config; a run without stages is one stage."""
    if not config.stages:
        return (Stage(1, "", 0, config),)
    found, first = list[Stage](), 0
    for number, own in enumerate(config.stages):
        with of_stage(number):
            stage = settled(config, own)
        found.append(Stage(number + 1, own.name or f"stage {number + 1}", first, stage))
        first = found[-1].last
        if own.optim.get("average") and own is not config.stages[-1]:
            raise ValueError(
                f"stages.{number} has optim.average, which applies at the run's end; write it in the last stage"
            )
    check_sources(found)
    return tuple(found)


def settled(config: TrainConfig, own: StageConfig) -> TrainConfig:
    """Return the run's config changed by a stage's keys."""
    parts = {name: merged(getattr(config, name), getattr(own, name), f"{name}.") for name in STAGED}
    numbers = {name: getattr(own, name) for name in ("batch", "micro_batch") if getattr(own, name)}
    numbers |= {} if own.valid_every is None else {"valid_every": own.valid_every}
    stage = replace(config, stages=(), steps=own.length(config), **parts, **numbers)
    for key in ALONG:
        part, _, name = key.partition(".")
        ours, runs = (getattr(getattr(each, part), name) for each in (stage, config))
        if ours != runs:
            raise ValueError(
                f"{key} is {ours!r} and the run's is {runs!r}; it holds for the whole run, so leave it out here"
            )
    if config.data.stream and replace(stage.data, valid=()) != replace(config.data, valid=()):
        raise ValueError(
            "data differs from the run's, and a stream cannot change between stages; prepare it and use data.train"
        )
    return stage


def check_sources(stages: Sequence[Stage]) -> None:
    """Raise a ValueError if two folders share a name, because the read position is stored by name."""
    paths: dict[str, str] = {}
    for stage in stages:
        for source in stage.config.data.train:
            if paths.setdefault(source.name, source.path) != source.path:
                raise ValueError(
                    f"stages.{stage.number - 1}.data.train has {source.name} in {source.path}, which in an earlier "
                    f"stage is {paths[source.name]}; give one of them another name"
                )


def stage_of(stages: Sequence[Stage], step: int) -> Stage:
    """Return the stage of a step: the first for step 0, the last for steps after the run's end."""
    return next((stage for stage in stages if step <= stage.last), stages[-1])


def tokens_by(stages: Sequence[Stage], step: int) -> int:
    """Return the tokens of the first steps of a run."""
    made = ((max(min(step, stage.last) - stage.first, 0), stage.config) for stage in stages)
    return sum(steps * config.batch * config.data.sequence for steps, config in made)
