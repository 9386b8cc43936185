"""Tiny models for the parallel tests: nothing in them is neutral, and every part of the decoder that a rank may hold a
share of is in one of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from training.data.batch import IGNORE, Batch
from training.model.decoder import Decoder
from upcycle.arch.spec import DenseSpec, Latent, MoESpec
from upcycle.planning import rng

SEQUENCE, VOCAB = 32, 48

DENSE = DenseSpec(
    family="llama", layers=3, hidden=16, ffn=24, heads=4, kv_heads=4, head_dim=8, vocab=VOCAB, context=64, qk_norm="head",
)  # fmt: skip
# a dense layer between two MoE ones; a shared expert with a gate
MOE = MoESpec(DENSE, layers=(0, 2), widths=(8,) * 8, top_k=2, copies=4, granularity=2, shared=8, shared_gate=True)
SPECS: dict[str, DenseSpec | MoESpec] = {
    "moe": MOE,
    # biases everywhere, norms of all heads together, a sliding window, a router that is balanced by its bias
    "odd": replace(
        MOE, score="sigmoid", order="softmax-then-topk", output_scale=1.5, shared_gate=False, widths=(8, 4) * 4,
        dense=replace(
            DENSE, qk_norm="full", qkv_bias=True, out_bias=True, ffn_bias=True, block="post", tied=True, window=5,
            window_layers=(1,), residual_scale=0.7, embed_scale=2.0, kv_heads=2,
        ),
    ),
    "parallel": replace(
        MOE, shared=0, shared_gate=False, order="topk-then-softmax",
        dense=replace(DENSE, gated=False, activation="gelu", norm="layernorm", block="parallel", ffn_bias=True),
    ),
    # the best copy of each of two slices, tokens of a rank in every class
    "slices": replace(MOE, copies=4, granularity=2, choice="each-slice", score="sigmoid", shared_gate=False),
    "dense": replace(DENSE, norm="rms1p"),
    # four norms a layer, soft caps that are reached, and each layer with a rope of its own: one, another, none
    "sandwich": replace(
        MOE,
        dense=replace(
            DENSE, norm="rms1p", block="sandwich", activation="gelu_tanh", kv_heads=2, tied=True, attention_cap=0.5,
            logit_cap=2.0, window=5, window_layers=(1,), window_rope={"rope_type": "default", "rope_theta": 50.0},
            nope_layers=(2,),
        ),
    ),
    # sinks, experts of clamped halves with biases, and one on the router's logits
    "sinks": replace(
        MOE, layers=(0, 1, 2), shared=0, shared_gate=False, order="topk-then-softmax", normalize=False,
        router_offset=True,
        dense=replace(
            DENSE, qk_norm="none", kv_heads=2, sinks=True, activation="clamped_swiglu", qkv_bias=True, out_bias=True,
            ffn_bias=True, window=5, window_layers=(1,),
        ),
    ),
    # latent attention, and a choice among the experts of the best two of four groups
    "latent": replace(
        MOE, layers=(1, 2), score="sigmoid", output_scale=1.5, shared_gate=False, groups=4, group_top_k=2, top_k=3,
        dense=replace(DENSE, qk_norm="none", head_dim=10, latent=Latent(q_rank=12, kv_rank=14, rope=4, value=8)),
    ),
}  # fmt: skip


def make(name: str, dtype: torch.dtype = torch.float64, **options: Any) -> Decoder:
    """A model of SPECS, with the same weights on every rank and in every part of the model."""
    model = Decoder(SPECS[name], **{"experts": "reference", "compute": dtype} | options).to(dtype)
    with torch.no_grad():
        for role, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensor.copy_(0.3 * rng.normal(tuple(tensor.shape), 0, role) + ("norm" in role))
    return model


def batch(size: int, seed: int = 0) -> Batch:
    """Samples that all differ, of two or three documents each, with some labels that are not scored."""
    generator = rng.generator(seed, "batch")
    tokens, labels = torch.randint(VOCAB, (2, size, SEQUENCE), generator=generator)
    documents = (torch.rand(size, SEQUENCE, generator=generator) < 0.06).long().cumsum(1)
    first = torch.nn.functional.one_hot(documents, SEQUENCE).argmax(1).gather(1, documents)
    positions = torch.arange(SEQUENCE) - first
    labels[torch.rand(size, SEQUENCE, generator=generator) < 0.2] = IGNORE
    return Batch(tokens, labels, documents.int(), positions)


def whole(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
