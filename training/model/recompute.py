"""Activation recomputation: what a layer does not keep for backward, but computes once more when backward needs it.

    recompute(model, "full")     # after experts and matrices are divided, before torch.compile and FSDP

selective: norms and the product of an FFN's gate and up. Cheap to compute, large to keep: in bf16 a norm's float32
    insides are three times its input. (The experts' own product is never kept, see experts/grouped.py.)
attention: selective, and the half of a layer that attends; for experts whose neurons cost more than all of attention.
experts: selective, and the MoE's half with its dispatch; for many rows of small experts. Of the experts' two
    products the default backend makes only the first again, which is all that backward needs.
full: both halves. What stays of a token is the stream before each, the FFN's normed input and the routing.

Whatever counts or decides is outside of every region, so no hook needs to know whether it runs for the second time: the
balance hook stands between the router and `MoE.routed`, and tokens go where the first pass sent them. Nothing in a
layer draws random numbers. No module is wrapped: each has its regions as attributes, so parameters keep their names.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from training.experts.common import recomputing
from training.model.decoder import Decoder, Layer
from training.model.layers import FeedForward, Norm
from training.model.moe import MoE
from training.model.stock.model import Stock

MOVES = ("experts", "full")  # those whose backward dispatches, and asks for the experts' weights, once more


def recompute(model: Decoder, mode: str) -> None:
    for layer in model.layers.values():
        assert isinstance(layer, Layer)
        REGIONS[mode](layer)


def recompute_stock(model: Stock, mode: str) -> None:
    """Of transformers' own model the dispatch and the experts alone can be computed once more."""
    for block in model.modules():
        if isinstance(block, MoE) and mode == "experts":
            block.region = again


def again(function: Callable[..., Any]) -> Callable[..., Any]:
    """The Region that keeps only its inputs."""
    if torch.compiler.is_compiling():  # the compiler itself leaves out what nobody reads
        return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)
    return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of the first pass and of the second."""
    return nullcontext(), recomputing()


def nothing(layer: Layer) -> None:
    pass


def cheap(part: nn.Module) -> None:
    for module in part.modules():
        if isinstance(module, Norm):
            module.region = again
        elif isinstance(module, FeedForward):
            module.neurons_region = again


def ffn_norms(layer: Layer) -> None:
    layer.ffn_norm.region = again
    if layer.block == "sandwich":
        layer.ffn_out_norm.region = again


def attending(layer: Layer) -> None:
    layer.region = again
    ffn_norms(layer)
    cheap(layer.ffn)


def routed(layer: Layer) -> None:
    if not isinstance(layer.ffn, MoE):
        cheap(layer)
        return
    for part in layer.children():
        if isinstance(part, Norm):
            part.region = again
    cheap(layer.attention)
    layer.ffn.region = again


def whole(layer: Layer) -> None:
    layer.region = again
    ffn_norms(layer)
    assert isinstance(layer.ffn, MoE | FeedForward)
    layer.ffn.region = again
    if isinstance(layer.ffn, MoE):
        layer.ffn.router.region = again  # a function of its input alone


REGIONS: dict[str, Callable[[Layer], None]] = {
    "none": nothing, "selective": cheap, "attention": attending, "experts": routed, "full": whole,
}  # fmt: skip
MODES = tuple(REGIONS)
