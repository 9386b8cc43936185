"""Count the bytes that a rank holds on any mapping, from a model's sizes alone: without a GPU and without weights.

FSDP gathers a model in units: one unit for each layer, and one for the parameters outside of all layers. A Share holds
the bytes of one unit on a rank. A Memory adds the shares of a rank's part of the pipeline, the activations of the
micro-batches in flight, and the loss. `upcycle estimate --help` says which numbers are counted and which are estimated.
tests/parallel/test_shard.py and test_pipeline.py compare the counts with the bytes that real ranks hold.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from training import dispatch, experts
from training.config.schema import TrainConfig
from training.config.stages import stages_of
from training.model.lora import LoraConfig, attach, encode
from training.model.loss import COPIES, LOGITS, TAUGHT
from training.model.nf4 import NF4
from training.model.recompute import MOVES
from training.model.stock.model import LAYER, dense_of, model_of
from training.optim.slots import MOMENTS, learning, multiplier, rule_of
from training.parallel.mesh import MeshConfig, grids
from training.parallel.pipeline import cut, stages
from training.parallel.placement import Rule, rule, sharded_dim
from training.run.parts import held_in
from upcycle.arch.spec import BYTES, DenseSpec, MoESpec

MASTER = 4  # bytes of a float32 weight, and of a summed gradient
SPARE = 3e9  # bytes of a GPU that NCCL, CUDA and the allocator take; no plan counts them
CPU_TOKENS = 4096  # of a micro-batch on a CPU, which gains nothing from more


@dataclass(frozen=True)
class Memory:
    """Hold the bytes of one rank, by their use."""

    weights: int  # float32; weights that never learn may be bfloat16
    gradients: int
    moments: int
    gathered: int  # weights that a layer computes with, in the compute dtype; a dispatcher's buffers
    activations: int
    loss: int  # the head's logits and gradient
    # activations that are already freed when the last backward allocates or widens gradients
    freed: int = 0
    teacher: int = 0  # a dense teacher's weights, its gathered head, and its hidden states of a micro-batch

    @property
    def total(self) -> int:
        held = self.weights + self.gradients + self.moments + self.gathered + self.activations + self.loss
        held += self.teacher
        return held - self.freed

    @property
    def host(self) -> int:
        """Return the bytes of host memory for the copies that an asynchronous checkpoint writes from."""
        return self.weights + self.moments


class Parameter(NamedTuple):
    rule: Rule
    shape: tuple[int, ...]
    learns: bool  # whether it learns in this stage
    moments: int  # numbers of the optimizer's state for a weight; 0 if it learns in no stage
    held: int  # bytes of one weight
    codes: bool  # whether it is part of the codes of experts, which no copy is made of

    def divided(self, sizes: Mapping[str, int]) -> tuple[int, int, int, bool]:
        """Return the numbers that its ranks share, the numbers of a padded shard, the ranks, and whether FSDP shards
        it."""
        part, (ranks, copies) = self.rule.part(self.shape, sizes), self.rule.ranks(sizes)
        whole, dim = math.prod(part), sharded_dim(part, ranks)
        return whole, whole // part[dim] * -(-part[dim] // ranks), ranks, ranks * copies > 1


Unit = tuple[Parameter, ...]  # parameters that FSDP gathers together: one layer's, or those outside of all layers


class Model:
    """Cache a model's units and the cuts of its layers, because a table needs the same ones thousands of times."""

    def __init__(
        self,
        spec: DenseSpec | MoESpec,
        config: TrainConfig,
        teacher: DenseSpec | None = None,
        whole: TrainConfig | None = None,
    ) -> None:
        """`whole` is the config of all stages if `config` is the config of one."""
        self.spec, self.optim, self.lora, self.frozen = spec, config.optim, config.lora, config.model.frozen
        self.all = [stage.config.optim for stage in stages_of(whole or config)]
        self.narrow = held_in(config.model, spec).itemsize
        self.teacher: Model | None = None
        if teacher is not None:
            plain = replace(config.model, frozen=config.model.frozen.removesuffix(NF4))
            self.teacher = Model(teacher, replace(config, lora=LoraConfig(), model=plain))
        self.dense = dense_of(spec)
        self.units: list[tuple[bool, Unit]] = []  # all distinct units: whether it is a layer's, and its parameters
        self.parts: dict[range, Counter[int]] = {}  # for each range of layers: how often each unit occurs
        self.cuts: dict[tuple[int, str], list[range]] = {}

    def ranges(self, pp: int, schedule: str) -> list[range]:
        """Return the layers of each stage."""
        if (pp, schedule) not in self.cuts:
            whole = [range(self.dense.layers)]
            self.cuts[pp, schedule] = whole if pp == 1 else cut(self.spec, pp, schedule)
        return self.cuts[pp, schedule]

    def of(self, part: range) -> Counter[int]:
        if part not in self.parts:
            with torch.device("meta"):
                model = model_of(self.spec, part=part, experts=experts.SPECIFICATION)
                attach(model, self.lora)
                encode(model, self.frozen)
            names = [name for name, _ in model.named_parameters()]
            learned, kept = learning(self.optim, names), set[str]().union(*(learning(o, names) for o in self.all))
            found: dict[str, Unit] = {}
            for name, parameter in model.named_parameters():
                of_layer = LAYER.match(name)
                layer = of_layer[2] if of_layer else ""
                placed = rule(name, model.dense)
                codes = "_codes." in name
                held = parameter.itemsize if codes else MASTER if name in kept or placed.exact else self.narrow
                moments = MOMENTS[rule_of(self.optim, name, parameter.shape)] if name in kept else 0
                each = Parameter(placed, tuple(parameter.shape), name in learned, moments, held, codes)
                found[layer] = (*found.get(layer, ()), each)
            self.parts[part] = Counter(self.number((layer != "", unit)) for layer, unit in found.items())
        return self.parts[part]

    def number(self, unit: tuple[bool, Unit]) -> int:
        if unit not in self.units:
            self.units.append(unit)
        return self.units.index(unit)


