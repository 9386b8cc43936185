"""What a run is made of: model with its weights, optimiser, balance, data, and the state that a checkpoint holds.

`start` makes a Run; `learner` makes the part of it that a training step needs, for bench.py too.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from training.checkpoint import layout, standalone
from training.checkpoint.layout import Origin
from training.checkpoint.state import Checkpoints, TrainState, found
from training.config.reading import upcycle_config
from training.config.resume import compared
from training.config.schema import ModelConfig, TrainConfig
from training.config.stages import Stage, stage_of, stages_of
from training.data.batch import Samples
from training.data.mixture import DataConfig, Loader
from training.data.open import check_tokens, first_tokens, open_training
from training.model import transformer_engine
from training.model.decoder import Decoder
from training.model.lora import attach, check_match, is_adapter
from training.model.moe import MoE
from training.model.stock.model import dense_of, model_of
from training.observe.flops import model_flops, spared_flops
from training.observe.profiling import Phases
from training.optim.balance import Balance
from training.optim.optimizer import Optimizer, SpikeGuard, check_groups, freeze, settled
from training.optim.teacher import Teacher, check_teacher, made
from training.parallel.collectives import all_reduce, broadcast
from training.parallel.mesh import MeshConfig, ParallelMesh, check
from training.parallel.pipeline import Pipeline, cut, stages
from training.parallel.pipeline import check as check_schedule
from training.parallel.placement import rule
from training.parallel.shard import learns_anew, parallelize
from upcycle.arch.spec import DenseSpec, MoESpec
from upcycle.io import disk
from upcycle.io.checkpoint import Checkpoint
from upcycle.planning.plan import UpcyclePlan

CHECKPOINTS = "checkpoints"  # in the run's folder


@dataclass
class Reading:
    """How far the data is read: one integer, and what a stream needs besides (a part of the checkpoint)."""

    cursor: int = 0
    saved: Mapping[str, Any] = field(default_factory=dict)
    samples: Samples | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self.cursor, "samples": self.samples.state(self.cursor) if self.samples else {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.cursor, self.saved = state["cursor"], state["samples"]


@dataclass(frozen=True)
class RouterLoads:
    """The routers' statistics so far, of all layers and ranks, as a part of a checkpoint: any mapping can go on with
    them."""

    balance: Balance
    model: Decoder
    spec: DenseSpec | MoESpec
    mesh: ParallelMesh

    @property
    def here(self) -> list[int]:
        """Which of the model's MoE layers are this rank's."""
        every = self.spec.layers if isinstance(self.spec, MoESpec) else ()
        return [every.index(int(number)) for number, layer in self.model.layers.items() if isinstance(layer.ffn, MoE)]

    def state_dict(self) -> dict[str, Tensor]:
        every = len(self.spec.layers) if isinstance(self.spec, MoESpec) else 0
        found = {}
        for name, tensor in self.balance.load.state_dict().items():
            whole = tensor.new_zeros(every, *tensor.shape[1:])
            whole[self.here] = all_reduce(tensor, self.mesh.tokens_group())
            found[name] = all_reduce(whole, self.mesh.group("pp"))
        return found

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        first = self.mesh.rank % (self.mesh.world // self.mesh.size("pp")) == 0  # one rank goes on with all ranks' sums
        own = {
            name: tensor[self.here] if first else torch.zeros_like(tensor[self.here]) for name, tensor in state.items()
        }
        self.balance.load.load_state_dict(own)


@dataclass
class Learner:
    """What a step needs."""

    config: TrainConfig
    mesh: ParallelMesh
    parts: list[Decoder]  # the model's parts that this rank computes: one, or several stages of a pipeline
    model: Decoder  # all these parts in one decoder, under the whole model's names
    pipeline: Pipeline | None
    optimizer: Optimizer | None  # None: gradients are made, but no update (bench.py)
    guard: SpikeGuard
    balance: Balance
    teacher: Teacher | None
    phases: Phases
    device: torch.device

    @property
    def micro_batches(self) -> int:
        return self.config.batch // (self.config.micro_batch * self.mesh.dp)

    def reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks with other tokens."""
        return all_reduce(tensor, self.mesh.tokens_group())

    def agree(self, number: Tensor) -> Tensor:
        """Rank 0's number, on every rank. Sums over different groups may differ in their last bit, and a number that
        all ranks scale or decide by must not: copies of a weight would drift apart, or one rank would skip a step."""
        if self.mesh.world > 1:
            dist.broadcast(number, 0)
        return number


