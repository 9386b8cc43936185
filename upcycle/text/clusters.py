"""Make router rows that divide text evenly from the first step: balanced clusters of a layer's router inputs.

Random rows send most tokens to a few experts, and their choice says little about the tokens; training moves half of
all tokens elsewhere before it ends (docs/science.md). These rows are linear, like a router: an expert's score is the
nearness of its cluster's centre minus a price, which is high for clusters that attract too many tokens.

Shapes: L layers, T tokens, D hidden size, N clusters. x_L is a list of one tensor a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
def rows(seen: Mapping[int, Tensor], count: int, seed: int) -> dict[int, Tensor]:
    """Make float32 router rows (N, D) for each layer, that send about equally many of its tokens (T, D) to each of
    `count` clusters.

    Prices of all layers change together: a change is a dozen small operations, and a GPU waits for the host to launch
    each. Sums of floats are made layer by layer, so that a layer's rows do not depend on which others are given.
    """
    for x_TD in seen.values():
        check(len(x_TD), count)
    x_L = [x_TD.float() for x_TD in seen.values()]
    mean_L = [x_TD.mean(0) for x_TD in x_L]
    apart_L = [x_TD - mean_D for x_TD, mean_D in zip(x_L, mean_L, strict=True)]
    centre_L = first_centres(apart_L, count, [rng.generator(seed, "cluster tokens", layer) for layer in seen])
    price_LN1 = x_L[0].new_zeros(len(x_L), count, 1)
    for _ in range(ROUNDS):
        far_LNT = torch.stack([distances(*each) for each in zip(apart_L, centre_L, strict=True)])
        step_L11 = BID * spread(far_LNT)
        for _ in range(BIDS):
            price_LN1 = price_LN1 + step_L11 * excess((far_LNT + price_LN1).min(1).indices, count)
        cluster_LT = (far_LNT + price_LN1).min(1).indices
        centre_L = [moved(*each) for each in zip(apart_L, centre_L, cluster_LT, strict=True)]
    agreed_L = [
        constant(x_TD, torch.cat([mean_D[None], centre_ND]))
        for x_TD, mean_D, centre_ND in zip(x_L, mean_L, centre_L, strict=True)
    ]
    rows_L = [nearness(*each) for each in zip(centre_L, price_LN1, mean_L, agreed_L, strict=True)]
    near_LNT = torch.stack([rows_ND @ x_TD.T for rows_ND, x_TD in zip(rows_L, x_L, strict=True)])
    agreed_L1T = torch.stack([x_TD @ agreed_D for x_TD, agreed_D in zip(x_L, agreed_L, strict=True)])[:, None]
    unit_L11, price_LN1 = spread(near_LNT), torch.zeros_like(price_LN1)
    for step in range(LAST):  # the constant direction is not exactly 1
        loads_LN1 = excess((near_LNT - price_LN1 * agreed_L1T).max(1).indices, count)
        price_LN1 = price_LN1 + BID * (1 - step / LAST) * unit_L11 * loads_LN1
    made_L = [
        scaled(rows_ND - price_N1 * agreed_D, x_TD)
        for rows_ND, price_N1, agreed_D, x_TD in zip(rows_L, price_LN1, agreed_L, x_L, strict=True)
    ]
    return dict(zip(seen, made_L, strict=True))


def check(tokens: int, count: int) -> None:
    """Raise a ValueError if there is not enough text to divide."""
    if tokens < 2 * count or count < 2:
        raise ValueError(
            f"{tokens} tokens of text cannot be divided into {count} clusters for router.init.name=clusters; give "
            f"at least {2 * max(count, 2)} (calibration.tokens), two experts, or write router.init.name=normal"
        )


def first_centres(apart_L: Sequence[Tensor], count: int, generators: Sequence[torch.Generator]) -> list[Tensor]:
    """Draw tokens of each layer as first centres (k-means++), with probability by their distance to the earlier ones.
    The layers' distances come from the device together, once for each centre."""
    far_LT = torch.ones(len(apart_L), len(apart_L[0]))
    drawn_L: list[list[int]] = [[] for _ in apart_L]
    for number in range(count):
        if number:
            pairs = zip(apart_L, drawn_L, strict=True)
            squares = (((apart_TD - apart_TD[drawn[-1]]) ** 2).sum(1) for apart_TD, drawn in pairs)
            to_last_LT = torch.stack(list(squares)).cpu()
            far_LT = to_last_LT if number == 1 else torch.minimum(far_LT, to_last_LT)
        for far_T, drawn, generator in zip(far_LT, drawn_L, generators, strict=True):
            weight_T = far_T if float(far_T.sum()) > 0 else torch.ones_like(far_T)
            drawn.append(int(torch.multinomial(weight_T, 1, generator=generator)))
    return [apart_TD[drawn].clone() for apart_TD, drawn in zip(apart_L, drawn_L, strict=True)]


