"""Attention of some queries over some keys, with the log-sum-exp from which context.py merges these blocks.

The kernels are those behind scaled_dot_product_attention, called by their aten names because that function does not
return the log-sum-exp. A backward kernel that gets the log-sum-exp and the output over *all* keys returns the part of
its block.

B sequences, H query heads, G key/value heads, S queries, T keys, A dimensions of a head. `bias` [B or 1, 1, S, T] is
finite and added to the scaled logits. `causal` blocks have as many queries as keys, and no bias. Only plain torch
computes a `cap`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.backends import cuda
from torch.nn import functional

aten = torch.ops.aten
LSE_ROWS = 32  # the efficient kernel pads its log-sum-exps to a multiple of this


def block(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float, cap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp over the keys of one block: (y_BHSA, lse_BHS)."""
    s = q.shape[2]
    kernel = "plain" if cap else fastest(q, k, v, bias, causal)
    if kernel == "cudnn":
        y, lse = aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, 0.0, causal, scale=scale)[:2]
    elif kernel == "flash":
        y, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]
    elif kernel == "efficient":
        k, v, bias = each_head(k, q), each_head(v, q), spread(bias, q)
        y, lse = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal, scale=scale)[:2]
    else:
        return plain(q, k, v, bias, causal, scale, cap)
    return y, lse.flatten(2)[:, :, :s]


def block_backward(
    d_y: Tensor,
    q: Tensor,
    y: Tensor,
    lse_BHS: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this block's part of (d_q, d_k, d_v); `y` and `lse_BHS` are over all blocks."""
    kernel = "plain" if cap else fastest(q, k, v, bias, causal)
    s, t = q.shape[2], k.shape[2]
    if kernel == "plain":
        return plain_backward(d_y, q, y, lse_BHS, k, v, bias, causal, scale, cap)
    seed = torch.zeros(2, dtype=torch.int64, device=q.device)  # of dropout, which is off
    lse = lse_BHS.contiguous()
    if kernel == "cudnn":
        return aten._scaled_dot_product_cudnn_attention_backward(  # type: ignore[no-any-return]
            d_y, q, k, v, y, lse[..., None], seed[0], seed[1], bias, None, None, s, t, 0.0, causal, scale=scale
        )
    if kernel == "flash":
        return aten._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
            d_y, q, k, v, y, lse, None, None, s, t, 0.0, causal, seed, seed[0], scale=scale
        )
    lse = functional.pad(lse, (0, -s % LSE_ROWS), value=math.inf)
    y = y.transpose(1, 2).contiguous().transpose(1, 2)  # the memory layout that the kernel assumes
    d_q, d_k, d_v, _ = aten._scaled_dot_product_efficient_attention_backward(
        d_y, q, each_head(k, q), each_head(v, q), spread(bias, q), y, lse, seed[0], seed[1], 0.0,
        [True, True, True, False], causal, scale=scale,
    )  # fmt: skip
    return d_q, each_group(d_k, k), each_group(d_v, v)


