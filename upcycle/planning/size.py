"""Count parameters (`measure`) and FLOPs per token (`moe_flops`, `dense_flops`) from the spec; read no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from upcycle.arch.spec import DenseSpec, MoESpec


@dataclass(frozen=True)
class Sizes:
    total: int  # parameters of the MoE
    active: int  # parameters that one token uses
    experts: int  # parameters of routed experts
    routers: int
    dense: int  # parameters of the dense model


def dense_parameters(d: DenseSpec) -> int:
    def count(shapes: dict[str, tuple[int, ...]]) -> int:
        return sum(s[0] * (s[1] if len(s) > 1 else 1) for s in shapes.values())

    if d.carried is not None:
        return d.carried.parameters + d.layers * count(d.ffn_shapes())
    return count(d.global_shapes()) + d.layers * (count(d.attention_shapes()) + count(d.ffn_shapes()))


def measure(moe: MoESpec, tensors: Sequence[tuple[str, int]]) -> Sizes:
    """Return the Sizes of an MoE. `tensors`: (kind of recipe, elements) of every part of every output."""
    total = sum(n for _, n in tensors)
    experts = sum(n for kind, n in tensors if kind == "expert")
    routers = sum(n for kind, n in tensors if kind == "router")
    mean_chosen = sum(sorted(moe.widths)[-moe.top_k :]) / sum(moe.widths)  # assumes the widest experts: an upper bound
    return Sizes(total, round(total - experts + experts * mean_chosen), experts, routers, dense_parameters(moe.dense))


def mean_context(sequence: int, window: int | None) -> float:
    """Return the mean number of keys a token attends to with a causal mask: half the square, as Megatron counts."""
    if window is None or window >= sequence:
        return sequence / 2
    return window - window * (window - 1) / (2 * sequence)


def flops_per_token(d: DenseSpec, matrix_weights: float, sequence: int) -> float:
    """Return the FLOPs per token, forward and backward: 6 per weight, and causal attention.

    Router, norms and recomputation do not count.
    """
    window_layers = len(d.window_layers) if d.window else 0
    # for a carried model, attention windows and the cost of linear attention are unknown and ignored
    layers = d.layers if d.carried is None else d.carried.attention_layers
    contexts = window_layers * mean_context(sequence, d.window) + (layers - window_layers) * mean_context(
        sequence, None
    )
    return 6 * matrix_weights + 6 * d.heads * (d.head_dim + d.value_dim) * contexts


def matrix_weights(d: DenseSpec, ffn_neurons_per_layer: Sequence[float], *, gated: bool) -> float:
    """Return the number of weights that a token is multiplied with: projections, FFN, head.

    `gated`: whether the FFNs have a gate in the target (see relu2_as_gated).
    """
    attention = float(d.layers * sum(prod(s) for s in d.attention_shapes().values() if len(s) == 2))
    if d.carried is not None:
        attention = d.carried.matrix_weights
    return attention + sum(ffn_neurons_per_layer) * d.hidden * (3 if gated else 2) + d.vocab * d.hidden


def dense_flops(d: DenseSpec, sequence: int) -> float:
    return flops_per_token(d, matrix_weights(d, [d.ffn] * d.layers, gated=d.gated), sequence)


def moe_flops(moe: MoESpec, sequence: int, *, gated: bool, forced: int = 0) -> float:
    """Return the FLOPs per token of an MoE. `forced`: zero neurons in each MoE layer that its target computes too."""
    chosen = moe.shared + forced + sum(moe.widths) / moe.experts * moe.top_k
    neurons = [chosen if layer in set(moe.layers) else moe.dense.ffn for layer in range(moe.dense.layers)]
    return flops_per_token(moe.dense, matrix_weights(moe.dense, neurons, gated=gated), sequence)
