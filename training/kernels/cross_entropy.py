"""Compute -log softmax(logits)[label] of each token, and write its gradient over the logits.

The kernel reads the logits twice in their own dtype, writes once and sums in float32; torch takes a dozen passes over
float32. The torch lines are the specification, and only they compute a teacher's divergence."""

from __future__ import annotations

import torch
from torch import Tensor


def on_kernel(logits: Tensor, cap: float = 0.0) -> bool:
    # float64 only checks gradients; only the torch lines compute a soft cap
    return logits.is_cuda and logits.element_size() <= 4 and not cap


def nats_(logits_TV: Tensor, label_T: Tensor, scale: float, gradient: bool, cap: float = 0.0) -> Tensor:
    """Return nats_T of scale * logits, or with a cap of cap * tanh(scale * logits / cap); 0 for negative labels.

    With `gradient`, logits_TV afterwards holds the gradient of the sum of nats_T."""
    if on_kernel(logits_TV, cap):
        from training.kernels.triton import cross_entropy as cross_entropy_triton

        nats_T: Tensor = cross_entropy_triton.nats_(logits_TV, label_T, scale, gradient)
        return nats_T
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    scaled_TV = logits_TV.to(wide) * scale
    if cap:
        bent_TV = (scaled_TV / cap).tanh_()
        scaled_TV = cap * bent_TV
    counts_T, index_T1 = (label_T >= 0).to(wide), label_T.clamp_min(0)[:, None]
    log_z_T = scaled_TV.logsumexp(-1)
    nats_T = (log_z_T - scaled_TV.gather(1, index_T1)[:, 0]) * counts_T
    if gradient:  # softmax - one hot
        grad_TV = scaled_TV.sub_(log_z_T[:, None]).exp_()
        grad_TV.scatter_add_(1, index_T1, torch.full_like(index_T1, -1, dtype=wide))
        if cap:
            grad_TV.mul_(1 - bent_TV.square_())
        logits_TV.copy_(grad_TV.mul_((counts_T * scale)[:, None]))
    return nats_T


def divergence_(
    told_TV: Tensor,
    logits_TV: Tensor,
    label_T: Tensor,
    told_bend: tuple[float, float],
    bend: tuple[float, float],
    temperature: float,
) -> Tensor:
    """Return KL(softmax(told / temperature) || softmax(logits / temperature)) * temperature^2 of each token, 0 where
    the label is negative.

    Afterwards told_TV holds its gradient with respect to logits_TV. A bend is (scale, cap) as in nats_."""
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    (scale, cap), counts_T = bend, (label_T >= 0).to(wide)
    p_TV = bent(told_TV.to(wide), *told_bend).div_(temperature).log_softmax(-1)
    bent_TV = bent(logits_TV.to(wide), scale, cap)
    slope_TV = 1 - (bent_TV / cap).square_() if cap else None
    q_TV = bent_TV.div_(temperature).log_softmax(-1)
    share_TV = p_TV.exp()
    nats_T = (p_TV.sub_(q_TV).mul_(share_TV)).sum(-1) * counts_T * temperature**2
    grad_TV = q_TV.exp_().sub_(share_TV)
    if slope_TV is not None:
        grad_TV.mul_(slope_TV)
    told_TV.copy_(grad_TV.mul_((counts_T * (scale * temperature))[:, None]))
    return nats_T


def bent(logits: Tensor, scale: float, cap: float) -> Tensor:
    """Return cap * tanh(scale * logits / cap), or scale * logits without a cap, as a new tensor."""
    scaled = logits * scale
    return scaled.div_(cap).tanh_().mul_(cap) if cap else scaled