def spread(value_LNT: Tensor) -> Tensor:
    """Return the mean deviation (L, 1, 1) of a token's values over the clusters."""
    return torch.stack([value_NT.std(0).mean() for value_NT in value_LNT])[:, None, None]


def moved(apart_TD: Tensor, centre_ND: Tensor, cluster_T: Tensor) -> Tensor:
    """Return the mean of each cluster's tokens, and the earlier centre of an empty cluster."""
    member_NT = (cluster_T == torch.arange(len(centre_ND), device=apart_TD.device)[:, None]).float()
    size_N1 = member_NT.sum(1, keepdim=True)  # sums as products, which have a fixed order on a GPU too
    return torch.where(size_N1 > 0, member_NT @ apart_TD / size_N1.clamp_min(1), centre_ND)


def scaled(rows_ND: Tensor, x_TD: Tensor) -> Tensor:
    """Return the rows around their mean, with logits that have the deviation SPREAD."""
    rows_ND = rows_ND - rows_ND.mean(0)
    return rows_ND * (SPREAD / (rows_ND @ x_TD.T).std(0).mean().clamp_min(1e-12))


def distances(apart_TD: Tensor, centre_ND: Tensor) -> Tensor:
    """Return squared distances (N, T) without |x|^2, which is equal for all clusters."""
    return (centre_ND**2).sum(1, keepdim=True) - 2 * centre_ND @ apart_TD.T


def nearness(centre_ND: Tensor, price_N1: Tensor, mean_D: Tensor, agreed_D: Tensor) -> Tensor:
    """Return rows whose product with x is -|x - mean - c|^2 - price for each centre c, without terms equal for all.

    A constant becomes a row along the direction in which x is 1.
    """
    offset_N1 = -(centre_ND**2).sum(1, keepdim=True) - 2 * (centre_ND @ mean_D)[:, None] - price_N1
    return 2 * centre_ND + offset_N1 * agreed_D


def excess(cluster_LT: Tensor, count: int) -> Tensor:
    """Return the logarithm (L, N, 1) of each cluster's load over the mean."""
    one_LT = torch.ones_like(cluster_LT)  # torch.bincount would wait for the GPU
    loads_LN = cluster_LT.new_zeros(len(cluster_LT), count).scatter_add_(1, cluster_LT, one_LT)
    return (loads_LN * (count / cluster_LT.shape[1])).float().clamp_min(EMPTY).log()[:, :, None]


def constant(x_TD: Tensor, span_MD: Tensor) -> Tensor:
    """Return the direction in the span along which all tokens are as near to 1 as possible."""
    seen_TM = (x_TD @ span_MD.T).double()
    gram_MM = seen_TM.T @ seen_TM
    gram_MM.diagonal().add_(CONSTANT * gram_MM.diagonal().mean())
    # few numbers: a GPU would first load its library of solvers
    solved_M = torch.linalg.solve(gram_MM.cpu(), seen_TM.sum(0).cpu())
    direction_D: Tensor = solved_M.float().to(span_MD.device) @ span_MD
    return direction_D
