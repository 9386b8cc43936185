"""Router initialisations: the rows of a router, one for each copy of the dense FFN, repeated inside a virtual group.

    normal      N(0, std). Also named `virtual_group`: with granularity > 1 the experts of one copy share a row.
    independent N(0, std), a row for each expert; not exact when granularity > 1.
    clusters    one row for each balanced cluster of the router's inputs on text (clusters.py).
    hidden      means of hidden states per domain or donor, taken at the router's input: after the post-attention norm.
    parts       zero for the anchor, and the discriminant of a part's documents from general text (text/parts.py).
    neurons     the gate row of a representative neuron of each expert (method `split`).

A router is never zero: top-k of equal logits is unspecified and sends every token to the same experts. `weights` is
the reference router, which the promise and the measurements use.

Shapes: T tokens, D hidden size, N experts, K experts per token, S slices, C copies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from upcycle.arch.spec import MoESpec
from upcycle.planning import rng

NAMES = ("auto", "normal", "virtual_group", "independent", "clusters", "hidden", "neurons", "parts")
MEASURED = ("clusters", "hidden", "neurons", "parts")  # measured on text
BY_TEXT = ("hidden", "parts")  # measured on texts of their own, router.init.texts
AS_MEASURED = ("clusters", "parts")  # used without centring and scaling


def normal(count: int, hidden: int, std: float, seed: int, layer: int) -> Tensor:
    return std * rng.normal((count, hidden), seed, "router", layer)


def centred(rows: Tensor, std: float) -> Tensor:
    """Return router rows from measured directions: without their mean, which is the same for all experts, and scaled so
    that the root mean square of the elements of each row is std."""
    rows = rows.float()
    if len(set(map(tuple, rows.tolist()))) < max(2, len(rows)):
        raise ValueError(
            "router rows need at least two texts (or neurons), and no two may measure exactly the same; give each "
            "copy a different one"
        )
    rows = rows - rows.mean(0, keepdim=True)
    rows = rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-12) * std * rows.shape[1] ** 0.5
    return rows


def repeated(rows: Tensor, experts: int) -> Tensor:
    """Repeat the distinct rows into one row per expert; experts of a virtual group are adjacent and share a row."""
    return rows.repeat_interleave(experts // rows.shape[0], 0)


def chosen(score_TN: Tensor, top_k: int, slices: int) -> Tensor:
    """Return expert_TK: the best top_k / slices experts of each class e % slices; with one slice the best of all."""
    score_TSC = score_TN.view(len(score_TN), -1, slices).transpose(1, 2)
    copy_TSK = torch.sort(score_TSC, dim=-1, descending=True, stable=True).indices[..., : top_k // slices]
    return (copy_TSK * slices + torch.arange(slices, device=score_TN.device)[:, None]).flatten(1)


def weights(x_TD: Tensor, rows_ND: Tensor, moe: MoESpec, bias_N: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (weight_TK, expert_TK) of the reference router. Ties go to the lower index, which keeps a group whole.
    `bias_N` is added to the scores for the selection only, not to the weights."""
    logits_TN = x_TD @ rows_ND.to(x_TD.dtype).T
    if moe.score == "sigmoid":
        score_TN = logits_TN.sigmoid()
    elif moe.order == "topk-then-softmax":
        score_TN = logits_TN
    else:
        score_TN = logits_TN.softmax(-1)
    expert_TK = chosen(score_TN if bias_N is None else score_TN + bias_N, moe.top_k, moe.slices)
    weight_TK = score_TN.gather(1, expert_TK)
    if moe.score == "softmax" and moe.order == "topk-then-softmax":
        return weight_TK.softmax(-1), expert_TK
    if moe.normalize:
        weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
    return weight_TK, expert_TK
