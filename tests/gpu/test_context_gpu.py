"""On a GPU: every kernel's blocks, merged by log-sum-exp as the ring merges them, against attention in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from training.kernels import attention
from training.parallel.context import NEVER, merge_

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
HALF, SCALE = 256, 64**-0.5


def tensors(groups: int) -> list[Tensor]:
    """q [2, 8, HALF, 64], k and v of twice as many positions, and the output's gradient."""
    draw = torch.Generator("cuda").manual_seed(0)
    shapes = [(2, 8, HALF, 64), (2, groups, 2 * HALF, 64), (2, groups, 2 * HALF, 64), (2, 8, HALF, 64)]
    return [torch.randn(shape, generator=draw, device="cuda").bfloat16() for shape in shapes]


def hidden(documents: bool) -> Tensor:
    """[2, 1, HALF, 2 * HALF], True where a query, in the later half, must not look. In the second sequence a document
    begins with the queries: none of them sees any key of the first half."""
    at = torch.arange(2 * HALF, device="cuda")
    mask = at[None, :] > at[HALF:, None]
    number = (at >= torch.tensor([[100], [HALF]], device="cuda")).int() + (at >= 400)
    if documents:
        return (mask | (number[:, HALF:, None] != number[:, None, :]))[:, None]
    return mask.expand(2, 1, -1, -1)


def exact(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, mask: Tensor) -> list[Tensor]:
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    copies = q.shape[1] // k.shape[1]
    logits = (q @ k.repeat_interleave(copies, 1).mT * SCALE).masked_fill(mask, -math.inf)
    y = logits.softmax(-1) @ v.repeat_interleave(copies, 1)
    return [y.detach(), *torch.autograd.grad(y, (q, k, v), grad.double())]


def in_blocks(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, mask: Tensor, documents: bool) -> list[Tensor]:
    """The earlier half of the keys, then the queries' own."""
    out, lse = torch.zeros(q.shape, device="cuda"), torch.full(q.shape[:3], -math.inf, device="cuda")
    parts = []
    for number, keys in enumerate((slice(0, HALF), slice(HALF, 2 * HALF))):
        bias = torch.zeros(mask[..., keys].shape, device="cuda", dtype=q.dtype).masked_fill_(mask[..., keys], NEVER)
        how = (bias if documents else None, number == 1 and not documents, SCALE)
        parts.append((keys, how))
        merge_(out, lse, *attention.block(q, k[:, :, keys], v[:, :, keys], *how))
    y = out.to(q.dtype)
    d_q, d_k, d_v = (torch.zeros(x.shape, device="cuda") for x in (q, k, v))
    for keys, how in parts:
        found = attention.block_backward(grad, q, y, lse, k[:, :, keys], v[:, :, keys], *how)
        d_q += found[0]
        d_k[:, :, keys] += found[1]
        d_v[:, :, keys] += found[2]
    return [y, d_q, d_k, d_v]


@pytest.mark.parametrize("groups", [8, 2])
@pytest.mark.parametrize(
    ("kernel", "documents"),
    [("cudnn", False), ("cudnn", True), ("flash", False), ("efficient", False), ("efficient", True), ("plain", True)],
)
def test_merged_blocks_are_attention(
    monkeypatch: pytest.MonkeyPatch, kernel: str, documents: bool, groups: int
) -> None:
    given, mask = tensors(groups), hidden(documents)
    if torch.cuda.get_device_capability() >= (9, 0):
        bias = mask.to(torch.bfloat16) if documents else None
        assert attention.fastest(given[0], given[1], given[2], bias, False) == "cudnn"
    elif kernel == "cudnn":
        pytest.skip("needs cuDNN's attention, of Hopper and later")
    monkeypatch.setattr(attention, "fastest", lambda *_: kernel)
    for name, found, expected in zip(
        ("y", "d_q", "d_k", "d_v"), in_blocks(*given, mask, documents), exact(*given, mask), strict=True
    ):
        # bfloat16 keeps 8 bits; the worst entry of these is off by less than 1 % of the largest
        error = float((found.double() - expected).abs().max() / expected.abs().max())
        assert error < 0.01, (name, error)
