"""Read a run's config from a YAML file and key=value words."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from training.config.resume import flat
from training.config.schema import ModelConfig, TrainConfig
from training.config.stages import stages_of
from upcycle.config.reading import build, read
from upcycle.config.ready import TRAIN
from upcycle.config.schema import UpcycleConfig
from upcycle.planning.request import sized


def read_config(file: str, words: Sequence[str] = ()) -> TrainConfig:
    """Read and check the config of a run and its stages."""
    config = read(TrainConfig, file, words, TRAIN)
    stages_of(config)
    return config


def upcycle_config(model: ModelConfig) -> UpcycleConfig:
    """Return `model.upcycle` as the converter's own config."""
    if isinstance(model.upcycle, str):
        return read(UpcycleConfig, model.upcycle)
    return build(UpcycleConfig, model.upcycle, "model.upcycle.")


def settings(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that all ranks must have in common, by key: everything except the device.

    It contains the upcycle config itself, because a file of the same name may differ on another node.
    """
    found = asdict(config)
    del found["device"]
    if config.model.upcycle:
        with suppress(ValueError, OSError):  # code that needs a missing file reports it; a resume does not need it
            found["model"]["upcycle"] = asdict(sized(upcycle_config(config.model))[0])
    return flat(found)