def fastest(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> str:
    """Return the name of the fastest kernel for this block: flash takes no bias, efficient no key/value groups."""
    if not q.is_cuda:
        return "plain"
    params = cuda.SDPAParams(q, k, v, bias, 0.0, causal, q.shape[1] != k.shape[1])
    if cuda.can_use_cudnn_attention(params):
        return "cudnn"
    if bias is None and cuda.can_use_flash_attention(params):
        return "flash"
    params = cuda.SDPAParams(q, each_head(k, q), each_head(v, q), spread(bias, q), 0.0, causal, False)
    aligned = bias is None or k.shape[2] % 16 == 0
    return "efficient" if aligned and cuda.can_use_efficient_attention(params) else "plain"


def each_head(x_BGTA: Tensor, q_BHSA: Tensor) -> Tensor:
    copies = q_BHSA.shape[1] // x_BGTA.shape[1]
    return x_BGTA if copies == 1 else x_BGTA.repeat_interleave(copies, dim=1)


def each_group(d_BHTA: Tensor, x_BGTA: Tensor) -> Tensor:
    return d_BHTA.view(len(d_BHTA), x_BGTA.shape[1], -1, *d_BHTA.shape[2:]).sum(2)


def spread(bias: Tensor | None, q_BHSA: Tensor) -> Tensor | None:
    return None if bias is None else bias.expand(*q_BHSA.shape[:2], -1, -1)


# ---- sinks: an extra logit of each head, which has no value

# finite, because -inf gives nan where a query sees no key of a block; with this the block gets a share of 0 in a merge
NEVER = -1e30


def sunk(y: Tensor, lse_BHS: Tensor, sink_H: Tensor) -> tuple[Tensor, Tensor]:
    """Return (y, lse) over all keys and the sinks; pass both to `block_backward`."""
    both = torch.logaddexp(lse_BHS, sink_H.to(lse_BHS.dtype)[:, None])
    return (y * (lse_BHS - both).exp()[..., None]).to(y.dtype), both


def d_sinks(d_y: Tensor, y: Tensor, lse_BHS: Tensor, sink_H: Tensor) -> Tensor:
    share_BHS = (sink_H.to(lse_BHS.dtype)[:, None] - lse_BHS).exp()
    return -(share_BHS * (d_y.to(lse_BHS.dtype) * y).sum(-1)).sum((0, 2)).to(sink_H.dtype)


def with_sinks(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink_H: Tensor, scale: float) -> Tensor:
    """Attend to all keys and the sinks, causally if there is no bias."""
    y: Tensor = _WithSinks.apply(q, k, v, bias, sink_H, scale)  # type: ignore[no-untyped-call]
    return y


class _WithSinks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink_H: Tensor, scale: float) -> Tensor:
        y, lse = sunk(*block(q, k, v, bias, bias is None, scale), sink_H)
        ctx.save_for_backward(q, k, v, bias, sink_H, y, lse)
        ctx.scale = scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, sink_H, y, lse = ctx.saved_tensors
        d_q, d_k, d_v = block_backward(d_y, q, y, lse, k, v, bias, bias is None, ctx.scale)
        return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), None, d_sinks(d_y, y, lse, sink_H), None


# ---- plain torch: any device and dtype, with all logits in memory


def plain(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float, cap: float = 0.0
) -> tuple[Tensor, Tensor]:
    logits = hidden(capped(products(q, k, scale), cap), bias, causal)
    lse = logits.logsumexp(-1)
    p = (logits - lse[..., None]).exp_()
    return (p @ each_head(v, q).to(p.dtype)).to(q.dtype), lse


def plain_backward(
    d_y: Tensor,
    q: Tensor,
    y: Tensor,
    lse: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    bent = capped(products(q, k, scale), cap)
    p = (hidden(bent, bias, causal) - lse[..., None]).exp_()
    d_y, y, all_k, all_v = (x.to(p.dtype) for x in (d_y, y, each_head(k, q), each_head(v, q)))
    d_logits = p * (d_y @ all_v.mT - (d_y * y).sum(-1, keepdim=True)) * scale
    if cap:
        d_logits *= 1 - (bent / cap).square()
    return d_logits @ all_k, each_group(d_logits.mT @ q.to(p.dtype), k), each_group(p.mT @ d_y, v)


def plain_capped(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float, sink_H: Tensor | None = None
) -> Tensor:
    """Attend to the keys where `mask` is True, or causally without a mask; autograd differentiates this."""
    logits = capped(products(q, k, scale), cap)
    if mask is None:
        mask = torch.ones_like(logits[0, 0], dtype=torch.bool).tril()
    # finite, because a row of padding sees nothing and must not become NaN
    logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
    if sink_H is not None:
        sinks = sink_H.to(logits.dtype)[:, None, None].expand(*logits.shape[:3], 1)
        p = torch.cat((logits, sinks), -1).softmax(-1)[..., :-1].to(q.dtype)
    else:
        p = logits.softmax(-1).to(q.dtype)
    return p @ each_head(v, q)


def capped(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap) if cap else x


def products(q: Tensor, k: Tensor, scale: float) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.to(wide) @ each_head(k, q).to(wide).mT * scale


def hidden(logits: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
    """Return the logits with the hidden positions masked."""
    if causal:
        logits = logits.masked_fill(torch.ones_like(logits[0, 0], dtype=torch.bool).triu(1), -math.inf)
    return logits if bias is None else logits + bias
