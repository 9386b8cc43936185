"""Load the suite that evaluates a run while it trains; only this file of training imports evaluation and lm-eval."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from training.config.schema import TrainConfig
from upcycle.cli.frame import install


def suite_of(config: TrainConfig) -> Any:
    """Return the module evaluation.ask.run if the run has a suite, else None.

    Its `ready` raises for wrong keys of eval; its `live` returns a function that evaluates the model.
    """
    if not config.eval.every:
        return None
    try:
        return import_module("evaluation.ask.run")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"eval.every={config.eval.every} needs the package {error.name}, which is not installed; "
            f"{install('lm_eval')}, or write eval.every=0"
        ) from None
