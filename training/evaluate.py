"""A suite of evaluation/, asked of the model as it trains.

The only file of training that knows evaluation, and only where a run wants it: lm-eval is imported then.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

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
        if self.every < 0:
            raise ValueError(f"eval.every is {self.every}; it must be at least 0")


def asker(config: EvalConfig, origin: Origin, model: Decoder, mesh: ParallelMesh) -> Callable[[], Mapping[str, float]]:
    """What asks the suite and returns its numbers, on all ranks together. Found wrong before training starts."""
    if not config.every:
        return dict
    if mesh.size("pp") > 1:
        raise ValueError(f"mesh.pp={mesh.size('pp')}: a pipeline is not evaluated while it trains; write eval.every=0")
    try:
        run = importlib.import_module("evaluation.run")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"eval.every={config.every} needs the package {error.name}, which is not installed; "
            'pip install -e ".[eval]", or write eval.every=0'
        ) from None
    source = str(origin.files[0].parent) if origin.files else "the checkpoint"
    words = importlib.import_module("evaluation.load").load_tokenizer(source, origin, config.tokenizer)
    asked = {name: getattr(config, name) for name in ("data", "texts", "fewshot", "limit")}
    return partial(run.evaluate_live, model, words, config.suite, mesh, **asked)
