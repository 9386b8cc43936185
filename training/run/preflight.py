"""Check a run before its model is built and its weights are read, which takes minutes."""

from __future__ import annotations

import os
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from training.checkpoint import mirror, standalone
from training.checkpoint.layout import Origin
from training.checkpoint.peft import ADAPTERS, check_peft
from training.checkpoint.state import CHECKPOINTS, found, step_of
from training.config.reading import upcycle_config
from training.config.schema import ModelConfig, TrainConfig, of_stage
from training.config.stages import Stage, stages_of
from training.config.suite import suite_of
from training.data.mixture import Mixture, same_tokenizer
from training.data.open import check_tokenizer, open_training, open_validation
from training.data.shards import partial_of
from training.dispatch import capabilities
from training.estimating.memory import sized
from training.experts import SPECIFICATION, backend
from training.model.decoder import Decoder
from training.model.lora import attach, check_match, is_adapter
from training.model.nf4 import ALONE, NF4
from training.model.stock.model import dense_of, model_of
from training.observe import trackers
from training.optim.config import settled
from training.optim.schedule import schedule
from training.optim.slots import check_groups
from training.optim.teacher import check_teacher
from training.parallel.mesh import MeshConfig, check, grids
from training.parallel.pipeline import check as check_schedule
from training.parallel.pipeline import cut
from training.parallel.processes import device_here, rank
from training.run.parts import origin_of, say, taught_by, whole_on_meta, with_backend
from upcycle.arch.siblings import text_of
from upcycle.arch.spec import DenseSpec, MoESpec
from upcycle.config.schema import UpcycleConfig
from upcycle.io import disk, publish
from upcycle.io.job import check_apart, check_ours
from upcycle.io.remote import Store, holds, is_url

ISLANDS = "islands"  # folder in a server's folder
# files of a run that ended before it wrote anything else
LEFT = re.compile(r"(\.mirror)?\.lock|secret|memory\.pickle|collectives-rank-\d+\.json|.+\.upcycle\.tmp", re.DOTALL)


def preflight(config: TrainConfig) -> TrainConfig:
    """Return the config with its micro_batch; raise a ValueError for the first problem."""
    if not config.output:
        raise ValueError("output is not set; write output=FOLDER for the run's checkpoints and metrics")
    stages = stages_of(config)
    for stage in stages:
        with of_stage(stage.number - 1) if config.stages else nullcontext():
            schedule(stage.config.schedule, stage.config.steps)
    capabilities(config.mesh.dispatcher).check_nodes(config.mesh.ep, int(os.environ.get("LOCAL_WORLD_SIZE", "0")))
    check_own(Path(config.output))
    for name, folder in (("output", config.output), ("export", config.export), ("lora.export", config.lora.export)):
        check_writable(name, folder)
    trackers.check(config.log.to)
    mirror.restore(config.checkpoint, Path(config.output))
    saved = found(Path(config.output) / CHECKPOINTS)
    step = step_of(saved[0]) if saved else 0
    check_export(config, step)
    with origin_of(config, bool(saved) and standalone.keeps(Path(config.output), config.model)) as origin:
        config, experts = with_own_backend(config, origin)
        config = with_micro_batch(config, origin)
        stages = stages_of(config)
        check_sizes(stages, origin, begun=bool(saved))
        if isinstance(origin.spec, MoESpec):
            backend(config.model.expert_backend)  # raises if it is not installed
        check_optim(config, origin.spec)
        if not saved or step < config.steps:
            check_peft(config.lora, origin)
        for asking in [stage.config for stage in stages if stage.config.teacher.asked][:1]:
            with taught_by(asking) as teacher:
                dense, alone = check_teacher(teacher, origin.spec), replace(config.mesh, ep=1, etp=1)
                check(alone, world_size(), dense, asking.data.sequence)
        check_data(stages, origin, begun=bool(saved))
        if (suite := suite_of(config)) is not None:
            suite.ready(config.eval, origin)
    say(experts)
    return config


def with_own_backend(config: TrainConfig, origin: Origin) -> tuple[TrainConfig, str]:
    """Return the config with an expert backend, the run's earlier one where it can be, and a sentence that says so."""
    folder = Path(config.output)
    known = standalone.begun(folder) and standalone.settings_file(folder).is_file()
    dtype, before = (standalone.dtype_of(folder), standalone.backend_of(folder)) if known else ("", "")
    asked = replace(config, model=replace(config.model, dtype=config.model.dtype or dtype))
    found, sentence = with_backend(asked, origin.spec, device_of(config), before)
    return replace(found, model=replace(found.model, dtype=config.model.dtype)), sentence


def device_of(config: TrainConfig) -> str:
    """Return the kind of device that the run computes on: cuda or cpu."""
    return device_here(config.device).type