class Share(NamedTuple):
    """Hold the bytes of one unit on a rank; `kept` and `moments` are numbers, not bytes."""

    weights: int = 0
    kept: int = 0  # how many weights have moments
    moments: int = 0  # how many moments they have
    gradients: int = 0
    late: int = 0  # bytes of gradients that only the last backward allocates
    resident: int = 0  # copies in the compute dtype that stay for the backward
    passing: int = 0  # copies in the compute dtype that are made for the layer's forward, and again for its backward
    summed: int = 0  # the largest sum that FSDP makes at once


def memory(spec: DenseSpec | MoESpec, config: TrainConfig, world: int, model: Model | None = None) -> Memory:
    """Return the fullest rank's Memory for `config` on `world` GPUs.

    `model` must have the same spec and optimiser, and the config's teacher if there is one."""
    return max(by_place(spec, config, world, model), key=lambda memory: memory.total)


def sized(config: TrainConfig, spec: DenseSpec | MoESpec, world: int, room: float) -> TrainConfig:
    """Return the config with a micro_batch: its own, or the largest whose plan fits into `room` bytes of a GPU.

    A `room` of 0 stands for a CPU. If nothing fits, the micro_batch is 1."""
    if config.micro_batch:
        return config
    ranks = world // (config.mesh.tp * config.mesh.cp)
    most = math.gcd(*(stage.config.batch for stage in stages_of(config))) // ranks
    for size in sorted((n for n in range(1, most + 1) if most % n == 0), reverse=True):
        found = replace(config, micro_batch=size)
        if room:
            plans = (memory(spec, stage.config, world) for stage in stages_of(found))
            fits = all(plan.total + SPARE <= room for plan in plans)
        else:
            fits = size * config.data.sequence <= CPU_TOKENS
        if fits:
            return found
    return replace(config, micro_batch=1)


