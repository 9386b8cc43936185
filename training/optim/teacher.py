"""Distil from a dense teacher: keep the model's next-token distributions near the teacher's.

    loss per token = nats of the label + weight * KL(teacher || model)

The teacher is frozen, in the model's compute dtype, and divided over the same ranks as the model. Each rank asks it
about its own tokens. Checkpoints do not contain it.
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
    weight: float = 0.0  # weight of KL(teacher || model) per token in the loss; 0 (and final 0): no teacher
    final: float | None = None  # weight at the last step, reached linearly; null: constant
    source: str = ""  # folder or Hub id of a dense model with the same vocabulary; "": the source of model.upcycle
    # divides both models' logits before they are compared; its square multiplies the divergence
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_values(self, "teacher.", {"weight final": finite(), "temperature": above_zero()})
        if self.source and not self.asked:
            raise ValueError(f"teacher.source is {self.source} and teacher.weight is 0; write a weight, for instance 1")

    @property
    def asked(self) -> bool:
        return self.weight > 0 or bool(self.final)


def weights(config: TeacherConfig, steps: int) -> Callable[[int], float]:
    """Return the weight of the divergence as a function of the step, counted from 0."""
    final = config.weight if config.final is None else config.final
    return lambda step: config.weight + (final - config.weight) * min(step / max(steps - 1, 1), 1.0)


def check_teacher(teacher: Origin, spec: DenseSpec | MoESpec) -> DenseSpec:
    """Return the teacher's spec; raise a ValueError if it cannot teach a model of `spec`."""
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
    """The frozen dense decoder, divided over the ranks."""

    divergence: Tensor  # per token, of the last step

    def __init__(self, decoder: Decoder, temperature: float) -> None:
        self.decoder, self.temperature, self.weight = decoder, temperature, 0.0
        if isinstance(decoder, FSDPModule):
            decoder.set_reshard_after_forward(True)
            decoder.set_reshard_after_forward(False, recurse=False)  # its head is needed after its forward

    def begin(self, weight: float) -> None:
        """Set the weight of the divergence for the next step."""
        self.weight = weight

    @torch.no_grad()
    def lesson(self, part: Batch, length: int) -> Lesson:
        """Return the teacher's hidden states and head for this rank's part of a micro-batch. The head stays gathered
        until `rest`."""
        x_BSD: Tensor = self.decoder(part.tokens, part.positions, part.documents, length=length)
        dense = self.decoder.dense
        head = self.decoder.head_weight.detach()
        return Lesson(x_BSD.flatten(0, 1), head, dense.logit_scale, dense.logit_cap, self.temperature, self.weight)

    def rest(self) -> None:
        """Free the gathered weights."""
        reshard(self.decoder)


def made(dense: DenseSpec, compute: torch.dtype) -> Decoder:
    """Return a frozen decoder without a loss, on the meta device. Its weights have the dtypes that the model computes
    in, so an upcycled model starts with exactly the teacher's numbers."""
    with torch.device("meta"):
        decoder = Decoder(dense, compute=compute)
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(False)
        if not rule(name, dense).exact:
            parameter.data = parameter.data.to(compute)
    decoder.last = False  # no loss and no logits
    return decoder