@dataclass
class Run(Learner):
    """A learner with its folder, its model's origin and its progress. Its config is that of the stage that it is in."""

    whole: TrainConfig  # of all stages
    stages: tuple[Stage, ...]
    stage: Stage
    at_hand: Teacher | None  # of the stages that ask for one
    folder: Path
    origin: Origin
    state: TrainState
    place: Reading
    control: dist.ProcessGroup | None  # gloo: what hosts tell each other beside the devices

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def leads(self) -> bool:
        """Whether this is the rank that writes and draws."""
        return self.mesh.rank == 0


@contextmanager
def start(config: TrainConfig, device: torch.device) -> Iterator[Run]:
    """Context that yields the Run: model, optimiser, balance, and the state that a checkpoint holds. Its weights are
    still to come, from a checkpoint or from `begin`."""
    stages = stages_of(config)
    for stage in stages:
        check_tokens(stage.config.data)
    folder, world = Path(config.output), dist.get_world_size() if dist.is_initialized() else 1
    resumes, has_origin = broadcast([bool(found(folder / CHECKPOINTS)), standalone.keeps(folder, config.model)])
    opened = source(config, nothing if resumes else observing(config, device))
    if resumes and has_origin:
        opened = nullcontext(standalone.kept(folder))
    with opened as origin:
        for stage in stages:
            check(config.mesh, world, origin.spec, stage.config.data.sequence)
        mesh = ParallelMesh(config.mesh, device_type=device.type)
        for stage in stages:
            check_batch(stage.config, config.mesh, mesh.dp)
        parts = [divided(config, origin, mesh, layers, device) for layers in stages_of_rank(origin.spec, mesh)]
        teacher = teacher_of(config, origin, mesh, device)
        core, place = learner(stages[-1].config, parts, mesh, device, teacher=teacher), Reading()
        assert core.optimizer is not None
        loads = RouterLoads(core.balance, core.model, origin.spec, mesh)
        state = TrainState(core.model, [core.optimizer], parts={"guard": core.guard, "data": place, "load": loads})
        control = dist.new_group(backend="gloo") if world > 1 else None
        run = Run(
            **vars(core), whole=config, stages=stages, stage=stages[-1], at_hand=teacher, folder=folder, origin=origin,
            state=state, place=place, control=control,
        )  # fmt: skip
        for stage in reversed(stages):  # what is wrong with any is said now, and the first is left to begin with
            follow(run, stage)
        yield run


def follow(run: Run, stage: Stage) -> bool:
    """Makes a run's parts do as a stage says; the model stays as it is. Returns whether other parameters learn than did
    before."""
    config, optimizer = stage.config, run.optimizer
    assert optimizer is not None
    run.stage, run.config = stage, config
    anew = [freeze(part, config.optim) for part in run.parts]
    optimizer.follow(config.optim)
    run.guard.sigma = config.optim.spike_sigma
    run.balance.follow(config.balance, scale_of(config, run.mesh), config.micro_batch)
    run.teacher = run.at_hand if config.teacher.asked else None
    if run.teacher is not None:
        run.teacher.temperature = config.teacher.temperature
    if run.pipeline is not None:
        run.pipeline.follow(run.micro_batches)
    return any(anew)


def enter(run: Run, stage: Stage, order: Callable[[DataConfig], DataConfig] | None = None) -> Samples:
    """Goes over to a stage, where the last one ended or a checkpoint was made, and returns its data, which goes on
    after what is read. `order`: gives an island an order of its own."""
    if follow(run, stage):
        for part in run.parts:
            learns_anew(part)
    place = run.place
    if place.samples is not None:
        place.saved = place.samples.state(place.cursor)
    data = stage.config.data if order is None else order(stage.config.data)
    place.samples = open_training(data, run.origin.dense.vocab, place.saved)
    return place.samples


def record(run: Run) -> None:
    """Writes the run's config.json and what it keeps of its model, on rank 0, once a resume is accepted."""
    if run.leads:
        disk.make_folder(run.folder)
        if not (found(run.folder / CHECKPOINTS) and standalone.keeps(run.folder, run.config.model)):
            standalone.keep(run.folder, run.origin, run.config.model)
        settings = json.dumps(asdict(run.whole), indent=2, default=str).encode() + b"\n"
        disk.write_atomic(run.folder / "config.json", settings)


