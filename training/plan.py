"""Will it fit? Bytes on the fullest rank of any mapping, without a GPU and without a byte of weights.

usage: python -m training.plan [CONFIG] gpus=N [key=value ...]

  python -m training.plan my.yaml gpus=8                  # the config's own mapping, and the others by their size
  python -m training.plan llama3-8b-e8t2 model.upcycle.source=./llama gpus=16 mesh.ep=4 model.recompute=full

Weights, gradients and moments are counted, parameter by parameter. Gathered weights and activations are estimated from
what the modules keep in bf16 on a GPU (attention without its square, experts without their product); the allocator's
own waste, NCCL's buffers and CUDA's context (some 3 GB together) are not in it. `host` is what an asynchronous
checkpoint copies to host memory. Frozen parameters (optim.groups) have neither gradients nor moments; activations are
counted as if all learned.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from training.build import check_optim, source
from training.config import TrainConfig, read_config
from training.model.decoder import Decoder
from training.model.loss import LOGITS
from training.model.recompute import MOVES
from training.optim import multiplier
from training.parallel.mesh import MeshConfig, changed_to, check, grids, problem
from training.parallel.pipeline import cut, stages
from training.parallel.placement import Rule, rule, sharded_dim
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

    @property
    def total(self) -> int:
        held = self.weights + self.gradients + self.moments + self.gathered + self.activations + self.loss
        return held - self.freed

    @property
    def host(self) -> int:
        """In host memory: the copies that an asynchronous checkpoint is written from."""
        return self.weights + self.moments


# parameters that are gathered for one layer, or for no layer: each one's rule and shape, and whether it learns
Unit = tuple[tuple[Rule, tuple[int, ...], bool], ...]
Parts = dict[range, Counter[tuple[bool, Unit]]]  # by range of layers: how often (whether of a layer, unit) occurs


def memory(spec: DenseSpec | MoESpec, config: TrainConfig, world: int, known: Parts | None = None) -> Memory:
    """The fullest rank's Memory for `config` on `world` GPUs. `known`: a cache of this model's parts."""
    known = {} if known is None else known
    layers = (spec.dense if isinstance(spec, MoESpec) else spec).layers
    ranks = [[0]] if config.mesh.pp == 1 else stages(config.mesh.pp, config.mesh.schedule)
    ranges = [range(layers)] if config.mesh.pp == 1 else cut(spec, config.mesh.pp, config.mesh.schedule)
    found = [
        of_rank(spec, config, world, [ranges[stage] for stage in own], place, known) for place, own in enumerate(ranks)
    ]
    return max(found, key=lambda memory: memory.total)


def of_rank(
    spec: DenseSpec | MoESpec, config: TrainConfig, world: int, parts: Sequence[range], place: int, known: Parts
) -> Memory:
    mesh, narrow = config.mesh, BYTES[config.model.compute]
    attention, experts = grids(mesh, world)
    sizes = attention | experts
    dense = spec.dense if isinstance(spec, MoESpec) else spec
    count = max(1, config.batch // (config.micro_batch * attention["dp_shard"] * mesh.dp_replicate))
    weights = learned = gradients = late = resident = most_passing = most_summed = 0
    for (of_a_layer, unit), alike in sum((units(spec, config, part, known) for part in parts), Counter()).items():
        passing = 0  # gathered or copied for the layer's forward, and again for its backward
        summed: Counter[Rule] = Counter()  # bytes of the sums that FSDP makes at once
        for placed, shape, learns in unit:
            left, (ranks, copies) = placed.part(shape, sizes), placed.ranks(sizes)
            whole, dim = math.prod(left), sharded_dim(left, ranks)
            shard = whole // left[dim] * -(-left[dim] // ranks)
            fsdp = ranks * copies > 1
            weights += alike * shard
            learned += alike * shard * learns
            gathered = shard * ranks  # where the ranks do not divide the dimension, padding is gathered too
            apart = placed.kind == "experts" and not fsdp and narrow < MASTER  # see LocalExperts
            # torch's pipelines sum gradients and free weights once a step, whatever mesh.reshard says
            once = fsdp and (not mesh.reshard or mesh.pp > 1)
            size, first = whole if once else shard, narrow if apart else MASTER
            if once and mesh.pp > 1 and learns:  # after the last backward one unit's gradients are copied to be sent
                summed[placed] += whole * MASTER
            most = first if count == 1 else MASTER  # the first micro-batch's may be narrow
            there = (0, first, MASTER)[min(count, 3) - 1]  # when the last one's backward begins
            gradients += alike * size * most * learns
            late += alike * size * (most - there) * learns  # only the last backward makes these bytes
            regathered = not once if fsdp else apart and config.model.recompute in MOVES
            computed = MASTER if placed.exact else narrow
            if regathered and of_a_layer:
                passing += gathered * computed
            elif fsdp or computed < MASTER:  # without FSDP the copy in the compute dtype stays for the backward
                resident += alike * gathered * computed
        most_passing = max(most_passing, passing)
        most_summed = max(most_summed, *summed.values(), 0)
    buffers = resident + 3 * most_passing + most_summed  # two layers' weights, one's gradients
    moments = learned * MOMENTS[config.optim.name] * BYTES[config.optim.moments]
    tokens = config.micro_batch * config.data.sequence // (mesh.cp * mesh.tp)
    flight = in_flight(mesh, count, place, len(parts))
    activations = sum(flight * tokens * of_layer(spec, config, layer) for part in parts for layer in part)
    loss = 0
    if any(part.stop == dense.layers for part in parts):
        # a chunk of logits, whose gradient takes their place; the head's gradient, in float32 and as it is handed on
        logits = min(LOGITS, tokens * dense.vocab) * narrow
        if dense.logit_cap:  # torch's lines in place of the kernel: a smaller chunk, and three copies of it in float32
            logits = min(LOGITS // 4, tokens * dense.vocab) * (narrow + 3 * MASTER)
        of_head = MASTER + narrow if multiplier(config.optim, "embed.weight" if dense.tied else "head.weight") else 0
        loss = logits + of_head * dense.vocab * dense.hidden
    freed = min(activations, late + most_summed)
    return Memory(weights * MASTER, gradients, moments, buffers, activations, loss, freed)


def units(spec: DenseSpec | MoESpec, config: TrainConfig, part: range, known: Parts) -> Counter[tuple[bool, Unit]]:
    """A part's units, counted. Each part is made once: a table asks for the same parts hundreds of times, of one model
    and optimiser."""
    if part not in known:
        with torch.device("meta"):
            model = Decoder(spec, part=part, experts="reference")
        found: dict[str, Unit] = {}
        for name, parameter in model.named_parameters():
            layer = name.split(".")[1] if name.startswith("layers.") else ""
            learns = multiplier(config.optim, name) != 0
            found[layer] = (*found.get(layer, ()), (rule(name, model.dense), tuple(parameter.shape), learns))
        known[part] = Counter((layer != "", unit) for layer, unit in found.items())
    return known[part]


def in_flight(mesh: MeshConfig, count: int, place: int, parts: int) -> int:
    """How many of the `count` micro-batches of a step have their activations on a rank at once."""
    if mesh.pp == 1:
        return 1
    return count if mesh.schedule == "gpipe" else min(count, mesh.pp - place if parts == 1 else mesh.pp)


def of_layer(spec: DenseSpec | MoESpec, config: TrainConfig, layer: int) -> int:
    """Bytes that one layer keeps for backward, of each token outside of attention."""
    mesh, narrow, mode = config.mesh, BYTES[config.model.compute], config.model.recompute
    moe = spec if isinstance(spec, MoESpec) and layer in spec.layers else None
    d = spec.dense if isinstance(spec, MoESpec) else spec
    router = 4 * 3 * moe.experts + 8 * 2 * moe.top_k if moe else 0
    sandwich = d.block == "sandwich"  # its last norms keep the outputs of attention and FFN
    halves = narrow * (4 if sandwich else 3) * d.hidden  # the stream twice, the FFN's input; in a sandwich its output
    if mode == "full":
        return halves + router
    # attention sees tp times as many tokens, with a tp-th of the heads: its inputs grow, its heads do not
    heads = (d.heads + 2 * d.kv_heads) * d.head_dim
    attention = narrow * (d.hidden * mesh.tp + 2 * heads + d.heads * d.head_dim) + 4 * d.heads
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
    sizes = [n for n in range(1, world + 1) if world % n == 0]
    sharded = replace(config.mesh, dp_replicate=1)
    for values in itertools.product(sizes, repeat=5):
        mesh = changed_to(sharded, ("tp", "cp", "pp", "ep", "etp"), values)
        if problem(mesh, world, spec, config.data.sequence):
            continue
        count, rest = divmod(config.batch, config.micro_batch * world // (mesh.tp * mesh.cp * mesh.pp))
        if count and not rest and (mesh.pp == 1 or count >= mesh.pp):
            yield mesh


def table(spec: DenseSpec | MoESpec, config: TrainConfig, world: int, rows: int = 12) -> str:
    own, known = config.mesh, Parts()
    found = [(mesh, memory(spec, replace(config, mesh=mesh), world, known)) for mesh in mappings(spec, config, world)]
    found = sorted(((mesh, size) for mesh, size in found if mesh != own), key=lambda item: item[1].total)[:rows]
    names = ["weights", "gradients", "moments", "gathered", "activations", "loss", "total"]
    names += ["host"] if config.checkpoint.asynchronous else []
    lines = ["  ".join(f"{name:>11}" for name in names) + f"   GB on the fullest of {world} GPUs"]
    for mesh, size in [(own, memory(spec, config, world, known)), *found]:
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
        print(table(origin.spec, config, int(counts[0])))
    return 0
