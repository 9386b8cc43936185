"""Will it fit, how long will it take, does it pay? For any mapping, without a GPU and without a byte of weights.

usage: python -m training.plan [CONFIG] gpus=N [hardware=NAME] [budget=AMOUNT] [price=P] [seen=AMOUNT]
       [islands=N link=SPEED] [key=value ...]

  python -m training.plan my.yaml gpus=8                  # the config's own mapping, and the others by their size
  python -m training.plan llama3-8b-e8t2 model.upcycle.source=./llama gpus=16 mesh.ep=4 model.recompute=full
  python -m training.plan my.yaml gpus=8 hardware=h100 budget="100B tokens" price=2.5 seen=15T   # the fastest that fit
  python -m training.plan my.yaml gpus=1 islands=4 link=1Gb/s    # and what islands send each other
  python -m training.plan bench-deepseek-v3 gpus=256 hardware=h100 mesh.ep=64 mesh.pp=4 batch=512   # of sizes alone
  python -m training.plan measure output=mine.yaml               # this machine's own hardware file, in a minute

Weights, gradients and moments are counted, parameter by parameter. Gathered weights and activations are estimated from
what the modules keep in bf16 on a GPU (attention without its square, experts without their product); the allocator's
own waste, NCCL's buffers and CUDA's context (some 3 GB together) are not in it. `host` is what an asynchronous
checkpoint copies to host memory. Frozen parameters (optim.groups) have neither gradients nor moments, and where they
are bfloat16 (model.frozen) half of the bytes; activations are counted as if all learned. A dense teacher
(teacher.weight) has a column of its own. A run in stages has a line for each, with the moments of all stages in every
one, and with `hardware` the hours of each.

With `hardware` those that fit are ranked by predicted tokens/s (training/seconds.py); `budget`, `price` and `seen` make
hours, money and what the law of upcycling expects of that. docs/planning.md says how good these predictions are.

keys, with defaults and meaning: docs/config.md, its own and those of training
"""

from __future__ import annotations

import sys

from upcycle import cli

if __name__ == "__main__":  # before the imports below, which take seconds
    sys.exit(cli.start("training.plan"))

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from tqdm import tqdm

from training import hardware
from training.build import check_batch, check_optim, held_in, source, taught_by, whole_on_meta
from training.checkpoint.layout import Origin
from training.config import READY, Stage, TrainConfig, read_config, stages_of
from training.dispatch import nvlink
from training.islands import plan as islands
from training.model.lora import LoraConfig, attach
from training.model.loss import COPIES, LOGITS, TAUGHT
from training.model.narrow import near
from training.model.recompute import MOVES
from training.model.stock import LAYER, dense_of, model_of
from training.observe.flops import model_flops
from training.optim import learning, multiplier
from training.parallel.mesh import MeshConfig, changed_to, check, grids, in_sizes, problem
from training.parallel.pipeline import SINGLE, cut, stages
from training.parallel.placement import Rule, rule, sharded_dim
from training.seconds import RANDOM, Routing, Seconds, step
from training.teacher import check_teacher
from upcycle import law, plugin, strict
from upcycle.config import find, read
from upcycle.size import dense_flops, dense_parameters
from upcycle.spec import BYTES, DenseSpec, MoESpec

MASTER = 4  # bytes of a weight, and of a sum of gradients
MOMENTS = {"adamw": 2, "muon": 1}


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, by what they are for."""

    weights: int  # float32; those that never learn perhaps bfloat16
    gradients: int
    moments: int
    gathered: int  # what a layer computes with, in the compute dtype; nvlink's buffers
    activations: int
    loss: int  # the head's logits and gradient
    # activations that are gone by the time the last backward has made the gradients, or has made them wide
    freed: int = 0
    teacher: int = 0  # a dense teacher's weights, its head while it is gathered, and what it says of a micro-batch

    @property
    def total(self) -> int:
        held = self.weights + self.gradients + self.moments + self.gathered + self.activations + self.loss
        held += self.teacher
        return held - self.freed

    @property
    def host(self) -> int:
        """In host memory: the copies that an asynchronous checkpoint is written from."""
        return self.weights + self.moments


class Parameter(NamedTuple):
    rule: Rule
    shape: tuple[int, ...]
    learns: bool  # in this stage
    kept: bool  # its moments: in any stage
    held: int  # bytes a weight


Unit = tuple[Parameter, ...]  # what is gathered for one layer, or for no layer


class Model:
    """A model's units and the cuts of its layers, each made once: a table asks for the same ones thousands of times."""

    def __init__(
        self,
        spec: DenseSpec | MoESpec,
        config: TrainConfig,
        teacher: DenseSpec | None = None,
        whole: TrainConfig | None = None,
    ) -> None:
        """`whole`: of all stages, where `config` is that of one."""
        self.spec, self.optim, self.lora = spec, config.optim, config.lora
        self.all = [stage.config.optim for stage in stages_of(whole or config)]
        self.narrow = held_in(config.model, spec).itemsize
        self.teacher = Model(teacher, replace(config, lora=LoraConfig())) if teacher is not None else None
        self.dense = spec.dense if isinstance(spec, MoESpec) else spec
        self.units: list[tuple[bool, Unit]] = []  # whether of a layer, and its parameters; all are different
        self.parts: dict[range, Counter[int]] = {}  # by range of layers: how often each unit occurs
        self.cuts: dict[tuple[int, str], list[range]] = {}

    def ranges(self, pp: int, schedule: str) -> list[range]:
        """The layers of each stage."""
        if (pp, schedule) not in self.cuts:
            whole = [range(self.dense.layers)]
            self.cuts[pp, schedule] = whole if pp == 1 else cut(self.spec, pp, schedule)
        return self.cuts[pp, schedule]

    def of(self, part: range) -> Counter[int]:
        if part not in self.parts:
            with torch.device("meta"):
                model = model_of(self.spec, part=part, experts="reference")
                attach(model, self.lora)
            names = [name for name, _ in model.named_parameters()]
            learned, kept = learning(self.optim, names), set[str]().union(*(learning(o, names) for o in self.all))
            found: dict[str, Unit] = {}
            for name, parameter in model.named_parameters():
                of_layer = LAYER.match(name)
                layer = of_layer[2] if of_layer else ""
                placed = rule(name, model.dense)
                held = MASTER if name in kept or placed.exact else self.narrow
                each = Parameter(placed, tuple(parameter.shape), name in learned, name in kept, held)
                found[layer] = (*found.get(layer, ()), each)
            self.parts[part] = Counter(self.number((layer != "", unit)) for layer, unit in found.items())
        return self.parts[part]

    def number(self, unit: tuple[bool, Unit]) -> int:
        if unit not in self.units:
            self.units.append(unit)
        return self.units.index(unit)