def begin(run: Run) -> None:
    """Fills in the weights of step 0: read, upcycled as they are read, or drawn."""
    if run.config.model.random:
        layout.initialise(run.model, run.config.seed)
    else:
        asked, dtype = run.config.model.frozen, run.origin.spec.dtype
        if asked == "bfloat16" and dtype != asked and run.leads:
            warnings.warn(f"weights that never learn are rounded to bfloat16; the checkpoint is {dtype}", stacklevel=2)
        layout.load(run.model, run.origin, exact=run.config.model.frozen != "bfloat16")
    layout.begin_adapters(run.model, run.config.seed)


def learner(
    config: TrainConfig,
    parts: list[Decoder],
    mesh: ParallelMesh,
    device: torch.device,
    *,
    learns: bool = True,
    teacher: Teacher | None = None,
) -> Learner:
    """Makes a learner of parts that are divided already. Weights narrower than float32 must be filled in before, since
    the optimiser copies them; float32 ones, as a run has, may be filled in later."""
    model = under_one_roof(parts)
    return Learner(
        config=config,
        mesh=mesh,
        parts=parts,
        model=model,
        pipeline=pipeline_of(config, parts, mesh),
        optimizer=Optimizer(config.optim, model.named_parameters(), model.moe) if learns else None,
        guard=SpikeGuard(config.optim, device),
        balance=balance_of(config, model, mesh),
        teacher=teacher,
        phases=Phases(device),
        device=device,
    )


def teacher_of(config: TrainConfig, origin: Origin, mesh: ParallelMesh, device: torch.device) -> Teacher | None:
    """The config's teacher with its weights, if it has one."""
    config = next((stage.config for stage in stages_of(config) if stage.config.teacher.asked), config)
    if not config.teacher.asked:
        return None
    with taught_by(config) as of_teacher:
        dense = check_teacher(of_teacher, origin.spec)
        check(replace(config.mesh, ep=1, etp=1), mesh.world, dense, config.data.sequence)
        model = replace(config.model, recompute="none")
        decoder = room(made(dense, getattr(torch, model.dtype)), model, mesh, device)
        return Teacher(layout.load(decoder, of_teacher), config.teacher.temperature)


def taught_by(config: TrainConfig) -> AbstractContextManager[Origin]:
    """The Origin of the config's teacher: unless it names one, of the dense model that is upcycled."""
    name = config.teacher.source or (upcycle_config(config.model).source if config.model.upcycle else "")
    if not name:
        raise ValueError("no teacher is known, because no dense model is upcycled by this config; write teacher.source")
    return layout.opened(name)


def flops_a_token(config: TrainConfig, spec: DenseSpec | MoESpec) -> float:
    """Of training: the model's, without gradients that nothing learns from, and the forward of its teacher."""
    whole = whole_on_meta(spec, config)
    freeze(whole, config.optim)
    flops = model_flops(spec, config.data.sequence) - spared_flops(whole, spec, config.data.sequence)
    if config.teacher.asked:
        with taught_by(config) as teacher:
            flops += model_flops(teacher.spec, config.data.sequence) / 3
    return flops


def balance_of(config: TrainConfig, model: Decoder, mesh: ParallelMesh) -> Balance:
    return Balance(
        config.balance,
        model,
        scale=scale_of(config, mesh),
        sequences=config.micro_batch,
        reduce=partial(all_reduce, group=mesh.tokens_group()),
        reduce_sequence=partial(all_reduce, group=mesh.group("cp", "tp")),
    )


def scale_of(config: TrainConfig, mesh: ParallelMesh) -> float:
    """The share of a rank's part of a micro-batch in a step's tokens."""
    return config.micro_batch / (config.batch * mesh.size("cp") * mesh.size("tp"))


def pipeline_of(config: TrainConfig, parts: Sequence[Decoder], mesh: ParallelMesh) -> Pipeline | None:
    count = config.batch // (config.micro_batch * mesh.dp)
    return Pipeline(parts, mesh, config.mesh.schedule, count) if mesh.size("pp") > 1 else None


def check_optim(config: TrainConfig, spec: DenseSpec | MoESpec) -> None:
    """Refuses groups of parameters that this model has none of, and what is meant for copies where there are none."""
    for stage in stages_of(config):
        settled(stage.config.optim, spec if isinstance(spec, MoESpec) else None)
    check_stock(config, spec)
    with torch.device("meta"):
        check_match(model_of(spec, experts="reference"), config.lora)
    check_cuts(spec, config)
    whole = whole_on_meta(spec, config)
    for stage in stages_of(config):
        check_groups(stage.config.optim, [name for name, _ in whole.named_parameters()])


