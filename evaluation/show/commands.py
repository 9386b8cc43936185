"""Say how a training run was made: its settings, the keys that tell runs apart, the command that trains it again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from training.checkpoint import standalone
from training.checkpoint.storage import read_manifest
from training.config.resume import flat, shown
from training.config.schema import ModelConfig, TrainConfig


def config_of(folder: Path) -> dict[str, Any]:
    """Return the settings of a run; empty if it has no run.json."""
    return standalone.settings_of(folder) if standalone.settings_file(folder).is_file() else {}


def settings(folder: Path) -> list[tuple[str, str]]:
    """Return the settings of a training run in a few rows."""
    config = flat(config_of(folder))
    if not config:
        return []

    def said(key: str) -> str:
        return shown(config[key]) if key in config else "?"

    upcycled = standalone.upcycled(folder)
    rate = f"{said('schedule.peak')} to {said('schedule.final')}, {said('schedule.warmup')} steps of warm-up"
    backend = f"{said('model.dtype')}, experts {said('model.expert_backend')}, seed {said('seed')}"
    return [
        ("model", f"upcycled as it was loaded from {upcycled.source}" if upcycled else said("model.source")),
        ("steps", f"{said('steps')} of {said('batch')} sequences of {said('data.sequence')} tokens"),
        ("learning rate", rate),
        ("computed in", backend),
    ]


def differing(arms: Sequence[Sequence[Mapping[str, Any]]]) -> list[tuple[str, ...]]:
    """Return every config key that differs between two runs, with its value in each arm, seed by seed."""
    every = [[flat(config) for config in configs] for configs in arms]
    rows = []
    for key in dict.fromkeys(key for configs in every for config in configs for key in config):
        values = [[shown(config.get(key)) for config in configs] for configs in every]
        if len({value for mine in values for value in mine}) > 1:
            rows.append((key, *(mine[0] if len(set(mine)) == 1 else ", ".join(mine) for mine in values)))
    return rows


def command(folder: Path) -> str:
    """Return the command that trains the run in `folder` again, followed by every key that is not a default."""
    config = config_of(folder)
    if not config:
        return ""
    count, defaults = ranks(folder), json.loads(json.dumps(asdict(TrainConfig(model=ModelConfig(source="?")))))
    words = ["upcycle", "train", str(standalone.settings_file(folder)), "output=AGAIN"]
    words += [f"nproc={count}"] if count > 1 else []
    return f"{shlex.join(words)}\n{yaml.safe_dump(chosen(config, defaults), sort_keys=False)}"


def chosen(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that differ from their defaults, at every depth."""
    out = {}
    for key, value in config.items():
        default = defaults.get(key)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            value, default = chosen(value, default), {}
        if value != default:
            out[key] = value
    return out


def ranks(folder: Path) -> int:
    """Return the number of processes that trained the run, from its newest checkpoint; 1 if there is none."""
    for step in sorted(folder.glob("checkpoints/step-*"), reverse=True):
        with suppress(ValueError):
            return int(read_manifest(step).get("world", 1))
    return 1