class Share(NamedTuple):
    """Bytes (and of what has moments, numbers) of one unit on a rank."""

    weights: int = 0
    kept: int = 0  # of the weights, those with moments
    gradients: int = 0
    late: int = 0  # of the gradients, those that only the last backward makes
    resident: int = 0  # copies in the compute dtype that stay for the backward
    passing: int = 0  # gathered or copied for the layer's forward, and again for its backward
    summed: int = 0  # the largest of the sums that FSDP makes at once


def memory(spec: DenseSpec | MoESpec, config: TrainConfig, world: int, model: Model | None = None) -> Memory:
    """The fullest rank's Memory for `config` on `world` GPUs. `model`: of the same spec and optimiser, with the teacher
    of the config if it has one."""
    return max(by_place(spec, config, world, model), key=lambda memory: memory.total)


def by_place(spec: DenseSpec | MoESpec, config: TrainConfig, world: int, model: Model | None = None) -> list[Memory]:
    """A rank's Memory at each place in the pipeline."""
    model, mesh = model or Model(spec, config), config.mesh
    ranks = [[0]] if mesh.pp == 1 else stages(mesh.pp, mesh.schedule)
    ranges = model.ranges(mesh.pp, mesh.schedule)
    attention, experts = grids(mesh, world)
    count = max(1, config.batch // (config.micro_batch * attention["dp_shard"] * mesh.dp_replicate))
    shares: dict[int, Share] = {}
    for own in ranges:
        for unit in model.of(own):
            if unit not in shares:
                shares[unit] = share(*model.units[unit], config, attention | experts, count)
    moe_layer, dense_layer = (of_layer(spec, config, moe, world) for moe in (True, False))
    kept = dict.fromkeys(spec.layers, moe_layer) if isinstance(spec, MoESpec) else {}
    found = []
    for place, numbers in enumerate(ranks):
        parts = [ranges[stage] for stage in numbers]
        units = sum((model.of(part) for part in parts), Counter())
        layers = sum(kept.get(layer, dense_layer) for part in parts for layer in part)
        rank = of_rank(model, config, count, place, parts, [(shares[u], n) for u, n in units.items()], layers)
        found.append(replace(rank, teacher=of_teacher(model.teacher, config, attention) if model.teacher else 0))
    return found


def of_teacher(teacher: Model, config: TrainConfig, sizes: Mapping[str, int]) -> int:
    """Bytes of its weights, in the dtype that they are computed in; of embedding and head while they are gathered; and
    of its last hidden states of a micro-batch. Its layers pass while the model's own do not."""
    mesh, narrow = config.mesh, BYTES[config.model.compute]
    total = config.micro_batch * config.data.sequence // (mesh.cp * mesh.tp) * teacher.dense.hidden * narrow
    for number, often in teacher.of(range(teacher.dense.layers)).items():
        of_a_layer, unit = teacher.units[number]
        for placed, shape, *_ in unit:
            left, (ranks, copies) = placed.part(shape, sizes), placed.ranks(sizes)
            whole, dim = math.prod(left), sharded_dim(left, ranks)
            shard = whole // left[dim] * -(-left[dim] // ranks)
            gathered = shard * ranks if ranks * copies > 1 and not of_a_layer else 0
            total += (shard + gathered) * often * (MASTER if placed.exact else narrow)
    return total


def share(of_a_layer: bool, unit: Unit, config: TrainConfig, sizes: Mapping[str, int], count: int) -> Share:
    """What one unit takes; `count`: micro-batches a step."""
    mesh, narrow = config.mesh, BYTES[config.model.compute]
    weights = with_moments = gradients = late = resident = passing = 0
    summed: Counter[Rule] = Counter()
    for placed, shape, learns, kept, held in unit:
        left, (ranks, copies) = placed.part(shape, sizes), placed.ranks(sizes)
        whole, dim = math.prod(left), sharded_dim(left, ranks)
        shard = whole // left[dim] * -(-left[dim] // ranks)
        fsdp = ranks * copies > 1
        weights += shard * held
        with_moments += shard * kept
        gathered = shard * ranks  # where the ranks do not divide the dimension, padding is gathered too
        apart = placed.kind == "experts" and not fsdp and narrow < held  # see LocalExperts
        # torch's pipelines sum gradients and free weights once a step, whatever mesh.reshard says
        once = fsdp and (not mesh.reshard or mesh.pp > 1)
        size, first = whole if once else shard, narrow if apart else MASTER
        if once and mesh.pp > 1 and learns:  # after its last backward a stage copies a unit's gradients to send them
            summed[placed] += whole * MASTER
        most = first if count == 1 else MASTER  # the first micro-batch's may be narrow
        there = (0, first, MASTER)[min(count, 3) - 1]  # when the last one's backward begins
        gradients += size * most * learns
        late += size * (most - there) * learns
        regathered = not once if fsdp else apart and config.model.recompute in MOVES
        computed = MASTER if placed.exact else narrow
        if regathered and of_a_layer:
            passing += gathered * computed
        elif fsdp or computed != held:  # without FSDP the copy in the compute dtype stays for the backward
            resident += gathered * computed
    return Share(weights, with_moments, gradients, late, resident, passing, max(summed.values(), default=0))


def of_rank(
    model: Model,
    config: TrainConfig,
    count: int,
    place: int,
    parts: Sequence[range],
    units: Sequence[tuple[Share, int]],
    layers: int,
) -> Memory:
    """The Memory of the rank at a place in the pipeline, with its units and how often it has each; `layers`: bytes of a
    token in all of its layers."""
    mesh, narrow, dense = config.mesh, BYTES[config.model.compute], model.dense
    total = Share(*(sum(each[i] * often for each, often in units) for i in range(len(Share._fields))))
    most_summed = max(each.summed for each, _ in units)
    buffers = total.resident + 3 * max(each.passing for each, _ in units) + most_summed
    moments = total.kept * MOMENTS[config.optim.name] * BYTES[config.optim.moments]
    moments += total.kept * MASTER * (model.all[-1].average > 0)  # the mean of the last steps' weights
    moments += total.kept * MASTER * 2 * config.islands.asked  # what the server knows, and what it is not told yet
    tokens = config.micro_batch * config.data.sequence // (mesh.cp * mesh.tp)
    if isinstance(model.spec, MoESpec) and mesh.dispatcher == "nvlink" and mesh.ep > 1:
        buffers += nvlink.buffer_bytes(tokens, mesh.ep, dense.hidden, model.spec.top_k, narrow)
    if mesh.dispatcher == "hybridep" and mesh.ep > 1 and isinstance(model.spec, MoESpec):
        buffers += tokens * mesh.ep * model.spec.experts  # the choices of all ranks' tokens, a byte an expert
    flight = in_flight(mesh, count, place, len(parts))
    activations = flight * tokens * layers
    loss = 0
    if any(part.stop == dense.layers for part in parts):
        # a chunk of logits, whose gradient takes their place; the head's gradient, in float32 and as it is handed on
        logits = min(LOGITS, tokens * dense.vocab) * narrow
        if dense.logit_cap:  # torch's lines in place of the kernel: a smaller chunk, and three copies of it in float32
            logits = min(LOGITS // 4, tokens * dense.vocab) * (narrow + 3 * MASTER)
        if model.teacher:
            logits = min(TAUGHT, tokens * dense.vocab) * (2 * narrow + COPIES * MASTER)
        learns = not config.lora.rank and multiplier(config.optim, "embed.weight" if dense.tied else "head.weight")
        of_head = MASTER + narrow if learns else 0
        loss = logits + of_head * dense.vocab * dense.hidden
    freed = min(activations, total.late + most_summed)
    return Memory(total.weights, total.gradients, moments, buffers, activations, loss, freed)


def in_flight(mesh: MeshConfig, count: int, place: int, parts: int) -> int:
    """How many of the `count` micro-batches of a step have their activations on a rank at once."""
    if mesh.pp == 1:
        return 1
    return count if mesh.schedule == "gpipe" else min(count, mesh.pp - place if parts == 1 else mesh.pp)


def of_layer(spec: DenseSpec | MoESpec, config: TrainConfig, routed: bool, world: int) -> int:
    """Bytes that one layer, with routed experts or without, keeps for backward, of each token outside of attention."""
    mesh, narrow, mode = config.mesh, BYTES[config.model.compute], config.model.recompute
    moe = spec if isinstance(spec, MoESpec) and routed else None
    d = spec.dense if isinstance(spec, MoESpec) else spec
    router = 4 * 3 * moe.experts + 8 * 2 * moe.top_k if moe else 0
    sandwich = d.block == "sandwich"  # its last norms keep the outputs of attention and FFN
    halves = narrow * (4 if sandwich else 3) * d.hidden  # the stream twice, the FFN's input; in a sandwich its output
    if mode == "full":
        return halves + router
    # attention sees tp times as many tokens, with a tp-th of the heads: its inputs grow, its heads do not
    heads = (d.heads + 2 * d.kv_heads) * d.head_dim
    attention = narrow * (d.hidden * mesh.tp + 2 * heads + d.heads * d.head_dim) + 4 * d.heads
    if d.latent is not None:  # latents before and after their norms; queries, keys, what made keys and values, outputs
        inputs = d.hidden + 2 * (d.latent.q_rank + d.latent.kv_rank) + d.latent.rope
        heads = d.heads * (3 * d.head_dim - d.latent.rope + 2 * d.latent.value)
        attention = narrow * (inputs * mesh.tp + heads) + 4 * d.heads
    if mode == "experts" and moe:
        return attention + halves + router
    stream = narrow * d.hidden * (4 if mode == "none" else 2) * (2 if sandwich else 1)
    width, matrices = moe.shared if moe else d.ffn, 2 if d.gated else 1
    ffn = narrow * (width * (matrices + (2 if mode == "none" else 0)) + (d.hidden * mesh.tp if width else 0))
    bytes_kept = (halves if mode == "attention" else attention + stream) + ffn
    if moe is None:
        return bytes_kept
    # rows of a token; padded to a capacity (which DeepEP 2.x does not do), as many as there is room for
    rows: float = moe.top_k
    if config.balance.pad_to_capacity and mesh.ep * mesh.etp > 1:
        rows = min(rows * config.balance.capacity_factor, moe.experts)
    elif mesh.dispatcher == "nvlink" and mesh.ep > 1:
        rows = nvlink.rows_a_token(moe.top_k, mesh.ep, moe.experts // mesh.ep, mesh.arrivals)
    # x and its products; over etp each rank has a slice of the neurons of etp times as many rows
    kept = d.hidden * mesh.etp + matrices * max(moe.widths)
    if world == 1 and near(config.micro_batch * config.data.sequence, moe.experts, d.hidden, max(moe.widths)):
        kept = max(kept, (matrices + 1) * max(moe.widths))  # products and their activation; x is there as tokens
    return bytes_kept + round(rows * narrow * kept) + router


# ---- the table


def mappings(spec: DenseSpec | MoESpec, config: TrainConfig, world: int) -> Iterator[MeshConfig]:
    """All mappings that can run, without copies of the model."""
    axes, layers = ("tp", "cp", "pp", "ep", "etp"), (spec.dense if isinstance(spec, MoESpec) else spec).layers
    sharded = replace(config.mesh, dp_replicate=1)

    def alone(axis: str, size: int) -> bool:
        mesh = changed_to(changed_to(sharded, axes, [1] * len(axes)), [axis], [size])
        return not in_sizes(mesh, world, spec, config.data.sequence)

    possible = [[n for n in range(1, world + 1) if world % n == 0 and alone(axis, n)] for axis in axes]
    for values in itertools.product(*possible):
        mesh = changed_to(sharded, axes, values)
        stages_of_all = mesh.pp * (1 if mesh.schedule in SINGLE else 2)
        if stages_of_all > layers or problem(mesh, world, spec, config.data.sequence):
            continue
        if dense_of(spec).carried is not None and mesh.tp * mesh.cp * mesh.pp * mesh.etp > 1:
            continue  # build.check_stock
        enough = micro_batches(config, mesh, world) >= mesh.pp
        if enough and not refusal(config, mesh, world) and goes_with(config, mesh):
            yield mesh


def data_ranks(mesh: MeshConfig, world: int) -> int:
    return world // (mesh.tp * mesh.cp * mesh.pp)


def micro_batches(config: TrainConfig, mesh: MeshConfig, world: int) -> int:
    return config.batch // (config.micro_batch * data_ranks(mesh, world))


def refusal(config: TrainConfig, mesh: MeshConfig, world: int) -> str:
    """Why training refuses to cut the batch for a mapping; "": it does not."""
    try:
        check_batch(config, mesh, data_ranks(mesh, world))
    except ValueError as error:
        return str(error)
    return ""


def refused(config: TrainConfig, world: int) -> str:
    """A sentence where the config's own mapping does not train, for which there are no seconds then."""
    reason = refusal(config, config.mesh, world)
    return f"This config does not train on {world} GPUs: {reason}" if reason else ""


def goes_with(config: TrainConfig, mesh: MeshConfig) -> bool:
    """Whether a config's other keys allow a mapping: a teacher or an evaluation, for instance, allows no pipeline."""
    try:
        replace(config, mesh=mesh)
    except ValueError:
        return False
    return True


def table(
    spec: DenseSpec | MoESpec, config: TrainConfig, world: int, rows: int = 12, teacher: DenseSpec | None = None
) -> str:
    own, stages = config.mesh, stages_of(config)
    models = [Model(spec, stage.config, teacher, config) for stage in stages]
    planned = [memory(spec, stage.config, world, model) for stage, model in zip(stages, models, strict=True)]
    fullest = max(range(len(stages)), key=lambda number: planned[number].total)
    config, model = stages[fullest].config, models[fullest]
    every = tqdm(list(mappings(spec, config, world)), desc="mappings", leave=False, delay=2, disable=None)
    found = [(mesh, memory(spec, replace(config, mesh=mesh), world, model)) for mesh in every]
    found = sorted(((mesh, size) for mesh, size in found if mesh != own), key=lambda item: item[1].total)[:rows]
    names = ["weights", "gradients", "moments", "gathered", "activations", "loss"]
    names += ["teacher", "total"] if teacher else ["total"]
    names += ["host"] if config.checkpoint.asynchronous else []
    lines = ["  ".join(f"{name:>11}" for name in names) + f"   GB on the fullest of {world} GPUs"]
    says = [f"   (this config{f', {stage.name}' if stage.name else ''})" for stage in stages] + [""] * len(found)
    for (mesh, size), said in zip([*((own, size) for size in planned), *found], says, strict=True):
        cells = "  ".join(f"{getattr(size, name) / 1e9:11.2f}" for name in names)
        axes = " ".join(f"{axis}={getattr(mesh, axis)}" for axis in ("tp", "cp", "pp", "ep", "etp"))
        lines.append(f"{cells}   {axes}{said}")
    unfit = dict.fromkeys(refused(stage.config, world) for stage in stages)
    return "\n".join([*lines, *filter(None, unfit)])


# ---- the same with a clock


@dataclass(frozen=True)
class PlanConfig:
    gpus: int = 0  # how many to plan for
    hardware: str = ""  # h100 | h200 | b200, or a file of `training.plan measure`: predicts seconds
    # "100B tokens", "1e22 FLOPs" or "5000 GPU-hours" of training: says hours, GPU-hours and money
    budget: str = ""
    price: float = 0.0  # of a GPU-hour, in any currency
    seen: str = ""  # tokens that the dense model was trained on, such as 15T: what the law of upcycling expects
    islands: int = 0  # how many of as many GPUs each (islands.join): says what they send each other
    link: str = ""  # between the islands and their server, such as 1Gb/s


COPIED = 64  # mappings that are also tried with a copy of the model in each node
SPARE = 3e9  # bytes of a GPU that NCCL, CUDA and the allocator take, and no plan counts
FEW = 1024  # tokens of a step for each GPU, below which a mapping is chosen among bad ones
HOSTED = 0.3  # of a step; below, a larger micro_batch wins little
BATCH = 2**22  # tokens of a step: more and fewer were worse where large models were upcycled (arXiv 2410.07524)
AMOUNT = re.compile(r"([\d.]+(?:e[+-]?\d+)?) ?([KMBT]?) ?(tokens|FLOPs|GPU-hours|)", re.IGNORECASE)
ABSURD = 1e30  # FLOPs, tokens or GPU-hours, of which nobody has so many
MOST_GPUS = 100_000  # that a search of all mappings still ends for
UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
# which keys of a hardware file a part of a step depends on
DEPENDS = {
    "products": ("products",), "experts": ("products",), "attention": ("attention",), "memory": ("bandwidth",),
    "rows": ("rows", "network"), "tensor": ("link", "network"), "gathers": ("link", "network"),
    "bubble": ("products", "network"), "optimizer": ("bandwidth",), "host": ("host",),
}  # fmt: skip


@dataclass(frozen=True)
class Timed:
    mesh: MeshConfig
    memory: Memory
    seconds: Seconds


def ranked(
    spec: DenseSpec | MoESpec,
    config: TrainConfig,
    world: int,
    card: hardware.Hardware,
    teacher: DenseSpec | None = None,
    whole: TrainConfig | None = None,
    routing: Routing | None = None,
) -> tuple[list[Timed], Timed]:
    """(the mappings that fit, the fastest first; the config's own, which may not run). `whole`: of all stages."""
    model = Model(spec, config, teacher, whole)

    def timed(mesh: MeshConfig) -> Timed:
        changed = replace(config, mesh=mesh)
        size = memory(spec, changed, world, model)
        if size.total + SPARE > card.memory * 1e9 and mesh != config.mesh:
            return Timed(mesh, size, Seconds())
        ranges = model.ranges(mesh.pp, mesh.schedule)
        return Timed(mesh, size, step(spec, changed, world, card, routing, ranges=ranges, taken=size.total))

    own = timed(config.mesh)
    every = tqdm(list(mappings(spec, config, world)), desc="mappings", leave=False, delay=2, disable=None)
    found = [own, *(timed(mesh) for mesh in every if mesh != config.mesh)]
    runs = found[1:] if refused(config, world) else found
    fit = sorted((each for each in runs if fits(each, card)), key=lambda each: each.seconds.total)
    # a copy of the model in each node: of the best, for it takes as much memory as a node's GPUs alone have
    best = [each.mesh for each in fit[:COPIED] if world > each.mesh.pp * card.node]
    copied = [replace(mesh, dp_replicate=world // (mesh.pp * card.node)) for mesh in best]
    copied = [m for m in copied if m != config.mesh and not problem(m, world, spec, config.data.sequence)]
    fit += [each for each in map(timed, copied) if fits(each, card)]
    return sorted(fit, key=lambda each: each.seconds.total), own


def fits(each: Timed, card: hardware.Hardware) -> bool:
    return each.memory.total + SPARE <= card.memory * 1e9


def clocked(
    spec: DenseSpec | MoESpec,
    config: TrainConfig,
    asked: PlanConfig,
    card: hardware.Hardware,
    rows: int = 12,
    teacher: DenseSpec | None = None,
    whole: TrainConfig | None = None,
    routing: Routing | None = None,
) -> str:
    """The table of the fastest mappings that fit, and what the budget takes with the first of them."""
    fit, own = ranked(spec, config, asked.gpus, card, teacher, whole, routing)
    unfit = refused(config, asked.gpus)
    if not fit:
        raise ValueError(
            unfit
            or f"no mapping of {asked.gpus} {card.name} holds this step, and the config's takes "
            f"{own.memory.total / 1e9:.0f} GB of {card.memory:g}; try more gpus, a smaller micro_batch or "
            "model.recompute=full"
        )
    tokens, flops = config.batch * config.data.sequence, model_flops(spec, config.data.sequence)
    shown = fit[:rows] + ([] if own in fit[:rows] or unfit else [own])
    lines = ["  rank   tokens/s    of a GPU   ms a step    MFU      GB   mapping; what takes longer than in the first"]
    for each in shown:
        rate = tokens / each.seconds.total
        share = rate * flops / asked.gpus / card.peak / 1e12
        axes = " ".join(f"{axis}={getattr(each.mesh, axis)}" for axis in ("tp", "cp", "pp", "ep", "etp"))
        axes += f" dp_replicate={each.mesh.dp_replicate}" if each.mesh.dp_replicate > 1 else ""
        place = f"{fit.index(each) + 1}" if each in fit else "no fit"
        lines.append(
            f"{place:>6} {rate:10,.0f}  {rate / asked.gpus:10,.0f}  {each.seconds.total * 1e3:10,.0f} {share:6.1%} "
            f"{each.memory.total / 1e9:7.1f}   {axes}{' (this config)' if each is own else ''}{why(each, fit[0])}"
        )
    first = fit[0]
    parts = sorted(vars(first.seconds).items(), key=lambda item: -item[1])
    lines.append(
        f"{card.name}, {len(fit):,} mappings fit. The first, in ms: "
        + ", ".join(f"{name} {seconds * 1e3:,.0f}" for name, seconds in parts if seconds >= 5e-4)
    )
    unsure = [(name, key) for name, _ in parts for key in DEPENDS[name] if key in card.sheet]
    if unsure and parts[0][1] > 0:
        keys = ", ".join(dict.fromkeys(key for _, key in unsure))
        lines.append(f"Not measured on this card: {keys}. Measure first what {unsure[0][0]} takes, then rent many.")
    if unfit:
        lines.append(unfit)
    halves, odd = divmod(micro_batches(config, first.mesh, asked.gpus), 2)
    if first.seconds.host > HOSTED * first.seconds.total and not odd and halves >= first.mesh.pp:
        lines.append(
            f"The host takes {first.seconds.host / first.seconds.total:.0%} of the first: it launches more slowly than "
            f"the GPUs compute; try micro_batch={2 * config.micro_batch}, or more if it fits."
        )
    if tokens < FEW * asked.gpus:
        lines.append(
            f"A step has {tokens:,} tokens, {tokens / asked.gpus:,.0f} a GPU, which leaves {asked.gpus:,} GPUs idle in "
            f"any mapping; write batch={math.ceil(BATCH / config.data.sequence)} for the 4 M that were best in "
            "upcycling (arXiv 2410.07524), or take fewer GPUs."
        )
    left = [name for name, there in uncounted(config).items() if there]
    if left:
        lines.append(f"Not in these seconds, which are of plain training: {', '.join(left)}.")
    if asked.budget:
        for name, each in {"this config": own, "the first": first}.items():
            if each in fit and (name == "this config" or own is not first):
                said = bill(asked.budget, asked.price, asked.gpus, tokens, flops, each.seconds.total)
                lines.append(f"{asked.budget} with {name}: {said}")
    return "\n".join(lines)


def uncounted(config: TrainConfig) -> dict[str, bool]:
    """What a step may have that training.seconds does not count, and whether this one has it."""
    return {
        "adapters": config.lora.rank > 0,
        "a teacher": config.teacher.asked,
        "frozen parameters": any(group.lr == 0 for group in config.optim.groups),
        "Muon's products": config.optim.name == "muon",
        "documents (less attention)": config.data.mask_documents,
        f"{config.model.compute} (they are bfloat16's)": config.model.compute != "bfloat16",
        "FP8": "fp8" in config.model.experts or "linear_fp8" in config.model.transformer_engine,
    }


def why(each: Timed, first: Timed) -> str:
    """The two largest parts in which it is slower."""
    more = {name: value - getattr(first.seconds, name) for name, value in vars(each.seconds).items()}
    most = sorted((item for item in more.items() if item[1] >= 5e-4), key=lambda item: -item[1])[:2]
    return "; " + ", ".join(f"{name} +{value * 1e3:,.0f} ms" for name, value in most) if most else ""


def bill(budget: str, price: float, gpus: int, tokens: int, flops: float, seconds: float) -> str:
    """Hours and money. `price`: of a GPU-hour; `tokens`, `seconds`: of a step; `flops`: of a token."""
    count = budgeted(budget, flops, tokens / seconds / gpus)
    hours = count / tokens * seconds / 3600
    of_all = hours * gpus
    money = f", {few(of_all * price)} at {price:g} a GPU-hour" if price else ""
    said = f"{law.short(count)} tokens in {few(hours, 1)} hours, {few(of_all)} GPU-hours{money}"
    return f"{said} (of training alone; predictions here were off by up to 15 %, see docs/planning.md)"


def few(number: float, digits: int = 0) -> str:
    """With so many digits behind the point, or two of those that count where it is small."""
    return f"{number:,.{digits}f}" if number >= 10 else f"{number:.2g}"


def budgeted(budget: str, flops: float, rate: float) -> float:
    """Tokens that it buys. `flops`: of a token; `rate`: tokens/s of a GPU."""
    number, unit = amount("budget", budget)
    return number / flops if unit == "flops" else number * 3600 * rate if unit == "gpu-hours" else number


def amount(key: str, text: str) -> tuple[float, str]:
    """(a number, its unit in small letters)"""
    found = AMOUNT.fullmatch(text.strip())
    try:
        number = float(found[1]) * UNITS[found[2].lower()] if found else 0.0
    except ValueError:
        number = 0.0
    if not 0 < number < ABSURD or not found or (key == "seen" and found[3].lower() not in ("", "tokens")):
        units = "" if key == "seen" else ', "1e22 FLOPs" or "5000 GPU-hours"'
        raise ValueError(f'{key} is {text!r}; write for instance {key}="100B tokens"{units}')
    return number, found[3].lower() or "tokens"


def advised(origin: Origin, sequence: int, budget: str, seen: str, rate: float) -> str:
    """What the law of upcycling expects of the budget. `rate`: tokens/s of a GPU."""
    plan = origin.plan
    if plan is None:
        return "The law of upcycling says nothing of a model that is not upcycled (model.upcycle is not set)."
    if plan.grown:
        return "The law of upcycling says nothing of a mixture that is made larger or smaller; it is of dense models."
    # of the plan: where a target's config has one width for all, what is read back has that of an expert
    dense, spec, method = plan.dense, plan.moe, plan.config.method
    flops = model_flops(origin.spec, sequence)
    case = law.Case(
        parameters=dense_parameters(dense), first=amount("seen", seen)[0],
        more=budgeted(budget, flops, rate), copies=spec.copies, top_k=max(1, spec.top_k // spec.granularity),
        granularity=spec.granularity, choice=spec.choice, cost=flops / dense_flops(dense, sequence),
        method=method if isinstance(method, str) else method["name"],
    )  # fmt: skip
    return law.advice(case)


def split(words: list[str]) -> tuple[PlanConfig, list[str]]:
    """The words of planning alone, read; and the rest, which are training's."""
    own = tuple(f"{field.name}=" for field in fields(PlanConfig))
    counts = [word.removeprefix("gpus=") for word in words if word.startswith("gpus=")]
    if len(counts) != 1 or not counts[0].isdecimal() or counts[0] == "0":
        raise ValueError("say for how many GPUs to plan, for instance gpus=8")
    if int(counts[0]) > MOST_GPUS:
        raise ValueError(f"gpus is {counts[0]}, and at most {MOST_GPUS:,} are planned for; write fewer")
    asked = read(PlanConfig, "", [word for word in words if word.startswith(own)])
    for name in ("budget", "seen"):
        if getattr(asked, name):
            amount(name, getattr(asked, name))
    if bool(asked.islands) != bool(asked.link) or asked.islands < 0:
        raise ValueError("say how many islands, and over what link, for instance islands=4 link=1Gb/s")
    if not 0 <= asked.price < math.inf:
        raise ValueError(f"price is {asked.price:g}; it must be finite and at least 0, of a GPU-hour")
    if not asked.hardware and (asked.price or asked.budget):
        raise ValueError("budget and price need seconds, and hardware is not set; write for instance hardware=h100")
    for key in ("seen", "price"):
        if getattr(asked, key) and not asked.budget:
            raise ValueError(
                f'{key} is for what a budget brings, and none is set; write for instance budget="100B tokens"'
            )
    return asked, [word for word in words if not word.startswith(own)]


def seconds_of(spec: DenseSpec | MoESpec, config: TrainConfig, world: int, card: hardware.Hardware) -> float:
    """Of a step of this very mapping."""
    return step(spec, config, world, card, taken=memory(spec, config, world).total).total


def lasting(stage: Stage, spec: DenseSpec | MoESpec, world: int, card: hardware.Hardware) -> str:
    """How long a stage takes with its mapping."""
    config = stage.config
    if unfit := refused(config, world):
        return f"{stage.name or 'stage'}: {unfit}"
    tokens = config.steps * config.batch * config.data.sequence
    hours = config.steps * seconds_of(spec, config, world, card) / 3600
    return f"{stage.name or 'stage'}: {config.steps:,} steps, {tokens / 1e9:,.3f} B tokens, {few(hours, 1)} hours"


def check_names(config: TrainConfig) -> None:
    """Refuses a dispatcher and experts that are not there: they would count as those that wait for nothing."""
    plugin.load("training.dispatch", config.mesh.dispatcher)
    plugin.load("training.experts", config.model.experts)


def of_frozen(spec: DenseSpec | MoESpec, config: TrainConfig) -> str:
    """A sentence where weights that never learn are not held as the checkpoint has them, or could take half."""
    names = [name for name, _ in whole_on_meta(spec, config).named_parameters()]
    if len(set[str]().union(*(learning(stage.config.optim, names) for stage in stages_of(config)))) == len(names):
        return ""
    held = held_in(config.model, spec)
    if held == torch.float32 and config.model.compute == "bfloat16" and not config.model.frozen:
        return f"frozen weights stay float32, because the checkpoint is {spec.dtype}; model.frozen=bfloat16 rounds them"
    if held == torch.bfloat16 and spec.dtype != "bfloat16":
        return f"frozen weights are rounded to bfloat16: the checkpoint is {spec.dtype}"
    return ""


def of_bench(file: str, words: list[str], asked: PlanConfig, card: hardware.Hardware | None) -> str:
    """The table of a config of training.bench, whose model is sizes alone; its routing is the bench's."""
    from training import bench  # all that trains

    row = read(bench.BenchConfig, file, words, READY)
    if row.stack or asked.seen or asked.islands:
        raise ValueError(
            "of a bench config whole steps of one machine or cluster are planned; leave stack, seen and islands out"
        )
    spec = bench.spec_of(row)
    check(row.mesh, asked.gpus, spec, row.sequence)
    config = bench.as_training(row, row.micro_batch or max(1, row.batch // data_ranks(row.mesh, asked.gpus)))
    check_names(config)
    if card is None:
        return table(spec, config, asked.gpus)
    balanced = row.routing == "balanced"
    half = f"Memory is of float32 weights; {row.weights}, as this config has them, takes half of theirs."
    half *= row.weights != "float32"
    try:
        found = clocked(spec, config, asked, card, routing=Routing(0.0 if balanced else RANDOM, in_turn=balanced))
    except ValueError as error:
        raise ValueError(f"{error}. {half}" if half else str(error)) from error
    return f"{found}\n{half}" if half else found


@cli.command()
def main(words: list[str]) -> int:
    if words[:1] == ["measure"]:
        from training import measure  # it needs the bench, and so all that trains

        return measure.main(words[1:])
    file, words = cli.file_and_words(words)
    asked, words = split(words)
    card = hardware.read(asked.hardware) if asked.hardware else None
    if "architecture" in (strict.read_yaml(find(file, READY)) if file else {}):
        print(of_bench(file, words, asked, card))
        return 0
    config = read_config(file, words)
    if asked.islands:  # memory is that of one of them
        config = replace(config, islands=replace(config.islands, local=0, join=config.islands.join or "server:29600"))
    with source(config) as origin:
        stages = stages_of(config)
        for stage in stages:
            check(config.mesh, asked.gpus, origin.spec, stage.config.data.sequence)
        check_optim(config, origin.spec)
        check_names(config)
        teacher = None
        for asking in [stage.config for stage in stages if stage.config.teacher.asked][:1]:
            with taught_by(asking) as its_origin:
                teacher = check_teacher(its_origin, origin.spec)
        if said := of_frozen(origin.spec, config):
            print(said)
        if origin.dense.carried is not None:
            if card is not None:
                raise ValueError(
                    f"hardware={asked.hardware} predicts seconds of our own decoder, and transformers' own code "
                    f"computes {origin.dense.family}; leave it out"
                )
            print(
                f"transformers' own code computes {origin.dense.family}: what its layers keep for backward is not "
                "planned but for attention and experts, and all logits are in memory, which `loss` does not count"
            )
        if card is None:
            print(table(origin.spec, config, asked.gpus, teacher=teacher))
        if asked.islands:
            print("\n" + islands.table(origin.spec, config, asked.islands, asked.link))
        if card is None:
            return 0
        whole, config = config, max(stages, key=lambda stage: stage.config.steps * stage.config.batch).config  # longest
        print(clocked(origin.spec, config, asked, card, teacher=teacher, whole=whole))
        for stage in stages if len(stages) > 1 else []:
            print(lasting(stage, origin.spec, asked.gpus, card))
        if asked.seen and not refused(config, asked.gpus):
            own = seconds_of(origin.spec, config, asked.gpus, card)
            rate = config.batch * config.data.sequence / own / asked.gpus
            print(advised(origin, config.data.sequence, asked.budget, asked.seen, rate))
    return 0