def by_place(spec: DenseSpec | MoESpec, config: TrainConfig, world: int, model: Model | None = None) -> list[Memory]:
    """Return a rank's Memory at each place in the pipeline."""
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
    """Return the bytes of a teacher: its weights in the compute dtype, its gathered embedding and head, and its last
    hidden states of a micro-batch.

    The teacher's gathered layers do not count, because they are freed before the model's own layers are gathered."""
    mesh, narrow = config.mesh, BYTES[config.model.computes()]
    total = config.micro_batch * config.data.sequence // (mesh.cp * mesh.tp) * teacher.dense.hidden * narrow
    for number, often in teacher.of(range(teacher.dense.layers)).items():
        of_a_layer, unit = teacher.units[number]
        for parameter in unit:
            _, shard, ranks, fsdp = parameter.divided(sizes)
            gathered = shard * ranks if fsdp and not of_a_layer else 0
            total += (shard + gathered) * often * (MASTER if parameter.rule.exact else narrow)
    return total


def share(of_a_layer: bool, unit: Unit, config: TrainConfig, sizes: Mapping[str, int], count: int) -> Share:
    """Return the Share of one unit; `count` is the number of micro-batches in a step."""
    mesh, narrow = config.mesh, BYTES[config.model.computes()]
    weights = with_moments = all_moments = gradients = late = resident = passing = 0
    summed: Counter[Rule] = Counter()
    for parameter in unit:
        placed, _, learns, moments, held, codes = parameter
        whole, shard, ranks, fsdp = parameter.divided(sizes)
        weights += shard * held
        if codes:
            continue
        with_moments += shard * (moments > 0)
        all_moments += shard * moments
        gathered = shard * ranks  # padding included, if the ranks do not divide the dimension
        apart = placed.kind == "experts" and not fsdp and narrow < held  # see LocalExperts
        # torch's pipelines sum gradients and free weights once a step, with any mesh.reshard
        once = fsdp and (not mesh.reshard or mesh.pp > 1)
        size, first = whole if once else shard, narrow if apart else MASTER
        if once and mesh.pp > 1 and learns:  # a stage copies a unit's gradients to send them after its last backward
            summed[placed] += whole * MASTER
        most = first if count == 1 else MASTER  # gradients of the first micro-batch may be narrow
        there = (0, first, MASTER)[min(count, 3) - 1]  # bytes of a gradient when the last backward begins
        gradients += size * most * learns
        late += size * (most - there) * learns
        computed = MASTER if placed.exact else narrow
        # backward makes copies again that it finds inside what it recomputes
        remade = computed != held if config.model.recompute == "full" else apart and config.model.recompute in MOVES
        regathered = not once if fsdp else remade
        if regathered and of_a_layer:
            passing += gathered * computed
        elif fsdp or computed != held:  # the copy in the compute dtype stays for the backward
            resident += gathered * computed
    most = max(summed.values(), default=0)
    return Share(weights, with_moments, all_moments, gradients, late, resident, passing, most)


