"""Activation recomputation: choose the parts of a layer that backward computes again instead of keeping their results.

    recompute(model, "full")     # after experts and matrices are divided, before torch.compile and FSDP

    selective   norms and the product of an FFN's gate and up, which are cheap to compute and large to keep
    attention   selective and the attention half of a layer; for experts whose neurons cost more than all of attention
    experts     selective and the MoE half with its dispatch; for many rows of small experts
    full        both halves; the residual stream before each, the FFN's normed input and the routing are kept

Balancing is outside of every region: its hook runs once, and tokens go where the first pass sent them. Every mode
recomputes experts of 4 bits (nf4.py)."""

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

MOVES = ("experts", "full")  # modes whose backward repeats the dispatch and asks for the experts' weights again


def recompute(model: Decoder, mode: str) -> None:
    for layer in model.layers.values():
        assert isinstance(layer, Layer)
        REGIONS[mode](layer)
        if isinstance(layer.ffn, MoE) and layer.ffn.experts.up_codes is not None:
            layer.ffn.region = again  # or autograd would keep the decoded experts of all layers


def recompute_stock(model: Stock, mode: str) -> None:
    """Recompute dispatch and experts of transformers' own model, and nothing else."""
    for block in model.modules():
        if isinstance(block, MoE) and mode == "experts":
            block.region = again


def again(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function checkpointed: only its inputs are kept, and backward runs the function again."""
    if torch.compiler.is_compiling():  # the compiler itself drops results that nobody reads
        return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)
    return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of the forward and of its recomputation."""
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
        layer.ffn.router.region = again  # its result depends on its input alone


REGIONS: dict[str, Callable[[Layer], None]] = {
    "none": nothing, "selective": cheap, "attention": attending, "experts": routed, "full": whole,
}  # fmt: skip
MODES = tuple(REGIONS)