def with_micro_batch(config: TrainConfig, origin: Origin) -> TrainConfig:
    """Return the config with a micro_batch; if it asks for one, use the run's earlier one, or what fits, and say it."""
    if config.micro_batch:
        return config
    begun = standalone.begun(Path(config.output))
    before, room = (standalone.micro_batch_of(Path(config.output)) if begun else 0), 0
    ranks = world_size() // (config.mesh.tp * config.mesh.cp)
    if device_of(config) == "cuda":
        room = torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", "0"))).total_memory
    kept = before and all(stage.config.batch % (before * ranks) == 0 for stage in stages_of(config))
    found = replace(config, micro_batch=before) if kept else sized(config, origin.spec, world_size(), room)
    if rank() == 0:
        why = "as before" if kept else f"the most that fits {room / 1e9:.0f} GB by plan" if room else "on a CPU"
        print(f"micro_batch={found.micro_batch}, {why}", file=sys.stderr)
    return found


def check_sizes(stages: tuple[Stage, ...], origin: Origin, *, begun: bool) -> None:
    """Raise a ValueError if mesh, batch or length do not fit the model, before text is measured or weights are read.

    `begun`: whether the run has a checkpoint; then any length is accepted."""
    world, dense, model = world_size(), origin.dense, stages[0].config.model
    for config in (stage.config for stage in stages):
        check(config.mesh, world, origin.spec, config.data.sequence)
        sizes, _ = grids(config.mesh, world)
        check_batch(config, config.mesh, sizes["dp_replicate"] * sizes["dp_shard"])
        stated = dense.carried is None or text_of(origin.config).get("max_position_embeddings")
        if stated and config.data.sequence > dense.longest and not (begun or model.random):
            raise ValueError(
                f"data.sequence={config.data.sequence} is longer than the model's context of {dense.longest} "
                f"tokens; write data.sequence={dense.longest}, or raise max_position_embeddings in the "
                "model's config.json, and adapt its rope, to train on longer texts"
            )
    if config.mesh.pp > 1:
        cut(origin.spec, config.mesh.pp, config.mesh.schedule)


def world_size() -> int:
    """Return the number of processes of the run, which may not be connected yet."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def check_data(stages: tuple[Stage, ...], origin: Origin, *, begun: bool) -> None:
    """Open the data of every stage; raise a ValueError if their tokenizers differ, or are not that of a model that a
    run begins with."""
    read = []
    for stage in stages:
        samples = open_training(stage.config.data, origin.dense.vocab)
        read += [source.shards for source in samples.sources] if isinstance(samples, Mixture) else []
        open_validation(stage.config.data, origin.dense.vocab)
    same_tokenizer(read)
    own = next((path.parent for path in origin.files if path.name == "tokenizer.json"), None)
    if own is not None and not (begun or stages[0].config.model.random):
        for stage in stages:
            check_tokenizer(stage.config.data, own)


def check_export(config: TrainConfig, step: int) -> None:
    """Raise a ValueError if an export folder exists, except a model at the run's end, which may be its own."""
    model, adapters = ("export", config.export, standalone.CONFIG), ("lora.export", config.lora.export, ADAPTERS)
    for name, word, file in (model, adapters):
        folder = Path(word)
        if is_url(word):
            if step < config.steps and holds(word, publish.MANIFEST):
                raise ValueError(f"{name}={word} exists already; remove it or choose another address")
            continue
        if word and folder.exists() and (step < config.steps or not (folder / file).is_file()):
            check_apart(name, folder, folders_read(config), "-trained")
            raise ValueError(f"{name}={folder} exists already; remove it or choose another folder")
        if word and folder.resolve() == Path(config.output).resolve():
            raise ValueError(f"{name}={folder} is also the output, which holds the run; choose another folder")
        if word:
            check_ours(partial_of(folder))


def folders_read(config: TrainConfig) -> list[str]:
    """List the folders that the run reads, and its own folder."""
    made_of = upcycle_config(config.model) if config.model.upcycle else UpcycleConfig()
    data = [each.path for stage in stages_of(config) for each in (*stage.config.data.train, *stage.config.data.valid)]
    return [name for name in (config.output, config.model.source, made_of.source, *made_of.donors, *data) if name]


def check_own(output: Path) -> None:
    """Raise a ValueError if the output folder holds something that is not a run, such as a model."""
    held = sorted(path.name for path in output.iterdir() if not hardly_begun(path)) if output.is_dir() else []
    begun = standalone.begun(output) or found(output / CHECKPOINTS) or any((output / ISLANDS).glob("log-*"))
    if not begun and (others := [name for name in held if not LEFT.fullmatch(name)]):
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        raise ValueError(
            f"output={output} holds {', '.join(others[:3])}{more}, and is not a run; write output=FOLDER for a "
            "folder that is new, empty, or of the run to resume"
        )


