"""Teach a model by a dense one: its next-token distributions are what the model should not forget.

    loss a token = nats of the label + weight * KL(teacher || model)

The teacher is frozen, in the dtype that the model computes in, and divided over the same ranks as the model: each rank
asks it about its own tokens. It is in no checkpoint, because its source has it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from training.checkpoint.layout import Origin
from training.data.batch import Batch
from training.model.decoder import Decoder
from training.model.loss import Lesson
from training.parallel.placement import rule
from training.parallel.shard import reshard
from upcycle.arch.spec import DenseSpec, MoESpec
from upcycle.config.values import above_zero, check_values, finite


@dataclass(frozen=True)
class TeacherConfig:
    weight: float = 0.0  # of KL(teacher || model) a token, which is added to the loss; 0 (and final 0): no teacher
    final: float | None = None  # the weight at the last step, to which it goes in a line; none given: it stays
    source: str = ""  # a dense checkpoint, a folder or hub id, of the same vocabulary; "": model.upcycle's own source
    # both models' logits are divided by it before they are compared, and the divergence is multiplied with its square
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_values(self, "teacher.", {"weight final": finite(), "temperature": above_zero()})
        if self.source and not self.asked:
            raise ValueError(f"teacher.source is {self.source} and teacher.weight is 0; write a weight, for instance 1")

    @property
    def asked(self) -> bool:
        return self.weight > 0 or bool(self.final)


def weights(config: TeacherConfig, steps: int) -> Callable[[int], float]:
    """Return the divergence's weight by step, from 0 on."""
    final = config.weight if config.final is None else config.final
    return lambda step: config.weight + (final - config.weight) * min(step / max(steps - 1, 1), 1.0)


def check_teacher(teacher: Origin, spec: DenseSpec | MoESpec) -> DenseSpec:
    """Return what the teacher is; raise a ValueError if it cannot teach a model of `spec`."""
    if not isinstance(teacher.spec, DenseSpec):
        raise ValueError("the teacher is a mixture-of-experts model and must be dense; write teacher.source=FOLDER")
    learner = spec.dense if isinstance(spec, MoESpec) else spec
    if teacher.spec.vocab != learner.vocab:
        raise ValueError(
            f"the teacher has a vocabulary of {teacher.spec.vocab} tokens and the model one of {learner.vocab}; give a "
            "teacher.source with the model's tokenizer"
        )
    return teacher.spec


class Teacher:
    """A decoder that `made` made, divided over the ranks."""

    divergence: Tensor  # of the last step, a token

    def __init__(self, decoder: Decoder, temperature: float) -> None:
        self.decoder, self.temperature, self.weight = decoder, temperature, 0.0
        if isinstance(decoder, FSDPModule):
            decoder.set_reshard_after_forward(True)
            decoder.set_reshard_after_forward(False, recurse=False)  # its head is wanted after its forward

    def begin(self, weight: float) -> None:
        """Take up the weight of the divergence in the next step."""
        self.weight = weight

    @torch.no_grad()
    def lesson(self, part: Batch, length: int) -> Lesson:
        """Return the lesson about this rank's part of a micro-batch. The head stays gathered until `rest`."""
        x_BSD: Tensor = self.decoder(part.tokens, part.positions, part.documents, length=length)
        dense = self.decoder.dense
        head = self.decoder.head_weight.detach()
        return Lesson(x_BSD.flatten(0, 1), head, dense.logit_scale, dense.logit_cap, self.temperature, self.weight)

    def rest(self) -> None:
        """Give up what was gathered."""
        reshard(self.decoder)


def made(dense: DenseSpec, compute: torch.dtype) -> Decoder:
    """Return a frozen decoder of hidden states, on the meta device. It holds in `compute` what the model computes with
    in `compute`, so an upcycled model begins with the very numbers of its teacher."""
    with torch.device("meta"):
        decoder = Decoder(dense, compute=compute)
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(False)
        if not rule(name, dense).exact:
            parameter.data = parameter.data.to(compute)
    decoder.last = False  # no loss and no logits of its own
    return decoder
