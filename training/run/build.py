"""Build a run: model, optimiser, balance, data, and the state that checkpoints store.

`start` makes a Run. `learner` makes the part that a training step needs, for bench too.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from training.checkpoint import layout, standalone
from training.checkpoint.layout import Origin
from training.checkpoint.state import CHECKPOINTS, TrainState, found
from training.config.schema import TrainConfig
from training.config.stages import Stage, stages_of
from training.data.batch import Samples
from training.data.mixture import Loader
from training.data.open import check_tokens
from training.model.decoder import Decoder
from training.model.moe import MoE
from training.model.nf4 import NF4
from training.observe.profiling import Phases
from training.optim.balance import Balance
from training.optim.guard import SpikeGuard
from training.optim.optimizer import Optimizer
from training.optim.slots import freeze
from training.optim.teacher import Teacher
from training.parallel.collectives import all_reduce, broadcast
from training.parallel.mesh import ParallelMesh
from training.parallel.pipeline import Pipeline
from training.parallel.processes import rank
from training.run.parts import (
    divided,
    nothing,
    observing,
    origin_of,
    say,
    stages_of_rank,
    teacher_of,
    under_one_roof,
    with_backend,
)
from upcycle.arch.spec import DenseSpec, MoESpec


@dataclass
class Reading:
    """The position in the data: one integer, plus a stream's own state. Checkpoints store it."""

    cursor: int = 0
    saved: Mapping[str, Any] = field(default_factory=dict)
    samples: Samples | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self.cursor, "samples": self.samples.state(self.cursor) if self.samples else {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.cursor, self.saved = state["cursor"], state["samples"]


@dataclass(frozen=True)
class RouterLoads:
    """The routers' statistics of all layers and ranks. Checkpoints store them for any mapping."""

    balance: Balance
    model: Decoder
    spec: DenseSpec | MoESpec
    mesh: ParallelMesh

    @property
    def here(self) -> list[int]:
        """Return the MoE layers of this rank."""
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
        first = self.mesh.rank % (self.mesh.world // self.mesh.size("pp")) == 0  # one rank takes over all ranks' sums
        own = {
            name: tensor[self.here] if first else torch.zeros_like(tensor[self.here]) for name, tensor in state.items()
        }
        self.balance.load.load_state_dict(own)


@dataclass
class Learner:
    """The objects that a training step needs."""

    config: TrainConfig
    mesh: ParallelMesh
    parts: list[Decoder]  # this rank's parts of the model: one, or several stages of a pipeline
    model: Decoder  # these parts in one decoder, under the whole model's names
    pipeline: Pipeline | None
    optimizer: Optimizer | None  # None: gradients without an update (bench.py)
    guard: SpikeGuard
    balance: Balance
    teacher: Teacher | None
    phases: Phases
    device: torch.device

    @property
    def micro_batches(self) -> int:
        return self.config.batch // (self.config.micro_batch * self.mesh.dp)

    def reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks with other tokens."""
        return all_reduce(tensor, self.mesh.tokens_group())

    def agree(self, number: Tensor) -> Tensor:
        """Return rank 0's number on every rank. Sums over different groups may differ in the last bit, but a number
        that scales or decides must be equal: otherwise copies of a weight drift apart, or only one rank skips."""
        if self.mesh.world > 1:
            dist.broadcast(number, 0)
        return number


@dataclass
class Run(Learner):
    """A learner with its folder, its model's origin and its progress. Its config is that of the current stage."""

    optimizer: Optimizer
    whole: TrainConfig  # the config of all stages
    stages: tuple[Stage, ...]
    stage: Stage
    at_hand: Teacher | None  # for the stages that need one
    folder: Path
    origin: Origin
    state: TrainState
    place: Reading
    control: dist.ProcessGroup | None  # gloo, for messages between hosts

    @property
    def leads(self) -> bool:
        """Return whether this rank writes and draws."""
        return self.mesh.rank == 0

    def follow(self, stage: Stage) -> bool:
        """Switch to a stage with the same model; return whether other parameters learn now."""
        config = stage.config
        self.stage, self.config = stage, config
        anew = [freeze(part, config.optim) for part in self.parts]
        self.optimizer.follow(config.optim)
        self.guard.sigma = config.optim.spike_sigma
        self.balance.follow(config.balance, scale_of(config, self.mesh), config.micro_batch)
        self.teacher = self.at_hand if config.teacher.asked else None
        if self.teacher is not None:
            self.teacher.temperature = config.teacher.temperature
        if self.pipeline is not None:
            self.pipeline.follow(self.micro_batches)
        return any(anew)


@contextmanager
def start(config: TrainConfig, device: torch.device) -> Iterator[Run]:
    """Yield a Run without weights, which come from a checkpoint or from `begin`."""
    folder = Path(config.output)
    resumes, keeps = broadcast([bool(found(folder / CHECKPOINTS)), standalone.keeps(folder, config.model)])
    config = settled(config, device.type, broadcast(standalone.dtype_of(folder) if resumes else ""))
    for stage in stages_of(config):
        check_tokens(stage.config.data)
    with origin_of(config, resumes and keeps, nothing if resumes else observing(config, device)) as origin:
        torch.cuda.empty_cache()  # of the measures; the model's tensors have other sizes
        config, experts = with_backend(config, origin.spec, device.type)
        say(experts)
        stages = stages_of(config)
        mesh = ParallelMesh(config.mesh, device_type=device.type)
        parts = [divided(config, origin, mesh, layers, device) for layers in stages_of_rank(origin.spec, mesh)]
        teacher = teacher_of(config, origin, mesh, device)
        core, place = learner(stages[-1].config, parts, mesh, device, teacher=teacher), Reading()
        assert core.optimizer is not None
        loads = RouterLoads(core.balance, core.model, origin.spec, mesh)
        state = TrainState(core.model, [core.optimizer], parts={"guard": core.guard, "data": place, "load": loads})
        control = dist.new_group(backend="gloo") if mesh.world > 1 else None
        run = Run(
            **vars(core), whole=config, stages=stages, stage=stages[-1], at_hand=teacher, folder=folder, origin=origin,
            state=state, place=place, control=control,
        )  # fmt: skip
        for stage in reversed(stages):  # check all stages now, ending with the first
            run.follow(stage)
        yield run


def settled(config: TrainConfig, device: str, before: str) -> TrainConfig:
    """Return the config with the compute dtype (the config's, the run's `before`, or the device's), and print it."""
    own, kind = config.model.computes(device), device.upper().replace("CUDA", "GPU")
    model = replace(config.model, dtype=config.model.dtype or before or own)
    if rank() == 0:
        kept = f", as this run did before; model.dtype={own} is the default here" if model.dtype != own else ""
        print(f"computes in {model.dtype} on this {kind}{kept}", file=sys.stderr)
    return replace(config, model=model)


def begin(run: Run) -> None:
    """Fill in the weights of step 0: read, upcycled while reading, or random."""
    model = run.whole.model
    if model.random:
        layout.initialise(run.model, run.whole.seed)
    else:
        if model.frozen == "bfloat16" and run.origin.spec.dtype != model.frozen and run.leads:
            kept = run.origin.spec.dtype
            warnings.warn(f"weights that never learn are rounded to bfloat16; the checkpoint is {kept}", stacklevel=2)
        layout.load(run.model, run.origin, exact=model.frozen not in ("bfloat16", NF4))
    layout.begin_adapters(run.model, run.whole.seed)


def learner(
    config: TrainConfig,
    parts: list[Decoder],
    mesh: ParallelMesh,
    device: torch.device,
    *,
    learns: bool = True,
    teacher: Teacher | None = None,
) -> Learner:
    """Return a learner from parts that are already divided. Weights narrower than float32 must be filled in first,
    since the optimiser copies them; float32 weights may be filled in later."""
    model = under_one_roof(parts)
    count = config.batch // (config.micro_batch * mesh.dp)
    return Learner(
        config=config,
        mesh=mesh,
        parts=parts,
        model=model,
        pipeline=Pipeline(parts, mesh, config.mesh.schedule, count) if mesh.size("pp") > 1 else None,
        optimizer=Optimizer(config.optim, model.named_parameters(), model.moe) if learns else None,
        guard=SpikeGuard(config.optim, device),
        balance=balance_of(config, model, mesh),
        teacher=teacher,
        phases=Phases(device),
        device=device,
    )


def balance_of(config: TrainConfig, model: Decoder, mesh: ParallelMesh) -> Balance:
    """Return the Balance of a model's routers over all ranks with other tokens."""
    return Balance(
        config.balance,
        model,
        scale=scale_of(config, mesh),
        sequences=config.micro_batch,
        reduce=partial(all_reduce, group=mesh.tokens_group()),
        reduce_sequence=partial(all_reduce, group=mesh.group("cp", "tp")),
    )


def scale_of(config: TrainConfig, mesh: ParallelMesh) -> float:
    """Return the share of the step's tokens that a rank has of a micro-batch."""
    return config.micro_batch / (config.batch * mesh.size("cp") * mesh.size("tp"))


def loader_of(run: Run, samples: Samples) -> Loader:
    """Return a loader of micro-batches in which data-parallel ranks take samples in turn, so that a step's samples and
    their grouping do not depend on the mesh."""
    size, ahead = run.config.micro_batch, 2 * run.micro_batches
    pin = run.device.type == "cuda"
    return Loader(samples, run.place.cursor, size, data_rank(run.mesh), run.mesh.dp, ahead=ahead, pin=pin)


def data_rank(mesh: ParallelMesh) -> int:
    """Return the data-parallel rank; ranks of one tensor, context and pipeline group read the same samples."""
    return mesh.index("dp_replicate") * mesh.dp_shard + mesh.index("dp_shard")
