"""Attention over a whole sequence, between the projections; context.py and evaluation replace it by other functions.

SDPA computes plain causal attention. For documents and windows it would need a mask of S * S and slow kernels, so on a
GPU FlexAttention skips hidden blocks of 128 x 128; `look` lists the blocks once a forward without waiting for the
device. A soft cap changes logits before the softmax: FlexAttention applies it with blocks, and plain torch otherwise,
with all logits in memory. Sinks take their share of the softmax from the log-sum-exp, which FlexAttention and the
kernels of kernels/attention.py return.

B sequences, S positions, H query heads, G key heads, A dimensions of a head, N = S / 128 blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from training.kernels import attention as kernel

# cuDNN's kernel first: its forward and backward reach 492 TFLOP/s on an H200, and Flash-2, the default, reaches 274
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
ORDER = [int(backend) for backend in BACKENDS]  # type: ignore[call-overload]  # the form in which torch stores its order
BLOCK = 128  # FlexAttention's own default


@dataclass(frozen=True, eq=False)
class Seen:
    """The limits of attention in addition to causality; all layers of a forward share one object."""

    documents_BS: Tensor | None = None
    blocks: Mapping[int | None, BlockMask] = field(default_factory=dict)  # by window; empty where SDPA attends
    found: dict[Any, Any] = field(default_factory=dict)  # results that attention computes in one layer for the others


class Attend(Protocol):
    """Attend to positions j <= i of the same document and within the window; `sink_H` holds the sinks' logits."""

    def __call__(
        self, q_BSHA: Tensor, k_BSGA: Tensor, v_BSGA: Tensor, seen: Seen, sink_H: Tensor | None = None
    ) -> Tensor: ...


@dataclass(frozen=True)
class Sdpa:
    window: int | None
    scale: float
    cap: float = field(default=0.0, kw_only=True)  # soft cap of the logits; 0: none

    def __call__(
        self, q_BSHA: Tensor, k_BSGA: Tensor, v_BSGA: Tensor, seen: Seen, sink_H: Tensor | None = None
    ) -> Tensor:
        q, k, v = [part.transpose(1, 2) for part in (q_BSHA, k_BSGA, v_BSGA)]
        if sink_H is not None and self.window not in seen.blocks:
            over_all: Tensor = self.with_sinks(q, k, v, seen, sink_H)
            return over_all.transpose(1, 2)
        grouped = q.shape[1] != k.shape[1]
        if self.window in seen.blocks:
            bend = bending(self.cap) if self.cap else None
            blocks, more = seen.blocks[self.window], None if sink_H is None else AuxRequest(lse=True)
            found = flex(
                q, k, v, score_mod=bend, block_mask=blocks, scale=self.scale, enable_gqa=grouped, return_aux=more,
                kernel_options=tiles(q),
            )  # fmt: skip
            y: Tensor = found if sink_H is None else kernel.sunk(found[0], found[1].lse, sink_H)[0]
            return y.transpose(1, 2)
        mask = visible(q.shape[2], self.window, seen.documents_BS, q.device)
        if self.cap:
            return kernel.plain_capped(q, k, v, mask, self.scale, self.cap).transpose(1, 2)
        with fastest_first():
            y = functional.scaled_dot_product_attention(
                q, k, v, mask, is_causal=mask is None, scale=self.scale, enable_gqa=grouped
            )
        return y.transpose(1, 2)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def with_sinks(self, q: Tensor, k: Tensor, v: Tensor, seen: Seen, sink_H: Tensor) -> Tensor:
        """Attend with sinks; layers with the same window share one mask."""
        if self.window not in seen.found:
            mask = visible(q.shape[2], self.window, seen.documents_BS, q.device)
            bias = None if mask is None else torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, kernel.NEVER)
            seen.found[self.window] = bias
        return kernel.with_sinks(q, k, v, seen.found[self.window], sink_H, self.scale)


def fastest_first() -> AbstractContextManager[Any]:
    """Return a context in which SDPA takes the first of BACKENDS that can run.

    Entering it costs eighty calls, so a forward enters it once for all layers."""
    if not torch.compiler.is_compiling() and torch._C._get_sdp_priority_order()[: len(ORDER)] == ORDER:
        return nullcontext()
    return sdpa_kernel(BACKENDS, set_priority=True)


def visible(length: int, window: int | None, documents_BS: Tensor | None, device: torch.device) -> Tensor | None:
    """Return a mask [B or 1, 1, S, S], True where a token may look, or None if causality is the only limit."""
    if documents_BS is None and (window is None or window >= length):
        return None
    at = torch.arange(length, device=device)
    back = at[:, None] - at[None, :]
    mask = (back >= 0) if window is None else (back >= 0) & (back < window)
    if documents_BS is None:
        return mask[None, None]
    return mask[None, None] & (documents_BS[:, None, :, None] == documents_BS[:, None, None, :])


