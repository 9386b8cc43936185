"""Rows out to their experts and back: a gather, and a gather with a sum over each token's rows. Both write a row once.

The torch lines are the specification and run on a CPU. On CUDA a compiler makes of the sum a reduction that reads
its rows in small pieces, at a third of the memory's speed; the Triton kernels read whole rows.
"""

from __future__ import annotations

from torch import Tensor


def spread(x_TD: Tensor, order_R: Tensor, k: int) -> Tensor:
    """Row r is a copy of token order_R[r] // k."""
    if kernels_run(x_TD):
        from training.kernels import permute_triton

        out: Tensor = permute_triton.spread(x_TD.contiguous(), order_R, k)
        return out
    return x_TD[order_R // k]


def gather(y_RD: Tensor, back_R: Tensor, k: int) -> Tensor:
    """Token t is the sum of rows back_R[t * k], ..., back_R[t * k + k - 1], in that order, in float32."""
    if kernels_run(y_RD):
        from training.kernels import permute_triton

        out: Tensor = permute_triton.gather(y_RD.contiguous(), back_R, k)
        return out
    return y_RD[back_R].view(-1, k, y_RD.shape[1]).sum(1)


def kernels_run(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.element_size() <= 4  # float64 is for checking gradients
