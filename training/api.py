"""The Python API of training: each function does what a command does (docs/api.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch

from training.checkpoint import export as exporting
from training.checkpoint import standalone
from training.checkpoint.state import check_model
from training.config.schema import TrainConfig
from training.config.stages import stages_of
from training.data.prepare import PrepareConfig
from training.data.prepare import prepare as prepare_shards
from training.data.shards import read_meta
from training.estimating.estimate import EstimateConfig, estimate_run
from training.estimating.recommend import RecommendConfig
from training.estimating.recommend import recommend as recommend_arms
from training.experts import SPECIFICATION
from training.model.stock.model import model_of
from training.parallel.processes import processes, rank
from training.parts import join as joining
from training.parts.add import AddConfig
from training.parts.add import add as add_part
from training.parts.upgrade import UpgradeConfig
from training.parts.upgrade import upgrade as move
from training.run import loop
from upcycle.config.reading import config_of
from upcycle.config.ready import TRAIN
from upcycle.io import publish
from upcycle.io.job import Worker, check_apart
from upcycle.io.remote import holds, is_url

Config = str | PathLike[str] | Mapping[str, Any] | TrainConfig


def train(config: Config = "", /, **keys: Any) -> Path:
    """Train a config (a YAML file, a ready config's name, or keys and values), changed by `keys`; return the run's
    folder.

    A stopped run resumes. Raises training.run.stop.Stopped if it is asked to stop.
    """
    asked = config_of(TrainConfig, config, keys, TRAIN)
    stages_of(asked)
    loop.train(asked)
    return Path(asked.output)


def prepare(output: str | PathLike[str], config: str | Mapping[str, Any] = "", /, **keys: Any) -> dict[str, Any]:
    """Turn texts into token shards in the folder `output`, and return its meta.json: documents, tokens, bytes."""
    asked = config_of(PrepareConfig, config, {**keys, "output": fspath(output)})
    prepare_shards(asked, Worker.here())
    return dict(read_meta(Path(output)))


def export(run: str | PathLike[str], output: str | PathLike[str]) -> int:
    """Export a run or one of its checkpoints as a Hugging Face folder; return the checkpoint's step."""
    source = Path(run)
    home, folder = standalone.training_run(source)
    if home is None:
        raise ValueError(f"{source} is not a training run or a checkpoint; give the folder that contains checkpoints/")
    target = fspath(output)
    if is_url(target) and holds(target, publish.MANIFEST):
        raise ValueError(f"{target} exists already; remove it or choose another address")
    if not is_url(target):
        if Path(target).exists():
            check_apart("output", Path(target), [home], "-exported")
        exporting.check_new(Path(target))
    origin = standalone.kept(home)
    with processes("cpu"):
        with torch.device("meta"):
            model = model_of(origin.spec, experts=SPECIFICATION, compute=torch.float32)
            standalone.attach_adapters(model, home)
        saved = standalone.shards_of(home, folder)
        check_model(model, saved)
        made = exporting.folder_for(target, home, saved.step)
        if not (is_url(target) and exporting.exported(made)):  # else a killed process has not sent it
            exporting.export(model, origin, made, saved=saved, facts=exporting.facts_of(home, saved.step))
    if rank() == 0:
        exporting.send(made, target)
    return saved.step


def add(
    model: str | PathLike[str],
    *,
    documents: str | PathLike[str],
    general: str | PathLike[str],
    name: str,
    output: str | PathLike[str],
    **keys: Any,
) -> Path:
    """Make the part `name` of a model: new copies of its FFNs that learn the documents; return its folder. `keys`
    change the ready config `part`.
    """
    asked = AddConfig(fspath(model), fspath(documents), fspath(general), name, fspath(output))
    return make_part(asked, [f"{key}={json.dumps(value)}" for key, value in keys.items()])


def make_part(asked: AddConfig, words: Sequence[str]) -> Path:
    """Make a part with a training config that words change, as `upcycle add` does."""
    return add_part(asked, words, loop.train)


def join(base: str | PathLike[str], *parts: str | PathLike[str], output: str | PathLike[str]) -> Path:
    """Write a model of a base with parts, and return its folder."""
    return joining.join(fspath(base), [fspath(part) for part in parts], fspath(output))


def remove(folder: str | PathLike[str], name: str, output: str | PathLike[str]) -> Path:
    """Write a joined model without a part, or the base's own files if it was the last; return the folder."""
    return joining.remove(fspath(folder), name, fspath(output))


def upgrade(
    part: str | PathLike[str],
    old: str | PathLike[str],
    new: str | PathLike[str],
    *,
    documents: str | PathLike[str],
    output: str | PathLike[str],
) -> Path:
    """Write a part for a base that was trained further, and return its folder; raise a ValueError with the losses if it
    breaks there.
    """
    return move(UpgradeConfig(fspath(part), fspath(old), fspath(new), fspath(documents), fspath(output)))[0]


def estimate(
    config: Config = "",
    /,
    *,
    gpus: int,
    hardware: str = "",
    budget: str = "",
    price: float = 0.0,
    seen: str = "",
    **keys: Any,
) -> str:
    """Return the table of memory, and with `hardware` of seconds, for every mapping on `gpus` GPUs."""
    asked = EstimateConfig(gpus=gpus, hardware=hardware, budget=budget, price=price, seen=seen)
    return estimate_run(config_of(TrainConfig, config, keys, TRAIN), asked)


def recommend(source: str | PathLike[str], *, gpus: str, tokens: str, sequence: int = 0) -> str:
    """Compare dense training, slices and copies for GPUs such as "8xh100" and tokens such as "10B"; return table and
    commands.
    """
    return recommend_arms(RecommendConfig(source=fspath(source), gpus=gpus, tokens=tokens, sequence=sequence))