def check_cuts(spec: DenseSpec | MoESpec, config: TrainConfig) -> None:
    """Raises a ValueError if a stage of the pipeline would have no adapters, and so nothing to learn."""
    if not (config.lora.rank and config.mesh.pp > 1):
        return
    for layers in cut(spec, config.mesh.pp, config.mesh.schedule):
        with torch.device("meta"):
            part = Decoder(spec, part=layers, experts="reference")
            attach(part, config.lora)
        if not any(is_adapter(name) for name, _ in part.named_parameters()):
            raise ValueError(
                f"mesh.pp={config.mesh.pp} makes a stage of layers {layers.start} to {layers.stop - 1}, in which "
                f"lora.match={','.join(config.lora.match)} adapts nothing; match more, or take a smaller mesh.pp"
            )


def check_stock(config: TrainConfig, spec: DenseSpec | MoESpec) -> None:
    """Refuses what transformers' own modelling code cannot do."""
    if dense_of(spec).carried is None:
        return
    own, default = config.model, ModelConfig()
    wrong: list[tuple[str, Any, Any]] = [
        (f"mesh.{axis}", getattr(config.mesh, axis), 1) for axis in ("tp", "cp", "pp", "etp")
    ]
    wrong += [
        (f"model.{name}", getattr(own, name), getattr(default, name))
        for name in ("random", "compile", "graph", "transformer_engine", "frozen")
    ]
    wrong += [("model.recompute", own.recompute, "none")] if own.recompute not in ("none", "experts") else []
    wrong += [("lora.rank", config.lora.rank, 0), ("eval.every", config.eval.every, 0)]
    wrong += [("islands.join", config.islands.asked, False)]
    for stage in stages_of(config):
        wrong += [("data.mask_documents", stage.config.data.mask_documents, False)]
        wrong += [("teacher.weight", stage.config.teacher.weight if stage.config.teacher.asked else 0.0, 0.0)]
    for key, got, instead in wrong:
        if got != instead:
            raise ValueError(
                f"{key} is {shown(got)}, but a {dense_of(spec).family} model is computed by transformers' own code, "
                "which goes with FSDP, mesh.ep and model.recompute=experts, and sees no ends of documents; write "
                f"{key}={shown(instead)}"
            )


def shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def whole_on_meta(spec: DenseSpec | MoESpec, config: TrainConfig) -> Decoder:
    """All of the model with its adapters, without memory: for the names in it."""
    with torch.device("meta"):
        whole = model_of(spec, experts="reference")
        attach(whole, config.lora)
    return whole


def check_batch(config: TrainConfig, mesh: MeshConfig, ranks: int) -> None:
    """Refuses a batch that so many data-parallel ranks cannot cut, or of which the schedule wants other pieces."""
    at_once = config.micro_batch * ranks
    if config.batch % at_once:
        raise ValueError(
            f"batch={config.batch} cannot be cut into micro-batches of micro_batch={config.micro_batch} sequences on "
            f"{ranks} data-parallel ranks; try batch={-(-config.batch // at_once) * at_once}"
        )
    count, model = config.batch // at_once, config.model
    check_schedule(mesh, count, recomputed=model.recompute, compiled=model.compile)


def stages_of_rank(spec: DenseSpec | MoESpec, mesh: ParallelMesh) -> list[range]:
    """The layers of each part of the model that this rank computes."""
    pp, name = mesh.size("pp"), mesh.config.schedule
    if pp == 1:
        return [range((spec.dense if isinstance(spec, MoESpec) else spec).layers)]
    layers = cut(spec, pp, name)
    return [layers[stage] for stage in stages(pp, name)[mesh.index("pp")]]


def divided(config: TrainConfig, origin: Origin, mesh: ParallelMesh, layers: range, device: torch.device) -> Decoder:
    """A Decoder of these layers, with memory for this rank's part of them only."""
    model = config.model
    with torch.device("meta"):
        part = model_of(origin.spec, part=layers, experts=model.expert_backend, compute=getattr(torch, model.dtype))
        attach(part, config.lora)
    freeze(part, *(stage.config.optim for stage in stages_of(config)))
    hold(part, held_in(model, origin.spec))
    return room(part, model, mesh, device)


