"""NF4: hold frozen matrices as codes of 4 bits, in blocks of 64 numbers that share a scale.

The levels are QLoRA's (arXiv 2305.14314): quantiles of normal numbers, and an exact zero. The scale of a block is its
largest absolute value. The root of the scale is rounded to 256 steps between the least and the largest of 256 blocks:
4.13 bits a number instead of 4.5. bitsandbytes has these levels, but no stacks of matrices and no promise for CPUs.

N matrices, B blocks of each, G groups of up to 256 blocks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

NF4 = "nf4"
ALONE = "model.frozen=nf4 keeps all experts on one GPU, and there are {} processes; use one, or leave it out"
BLOCK, GROUP = 64, 256
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
MIDDLES = tuple((low + high) / 2 for low, high in pairwise(LEVELS))
CHUNK = 2**24  # numbers that are encoded or decoded at a time; each needs 6 bytes meanwhile


class Codes(nn.Module):
    """The codes of N frozen matrices of the same size."""

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        n, self.numbers = len(like), like[0].numel()
        blocks = -(-self.numbers // BLOCK)

        def frozen(*shape: int, dtype: torch.dtype = torch.uint8) -> nn.Parameter:
            return nn.Parameter(torch.empty(n, *shape, dtype=dtype, device=like.device), requires_grad=False)

        self.code = frozen(blocks, BLOCK // 2)  # two numbers in a byte
        self.step = frozen(blocks)  # of the scale's root, within its group
        self.bounds = frozen(-(-blocks // GROUP), 2, dtype=torch.float32)  # least root of a group, and size of a step

    @torch.no_grad()
    def encode(self, matrices: Tensor) -> None:
        """Replace the codes by those of N matrices."""
        blocks = self.code.shape[1]
        for few in chunks(len(matrices), self.numbers):
            numbers = matrices[few].flatten(1).float()
            x_NBb = functional.pad(numbers, (0, blocks * BLOCK - self.numbers)).view(-1, blocks, BLOCK)
            scale_NB = x_NBb.abs().amax(2)
            self.bounds[few], self.step[few] = rounded(scale_NB)
            scale_NB = scales(self.bounds[few], self.step[few])
            ratio_NBb = x_NBb / torch.where(scale_NB > 0, scale_NB, 1)[:, :, None]
            middles = torch.tensor(MIDDLES, device=numbers.device)
            code_NBb = torch.bucketize(ratio_NBb, middles, out_int32=True).to(torch.uint8)
            self.code[few] = code_NBb[:, :, ::2] << 4 | code_NBb[:, :, 1::2]

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Return the matrices (N, numbers) in `dtype`."""
        return decode(self.code, self.step, self.bounds, self.numbers, dtype)


@torch.no_grad()
def decode(code_NBb: Tensor, step_NB: Tensor, bounds_NG2: Tensor, numbers: int, dtype: torch.dtype) -> Tensor:
    n, blocks, _ = code_NBb.shape
    out_NBb = torch.empty(n, blocks, BLOCK, dtype=dtype, device=code_NBb.device)
    scale_NB = scales(bounds_NG2, step_NB)
    for few in chunks(n, numbers):
        # a byte's two levels are one element of 8 bytes
        levels = pairs(code_NBb.device).index_select(0, code_NBb[few].flatten().int()).view(torch.float32)
        torch.mul(levels.view(-1, blocks, BLOCK), scale_NB[few, :, None], out=out_NBb[few])
    return out_NBb.flatten(1)[:, :numbers].contiguous()


@lru_cache  # so that a recorded step copies nothing from the host
def pairs(device: torch.device) -> Tensor:
    """Return the two levels of each byte, as one element each."""
    both = [(high, low) for high in LEVELS for low in LEVELS]
    return torch.tensor(both, dtype=torch.float32, device=device).view(torch.int64).flatten()


def rounded(scale_NB: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bounds of each group of scales, and the scales as steps between them."""
    blocks = scale_NB.shape[1]
    groups = -(-blocks // GROUP)
    last = scale_NB[:, -1:].expand(-1, groups * GROUP - blocks)
    # roots, so that one large block leaves enough steps for small ones
    root_NGg = torch.cat([scale_NB, last], 1).sqrt().view(-1, groups, GROUP)
    least, most = root_NGg.aminmax(dim=2, keepdim=True)
    size = (most - least) / 255
    step_NGg = ((root_NGg - least) / torch.where(size > 0, size, 1)).round()
    return torch.cat([least, size], 2), step_NGg.to(torch.uint8).flatten(1)[:, :blocks]


def scales(bounds_NG2: Tensor, step_NB: Tensor) -> Tensor:
    """Return the scale of each block."""
    least, size = bounds_NG2.repeat_interleave(GROUP, 1)[:, : step_NB.shape[1]].unbind(2)
    return (least + size * step_NB).square()


def chunks(n: int, numbers: int) -> Iterator[slice]:
    """Yield ranges of matrices that have CHUNK numbers together, or one matrix."""
    few = max(1, CHUNK // numbers)
    return (slice(first, first + few) for first in range(0, n, few))


def count(model: nn.Module) -> int:
    """Return the number of a model's weights, those that are codes included."""
    codes = [module for module in model.modules() if isinstance(module, Codes)]
    inside = {id(parameter) for module in codes for parameter in module.parameters()}
    plain = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in inside)
    return plain + sum(len(module.code) * module.numbers for module in codes)
