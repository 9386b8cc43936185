"""Run micro-batches through stages of consecutive layers on different ranks.

The schedules are torch's. The cut into stages, the inputs and the outputs are ours.

    schedule     stages a rank   bubble          cost
    gpipe              1         most            activations of all micro-batches
    1f1b               1         as gpipe        activations of pp micro-batches
    interleaved        2         half            twice the messages
    zero_bubble        2         less            gradients of weights are computed later, in the bubble
    zbv                2         almost none     the same; stages form a V, so rank 0 has the first and the last

Splitting backward gains nothing for our autograd functions that compute all gradients at once: they run for the inputs
and again for the weights. The experts' function is one of them and is most of an MoE's work, so the last two schedules
suit dense models, or bubbles that are longer than that.

Every rank of a pipeline reads the same batch: the first stage needs tokens, the last labels, all need positions and
documents, so only hidden states travel. The loss is nats divided by the tokens that all ranks score, and torch's own
scaling of gradients is off. Router losses enter the gradient on their own stage (balance.AuxLoss).

    ranges = [cut(spec, pp, name)[stage] for stage in stages(pp, name)[rank]]
    pipeline = Pipeline([Decoder(spec, part=layers) for layers in ranges], mesh, name, micro_batches)
    loss = pipeline.step(batch, scored)        # forward, backward; then the optimiser's step as usual
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from training.data.batch import Batch
from training.model.decoder import Decoder
from training.parallel.collectives import local
from training.parallel.mesh import MeshConfig, ParallelMesh
from upcycle.arch.spec import DenseSpec, MoESpec

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
SINGLE = ("gpipe", "1f1b")  # one stage a rank
SPLIT = ("zero_bubble", "zbv")  # gradients of inputs first, of weights later


def stages(pp: int, schedule: str) -> list[list[int]]:
    """Return the stages of each rank."""
    if schedule in SINGLE:
        return [[rank] for rank in range(pp)]
    return [[rank, 2 * pp - 1 - rank if schedule == "zbv" else rank + pp] for rank in range(pp)]


def cut(spec: DenseSpec | MoESpec, pp: int, schedule: str) -> list[range]:
    """Return the layers of each stage, as even as possible; embedding and head count as one layer each."""
    layers = (spec.dense if isinstance(spec, MoESpec) else spec).layers
    count = pp if schedule in SINGLE else 2 * pp
    if count > layers:
        raise ValueError(
            f"mesh.pp={pp} with mesh.schedule={schedule} makes {count} stages, and the model has {layers} layers; try "
            f"mesh.pp={max(1, layers * pp // count)}"
        )
    held = [0] * count
    load = [(stage == 0) + (stage == count - 1) for stage in range(count)]
    for _ in range(layers):
        least = min(range(count), key=lambda stage: (held[stage] + load[stage], held[stage]))
        held[least] += 1
    ends = [sum(held[: stage + 1]) for stage in range(count)]
    return [range(end - size, end) for end, size in zip(ends, held, strict=True)]


def check(config: MeshConfig, micro_batches: int, *, recomputed: str = "none", compiled: bool = False) -> None:
    """Raise a ValueError if the schedule cannot run this config."""
    pp, name = config.pp, config.schedule
    if pp == 1:
        return
    if name == "1f1b" and micro_batches < pp:
        raise ValueError(
            f"mesh.schedule=1f1b with mesh.pp={pp} needs {pp} micro-batches a step, got {micro_batches}; make batch "
            "larger or micro_batch smaller, or try mesh.schedule=gpipe"
        )
    if name in ("interleaved", "zero_bubble") and micro_batches % max(1, micro_batches // pp):
        raise ValueError(
            f"mesh.schedule={name} with mesh.pp={pp} needs a multiple of {pp} micro-batches a step, got "
            f"{micro_batches}; try {micro_batches // pp * pp}"
        )
    if name in SPLIT and not can_split():
        raise ValueError(
            f"mesh.schedule={name} needs torch 2.13, and this is {torch.__version__}; update it or use "
            "mesh.schedule=interleaved"
        )
    # each weight's gradient would go through its region separately and compute the region again
    again = f"model.recompute={recomputed}" if recomputed != "none" else "model.compile=true" if compiled else ""
    if name in SPLIT and again:
        raise ValueError(
            f"mesh.schedule={name} makes the gradients of inputs and of weights one after the other, which {again} "
            "does not go with; switch that off or use mesh.schedule=interleaved"
        )


def can_split() -> bool:
    """Return whether torch can split backward. Before 2.13 it splits functions with two outputs, such as our norm with
    the addition before it, wrongly or not at all."""
    return bool(torch.torch_version.TorchVersion(torch.__version__) >= "2.13")


class Pipeline:
    """Run micro-batches through the stages. `parts`: this rank's stages in the order of `stages()`, each a Decoder of
    its layers, possibly divided further."""

    def __init__(self, parts: Sequence[Decoder], mesh: ParallelMesh, schedule: str, micro_batches: int) -> None:
        group = mesh.group("pp")
        assert group is not None, "one stage is not a pipeline"
        self.group, self.name, self.micro_batches = group, schedule, micro_batches
        placed = stages(group.size(), schedule)
        self.parts = dict(zip(placed[group.rank()], parts, strict=True))
        self.ranks = {stage: rank for rank, held in enumerate(placed) for stage in held}
        self.last = len(self.ranks) - 1
        self.device = next(parts[0].parameters()).device
        self.dense, self.compute = parts[0].dense, parts[0].compute
        self.scored = torch.ones((), device=self.device)
        self.shape: tuple[int, ...] = ()  # of a batch, because the schedule's buffers have one shape
        self.schedule: Any = None
        self.length: int | None = None
        for part in parts:
            part.register_forward_pre_hook(self.add_length, with_kwargs=True)
        if schedule in SPLIT:  # backward would not find weights that are freed after forward
            for module in (module for part in parts for module in part.modules()):
                if isinstance(module, FSDPModule):
                    module.set_reshard_after_forward(False)
        # NCCL needs the first call of a group from all its ranks, and stages call in pairs
        dist.all_reduce(torch.zeros(1, device=self.device), group=group)

    def step(self, batch: Batch, scored: Tensor, length: int | None = None) -> Tensor:
        """Run forward and backward of all micro-batches and add gradients to `.grad`. Return the nats of the batch's
        labels divided by `scored`, equal on all ranks of the pipeline.

        `batch`: tokens and labels [B, s], equal on all ranks of the pipeline, with positions and documents for the
        model. `scored`: the labels that all ranks score in the step. `length`: see Decoder.
        """
        if batch.tokens.shape[0] % self.micro_batches:
            raise ValueError(
                f"a pipeline's batch of {batch.tokens.shape[0]} sequences cannot be cut into {self.micro_batches} "
                "micro-batches of one size"
            )
        if batch.tokens.shape != self.shape:
            self.shape = tuple(batch.tokens.shape)
            self.schedule = self.planned()
        self.copy_tied()
        self.scored, self.length = scored, length
        arguments = {"positions_BS": batch.positions, "documents_BS": batch.documents, "labels_BS": batch.labels}
        # torch 2.11 can split the backward of a stage only if all its inputs are tensors
        arguments = {name: tensor for name, tensor in arguments.items() if tensor is not None}
        losses: list[Tensor] = []
        tokens = [batch.tokens] if 0 in self.parts else []
        self.schedule.step(*tokens, target=batch.labels, losses=losses, return_outputs=False, **arguments)
        self.sum_tied()
        return self.from_last(sum(losses[1:], losses[0]).detach() if losses else None)

    def follow(self, micro_batches: int) -> None:
        """Set the number of micro-batches of a step."""
        self.micro_batches, self.shape = micro_batches, ()

    def add_length(self, _: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return inputs, named | {"length": self.length}

    def planned(self) -> Any:
        """Return torch's schedule with the shapes of all that travels. Otherwise torch would run the model once to find
        them, with all side effects."""
        sequences, tokens = self.shape
        size = sequences // self.micro_batches
        first = torch.empty(size, tokens, dtype=torch.int64, device="meta")
        hidden = torch.empty(size, tokens, self.dense.hidden, dtype=self.compute, device="meta", requires_grad=True)
        nats = torch.empty((), dtype=self.wide, device="meta", requires_grad=True)
        staged = [
            PipelineStage(
                part,
                stage,
                len(self.ranks),
                self.device,
                input_args=hidden if stage else first,
                output_args=hidden if stage < self.last else nats,
                group=self.group,
            )
            for stage, part in self.parts.items()
        ]
        return SCHEDULES[self.name](
            staged[0] if self.name in SINGLE else staged,
            self.micro_batches,
            loss_fn=lambda nats, _: nats / self.scored,
            scale_grads=False,
        )

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.compute, torch.float32)

    def from_last(self, found: Tensor | None) -> Tensor:
        """Return the last stage's number on every rank; `found` is None on ranks without that stage."""
        total = torch.zeros((), dtype=self.wide, device=self.device) if found is None else found.to(self.wide).clone()
        dist.all_reduce(total, group=self.group)
        return total

    @torch.no_grad()
    def sum_tied(self) -> None:
        """Sum the gradients of tied embeddings, which are one matrix on two stages.

        On two ranks both get the sum, take the same step and stay equal. On one rank (zbv) only the first stage's
        matrix is trained and the last stage's is a copy of it.
        """
        gradients = [local(weight.grad) for weight in self.tied() if weight.grad is not None]
        if len(gradients) == 2:
            gradients[0].add_(gradients[1])
            self.tied()[1].grad = None
        elif gradients:
            peer = self.ranks[self.last if 0 in self.parts else 0]
            theirs = torch.empty_like(gradients[0])
            self.exchange([(dist.isend, gradients[0], peer), (dist.irecv, theirs, peer)])
            gradients[0].add_(theirs)

    @torch.no_grad()
    def copy_tied(self) -> None:
        copies = [local(weight) for weight in self.tied()]
        if len(copies) == 2:
            copies[1].copy_(copies[0])

    def tied(self) -> list[Tensor]:
        """Return this rank's copies of the tied embedding, the first stage's first."""
        ends = (self.parts[stage] for stage in (0, self.last) if stage in self.parts)
        return [part.embed.weight for part in ends if self.dense.tied and part.embed is not None]

    @torch.no_grad()
    def evaluate(self, batch: Batch, length: int | None = None) -> Tensor:
        """Return the nats of the batch's labels on all ranks of the pipeline, for any number of sequences.

        Each tick sends everything before the next begins, so that stages cannot block each other. FSDP keeps gathered
        weights: call shard.reshard() afterwards.
        """
        self.copy_tied()
        self.length = length
        count = min(self.micro_batches, len(batch.tokens))
        split = [[None] * count if x is None else x.tensor_split(count) for x in vars(batch).values()]
        pieces = [Batch(*parts) for parts in zip(*split, strict=True)]
        nats: Tensor | None = None
        waiting: dict[tuple[int, int], Tensor] = {}  # inputs by (stage, piece)
        for tick in range(self.last + len(pieces)):
            ops: list[tuple[Any, Tensor, int]] = []
            for stage, part in self.parts.items():
                number = tick - stage
                if not 0 <= number < len(pieces):
                    continue
                piece = pieces[number]
                x = waiting.pop((stage, number)) if stage else piece.tokens
                y = part(x, piece.positions, piece.documents, piece.labels)
                if stage == self.last:
                    nats = y if nats is None else nats + y
                elif stage + 1 in self.parts:
                    waiting[stage + 1, number] = y
                else:
                    ops.append((dist.isend, y.contiguous(), self.ranks[stage + 1]))
            for stage in self.parts:
                number = tick + 1 - stage
                if stage and stage - 1 not in self.parts and 0 <= number < len(pieces):
                    shape = (*pieces[number].tokens.shape, self.dense.hidden)
                    coming = torch.empty(shape, dtype=self.compute, device=self.device)
                    waiting[stage, number] = coming
                    ops.append((dist.irecv, coming, self.ranks[stage - 1]))
            self.exchange(ops)
        return self.from_last(nats)

    def exchange(self, ops: Sequence[tuple[Any, Tensor, int]]) -> None:
        calls = [P2POp(way, tensor, dist.get_global_rank(self.group, peer), self.group) for way, tensor, peer in ops]
        for work in dist.batch_isend_irecv(calls) if calls else []:
            work.wait()
