"""Cross-entropy of a linear head without ever holding all logits: chunk by chunk, gradients made on the way.

A vocabulary of 150,000 times 16,000 tokens is 10 GB of float32 logits, three times over in a plain implementation.
Here a chunk's logits live while the chunk is worked on; backward multiplies what forward made by the loss's gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LOGITS = 1 << 28  # elements of a chunk's logits


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_VD: Tensor, label_T: Tensor, scale: float) -> Tensor:
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        w_VD = weight_VD.to(x_TD.dtype)
        total = torch.zeros((), dtype=wide, device=x_TD.device)
        need_x, need_w = ctx.needs_input_grad[:2]
        grad_x = torch.empty_like(x_TD) if need_x else None
        grad_w = torch.zeros(weight_VD.shape, dtype=wide, device=x_TD.device) if need_w else None
        step = max(1, LOGITS // w_VD.shape[0])
        for start in range(0, x_TD.shape[0], step):
            x, label = x_TD[start : start + step], label_T[start : start + step]
            logits = (x @ w_VD.T).to(wide) * scale
            counts = (label >= 0).to(wide)
            index = label.clamp_min(0)[:, None]
            log_z = logits.logsumexp(-1)
            total += ((log_z - logits.gather(1, index)[:, 0]) * counts).sum()
            if not (need_x or need_w):
                continue
            # d nll / d logits = softmax - one hot; in place of the logits
            grad = logits.sub_(log_z[:, None]).exp_()
            grad.scatter_add_(1, index, torch.full_like(index, -1, dtype=wide))
            grad = grad.mul_((counts * scale)[:, None]).to(x.dtype)
            if grad_x is not None:
                torch.mm(grad, w_VD, out=grad_x[start : start + step])
            if grad_w is not None:
                grad_w += grad.T @ x
        ctx.save_for_backward(grad_x, None if grad_w is None else grad_w.to(weight_VD.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_x, grad_w = ctx.saved_tensors
        x = None if grad_x is None else grad_x * grad.to(grad_x.dtype)
        return x, None if grad_w is None else grad_w * grad.to(grad_w.dtype), None, None


def linear_cross_entropy(x_TD: Tensor, weight_VD: Tensor, label_T: Tensor, scale: float = 1.0) -> Tensor:
    """Sum over labels >= 0 of -log softmax(scale * x W^T)[label], in float32 at least."""
    return LinearCrossEntropy.apply(x_TD, weight_VD, label_T, scale)  # type: ignore[no-any-return,no-untyped-call]
