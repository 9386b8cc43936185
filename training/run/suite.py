"""Fetch the suite that evaluates a run while it trains. Only here does training name evaluation, and so lm-eval."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Protocol, cast

from training.checkpoint.layout import Origin
from training.config.schema import EvalConfig, TrainConfig
from training.model.decoder import Decoder
from training.parallel.mesh import ParallelMesh

Ask = Callable[[], Mapping[str, float]]  # called by all ranks together; all get the numbers
Poll = Callable[[], object]  # called by all ranks together; raises Stopped where the run is to end


class Suite(Protocol):
    """The module evaluation.ask.run."""

    def ready(self, config: EvalConfig, origin: Origin) -> None:
        """Raise what is wrong with these keys, before the model has its weights."""
        ...

    def live(self, config: EvalConfig, model: Decoder, origin: Origin, mesh: ParallelMesh, poll: Poll) -> Ask:
        """Return the function that evaluates this model. It calls `poll` before each forward, so that nobody waits for
        a suite's end to stop a run."""
        ...


def suite_of(config: TrainConfig) -> Suite | None:
    """Return evaluation's suite, if the run wants one."""
    if not config.eval.every:
        return None
    try:
        return cast(Suite, import_module("evaluation.ask.run"))
    except ModuleNotFoundError as error:
        raise ValueError(
            f"eval.every={config.eval.every} needs the package {error.name}, which is not installed; "
            'pip install -e ".[eval]", or write eval.every=0'
        ) from None
