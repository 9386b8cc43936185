"""Activation recomputation: what a layer does not keep for backward, but computes once more when backward needs it.

    recompute(model, "full")     # after experts and matrices are divided, before torch.compile and FSDP

selective: norms and the product of an FFN's gate and up. Cheap to compute, large to keep: in bf16 a norm's float32
    insides are three times its input. (The experts' own product is never kept, see experts/grouped.py.)
full: nearly all of a layer. What stays of a token is the stream at the layer's two halves, the FFN's normed input and
    the routing; what is paid is one more forward pass, with an MoE's dispatch.

What counts or decides is outside of every region, so no hook needs to know whether it is seen for the second time: the
balance hook stands between the router and `MoE.routed`, and tokens go where the first pass sent them. Nothing in a
layer draws random numbers. Only functions are replaced, so parameters keep their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from training.model.decoder import Decoder, Layer
from training.model.layers import FeedForward, Norm
from training.model.moe import MoE

MODES = ("none", "selective", "full")


def recompute(model: Decoder, mode: str) -> None:
    regions = {"none": nothing, "selective": cheap, "full": whole}[mode]
    for layer in model.layers.values():
        assert isinstance(layer, Layer)
        for module, name in regions(layer):
            setattr(module, name, again(getattr(module, name)))


def again(function: Callable[..., Any]) -> Callable[..., Any]:
    def region(*inputs: Any) -> Any:
        return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)

    return region


Region = tuple[nn.Module, str]


def nothing(layer: Layer) -> Iterator[Region]:
    yield from ()


def cheap(layer: Layer) -> Iterator[Region]:
    for module in layer.modules():
        if isinstance(module, Norm):
            yield module, "forward"
        elif isinstance(module, FeedForward):
            yield module, "neurons"


def whole(layer: Layer) -> Iterator[Region]:
    yield layer, "attended"
    yield layer.ffn_norm, "forward"
    if isinstance(layer.ffn, MoE):
        yield layer.ffn.router, "forward"  # a function of its input alone
        yield layer.ffn, "routed"
    else:
        yield layer.ffn, "forward"
