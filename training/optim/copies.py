"""Pull the copies of an expert together, on whichever ranks they are.

An upcycled expert e * G + g starts as slice g of the dense FFN, like all experts with the same number modulo G: its
copies. It sees only some of the tokens, so its gradient is noisier than the dense model's. AdamW's steps do not shrink
with noise, so copies move apart faster than they learn. Two remedies help (docs/science.md):

    pull_(gradient, slices, 0.5)     # learn half from its own tokens, half from the tokens of all copies
    pull_(weight, slices, 0.25)      # to use the weights, remove a quarter of the distance to the copies' mean
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from training.model.lora import is_adapter
from training.parallel.collectives import local

# the mesh axes that divide experts, the outer one first
OVER = ("ep", "edp_shard")


def is_stack(name: str) -> bool:
    """Return whether a parameter is a stack of experts. Adapters are none: the mean of their products is not the
    product of their means."""
    return "experts" in name.split(".") and not is_adapter(name)


@torch.no_grad()
def pull_(experts: Tensor, slices: int, share: float) -> None:
    """Move every expert of a stack `share` of the way to the mean of its copies. All ranks with experts of the stack
    must call this together."""
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
    if len(part) % slices == 0:  # complete rounds of neighbours, one for each slice
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
