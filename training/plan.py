"""Will it fit? Bytes on the fullest rank of any mapping, without a GPU and without a byte of weights.

usage: python -m training.plan [CONFIG] gpus=N [key=value ...]

  python -m training.plan my.yaml gpus=8                  # the config's own mapping, and the others by their size
  python -m training.plan llama3-8b-e8t2 model.upcycle.source=./llama gpus=16 mesh.ep=4 model.recompute=full

Weights, gradients and moments are counted, parameter by parameter. Gathered weights and activations are estimated from
what the modules keep in bf16 on a GPU (attention without its square, experts without their product); the allocator's
own waste, NCCL's buffers and CUDA's context (some 3 GB together) are not in it.

keys, with defaults and meaning: docs/config.md, those of training
"""

from __future__ import annotations

import sys

from upcycle import cli

if __name__ == "__main__":  # before the imports below, which take seconds
    sys.exit(cli.start("training.plan"))

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from training.build import source
from training.config import TrainConfig, read_config
from training.model.decoder import Decoder
from training.model.loss import LOGITS
from training.model.recompute import MOVES
from training.parallel.mesh import MeshConfig, changed_to, check, grids, problem
from training.parallel.pipeline import cut, stages
from upcycle.spec import BYTES, DenseSpec, MoESpec

MASTER = 4  # bytes of a weight, and of a sum of gradients
MOMENTS = {"adamw": 2, "muon": 1}


@dataclass(frozen=True)
class Memory:
    """Bytes."""

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


Parts = dict[range, Decoder]  # by their layers; on meta, where they weigh nothing


def memory(spec: DenseSpec | MoESpec, config: TrainConfig, world: int, built: Parts | None = None) -> Memory:
    """Of the fullest rank of `config` on `world` GPUs. `built`: parts of this model that were made before."""
    built = {} if built is None else built
    layers = (spec.dense if isinstance(spec, MoESpec) else spec).layers
    ranks = [[0]] if config.mesh.pp == 1 else stages(config.mesh.pp, config.mesh.schedule)
    ranges = [range(layers)] if config.mesh.pp == 1 else cut(spec, config.mesh.pp, config.mesh.schedule)
    found = [
        of_rank(spec, config, world, [ranges[stage] for stage in held], place, built)
        for place, held in enumerate(ranks)
    ]
    return max(found, key=lambda memory: memory.total)


