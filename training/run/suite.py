"""Evaluation during training: what the loop expects of a Suite.

Nothing here knows evaluation/: training/__main__.py imports its suite, where a run wants one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from training.checkpoint.layout import Origin
from training.config.schema import EvalConfig
from training.model.decoder import Decoder
from training.parallel.mesh import ParallelMesh

Ask = Callable[[], Mapping[str, float]]  # called by all ranks together; all get the numbers


Poll = Callable[[], object]  # called by all ranks together; raises Stopped where the run is to end


class Suite(Protocol):
    """The module evaluation.ask.run."""

    def ready(self, config: EvalConfig, origin: Origin) -> None:
        """Raises what is wrong with these keys, before the model has its weights."""
        ...

    def live(self, config: EvalConfig, model: Decoder, origin: Origin, mesh: ParallelMesh, poll: Poll) -> Ask:
        """Returns the function that evaluates this model. `poll` is called before each forward, so that nobody waits
        for a suite's end to stop a run."""
        ...
