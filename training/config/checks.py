"""List what keys of a training run do not go together, each with the sentence that a person reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from training.experts import DEFAULT, capabilities
from training.model import transformer_engine
from training.observe.profiling import steps_to_trace

COMPUTE = ("bfloat16", "float32", "float64")


def te_attention(config: Any) -> bool:
    return "attention" in config.model.transformer_engine


# (what is wrong of a TrainConfig, what is said of it)
RULES: tuple[tuple[Callable[[Any], object], Callable[[Any], str]], ...] = (
    (
        lambda c: c.batch % c.micro_batch,
        lambda c: f"micro_batch={c.micro_batch} must divide batch={c.batch}; try micro_batch={divisor(c)}",
    ),
    (
        lambda c: c.eval.every and c.mesh.pp > 1,
        lambda c: (
            f"eval.every={c.eval.every} does not go with mesh.pp={c.mesh.pp}, because a pipeline is not "
            "evaluated while it trains; write eval.every=0"
        ),
    ),
    (
        lambda c: c.teacher.asked and c.mesh.pp > 1,
        lambda c: (
            f"teacher.weight={c.teacher.weight:g} does not go with mesh.pp={c.mesh.pp}, because a teacher is "
            "not cut into stages; write mesh.pp=1 or teacher.weight=0"
        ),
    ),
    (
        lambda c: c.islands.asked and c.optim.average,
        lambda c: (
            f"optim.average={c.optim.average:g} does not go with islands.join, whose exchanges are a mean; leave it out"
        ),
    ),
    (
        lambda c: c.islands.asked and c.stages,
        lambda c: "stages do not go with islands.join, whose server knows one run of equal steps; leave them out",
    ),
    (
        lambda c: c.islands.asked and c.data.stream,
        lambda c: (
            f"data.stream={c.data.stream} does not go with islands.join, because all islands would read the "
            "same; prepare it with upcycle prepare"
        ),
    ),
    (
        lambda c: c.lora.rank and not capabilities(c.model.expert_backend).adapters,
        lambda c: (
            f"lora.rank={c.lora.rank} does not go with model.expert_backend={c.model.expert_backend}, which "
            f"has no adapters; write model.expert_backend={DEFAULT}"
        ),
    ),
    (
        lambda c: te_attention(c) and c.mesh.pp > 1,
        lambda c: (
            f"Transformer Engine's attention does not go with mesh.pp={c.mesh.pp}; leave attention out of "
            "model.transformer_engine or write mesh.pp=1"
        ),
    ),
    (
        lambda c: te_attention(c) and c.data.mask_documents,
        lambda c: (
            "Transformer Engine's attention does not go with data.mask_documents=true; leave attention out of "
            "model.transformer_engine or write data.mask_documents=false"
        ),
    ),
    (
        lambda c: bool(c.model.source) == bool(c.model.upcycle),
        lambda c: (
            "the model comes from model.source (a checkpoint) or model.upcycle (a dense one, upcycled as it is "
            f"read); {'both are' if c.model.source else 'neither is'} set"
        ),
    ),
)


def check_run(config: Any) -> None:
    """Raise a ValueError for the first rule that a TrainConfig breaks."""
    steps_to_trace(config.profile)
    transformer_engine.known(config.model.transformer_engine)
    for wrong, sentence in RULES:
        if wrong(config):
            raise ValueError(sentence(config))


def divisor(config: Any) -> int:
    """Return the largest micro-batch that divides the batch, up to the one that is asked for."""
    return max(n for n in range(1, config.micro_batch + 1) if config.batch % n == 0)