def of_rank(
    spec: DenseSpec | MoESpec, config: TrainConfig, world: int, parts: Sequence[range], place: int, built: Parts
) -> Memory:
    mesh, narrow = config.mesh, BYTES[config.model.compute]
    attention, experts = grids(mesh, world)
    shards = {
        "tokens": attention["dp_shard"] * mesh.cp * mesh.tp,
        "tensor": attention["dp_shard"] * mesh.cp,
        "experts": experts["edp_shard"],
    }
    copies = {"tokens": mesh.dp_replicate, "tensor": mesh.dp_replicate, "experts": experts["edp_replicate"]}
    dense = spec.dense if isinstance(spec, MoESpec) else spec
    models = [part_of(spec, part, built) for part in parts]
    count = max(1, config.batch // (config.micro_batch * attention["dp_shard"] * mesh.dp_replicate))
    kept = gradients = late = resident = 0
    passing: dict[str, int] = {}  # by layer: gathered or copied for its forward, and again for its backward
    for name, parameter in (named for model in models for named in model.named_parameters()):
        kind, shape = divided(name, parameter, mesh, dense)
        whole, ranks = math.prod(shape), shards[kind]
        by_hidden = kind == "experts" and shape[0] % ranks and len(shape) > 2
        shard = whole // ranks if by_hidden else whole // shape[0] * -(-shape[0] // ranks)
        fsdp = ranks * copies[kind] > 1
        kept += shard
        apart = kind == "experts" and not fsdp and narrow < MASTER  # see LocalExperts
        size, first = whole if fsdp and not mesh.reshard else shard, narrow if apart else MASTER
        most = first if count == 1 else MASTER  # the first micro-batch's may be narrow
        there = (0, first, MASTER)[min(count, 3) - 1]  # when the last one's backward begins
        gradients += size * most
        late += size * (most - there)
        again = mesh.reshard if fsdp else apart and config.model.recompute in MOVES
        if again and name.startswith("layers."):
            layer = name.split(".")[1]
            passing[layer] = passing.get(layer, 0) + whole * narrow
        elif fsdp or narrow < MASTER:  # without FSDP the copy in the compute dtype stays for the backward
            resident += whole * narrow
    gathered = resident + 3 * max(passing.values(), default=0)  # two layers' weights, one's gradients
    moments = kept * MOMENTS[config.optim.name] * BYTES[config.optim.moments]
    tokens = config.micro_batch * config.data.sequence // (mesh.cp * mesh.tp)
    flight = in_flight(mesh, count, place, len(parts))
    activations = sum(flight * tokens * of_layer(spec, config, layer) for part in parts for layer in part)
    loss = 0
    if any(model.last for model in models):
        # a chunk of logits, whose gradient takes their place; the head's gradient, in float32 and as it is handed on
        loss = min(LOGITS, tokens * dense.vocab) * narrow + (MASTER + narrow) * dense.vocab * dense.hidden
    return Memory(kept * MASTER, gradients, moments, gathered, activations, loss, min(activations, late))


def part_of(spec: DenseSpec | MoESpec, part: range, built: Parts) -> Decoder:
    """Made once: a table asks for the same parts hundreds of times."""
    if part not in built:
        with torch.device("meta"):
            built[part] = Decoder(spec, part=part, experts="reference")
    return built[part]


COLUMNS, ROWS = ("q", "k", "v", "gate", "up"), ("o", "down")


def divided(name: str, parameter: nn.Parameter, mesh: MeshConfig, dense: DenseSpec) -> tuple[str, list[int]]:
    """The kind of a parameter, and what tensor and expert parallel leave of its shape on a rank: see shard.py."""
    shape, words = list(parameter.shape), name.split(".")
    if "experts" in words:
        shape[0] //= mesh.ep
        if len(shape) > 2:
            shape[2] //= mesh.etp
        return "experts", shape
    if "attention" not in words and words[-2] not in COLUMNS + ROWS:
        return "tokens", shape
    if words[-2] in COLUMNS or (words[-2] in ("q_norm", "k_norm") and dense.qk_norm == "full"):
        shape[0] //= mesh.tp
    elif words[-2] in ROWS and words[-1] == "weight":
        shape[1] //= mesh.tp
    return "tensor", shape


def in_flight(mesh: MeshConfig, count: int, place: int, parts: int) -> int:
    """Of `count` micro-batches a step, how many have their activations on a rank at once."""
    if mesh.pp == 1:
        return 1
    return count if mesh.schedule == "gpipe" else min(count, mesh.pp - place if parts == 1 else mesh.pp)


def of_layer(spec: DenseSpec | MoESpec, config: TrainConfig, layer: int) -> int:
    """Bytes that one layer keeps for backward, of each token outside of attention."""
    mesh, narrow, mode = config.mesh, BYTES[config.model.compute], config.model.recompute
    moe = spec if isinstance(spec, MoESpec) and layer in spec.layers else None
    d = spec.dense if isinstance(spec, MoESpec) else spec
    router = 4 * 3 * moe.experts + 8 * 2 * moe.top_k if moe else 0
    halves = narrow * 3 * d.hidden  # the stream twice, the FFN's input
    if mode == "full":
        return halves + router
    # attention sees tp times as many tokens, with a tp-th of the heads: its inputs grow, its heads do not
    heads = (d.heads + 2 * d.kv_heads) * d.head_dim
    attention = narrow * (d.hidden * mesh.tp + 2 * heads + d.heads * d.head_dim) + 4 * d.heads
    if mode == "experts" and moe:
        return attention + halves + router
    stream = narrow * d.hidden * (4 if mode == "none" else 2)
    width, matrices = moe.shared if moe else d.ffn, 2 if d.gated else 1
    ffn = narrow * (width * (matrices + (2 if mode == "none" else 0)) + (d.hidden * mesh.tp if width else 0))
    kept = (halves if mode == "attention" else attention + stream) + ffn
    if moe is None:
        return kept
    # of a token; where they are padded to a capacity (which DeepEP 2.x does not), as many as there is room for
    rows: float = moe.top_k
    if config.balance.pad_to_capacity and mesh.ep * mesh.etp > 1:
        rows = min(rows * config.balance.capacity_factor, moe.experts)
    # x and its products; over etp each rank has a slice of the neurons of etp times as many rows
    return kept + round(rows * narrow * (d.hidden * mesh.etp + matrices * max(moe.widths))) + router


# ---- the table


def mappings(spec: DenseSpec | MoESpec, config: TrainConfig, world: int) -> Iterator[MeshConfig]:
    """All that can run, without copies of the model."""
    sizes = [n for n in range(1, world + 1) if world % n == 0]
    for values in itertools.product(sizes, repeat=5):
        mesh = changed_to(config.mesh, ("tp", "cp", "pp", "ep", "etp"), values)
        mesh = replace(mesh, dp_replicate=1)
        if problem(mesh, world, spec, config.data.sequence):
            continue
        count, rest = divmod(config.batch, config.micro_batch * world // (mesh.tp * mesh.cp * mesh.pp))
        if count and not rest and (mesh.pp == 1 or count >= mesh.pp):
            yield mesh


def table(spec: DenseSpec | MoESpec, config: TrainConfig, world: int, rows: int = 12) -> str:
    own, built = config.mesh, Parts()
    found = [(mesh, memory(spec, replace(config, mesh=mesh), world, built)) for mesh in mappings(spec, config, world)]
    found = sorted(((mesh, size) for mesh, size in found if mesh != own), key=lambda item: item[1].total)[:rows]
    names = ("weights", "gradients", "moments", "gathered", "activations", "loss", "total")
    lines = ["  ".join(f"{name:>11}" for name in names) + f"   GB on the fullest of {world} GPUs"]
    for mesh, size in [(own, memory(spec, config, world, built)), *found]:
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
        print(table(origin.spec, config, int(counts[0])))
    return 0
