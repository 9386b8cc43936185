"""Open the model that a run trains, and build this rank's parts of it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from training.checkpoint import layout, standalone
from training.checkpoint.layout import Origin
from training.config.reading import upcycle_config
from training.config.schema import ModelConfig, TrainConfig
from training.config.stages import stages_of
from training.data.open import first_tokens
from training.experts import AUTO, SPECIFICATION, Need, fastest, unfit
from training.model import transformer_engine
from training.model.decoder import Decoder
from training.model.lora import attach, encode
from training.model.nf4 import NF4
from training.model.stock.model import dense_of, model_of
from training.optim.slots import freeze
from training.optim.teacher import Teacher, check_teacher, made
from training.parallel.mesh import ParallelMesh
from training.parallel.pipeline import cut, stages
from training.parallel.placement import rule
from training.parallel.processes import rank
from training.parallel.shard import parallelize
from upcycle import plugin
from upcycle.arch.spec import DenseSpec, MoESpec
from upcycle.io.checkpoint import Checkpoint
from upcycle.planning.plan import UpcyclePlan


def nothing(plan: UpcyclePlan, checkpoints: Sequence[Checkpoint]) -> Mapping[str, Tensor]:
    """Measure nothing on text."""
    return {}


def observing(config: TrainConfig, device: torch.device) -> layout.Observe:
    """Return the function that measures for upcycling on this device, on the texts of model.upcycle or the run's first
    ones, unless the run's folder has the measurements."""
    first = stages_of(config)[0].config
    folder = Path(config.output) if config.output else None
    given = partial(first_tokens, first.data, first.steps * first.batch)
    return partial(standalone.measured_once, folder=folder, given=given, device=device)


def source(config: TrainConfig, observe: layout.Observe = nothing) -> AbstractContextManager[Origin]:
    """Open the Origin of the config's model. Without `observe` it knows sizes but nothing measured on text."""
    model, text = config.model, bool(stages_of(config)[0].config.data.train)
    return layout.online(upcycle_config(model), observe, text=text) if model.upcycle else layout.opened(model.source)


def origin_of(config: TrainConfig, kept: bool, observe: layout.Observe = nothing) -> AbstractContextManager[Origin]:
    """Open the Origin in the run's folder if `kept`, else that of the config's model."""
    return nullcontext(standalone.kept(Path(config.output))) if kept else source(config, observe)


def taught_by(config: TrainConfig) -> AbstractContextManager[Origin]:
    """Open the Origin of the teacher: the one that the config names, else the upcycled dense model."""
    name = config.teacher.source or (upcycle_config(config.model).source if config.model.upcycle else "")
    if not name:
        raise ValueError("this config has no teacher, because it upcycles no dense model; write teacher.source")
    return layout.opened(name)


def teacher_of(config: TrainConfig, origin: Origin, mesh: ParallelMesh, device: torch.device) -> Teacher | None:
    """Return the config's teacher with its weights, if any stage has one."""
    config = next((stage.config for stage in stages_of(config) if stage.config.teacher.asked), config)
    if not config.teacher.asked:
        return None
    with taught_by(config) as of_teacher:
        dense = check_teacher(of_teacher, origin.spec)
        model = replace(config.model, recompute="none")
        decoder = room(made(dense, getattr(torch, model.computes(device.type))), model, mesh, device)
        return Teacher(layout.load(decoder, of_teacher), config.teacher.temperature)


