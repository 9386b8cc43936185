"""Evaluation during training: its config, and what the loop expects of a Suite.

Nothing here knows evaluation/: training/__main__.py imports its suite, where a run wants one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from training.checkpoint.layout import Origin
from training.model.decoder import Decoder
from training.parallel.mesh import ParallelMesh


@dataclass(frozen=True)
class EvalConfig:
    every: int = 0  # steps between evaluations, besides those before the first and after the last; 0: none
    suite: str = "tiny"  # a file of evaluation/suites, or one of your own
    data: str = ""  # a folder with the suite's files; "": from the hub
    texts: tuple[str, ...] = ()  # suite perplexity: .txt, .jsonl or .jsonl.zst
    fewshot: int | None = None  # examples in a prompt, where the task leaves it open
    limit: int = 0  # items of each task; 0: all
    tokenizer: str = ""  # a folder with one; "": the checkpoint's

    def __post_init__(self) -> None:
        for name in ("every", "limit", "fewshot"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"eval.{name} is {getattr(self, name)}; it must be at least 0")


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
