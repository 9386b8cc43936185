"""List the rules between keys of a training run, each with its error sentence."""

from __future__ import annotations

from math import isqrt
from typing import Any

from training.experts import DEFAULT, capabilities
from training.model import transformer_engine
from training.model.nf4 import NF4
from training.observe.profiling import steps_to_trace
from upcycle.config.values import Rule
from upcycle.io.hub import check_id
from upcycle.io.remote import is_url

COMPUTE = ("bfloat16", "float32", "float64")
DTYPE = Rule(lambda value: value in ("", *COMPUTE), f"it must be one of {', '.join(COMPUTE)}, or left out")


def check_run(config: Any) -> None:
    """Raise a ValueError for the first rule that a TrainConfig breaks."""
    steps_to_trace(config.profile)
    if config.push:
        check_id(config.push)
    capabilities(config.model.expert_backend)  # raises for an unknown name
    transformer_engine.known(config.model.transformer_engine)
    for wrong, sentence in rules(config):
        if wrong:
            raise ValueError(sentence)


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of `number` that is at most `most`."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return max(n for part in small for n in (part, number // part) if n <= most)


def rules(c: Any) -> list[tuple[object, str]]:
    """List (whether a rule is broken, its sentence) for a TrainConfig."""
    model, pp, stream = c.model, c.mesh.pp, c.data.stream
    te_attention = "attention" in model.transformer_engine
    got = f"mesh.pp={pp}" if pp > 1 else "data.mask_documents=true" if c.data.mask_documents else ""
    near = largest_divisor(c.batch, c.micro_batch or 1)
    return [
        (
            c.micro_batch and c.batch % c.micro_batch,
            f"micro_batch={c.micro_batch} must divide batch={c.batch}; try micro_batch={near}",
        ),
        (
            not c.micro_batch and pp > 1,
            f"micro_batch=auto does not go with mesh.pp={pp}, where the number of micro-batches decides how long "
            "stages wait; write micro_batch=1 or more",
        ),
        (
            c.eval.every and pp > 1,
            f"eval.every={c.eval.every} does not go with mesh.pp={pp}, because a pipeline is not evaluated while it "
            "trains; write eval.every=0",
        ),
        (
            c.teacher.asked and pp > 1,
            f"teacher.weight={c.teacher.weight:g} does not go with mesh.pp={pp}, because a teacher is not cut into "
            "stages; write mesh.pp=1 or teacher.weight=0",
        ),
        (
            c.islands.asked and c.optim.average,
            f"optim.average={c.optim.average:g} does not go with islands.join, whose exchanges are a mean; leave it "
            "out",
        ),
        (
            c.islands.asked and c.stages,
            "stages do not go with islands.join, whose server knows one run of equal steps; leave them out",
        ),
        (
            c.checkpoint.mirror and (c.islands.local or c.islands.serve),
            "checkpoint.mirror does not go with islands.local or islands.serve, because each island needs a mirror of "
            "its own; write it in the commands of islands that join",
        ),
        (
            c.push and not c.export,
            f"push={c.push} uploads the export, and there is none; write export=FOLDER too",
        ),
        (
            (c.push or is_url(c.export)) and (c.islands.local or c.islands.serve),
            "islands.local and islands.serve export to a folder here; write export=FOLDER, then upcycle push",
        ),
        (
            c.islands.asked and stream,
            f"data.stream={stream} does not go with islands.join, because all islands would read the same; prepare "
            "it with upcycle prepare",
        ),
        (
            c.lora.rank and not capabilities(model.expert_backend).adapters,
            f"lora.rank={c.lora.rank} does not go with model.expert_backend={model.expert_backend}, which has no "
            f"adapters; write model.expert_backend={DEFAULT}",
        ),
        (
            model.frozen == NF4 and not c.lora.rank,
            "model.frozen=nf4 needs adapters, because codes of 4 bits cannot learn; write lora.rank=16 too",
        ),
        (
            te_attention and got,
            f"Transformer Engine's attention does not go with {got}; leave attention out of model.transformer_engine "
            "or change that",
        ),
        (
            bool(model.source) == bool(model.upcycle),
            "the model comes from model.source (a checkpoint) or model.upcycle (a dense one, upcycled as it is "
            f"read); {'both are set: leave one out' if model.source else 'neither is set: write model.source=FOLDER'}",
        ),
    ]
