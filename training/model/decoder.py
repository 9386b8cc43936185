"""The decoder: embedding, layers, last norm, head. Dense if it is given a DenseSpec, MoE if an MoESpec."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.model.layers import Attention, FeedForward, Linear, norm
from training.model.loss import linear_cross_entropy
from training.model.moe import ExpertFunction, MoE
from training.model.rope import angles
from upcycle import plugin
from upcycle.spec import DenseSpec, MoESpec


class Layer(nn.Module):
    def __init__(self, dense: DenseSpec, moe: MoESpec | None, layer: int, experts: ExpertFunction | None) -> None:
        super().__init__()
        self.block, self.scale = dense.block, dense.residual_scale
        self.attn_norm, self.ffn_norm = norm(dense), norm(dense)
        self.attention = Attention(dense, layer)
        self.ffn: nn.Module
        if moe is not None and layer in moe.layers:
            assert experts is not None
            self.ffn = MoE(moe, experts)
        else:
            self.ffn = FeedForward(dense, dense.ffn)

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor, documents_BS: Tensor | None) -> Tensor:
        if self.block == "post":
            x_BSD = x_BSD + self.scaled(self.attn_norm(self.attention(x_BSD, cos, sin, documents_BS)))
            return x_BSD + self.scaled(self.ffn_norm(self.ffn(x_BSD)))
        attended = self.scaled(self.attention(self.attn_norm(x_BSD), cos, sin, documents_BS))
        if self.block == "parallel":
            return x_BSD + attended + self.scaled(self.ffn(self.ffn_norm(x_BSD)))
        x_BSD = x_BSD + attended
        return x_BSD + self.scaled(self.ffn(self.ffn_norm(x_BSD)))

    def scaled(self, y: Tensor) -> Tensor:
        return y if self.scale == 1.0 else y * self.scale


def expert_backend(name: str) -> ExpertFunction:
    module = plugin.load("training.experts", name)
    why_not: str = module.available()
    if why_not:
        raise ValueError(why_not)
    backend: ExpertFunction = module.experts
    return backend


class Decoder(nn.Module):
    def __init__(
        self, spec: DenseSpec | MoESpec, *, experts: str = "grouped", compute: torch.dtype = torch.float32
    ) -> None:
        """`experts`: a backend of training/experts. `compute`: the dtype of activations; parameters have their own."""
        super().__init__()
        self.moe = spec if isinstance(spec, MoESpec) else None
        self.dense = spec.dense if isinstance(spec, MoESpec) else spec
        self.compute = compute
        d = self.dense
        backend = None if self.moe is None else expert_backend(experts)
        self.embed = nn.Embedding(d.vocab, d.hidden)
        # by number, so that a part of the layers keeps its names
        self.layers = nn.ModuleDict({str(i): Layer(d, self.moe, i, backend) for i in range(d.layers)})
        self.final_norm = norm(d)
        self.head = None if d.tied else Linear(d.hidden, d.vocab)

    def hidden(
        self, tokens_BS: Tensor, positions_BS: Tensor | None = None, documents_BS: Tensor | None = None
    ) -> Tensor:
        """The last hidden states, normed. Positions count from 0 unless given; tokens see their own document only."""
        x_BSD = functional.embedding(tokens_BS, self.embed.weight).to(self.compute)
        if self.dense.embed_scale != 1.0:  # rounded as Gemma was trained
            x_BSD = x_BSD * torch.tensor(self.dense.embed_scale, dtype=self.compute, device=x_BSD.device)
        if positions_BS is None:
            positions_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)[None]
        cos, sin = angles(self.dense, positions_BS, self.compute)
        for layer in self.layers.values():
            x_BSD = layer(x_BSD, cos, sin, documents_BS)
        y: Tensor = self.final_norm(x_BSD)
        return y

    @property
    def head_weight(self) -> Tensor:
        return self.embed.weight if self.head is None else self.head.weight

    def forward(
        self, tokens_BS: Tensor, positions_BS: Tensor | None = None, documents_BS: Tensor | None = None
    ) -> Tensor:
        """Logits; for training use loss(), which never holds them all."""
        x_BSD = self.hidden(tokens_BS, positions_BS, documents_BS)
        return functional.linear(x_BSD, self.head_weight.to(x_BSD.dtype)) * self.dense.logit_scale

    def loss(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor,
        positions_BS: Tensor | None = None,
        documents_BS: Tensor | None = None,
    ) -> Tensor:
        """The sum of -log p(label) in nats over labels that are not negative."""
        x_BSD = self.hidden(tokens_BS, positions_BS, documents_BS)
        return linear_cross_entropy(x_BSD.flatten(0, 1), self.head_weight, labels_BS.flatten(), self.dense.logit_scale)
