"""Make router rows that divide text evenly from the first step: balanced clusters of a layer's router inputs.

Random rows send most tokens to a few experts, and their choice says little about the tokens; training moves half of
all tokens elsewhere before it ends (docs/science.md). These rows are linear, like a router: an expert's score is the
nearness of its cluster's centre minus a price, which is high for clusters that attract too many tokens.

Shapes: T tokens, D hidden size, N clusters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from upcycle.planning import rng

SPREAD = 0.3  # standard deviation of a token's logits over the clusters
ROUNDS = 12  # rounds of k-means
BIDS = 25  # price changes in a round
BID = 0.08  # size of a price change for a cluster with e times its share of tokens, in deviations of the distances
LAST = 200  # price changes for the final rows, each smaller
EMPTY = 0.05  # share of its fair load that an empty cluster counts with, so that its price does not fall forever
CONSTANT = 1e-4  # ridge for the direction on which all tokens agree


@torch.no_grad()
def rows(x_TD: Tensor, count: int, seed: int, layer: int) -> Tensor:
    """Make float32 router rows (N, D) that send about equally many of these tokens to each of `count` clusters."""
    if len(x_TD) < 2 * count or count < 2:
        raise ValueError(
            f"{len(x_TD)} tokens of text cannot be divided into {count} clusters for router.init.name=clusters; give "
            f"at least {2 * max(count, 2)} (calibration.tokens), two experts, or write router.init.name=normal"
        )
    x_TD = x_TD.float()
    mean_D = x_TD.mean(0)
    apart_TD = x_TD - mean_D
    centre_ND = first_centres(apart_TD, count, seed, layer)
    price_N1 = x_TD.new_zeros(count, 1)
    for _ in range(ROUNDS):
        far_NT = distances(apart_TD, centre_ND)
        unit = far_NT.std(0).mean()
        for _ in range(BIDS):
            price_N1 = price_N1 + BID * unit * excess((far_NT + price_N1).min(0).indices, count)
        cluster_T = (far_NT + price_N1).min(0).indices
        member_NT = (cluster_T == torch.arange(count, device=x_TD.device)[:, None]).float()
        size_N1 = member_NT.sum(1, keepdim=True)  # sums as products, which have a fixed order on a GPU too
        centre_ND = torch.where(size_N1 > 0, member_NT @ apart_TD / size_N1.clamp_min(1), centre_ND)
    agreed_D = constant(x_TD, torch.cat([mean_D[None], centre_ND]))
    rows_ND = nearness(centre_ND, price_N1, mean_D, agreed_D)
    near_NT, agreed_T = rows_ND @ x_TD.T, x_TD @ agreed_D
    unit, price_N1 = near_NT.std(0).mean(), torch.zeros_like(price_N1)
    for step in range(LAST):  # the constant direction is not exactly 1
        loads_N1 = excess((near_NT - price_N1 * agreed_T).max(0).indices, count)
        price_N1 = price_N1 + BID * (1 - step / LAST) * unit * loads_N1
    rows_ND = rows_ND - price_N1 * agreed_D
    rows_ND = rows_ND - rows_ND.mean(0)
    return rows_ND * (SPREAD / (rows_ND @ x_TD.T).std(0).mean().clamp_min(1e-12))


def first_centres(apart_TD: Tensor, count: int, seed: int, layer: int) -> Tensor:
    """Draw tokens as first centres (k-means++), with probability by their distance to the earlier centres."""
    generator = rng.generator(seed, "cluster tokens", layer)
    far_T, drawn = torch.ones(len(apart_TD)), list[int]()
    for _ in range(count):
        weight_T = far_T if float(far_T.sum()) > 0 else torch.ones_like(far_T)
        drawn.append(int(torch.multinomial(weight_T, 1, generator=generator)))
        to_last_T = ((apart_TD - apart_TD[drawn[-1]]) ** 2).sum(1).cpu()
        far_T = to_last_T if len(drawn) == 1 else torch.minimum(far_T, to_last_T)
    return apart_TD[drawn].clone()


def distances(apart_TD: Tensor, centre_ND: Tensor) -> Tensor:
    """Return squared distances (N, T) without |x|^2, which is equal for all clusters."""
    return (centre_ND**2).sum(1, keepdim=True) - 2 * centre_ND @ apart_TD.T


def nearness(centre_ND: Tensor, price_N1: Tensor, mean_D: Tensor, agreed_D: Tensor) -> Tensor:
    """Return rows whose product with x is -|x - mean - c|^2 - price for each centre c, without terms equal for all.

    A constant becomes a row along the direction in which x is 1.
    """
    offset_N1 = -(centre_ND**2).sum(1, keepdim=True) - 2 * (centre_ND @ mean_D)[:, None] - price_N1
    return 2 * centre_ND + offset_N1 * agreed_D


def excess(cluster_T: Tensor, count: int) -> Tensor:
    """Return the logarithm (N, 1) of each cluster's load over the mean."""
    one_T = torch.ones_like(cluster_T)  # torch.bincount would wait for the GPU
    loads_N = cluster_T.new_zeros(count).scatter_add_(0, cluster_T, one_T) * (count / len(cluster_T))
    return loads_N.float().clamp_min(EMPTY).log()[:, None]


def constant(x_TD: Tensor, span_MD: Tensor) -> Tensor:
    """Return the direction in the span along which all tokens are as near to 1 as possible."""
    seen_TM = (x_TD @ span_MD.T).double()
    gram_MM = seen_TM.T @ seen_TM
    gram_MM.diagonal().add_(CONSTANT * gram_MM.diagonal().mean())
    weight_M = torch.linalg.solve(gram_MM, seen_TM.sum(0))
    direction_D: Tensor = weight_M.float() @ span_MD
    return direction_D