def held_in(model: ModelConfig, spec: DenseSpec | MoESpec) -> torch.dtype:
    """The dtype of the weights that never learn."""
    if dense_of(spec).carried is not None:
        return torch.float32  # transformers' layers hold weights of one dtype
    narrow = model.frozen or (spec.dtype if model.dtype == "bfloat16" else "")
    return torch.bfloat16 if narrow == "bfloat16" else torch.float32


def hold(part: Decoder, dtype: torch.dtype) -> None:
    """Makes the parameters of a part on the meta device that do not learn of this dtype: they need no float32 master.
    Not routers and norms, which are small, and are gathered together with such as learn."""
    for name, parameter in part.named_parameters():
        if not parameter.requires_grad and not rule(name, part.dense).exact:
            parameter.data = parameter.data.to(dtype)


def room(part: Decoder, model: ModelConfig, mesh: ParallelMesh, device: torch.device) -> Decoder:
    """Takes a part on the meta device and returns it set up as `model` wants it, with memory for this rank's share."""
    transformer_engine.use(part, model.transformer_engine)
    parallelize(part, mesh, recomputed=model.recompute, compiled=model.compile)
    return part.to_empty(device=device)


def under_one_roof(parts: Sequence[Decoder]) -> Decoder:
    """A Decoder with all the parts' parameters under the whole model's names; of several parts it cannot compute."""
    if len(parts) == 1:
        return parts[0]
    roof = Decoder(parts[0].moe or parts[0].dense, part=range(1, 1))
    for part in parts:
        roof.layers.update(dict(part.layers.items()))
        roof.embed = roof.embed or part.embed  # if tied, the first part's: see Pipeline.sum_tied
        roof.final_norm, roof.head = roof.final_norm or part.final_norm, roof.head or part.head
    return roof


def loader_of(run: Run, samples: Samples) -> Loader:
    """A loader of micro-batches, in each of which the data-parallel ranks take samples in turn: a step's samples, and
    which of them are computed settled, are the same on every mesh that computes as many at a time."""
    size, ahead = run.config.micro_batch, 2 * run.micro_batches
    return Loader(samples, run.place.cursor, size, data_rank(run.mesh), run.mesh.dp, ahead=ahead, pin=run.cuda)


def data_rank(mesh: ParallelMesh) -> int:
    """Ranks of one tensor, context and pipeline parallel group read the same samples."""
    return mesh.index("dp_replicate") * mesh.dp_shard + mesh.index("dp_shard")


def checkpoints_of(run: Run) -> Checkpoints:
    keep = run.config.checkpoint
    return Checkpoints(
        run.folder / CHECKPOINTS,
        keep=keep.keep,
        keep_every=keep.keep_every,
        asynchronous=keep.asynchronous,
        settings=partial(settings_at, run.whole),
        allow=run.config.resume.allow,
    )


def settings_of(config: TrainConfig) -> dict[str, Any]:
    """What a checkpoint holds of the config, with all that it says of the model, and not a ready config's name."""
    settings: dict[str, Any] = json.loads(json.dumps(asdict(config), default=str))
    settings["model"]["upcycle"] = standalone.named(config.model)["upcycle"]
    del settings["stages"]  # see settings_at
    return compared(settings)


def settings_at(config: TrainConfig, step: int) -> dict[str, Any]:
    """What a checkpoint after a step holds: of a run in stages, the settings of the one that made the step, and where
    that began. So other stages may be put in, left out or changed before they begin."""
    stage = stage_of(stages_of(config), min(step, config.steps))
    return settings_of(stage.config) | ({"stages": f"{stage.name}, after step {stage.first}"} if stage.first else {})


def nothing(plan: UpcyclePlan, checkpoints: Sequence[Checkpoint]) -> Mapping[str, Tensor]:
    return {}


def observing(config: TrainConfig, device: torch.device) -> layout.Observe:
    """What measures for upcycling on this device: on texts that model.upcycle names, else on the run's first ones."""
    first = stages_of(config)[0].config
    given = partial(first_tokens, first.data, first.steps * first.batch)
    return partial(standalone.measured_once, given=given, device=device)


def source(config: TrainConfig, observe: layout.Observe = nothing) -> AbstractContextManager[Origin]:
    """The Origin of the config's model. Without `observe` nothing is measured on text: enough for the model's sizes."""
    model, text = config.model, bool(stages_of(config)[0].config.data.train)
    return layout.online(upcycle_config(model), observe, text=text) if model.upcycle else layout.opened(model.source)