def with_backend(
    config: TrainConfig, spec: DenseSpec | MoESpec, device: str, before: str = ""
) -> tuple[TrainConfig, str]:
    """Return the config with an expert backend, and a sentence if it asks for one: the run's `before` or the fastest.

    A dense model needs none, and a config that names one keeps it."""
    if config.model.expert_backend != AUTO or not isinstance(spec, MoESpec):
        return config, ""
    dtype, dense = getattr(torch, config.model.computes(device)), spec.dense
    width, adapters = max(spec.widths) // config.mesh.etp, bool(config.lora.rank)
    need = Need(dense.hidden, width, dtype, device, dense.activation, dense.gated, dense.ffn_bias, adapters)
    name, why = fastest(need)
    more = f" ({why.partition('; use ')[0]})" if why and device == "cuda" else ""
    if before != name and before in plugin.names("training.experts") and not unfit(before, need):
        name, more = before, f", as this run did before; {name} is the fastest here"
    return replace(config, model=replace(config.model, expert_backend=name)), f"computes experts by {name}{more}"


def say(sentence: str) -> None:
    """Print a sentence on stderr, if there is one, from rank 0 alone."""
    if sentence and rank() == 0:
        print(sentence, file=sys.stderr)


def whole_on_meta(spec: DenseSpec | MoESpec, config: TrainConfig) -> Decoder:
    """Return the whole model with its adapters on the meta device, for its names."""
    with torch.device("meta"):
        whole = model_of(spec, experts=SPECIFICATION)
        attach(whole, config.lora)
    return whole


def stages_of_rank(spec: DenseSpec | MoESpec, mesh: ParallelMesh) -> list[range]:
    """Return the layers of each of this rank's parts."""
    pp, name = mesh.size("pp"), mesh.config.schedule
    if pp == 1:
        return [range(dense_of(spec).layers)]
    layers = cut(spec, pp, name)
    return [layers[stage] for stage in stages(pp, name)[mesh.index("pp")]]


def divided(config: TrainConfig, origin: Origin, mesh: ParallelMesh, layers: range, device: torch.device) -> Decoder:
    """Return a Decoder of these layers with memory for this rank's share only."""
    model = config.model
    with torch.device("meta"):
        compute = getattr(torch, model.computes(device.type))
        part = model_of(origin.spec, part=layers, experts=model.expert_backend, compute=compute)
        attach(part, config.lora)
    freeze(part, *(stage.config.optim for stage in stages_of(config)))
    hold(part, held_in(model, origin.spec))
    encode(part, model.frozen)
    return room(part, model, mesh, device)


def held_in(model: ModelConfig, spec: DenseSpec | MoESpec) -> torch.dtype:
    """Return the dtype of the weights that never learn, except those of 4 bits."""
    if dense_of(spec).carried is not None:
        return torch.float32  # transformers' layers need one dtype
    narrow = model.frozen or (spec.dtype if model.computes() == "bfloat16" else "")
    narrow = model.computes() if narrow == NF4 else narrow
    return torch.bfloat16 if narrow == "bfloat16" else torch.float32


def hold(part: Decoder, dtype: torch.dtype) -> None:
    """Give this dtype to the frozen parameters of a part on the meta device, which need no float32 master.

    Routers and norms keep float32: they are small and are gathered with parameters that learn.
    """
    for name, parameter in part.named_parameters():
        if not parameter.requires_grad and not rule(name, part.dense).exact:
            parameter.data = parameter.data.to(dtype)


def room(part: Decoder, model: ModelConfig, mesh: ParallelMesh, device: torch.device) -> Decoder:
    """Divide a part on the meta device as `model` says, and return it with memory for this rank's share."""
    transformer_engine.use(part, model.transformer_engine)
    parallelize(part, mesh, recomputed=model.recompute, compiled=model.compile)
    return part.to_empty(device=device)


def under_one_roof(parts: Sequence[Decoder]) -> Decoder:
    """Return a Decoder with all parts' parameters under the whole model's names; only a single part can compute."""
    if len(parts) == 1:
        return parts[0]
    roof = Decoder(parts[0].moe or parts[0].dense, part=range(1, 1))
    for part in parts:
        roof.layers.update(dict(part.layers.items()))
        roof.embed = roof.embed or part.embed  # if tied, use the first part's (see Pipeline.sum_tied)
        roof.final_norm, roof.head = roof.final_norm or part.final_norm, roof.head or part.head
    return roof