def hardly_begun(path: Path) -> bool:
    """Return whether a path is the folder of a run's model or of a server's log, and a kill left no file in it."""
    begins = path.name in (standalone.FOLDER, ISLANDS) and path.is_dir()
    names = [each.name for each in path.iterdir()] if begins else [path.name]
    return all(disk.TEMPORARY.fullmatch(name) for name in names)


def check_writable(name: str, word: str) -> None:
    """Raise a ValueError if a folder cannot be made, here or in a store."""
    if is_url(word):
        if name != "export":
            more = f" and checkpoint.mirror={word}" if name == "output" else ""
            raise ValueError(f"{name}={word} is an address, but must be a folder here; write {name}=FOLDER{more}")
        if rank() == 0:
            Store(word).check_writable()
        return
    folder = Path(word)
    there = next(path for path in (folder, *folder.parents, Path(".")) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        what = "may not be written to" if there.is_dir() else "is a file"
        raise ValueError(f"{name}={folder} cannot be made, because {there} {what}; choose another folder")


def check_optim(config: TrainConfig, spec: DenseSpec | MoESpec) -> None:
    """Raise a ValueError for parameter groups that match nothing, and for keys of copies without copies."""
    for stage in stages_of(config):
        settled(stage.config.optim, spec if isinstance(spec, MoESpec) else None)
    check_stock(config, spec)
    if config.model.frozen == NF4 and not isinstance(spec, MoESpec):
        raise ValueError("model.frozen=nf4 is for routed experts, and this model has none; leave it out")
    with torch.device("meta"):
        check_match(model_of(spec, experts=SPECIFICATION), config.lora)
    check_cuts(spec, config)
    whole = whole_on_meta(spec, config)
    for stage in stages_of(config):
        check_groups(stage.config.optim, [name for name, _ in whole.named_parameters()])


def check_cuts(spec: DenseSpec | MoESpec, config: TrainConfig) -> None:
    """Raise a ValueError if a pipeline stage would have no adapters and so nothing to learn."""
    if not (config.lora.rank and config.mesh.pp > 1):
        return
    for layers in cut(spec, config.mesh.pp, config.mesh.schedule):
        with torch.device("meta"):
            part = Decoder(spec, part=layers, experts=SPECIFICATION)
            attach(part, config.lora)
        if not any(is_adapter(name) for name, _ in part.named_parameters()):
            raise ValueError(
                f"mesh.pp={config.mesh.pp} makes a stage of layers {layers.start} to {layers.stop - 1}, in which "
                f"lora.match={','.join(config.lora.match)} adapts nothing; match more, or take a smaller mesh.pp"
            )


def check_stock(config: TrainConfig, spec: DenseSpec | MoESpec) -> None:
    """Raise a ValueError for keys that transformers' own modelling code does not support."""
    if dense_of(spec).carried is None:
        return
    default: dict[str, Any] = {f"mesh.{axis}": 1 for axis in ("tp", "cp", "pp", "etp")}
    for name in ("random", "compile", "graph", "transformer_engine", "frozen"):
        default[f"model.{name}"] = getattr(ModelConfig(), name)
    default |= {"model.recompute": "none"} if config.model.recompute != "experts" else {}
    default |= {"lora.rank": 0, "eval.every": 0, "islands.join": ""}
    given = [(config, default), *((stage.config, {"data.mask_documents": False}) for stage in stages_of(config))]
    given += [(stage.config, {"teacher.weight": 0.0}) for stage in stages_of(config) if stage.config.teacher.asked]
    for settings, allowed in given:
        for key, instead in allowed.items():
            part, _, name = key.partition(".")
            if (got := getattr(getattr(settings, part), name)) != instead:
                raise ValueError(
                    f"{key} is {shown(got)}, but a {dense_of(spec).family} model is computed by transformers' own "
                    "code, which goes with FSDP, mesh.ep and model.recompute=experts, and sees no ends of documents; "
                    f"write {key}={shown(instead)}"
                )


def shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_batch(config: TrainConfig, mesh: MeshConfig, ranks: int) -> None:
    """Raise a ValueError if the ranks cannot divide the batch, or the pipeline does not accept the pieces."""
    world = ranks * mesh.tp * mesh.cp * mesh.pp
    if config.model.frozen == NF4 and world > 1:
        raise ValueError(ALONE.format(world))
    at_once = config.micro_batch * ranks
    if config.batch % at_once:
        raise ValueError(
            f"batch={config.batch} cannot be cut into micro-batches of micro_batch={config.micro_batch} sequences on "
            f"{ranks} data-parallel ranks; try batch={-(-config.batch // at_once) * at_once}"
        )
    count, model = config.batch // at_once, config.model
    check_schedule(mesh, count, recomputed=model.recompute, compiled=model.compile)
