"""-log softmax(logits)[label] a token, and its gradient in place of the logits.

The kernel reads the logits in their own dtype, twice, writes once, and sums in float32, for a dozen passes of torch
over float32. The torch lines are the specification, and alone compute a teacher's divergence."""

from __future__ import annotations

import torch
from torch import Tensor


def on_kernel(logits: Tensor, cap: float = 0.0) -> bool:
    # float64 is for checking gradients; a soft cap has torch's lines alone
    return logits.is_cuda and logits.element_size() <= 4 and not cap


def nats_(logits_TV: Tensor, label_T: Tensor, scale: float, gradient: bool, cap: float = 0.0) -> Tensor:
    """Return nats_T of scale * logits (of cap * tanh(that / cap) with a cap), 0 where the label is negative. With
    `gradient`, logits_TV holds the gradient of their sum afterwards."""
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
    the label is negative; told_TV holds its gradient by logits_TV afterwards. A bend is (scale, cap) as in nats_."""
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
    """Return cap * tanh(scale * logits / cap), or without a cap scale * logits, in memory of its own."""
    scaled = logits * scale
    return scaled.div_(cap).tanh_().mul_(cap) if cap else scaled
