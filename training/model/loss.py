"""Cross-entropy of a linear head without storing all logits: chunk by chunk, with gradients computed in the forward.

A vocabulary of 150,000 times 16,000 tokens is 10 GB of float32 logits, three times over in a plain implementation."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from training.kernels import cross_entropy

LOGITS = 1 << 29  # the most elements of a chunk's logits; a fourth of it where torch copies the logits to float32
TAUGHT = LOGITS // 8  # with a teacher: memory holds both models' logits, and COPIES float32 copies of logits
COPIES = 5


@dataclass(frozen=True)
class Lesson:
    """A teacher's last hidden states for the same tokens, and the head that turns them into logits."""

    x_TD: Tensor
    weight_VD: Tensor
    scale: float
    cap: float
    temperature: float  # both models' logits are divided by it before they are compared
    weight: float  # of the divergence, which is added to the nats of the labels


class LinearCrossEntropy(torch.autograd.Function):
    """Return (nats + lesson.weight * divergence, nats, divergence); only the first has a gradient."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight_VD: Tensor, label_T: Tensor, scale: float, cap: float, lesson: Lesson | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        w_VD = weight_VD.to(x_TD.dtype)
        nats, diverged = (torch.zeros((), dtype=wide, device=x_TD.device) for _ in range(2))
        told_VD = None if lesson is None else lesson.weight_VD.to(lesson.x_TD.dtype)
        need_x, need_w = ctx.needs_input_grad[:2]
        grad_x = torch.empty_like(x_TD) if need_x else None
        grad_w = torch.zeros(weight_VD.shape, dtype=wide, device=x_TD.device) if need_w else None
        limit = LOGITS if cross_entropy.on_kernel(x_TD, cap) else LOGITS // 4
        limit = limit if lesson is None else TAUGHT
        chunks = max(1, -(-x_TD.shape[0] * w_VD.shape[0] // limit))  # of about the same number of tokens
        starts = [x_TD.shape[0] * number // chunks for number in range(chunks + 1)]
        for start, end in itertools.pairwise(starts):
            x = x_TD[start:end]
            logits, label = x @ w_VD.T, label_T[start:end]
            told = None
            if lesson is not None and told_VD is not None:  # first, because nats_ overwrites the logits
                told = lesson.x_TD[start:end] @ told_VD.T
                bends = (lesson.scale, lesson.cap), (scale, cap)
                diverged += cross_entropy.divergence_(told, logits, label, *bends, lesson.temperature).sum()
            nats += cross_entropy.nats_(logits, label, scale, need_x or need_w, cap).sum()
            grad = logits  # nats_ wrote its gradient over the logits, and divergence_ wrote its gradient over `told`
            if told is not None and lesson is not None:
                grad.add_(told, alpha=lesson.weight)
            if grad_x is not None:
                torch.mm(grad, w_VD, out=grad_x[start:end])
            if grad_w is not None:
                add_product_(grad_w, grad.T, x)
            del logits, grad, told  # frees their memory before the next chunk needs it
        ctx.save_for_backward(grad_x, None if grad_w is None else grad_w.to(weight_VD.dtype))
        ctx.mark_non_differentiable(nats, diverged)
        return nats + diverged * (0.0 if lesson is None else lesson.weight), nats, diverged

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        grad_x, grad_w = ctx.saved_tensors
        return scaled(grad_x, grad), scaled(grad_w, grad), None, None, None, None


def scaled(x: Tensor | None, factor: Tensor) -> Tensor | None:
    """Return x * factor in x's dtype, multiplied in the wider one: in bfloat16 1 / tokens is up to 0.39 % off."""
    # one dimension, because torch rounds a scalar before it multiplies
    return None if x is None else torch.mul(x, factor.reshape(1), out=torch.empty_like(x))


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to a float32 total, in float32 even if a and b are bfloat16."""
    if a.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def linear_cross_entropy(
    x_TD: Tensor, weight_VD: Tensor, label_T: Tensor, scale: float = 1.0, cap: float = 0.0
) -> Tensor:
    """Return the sum over labels >= 0 of -log softmax(scale * x W^T)[label]; a `cap` other than 0 caps the logits."""
    return taught_cross_entropy(x_TD, weight_VD, label_T, scale, cap, None)[0]


def taught_cross_entropy(
    x_TD: Tensor, weight_VD: Tensor, label_T: Tensor, scale: float, cap: float, lesson: Lesson | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (nats + lesson.weight * divergence, nats, divergence); only the first has a gradient.

    The divergence is KL(teacher || student) of the next token times temperature squared, which keeps the size of its
    gradient."""
    if not torch.is_grad_enabled():  # a Function's forward does not see no_grad, and would compute gradients
        x_TD, weight_VD = x_TD.detach(), weight_VD.detach()
    return LinearCrossEntropy.apply(x_TD, weight_VD, label_T, scale, cap, lesson)  # type: ignore[no-any-return,no-untyped-call]
