"""Run the dense model on text in one streamed pass, with one layer in memory, and compute statistics from it.

`walk` runs the model layer by layer in float32 and yields each layer's router input. Memory holds one layer and the
hidden states of the calibration tokens, so the model may be larger than the machine. The functions below turn these
values into router rows, the router's probability mass, or clusters of neurons.

Shapes: T tokens, D hidden size, F neurons, N experts, E domains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from upcycle.arch.ffn import ACTIVATIONS, FFN
from upcycle.arch.spec import DenseSpec, MoESpec
from upcycle.planning import rng, routers
from upcycle.text.layer import Layer, Read, layer_ffn

CHUNK = 2048  # tokens at a time where a (T, F) or (T, N) matrix would be large
ROUNDS = 10  # of k-means, at most


@dataclass(frozen=True)
class LayerView:
    """One layer of the dense model on the calibration tokens."""

    layer: int
    router_input: Tensor  # (T, D), the input of a router of this layer
    ffn: FFN  # the dense weights, each read on use
    output: Tensor  # (T, D), the next layer's input, which overwrites it when `walk` continues


def walk(
    spec: DenseSpec, read: Read, ids: Tensor, *, quiet: bool = False, device: torch.device | str = "cpu"
) -> Iterator[LayerView]:
    """Yield a LayerView of each layer on ids [sequence, token], computed on a device. If the caller stops early, the
    rest is never read."""
    # convert only rows that occur to float32: the embedding can be larger than all hidden states
    x_BSD = functional.embedding(ids, read("embed.weight")).to(device).float() * spec.embed_scale
    for layer in tqdm(range(spec.layers), "observe", unit="layer", delay=2, disable=quiet):
        router_input_TD = run_layer(spec, read, layer, x_BSD)
        yield LayerView(layer, router_input_TD, layer_ffn(spec, read, layer), x_BSD.flatten(0, 1))


@torch.no_grad()
def run_layer(spec: DenseSpec, read: Read, index: int, x_BSD: Tensor) -> Tensor:
    """Replace x_BSD in place by the layer's output, and return the input of its FFN, (T, D)."""
    roles = [f"layers.{index}.{role}" for role in spec.attention_shapes() | spec.ffn_shapes()]
    layer = Layer(spec, index, {role: read(role).to(x_BSD.device).float() for role in roles}.__getitem__)
    seen = []
    for part_BSD in torch.split(x_BSD, max(1, CHUNK // x_BSD.shape[1])):
        out_BSD, read_BSD = layer(part_BSD)
        seen.append(read_BSD.flatten(0, 1))
        part_BSD.copy_(out_BSD)
    return torch.cat(seen)


# ---- for routers


def domain_means(x_TD: Tensor, domain_T: Tensor) -> Tensor:
    """Return the mean of each domain's tokens, (E, D)."""
    count_E = torch.bincount(domain_T)
    assert bool((count_E > 0).all()), "a domain without tokens has no mean"
    return x_TD.new_zeros(len(count_E), x_TD.shape[1]).index_add_(0, domain_T, x_TD) / count_E[:, None]


def router_mass(x_TD: Tensor, rows_ND: Tensor, moe: MoESpec) -> float:
    """Return the mean sum of a token's chosen weights: 1 if normalised, top_k / N if all logits are equal."""
    sums = [routers.weights(part, rows_ND, moe)[0].sum(-1).double() for part in torch.split(x_TD, CHUNK)]
    return float(torch.cat(sums).mean())


# ---- for `split` by activation


@torch.no_grad()
def neuron_activity(ffn: FFN, x_TD: Tensor, activation: str, top: int) -> Tensor:
    """Mark the `top` neurons of each token in a mask (T, F), by the size of act(gate x) * up x (CMoE)."""
    wide = {name: ffn[name].to(x_TD.dtype) for name in ffn.matrices if not name.startswith("down")}
    act, marks = ACTIVATIONS[activation], torch.zeros(len(x_TD), ffn.width, dtype=torch.bool)
    for x, marked in zip(torch.split(x_TD, CHUNK), torch.split(marks, CHUNK), strict=True):
        h = functional.linear(x, wide["up"], wide.get("up_bias"))
        h = act(functional.linear(x, wide["gate"], wide.get("gate_bias"))) * h if ffn.gated else act(h)
        best = h.abs().topk(min(top, ffn.width), dim=-1)
        marked.scatter_(1, best.indices, best.values > 0)  # a neuron that ReLU switched off is not active
    return marks


def cluster_neurons(marks_TF: Tensor, shared: int, widths: Sequence[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return (order of all neurons, representative of each cluster): the `shared` most active first, then the clusters.

    Balanced k-means on the tokens for which each neuron is active (LLaMA-MoE, CMoE), by cosine, so that a neuron's
    frequency does not decide its cluster. A representative is the neuron nearest to its cluster's centre.
    """
    assert shared + sum(widths) == marks_TF.shape[1]
    by_activity = torch.sort(marks_TF.sum(0), descending=True, stable=True).indices
    rest = by_activity[shared:].sort().values
    # a token marks few neurons, so the matrix is sparse and an (F, T) x (T, N) product is cheap
    neuron_token = marks_TF[:, rest].T.nonzero().T
    unit = torch.bincount(neuron_token[0], minlength=len(rest)).clamp_min(1).rsqrt()[neuron_token[0]]
    unit_FT = torch.sparse_coo_tensor(neuron_token, unit, (len(rest), len(marks_TF)), check_invariants=True).coalesce()
    label_F, like_FN = kmeans(unit_FT, widths, seed)
    own_F = like_FN.gather(1, label_F[:, None]).squeeze(1)
    clusters = [(label_F == i).nonzero().squeeze(1) for i in range(len(widths))]
    representatives = torch.stack([members[own_F[members].argmax()] for members in clusters])
    return torch.cat([by_activity[:shared], *(rest[members] for members in clusters)]), rest[representatives]


def kmeans(unit_FT: Tensor, widths: Sequence[int], seed: int) -> tuple[Tensor, Tensor]:
    """Return (each neuron's cluster, its similarity to each final centre); cluster i has widths[i] neurons."""
    centre_TN, best_total, result = first_centres(unit_FT, len(widths), seed), -1.0, None
    for _ in range(ROUNDS):
        label_F = assign(torch.sparse.mm(unit_FT, centre_TN), widths)
        member_FN = functional.one_hot(label_F, len(widths)).to(centre_TN.dtype)
        centre_TN = functional.normalize(torch.sparse.mm(unit_FT.T, member_FN), dim=0)
        like_FN = torch.sparse.mm(unit_FT, centre_TN)
        total = float(like_FN.gather(1, label_F[:, None]).sum())
        if total <= best_total * (1 + 1e-6):
            break
        best_total, result = total, (label_F, like_FN)
    assert result is not None
    return result


def first_centres(unit_FT: Tensor, count: int, seed: int) -> Tensor:
    """Draw centres (T, N) by k-means++: each next one is the best of a few neurons far from the earlier centres."""
    generator = rng.generator(seed, "cluster neurons")
    dead_F = torch.sparse.sum(unit_FT, dim=1).to_dense() == 0  # far from every centre, so they would all be drawn
    unlike_F, chosen = (~dead_F).float(), []
    tries = 2 + count.bit_length()
    for _ in range(count):
        weight_F = unlike_F if float(unlike_F.sum()) > 1e-6 else torch.ones_like(unlike_F)
        drawn = torch.multinomial(weight_F, tries, replacement=True, generator=generator)
        tried_TC = columns(unit_FT, drawn)
        left_FC = torch.minimum(unlike_F[:, None], 1 - torch.sparse.mm(unit_FT, tried_TC)).clamp_min(0)
        pick = int(left_FC.sum(0).argmin())
        unlike_F = left_FC[:, pick]
        chosen.append(tried_TC[:, pick])
    return torch.stack(chosen, dim=1)


def columns(unit_FT: Tensor, index: Tensor) -> Tensor:
    """Return the neurons at `index` as dense columns (T, C)."""
    dense: Tensor = unit_FT.index_select(0, index).to_dense()
    return dense.T.contiguous()


def assign(like_FN: Tensor, widths: Sequence[int]) -> Tensor:
    """Assign each neuron to a cluster; cluster i gets exactly widths[i] of them.

    Each neuron asks for the most similar cluster with room. If too many ask, those that would lose most by their second
    choice stay, and the others ask again. Each round except the last fills a cluster, so there are at most N rounds.
    """
    like_FN = like_FN.clone()
    label_F, room = torch.full((len(like_FN),), -1), list(widths)
    while bool((label_F < 0).any()):
        asking = (label_F < 0).nonzero().squeeze(1)
        like, wish = like_FN[asking].topk(min(2, len(widths)), dim=1)
        loss = like[:, 0] - like[:, -1]
        for cluster in sorted(set(wish[:, 0].tolist())):
            asks = (wish[:, 0] == cluster).nonzero().squeeze(1)
            asks = asks[torch.sort(loss[asks], descending=True, stable=True).indices][: room[cluster]]
            label_F[asking[asks]] = cluster
            room[cluster] -= len(asks)
            if not room[cluster]:
                like_FN[:, cluster] = -torch.inf
    return label_F
