"""What is wrong with a run and can be known before its model is made and its weights are read, which takes minutes."""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from training.checkpoint import standalone
from training.checkpoint.layout import Origin
from training.checkpoint.peft import check_peft
from training.checkpoint.state import found, step_of
from training.config.schema import TrainConfig, of_stage
from training.config.stages import stages_of
from training.data.mixture import Mixture, same_tokenizer
from training.data.open import open_training, open_validation
from training.data.shards import partial_of
from training.dispatch.nvlink import check_nodes
from training.optim.schedule import schedule
from training.optim.teacher import check_teacher
from training.run.build import CHECKPOINTS, check_optim, source, taught_by
from training.run.suite import Suite
from upcycle.converting.job import check_ours


def preflight(config: TrainConfig, suite: Suite | None) -> None:
    """Raises a ValueError of one sentence for the first thing that is wrong."""
    if not config.output:
        raise ValueError("output is not set; write output=FOLDER for the run's checkpoints and metrics")
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device is {config.device} and this machine has none; write device=cpu, or leave it out")
    stages = stages_of(config)
    for stage in stages:
        with of_stage(stage.number - 1) if config.stages else nullcontext():
            schedule(stage.config.schedule, stage.config.steps)
    if config.mesh.dispatcher == "nvlink":
        check_nodes(config.mesh.ep, int(os.environ.get("LOCAL_WORLD_SIZE", "0")))
    for name, folder in (("output", config.output), ("export", config.export), ("lora.export", config.lora.export)):
        check_writable(name, Path(folder))
    for name, wanted in (("tensorboard", config.log.tensorboard), ("wandb", config.log.wandb)):
        if wanted and importlib.util.find_spec(name) is None:
            raise ValueError(f"{name} is asked for but not installed; pip install {name}, or leave log.{name} out")
    saved = found(Path(config.output) / CHECKPOINTS)
    check_export(config, step_of(saved[0]) if saved else 0)
    with described(config, resumes=bool(saved)) as origin:
        check_optim(config, origin.spec)
        if not saved or step_of(saved[0]) < config.steps:
            check_peft(config.lora, origin)
        for asking in [stage.config for stage in stages if stage.config.teacher.asked][:1]:
            with taught_by(asking) as teacher:
                check_teacher(teacher, origin.spec)
        read = []
        for stage in stages:
            samples = open_training(stage.config.data, origin.dense.vocab)
            read += [source.shards for source in samples.sources] if isinstance(samples, Mixture) else []
            open_validation(stage.config.data, origin.dense.vocab)
        same_tokenizer(read)
        if suite is not None and config.eval.every:
            suite.ready(config.eval, origin)


def described(config: TrainConfig, *, resumes: bool) -> AbstractContextManager[Origin]:
    folder = Path(config.output)
    return (
        nullcontext(standalone.kept(folder)) if resumes and standalone.keeps(folder, config.model) else source(config)
    )


def check_export(config: TrainConfig, step: int) -> None:
    """Refuses an export that is there; but of a run that is at its end, whose own it may be."""
    if config.export and step < config.steps and Path(config.export).exists():
        raise ValueError(f"export={config.export} exists already; remove it or choose another folder")
    if config.export:
        check_ours(partial_of(Path(config.export)))


def check_writable(name: str, folder: Path) -> None:
    there = next(path for path in (folder, *folder.parents, Path(".")) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        what = "may not be written to" if there.is_dir() else "is a file"
        raise ValueError(f"{name}={folder} cannot be made, because {there} {what}; choose another folder")
