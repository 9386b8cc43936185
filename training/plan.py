"""Will it fit? Bytes on the fullest rank of any mapping, without a GPU and without a byte of weights.

usage: python -m training.plan [CONFIG] gpus=N [key=value ...]

  python -m training.plan my.yaml gpus=8                  # the config's own mapping, and the others by their size
  python -m training.plan llama3-8b-e8t2 model.upcycle.source=./llama gpus=16 mesh.ep=4 model.recompute=full

Weights, gradients and moments are counted, parameter by parameter. Gathered weights and activations are estimated from
what the modules keep in bf16 on a GPU (attention without its square, experts without their product); the allocator's
own waste, NCCL's buffers and CUDA's context (some 3 GB together) are not in it. `host` is what an asynchronous
checkpoint copies to host memory. Frozen parameters (optim.groups) have neither gradients nor moments; activations are
counted as if all learned. A dense teacher (teacher.weight) has a column of its own.

keys, with defaults and meaning: docs/config.md, those of training
"""

from __future__ import annotations

import sys

from upcycle import cli

if __name__ == "__main__":  # before the imports below, which take seconds
    sys.exit(cli.start("training.plan"))

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from tqdm import tqdm

from training.build import check_optim, source, taught_by
from training.config import TrainConfig, read_config
from training.model.decoder import Decoder
from training.model.lora import LoraConfig, attach
from training.model.loss import COPIES, LOGITS, TAUGHT
from training.model.recompute import MOVES
from training.optim import learning, multiplier
from training.parallel.mesh import MeshConfig, changed_to, check, grids, problem
from training.parallel.pipeline import SINGLE, cut, stages
from training.parallel.placement import Rule, rule, sharded_dim
from training.teacher import check_teacher
from upcycle.spec import BYTES, DenseSpec, MoESpec

MASTER = 4  # bytes of a weight, and of a sum of gradients
MOMENTS = {"adamw": 2, "muon": 1}


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, by what they are for."""

    weights: int  # float32
    gradients: int
    moments: int
    gathered: int  # what a layer computes with, in the compute dtype
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


# parameters that are gathered for one layer, or for no layer: each one's rule and shape, and whether it learns
Unit = tuple[tuple[Rule, tuple[int, ...], bool], ...]


class Model:
    """A model's units and the cuts of its layers, each made once: a table asks for the same ones thousands of times."""

    def __init__(self, spec: DenseSpec | MoESpec, config: TrainConfig, teacher: DenseSpec | None = None) -> None:
        self.spec, self.optim, self.lora = spec, config.optim, config.lora
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
                model = Decoder(self.spec, part=part, experts="reference")
                attach(model, self.lora)
            learned = learning(self.optim, [name for name, _ in model.named_parameters()])
            found: dict[str, Unit] = {}
            for name, parameter in model.named_parameters():
                layer = name.split(".")[1] if name.startswith("layers.") else ""
                placed = rule(name, model.dense), tuple(parameter.shape), name in learned
                found[layer] = (*found.get(layer, ()), placed)
            self.parts[part] = Counter(self.number((layer != "", unit)) for layer, unit in found.items())
        return self.parts[part]

    def number(self, unit: tuple[bool, Unit]) -> int:
        if unit not in self.units:
            self.units.append(unit)
        return self.units.index(unit)


class Share(NamedTuple):
    """Bytes (and of weights, numbers) of one unit on a rank."""

    weights: int = 0
    learned: int = 0  # of the weights
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
    moe_layer, dense_layer = (of_layer(spec, config, moe) for moe in (True, False))
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
        for placed, shape, _ in unit:
            left, (ranks, copies) = placed.part(shape, sizes), placed.ranks(sizes)
            whole, dim = math.prod(left), sharded_dim(left, ranks)
            shard = whole // left[dim] * -(-left[dim] // ranks)
            gathered = shard * ranks if ranks * copies > 1 and not of_a_layer else 0
            total += (shard + gathered) * often * (MASTER if placed.exact else narrow)
    return total