# ---- block masks, on a GPU


def look(
    documents_BS: Tensor | None,
    length: int,
    windows: Iterable[int | None],
    device: torch.device,
    dtype: torch.dtype,
    capped: bool = False,
) -> Seen:
    """Return the limits of attention for a forward in `dtype`, with block masks for those of the layers' `windows` that
    need one; if `capped`, all of them do.

    Only 16 bits on CUDA use block masks: wider dtypes check gradients, and a sequence of one block has a small mask."""
    blocks: dict[int | None, BlockMask] = {}
    if device.type == "cuda" and dtype.itemsize == 2 and length > BLOCK:
        for window in set(windows):
            if capped or documents_BS is not None or (window is not None and window < length):
                blocks[window] = block_mask(documents_BS, length, window, device)
    return Seen(documents_BS, blocks)


def block_mask(documents_BS: Tensor | None, length: int, window: int | None, device: torch.device) -> BlockMask:
    """Return the mask of blocks that hold visible pairs, from each block's first and last position and document."""
    count = -(-length // BLOCK)
    first_N = torch.arange(count, device=device) * BLOCK
    last_N = first_N + BLOCK - 1
    nearest_NN = first_N[:, None] - last_N[None, :]  # from a query back to a key
    farthest_NN = last_N[:, None] - first_N[None, :]
    nonempty = farthest_NN >= 0
    whole = (nearest_NN >= 0) & (last_N < length)[:, None]
    if window is not None:
        nonempty, whole = nonempty & (nearest_NN < window), whole & (farthest_NN < window)
    nonempty, whole = nonempty[None], whole[None]
    if documents_BS is not None:
        position = torch.arange(count * BLOCK, device=device).clamp(max=length - 1)
        low_BN, high_BN = documents_BS[:, position].view(-1, count, BLOCK).aminmax(dim=-1)
        overlap = (low_BN[:, :, None] <= high_BN[:, None, :]) & (low_BN[:, None, :] <= high_BN[:, :, None])
        single = low_BN == high_BN
        nonempty, whole = nonempty & overlap, whole & overlap & single[:, :, None] & single[:, None, :]
    partial = nonempty & ~whole
    (part, part_at), (full, full_at), (q_part, q_part_at), (q_full, q_full_at) = listed(
        torch.stack((partial, whole, partial.mT, whole.mT))  # backward reads columns
    )
    return BlockMask(
        seq_lengths=(length, length),
        kv_num_blocks=part,
        kv_indices=part_at,
        full_kv_num_blocks=full,
        full_kv_indices=full_at,
        q_num_blocks=q_part,
        q_indices=q_part_at,
        full_q_num_blocks=q_full,
        full_q_indices=q_full_at,
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=rule(documents_BS, window),
    )


def listed(chosen_XBNN: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield, for each table, the number of chosen columns of each row, and all columns with the chosen ones first."""
    order = chosen_XBNN.byte().argsort(dim=-1, descending=True, stable=True).int()
    count = chosen_XBNN.sum(-1, dtype=torch.int32)
    return zip(count[:, :, None], order[:, :, None], strict=True)


def rule(documents_BS: Tensor | None, window: int | None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return a function that says whether one position sees another, by the same rule as `visible`."""

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = q >= k
        if window is not None:
            seen = seen & (q - k < window)
        return seen if documents_BS is None else seen & (documents_BS[b, q] == documents_BS[b, k])

    return sees


@functools.cache  # one function object a cap: a new object would be compiled again
def bending(cap: float) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    def bend(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return bend


def flex(*given: Any, **named: Any) -> Any:
    """Call FlexAttention, compiled unless the layer around it is already compiled."""
    if torch.compiler.is_compiling():
        return flex_attention(*given, **named)
    # each size and window, with and without gradients, compiles a variant; by default the 9th would run uncompiled, on
    # all pairs of positions. Before torch 2.13 the output's gradient would be copied into another memory order
    with torch._dynamo.config.patch(recompile_limit=256), kept_strides():
        return compiled_flex()(*given, **named)


def kept_strides() -> Any:
    """Return a context in which gradients have their tensors' memory order, which is torch's default from 2.13 on."""
    name = "guess_tangent_strides_as_outputs"  # a comment in torch says that this option will be removed
    config = torch._functorch.config
    return nullcontext() if getattr(config, name, True) else config.patch({name: True})


def tiles(q_BHSA: Tensor) -> dict[str, int] | None:
    """Return tiles for the forward kernel where they are faster than torch's, else None (docs/performance.md)."""
    hopper = q_BHSA.is_cuda and torch.cuda.get_device_capability(q_BHSA.device)[0] == 9
    return {"fwd_BLOCK_N": 64} if hopper and q_BHSA.shape[-1] == 64 and q_BHSA.element_size() == 2 else None


@functools.cache
def compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)
