"""Pull the copies of an expert together, wherever they are.

An upcycled expert e * G + g begins as slice g of the dense FFN, like every expert whose number is g modulo G: its
copies. It sees a part of the tokens, so its gradient is noisier than the dense model's, and AdamW's steps, whose size
does not depend on noise, part the copies faster than they learn. Two remedies were measured (docs/science.md):

    pull_(gradient, slices, 0.5)     # learn half from one's own tokens, half from what all copies' tokens say
    pull_(weight, slices, 0.25)      # at the end, give up a quarter of what tells an expert from its copies
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from training.parallel.collectives import local

# the axes of a mesh that experts are divided over, the outer one first
OVER = ("ep", "edp_shard")


@torch.no_grad()
def pull_(experts: Tensor, slices: int, share: float) -> None:
    """Move every expert of a stack `share` of the way to the mean of its copies. All ranks that have experts of it call
    this together."""
    part, groups, index = local(experts), [], 0
    if isinstance(experts, DTensor):
        mesh, names = experts.device_mesh, list(experts.device_mesh.mesh_dim_names or ())
        cut = {
            name
            for name, placement in zip(names, experts.placements, strict=True)
            if not placement.is_replicate() and placement.dim == 0  # type: ignore[attr-defined]  # a shard
        }
        assert cut <= set(OVER), f"experts are divided over {', '.join(cut)}"
        for axis in (names.index(name) for name in OVER if name in cut):
            index = index * mesh.size(axis) + mesh.get_local_rank(axis)
            groups.append(mesh.get_group(axis))
    wide = torch.promote_types(part.dtype, torch.float32)
    if len(part) % slices == 0:  # whole rounds of neighbours, one of each slice
        mine = part.unflatten(0, (-1, slices))  # type: ignore[no-untyped-call]
        mean = mine.sum(0, dtype=wide)
    else:
        mine = part
        mean = part.new_zeros(slices, *part.shape[1:], dtype=wide)
        order = [(index * len(part) + at) % slices for at in range(len(part))]
        for row, place in zip(part, order, strict=True):
            mean[place] += row
    for group in groups:
        dist.all_reduce(mean, group=group)
    mean = (mean * (slices / experts.shape[0])).to(part.dtype)
    if mine is part:
        mean = mean[order]
    mine.lerp_(mean.expand_as(mine), share)