def share(of_a_layer: bool, unit: Unit, config: TrainConfig, sizes: Mapping[str, int], count: int) -> Share:
    """What one unit takes; `count`: micro-batches a step."""
    mesh, narrow = config.mesh, BYTES[config.model.compute]
    weights = learned = gradients = late = resident = passing = 0
    summed: Counter[Rule] = Counter()
    for placed, shape, learns in unit:
        left, (ranks, copies) = placed.part(shape, sizes), placed.ranks(sizes)
        whole, dim = math.prod(left), sharded_dim(left, ranks)
        shard = whole // left[dim] * -(-left[dim] // ranks)
        fsdp = ranks * copies > 1
        weights += shard
        learned += shard * learns
        gathered = shard * ranks  # where the ranks do not divide the dimension, padding is gathered too
        apart = placed.kind == "experts" and not fsdp and narrow < MASTER  # see LocalExperts
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
        elif fsdp or computed < MASTER:  # without FSDP the copy in the compute dtype stays for the backward
            resident += gathered * computed
    return Share(weights, learned, gradients, late, resident, passing, max(summed.values(), default=0))


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
    moments = total.learned * MOMENTS[config.optim.name] * BYTES[config.optim.moments]
    moments += total.learned * MASTER * (config.optim.average > 0)  # the mean of the last steps' weights
    tokens = config.micro_batch * config.data.sequence // (mesh.cp * mesh.tp)
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
    return Memory(total.weights * MASTER, total.gradients, moments, buffers, activations, loss, freed)


def in_flight(mesh: MeshConfig, count: int, place: int, parts: int) -> int:
    """How many of the `count` micro-batches of a step have their activations on a rank at once."""
    if mesh.pp == 1:
        return 1
    return count if mesh.schedule == "gpipe" else min(count, mesh.pp - place if parts == 1 else mesh.pp)


def of_layer(spec: DenseSpec | MoESpec, config: TrainConfig, routed: bool) -> int:
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
    # x and its products; over etp each rank has a slice of the neurons of etp times as many rows
    return bytes_kept + round(rows * narrow * (d.hidden * mesh.etp + matrices * max(moe.widths))) + router


# ---- the table


def mappings(spec: DenseSpec | MoESpec, config: TrainConfig, world: int) -> Iterator[MeshConfig]:
    """All mappings that can run, without copies of the model."""
    axes, layers = ("tp", "cp", "pp", "ep", "etp"), (spec.dense if isinstance(spec, MoESpec) else spec).layers
    sharded = replace(config.mesh, dp_replicate=1)

    def refused(names: Sequence[str], sizes: Sequence[int]) -> bool:
        mesh = changed_to(sharded, axes, [1] * len(axes))
        return bool(problem(changed_to(mesh, names, sizes), world, spec, config.data.sequence))

    # a size that is impossible with every other axis at 1 is impossible in any mapping
    possible = [[n for n in range(1, world + 1) if world % n == 0 and not refused([axis], [n])] for axis in axes]
    for values in itertools.product(*possible):
        mesh = changed_to(sharded, axes, values)
        stages_of_all = mesh.pp * (1 if mesh.schedule in SINGLE else 2)
        if refused(axes, values) or stages_of_all > layers:
            continue
        count, rest = divmod(config.batch, config.micro_batch * world // (mesh.tp * mesh.cp * mesh.pp))
        if count and not rest and (mesh.pp == 1 or count >= mesh.pp) and goes_with(config, mesh):
            yield mesh


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
    own, model = config.mesh, Model(spec, config, teacher)
    every = tqdm(list(mappings(spec, config, world)), desc="mappings", leave=False, delay=2, disable=None)
    found = [(mesh, memory(spec, replace(config, mesh=mesh), world, model)) for mesh in every]
    found = sorted(((mesh, size) for mesh, size in found if mesh != own), key=lambda item: item[1].total)[:rows]
    names = ["weights", "gradients", "moments", "gathered", "activations", "loss"]
    names += ["teacher", "total"] if teacher else ["total"]
    names += ["host"] if config.checkpoint.asynchronous else []
    lines = ["  ".join(f"{name:>11}" for name in names) + f"   GB on the fullest of {world} GPUs"]
    for mesh, size in [(own, memory(spec, config, world, model)), *found]:
        cells = "  ".join(f"{getattr(size, name) / 1e9:11.2f}" for name in names)
        axes = " ".join(f"{axis}={getattr(mesh, axis)}" for axis in ("tp", "cp", "pp", "ep", "etp"))
        lines.append(f"{cells}   {axes}" + ("   (this config)" if mesh == own else ""))
    return "\n".join(lines)


@cli.command()
def main(words: list[str]) -> int:
    file, words = cli.file_and_words(words)
    counts = [word.removeprefix("gpus=") for word in words if word.startswith("gpus=")]
    if len(counts) != 1 or not counts[0].isdecimal() or counts[0] == "0":
        raise ValueError("say for how many GPUs to plan, for instance gpus=8")
    config = read_config(file, [word for word in words if not word.startswith("gpus=")])
    with source(config) as origin:
        check(config.mesh, int(counts[0]), origin.spec, config.data.sequence)
        check_optim(config, origin.spec)
        teacher = None
        if config.teacher.asked:
            with taught_by(config) as its_origin:
                teacher = check_teacher(its_origin, origin.spec)
        print(table(origin.spec, config, int(counts[0]), teacher=teacher))
    return 0
