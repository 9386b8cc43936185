"""Run one training step or one validation; the loop repeats them and bench times them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from tqdm import tqdm

from training.data.batch import Batch
from training.data.mixture import Validation
from training.model.moe import MoE
from training.optim.loads import FIGURES
from training.parallel.collectives import all_reduce, gather
from training.parallel.shard import one_step, own_part, reshard, synchronize
from training.run.build import Learner, data_rank

BY_LAYER = ("max_over_mean", "entropy", "whole", "missing", "doubled")  # in the log


def train_step(run: Learner, batches: Sequence[Batch], lr: float | None) -> dict[str, Tensor]:
    """Run forward and backward over the micro-batches and update once, at rate `lr` or the rate that was set.
    Everything stays on the device."""
    assert run.optimizer is not None, "nothing to learn with"
    loss = run.agree(gradients(run, batches))
    with run.phases("optimizer"):
        norm = run.optimizer.clip(lambda square: run.agree(all_reduce(square, run.mesh.group("pp"))), elsewhere(run))
        skip = ~(torch.isfinite(loss) & torch.isfinite(norm))
        if run.config.optim.spike_sigma:
            skip = skip | run.guard.spike(loss, norm)
        run.optimizer.step(lr, skip)
        run.balance.end_step(skip)
        run.optimizer.zero_grad(set_to_none=True)
    told = {} if run.teacher is None else {"loss/teacher": run.teacher.divergence}
    return {"loss": loss, **told, "grad_norm": norm, "skipped": run.optimizer.skipped}


def gradients(run: Learner, batches: Sequence[Batch]) -> Tensor:
    """Compute the gradients of the step's loss per token and return that loss: all ranks' nats divided by the labels
    that they score. A teacher's divergence enters the gradients but not the returned loss."""
    parts = [own_part(batch.to(run.device), run.mesh) for batch in batches]
    scored = run.reduce(torch.stack([part.scored.sum() for part in parts]).sum())
    if run.pipeline is not None:
        with run.phases("forward and backward"), one_step(run.balance.blocks, run.pipeline.micro_batches):
            whole = Batch(*(torch.cat(tensors) for tensors in zip(*(vars(p).values() for p in parts), strict=True)))
            return run.reduce(run.pipeline.step(seen(run, whole), scored, run.config.data.sequence))
    wide = torch.promote_types(run.model.compute, torch.float32)
    nats, diverged = (torch.zeros((), dtype=wide, device=run.device) for _ in range(2))
    with one_step(run.balance.blocks, len(parts)):
        for number, part in enumerate(parts, 1):
            synchronize(run.model, run.mesh, number == len(parts))
            with run.phases("forward"):
                learned, loss, divergence = taught(run, part)
            with run.phases("backward"):
                (learned / scored).backward()  # type: ignore[no-untyped-call]
            nats += loss.detach()
            diverged += divergence
    if run.teacher is not None:
        run.teacher.divergence = run.reduce(diverged) / scored
    return run.reduce(nats) / scored


def seen(run: Learner, part: Batch) -> Batch:
    """Return the model's input: without mask_documents it has no documents, so that attention needs no mask."""
    return part if run.config.data.mask_documents else replace(part, documents=None)  # type: ignore[arg-type]


def nll(run: Learner, part: Batch) -> Tensor:
    part = seen(run, part)
    return run.model.loss(part.tokens, part.labels, part.positions, part.documents, run.config.data.sequence)


def taught(run: Learner, part: Batch) -> tuple[Tensor, Tensor, Tensor | float]:
    """Return the loss to learn, its nats, and its divergence from the teacher."""
    if run.teacher is None:
        loss = nll(run, part)
        return loss, loss, 0.0
    part, length = seen(run, part), run.config.data.sequence
    lesson = run.teacher.lesson(part, length)
    found: tuple[Tensor, Tensor, Tensor] = run.model(
        part.tokens, part.positions, part.documents, part.labels, length, lesson
    )
    run.teacher.rest()
    return found


def elsewhere(run: Learner) -> tuple[str, ...]:
    """Return the parameters that another stage counts: tied embeddings are on two stages."""
    return ("embed.weight",) if run.model.dense.tied and run.mesh.index("pp") > 0 else ()


@torch.no_grad()
def validate(run: Learner, valid: Sequence[Validation], poll: Callable[[], object]) -> dict[str, float]:
    """Return loss per token and bits per byte of every validation set. `poll` is called before each batch, on all
    ranks.
    """
    found: dict[str, float] = {}
    run.phases.tell("validation")
    size, ranks = run.config.micro_batch, run.mesh.dp
    for part in valid:
        nats, tokens = torch.zeros(2, dtype=torch.float64, device=run.device)
        batches = part.batches(size, data_rank(run.mesh), ranks)
        # validations repeat, so the bar disappears, and a log file does not get ten lines a second
        for batch in tqdm(
            batches, f"validation {part.name}", part.rounds(size, ranks), leave=False, unit="batch", delay=2,
            mininterval=0.1 if sys.stderr.isatty() else 10.0, disable=run.mesh.rank > 0,
        ):  # fmt: skip
            poll()
            own = own_part(batch.to(run.device), run.mesh)
            if run.pipeline is not None:
                nats += run.pipeline.evaluate(seen(run, own), run.config.data.sequence)
            else:
                nats += nll(run, own)
            tokens += own.scored.sum()
        nats, tokens = run.reduce(torch.stack([nats, tokens])).tolist()
        found |= {
            f"valid/{part.name}/loss": nats / tokens,
            f"valid/{part.name}/bpb": part.bits_per_byte(nats),
        }
    for stage in run.parts:
        reshard(stage)
    run.phases.tell("")
    return found


def balance_numbers(run: Learner) -> dict[str, float]:
    """Return the routers' measured statistics since the last call: worst and mean over layers, and each layer's."""
    moe = [int(number) for number, layer in run.model.layers.items() if isinstance(layer.ffn, MoE)]
    loads = zip(moe, run.balance.load.fetch(run.reduce), strict=True)
    layers = [(number, {name: getattr(load, name) for name in (*BY_LAYER, *FIGURES)}) for number, load in loads]
    if run.mesh.size("pp") > 1:
        layers = [layer for stage in gather(layers, run.mesh.group("pp"), run.device) for layer in stage]
    by_layer = [figures for _, figures in sorted(layers, key=lambda layer: layer[0])]
    found = {f"balance/{place}/{name}": row[name] for place, row in enumerate(by_layer) for name in BY_LAYER}
    if by_layer:
        found["balance/max_over_mean"] = max(row["max_over_mean"] for row in by_layer)
        found |= {f"balance/{name}": sum(row[name] for row in by_layer) / len(by_layer) for name in FIGURES}
    return {name: value for name, value in found.items() if not math.isnan(value)}