def of_rank(
    model: Model,
    config: TrainConfig,
    count: int,
    place: int,
    parts: Sequence[range],
    units: Sequence[tuple[Share, int]],
    layers: int,
) -> Memory:
    """Return the Memory of the rank at one place in the pipeline.

    `units` gives each unit's Share and how often the rank has it. `layers` gives the bytes of a token in all of the
    rank's layers."""
    mesh, narrow, dense = config.mesh, BYTES[config.model.computes()], model.dense
    total = Share(*(sum(each[i] * often for each, often in units) for i in range(len(Share._fields))))
    most_summed = max(each.summed for each, _ in units)
    buffers = total.resident + 3 * max(each.passing for each, _ in units) + most_summed
    if isinstance(model.spec, MoESpec) and model.frozen == NF4:  # of one layer, decoded
        buffers += model.spec.experts * (3 if dense.gated else 2) * max(model.spec.widths) * dense.hidden * narrow
    moments = total.moments * BYTES[config.optim.moments]
    moments += total.kept * MASTER * (model.all[-1].average > 0)  # the mean of the last steps' weights
    moments += total.kept * MASTER * 2 * config.islands.asked  # the server's weights, and changes not yet sent to it
    tokens = config.micro_batch * config.data.sequence // (mesh.cp * mesh.tp)
    if isinstance(model.spec, MoESpec) and mesh.ep > 1:
        can = dispatch.capabilities(mesh.dispatcher)
        buffers += can.buffer_bytes(tokens, mesh.ep, dense.hidden, model.spec.top_k, narrow)
        buffers += can.tells * tokens * mesh.ep * model.spec.experts
    flight = in_flight(mesh, count, place, len(parts))
    activations = flight * tokens * layers
    loss = 0
    if any(part.stop == dense.layers for part in parts):
        # a chunk of logits, which its gradient overwrites; the head's gradient, in float32 and in the compute dtype
        logits = min(LOGITS, tokens * dense.vocab) * narrow
        if dense.logit_cap:  # torch computes it without our kernel: a smaller chunk, and three float32 copies of it
            logits = min(LOGITS // 4, tokens * dense.vocab) * (narrow + 3 * MASTER)
        if model.teacher:
            logits = min(TAUGHT, tokens * dense.vocab) * (2 * narrow + COPIES * MASTER)
        learns = not config.lora.rank and multiplier(config.optim, "embed.weight" if dense.tied else "head.weight")
        of_head = MASTER + narrow if learns else 0
        loss = logits + of_head * dense.vocab * dense.hidden
    freed = min(activations, total.late + most_summed)
    return Memory(total.weights, total.gradients, moments, buffers, activations, loss, freed)


def in_flight(mesh: MeshConfig, count: int, place: int, parts: int) -> int:
    """Return how many of a step's `count` micro-batches have activations on a rank at the same time."""
    if mesh.pp == 1:
        return 1
    return count if mesh.schedule == "gpipe" else min(count, mesh.pp - place if parts == 1 else mesh.pp)


def of_layer(spec: DenseSpec | MoESpec, config: TrainConfig, routed: bool, world: int) -> int:
    """Return the bytes of each token that one layer, with or without routed experts, keeps for its backward."""
    mesh, narrow, mode = config.mesh, BYTES[config.model.computes()], config.model.recompute
    moe = spec if isinstance(spec, MoESpec) and routed else None
    d = dense_of(spec)
    router = 4 * 3 * moe.experts + 8 * 2 * moe.top_k if moe else 0
    sandwich = d.block == "sandwich"  # the last norms keep the outputs of attention and FFN
    # the residual stream twice and the FFN's input; a sandwich also keeps the FFN's output
    halves = narrow * (4 if sandwich else 3) * d.hidden
    if mode == "full":
        return halves + router
    # attention gets tp times as many tokens and 1 / tp of the heads: only its inputs grow
    heads = (d.heads + 2 * d.kv_heads) * d.head_dim
    attention = narrow * (d.hidden * mesh.tp + 2 * heads + d.heads * d.head_dim) + 4 * d.heads
    if d.latent is not None:  # latents before and after their norms; queries, keys, inputs of keys and values, outputs
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
    if config.model.frozen == NF4:  # experts are recomputed from their input
        return bytes_kept - ffn + narrow * d.hidden + router
    # rows of a token; with padding to a capacity (DeepEP 2.x has none) all rows that there is room for
    rows: float = moe.top_k
    if config.balance.pad_to_capacity and mesh.ep * mesh.etp > 1:
        rows = min(rows * config.balance.capacity_factor, moe.experts)
    elif mesh.ep > 1:
        room = dispatch.capabilities(mesh.dispatcher).rows_a_token
        rows = room(moe.top_k, mesh.ep, moe.experts // mesh.ep, mesh.arrivals)
    # x and its products; with etp each rank has a slice of the neurons and etp times as many rows
    kept = d.hidden * mesh.etp + matrices * max(moe.widths)
    if world == 1:
        tokens, can = config.micro_batch * config.data.sequence, experts.capabilities(config.model.expert_backend)
        kept = can.kept(tokens, moe.experts, d.hidden, max(moe.widths), matrices) or kept
    return bytes_kept + round(rows * narrow * kept) + router
