"""The decoder: embedding, layers, last norm, head. A DenseSpec makes a dense model, an MoESpec an MoE model."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.experts import DEFAULT, Backend, backend
from training.kernels.attention import capped
from training.model.attention import Sdpa, Seen, fastest_first, look
from training.model.layers import Attention, FeedForward, LatentAttention, Linear, Norm, Region, norm, once
from training.model.loss import Lesson, taught_cross_entropy
from training.model.moe import MoE
from upcycle.arch.rope import angles
from upcycle.arch.spec import DenseSpec, MoESpec


class Layer(nn.Module):
    region: Region  # replaced by recompute: around the attention half

    def __init__(self, dense: DenseSpec, moe: MoESpec | None, layer: int, experts: Backend | None) -> None:
        super().__init__()
        self.block, self.scale = dense.block, dense.residual_scale
        self.attn_norm, self.ffn_norm = norm(dense), norm(dense)
        if self.block == "sandwich":
            self.attn_out_norm, self.ffn_out_norm = norm(dense), norm(dense)
        self.attention = Attention(dense, layer) if dense.latent is None else LatentAttention(dense, layer)
        self.ffn: nn.Module
        if moe is not None and layer in moe.layers:
            assert experts is not None
            self.ffn = MoE(moe, experts)
        else:
            self.ffn = FeedForward(dense, dense.ffn)
        self.region = once

    def forward(self, x_BSD: Tensor, cos: Tensor | None, sin: Tensor | None, seen: Seen) -> Tensor:
        attended: Tensor
        x_BSD, attended = self.region(self.attended)(x_BSD, cos, sin, seen)
        ffn, ffn_norm = self.ffn, self.ffn_norm
        if self.block == "parallel":
            return x_BSD + attended + self.scaled(ffn(ffn_norm(x_BSD)))
        if self.block == "post":
            x_BSD = x_BSD + attended
            return x_BSD + self.scaled(ffn_norm(ffn(x_BSD)))
        x_BSD, normed_BSD = ffn_norm.added(ffn_norm, x_BSD, attended)
        if self.block == "sandwich":
            return x_BSD + self.scaled(self.ffn_out_norm(ffn(normed_BSD)))
        if self.scale == 1.0 and isinstance(ffn, MoE) and ffn.joins(normed_BSD):
            return ffn.added(normed_BSD, x_BSD)
        return x_BSD + self.scaled(ffn(normed_BSD))

    def attended(self, x_BSD: Tensor, cos: Tensor | None, sin: Tensor | None, seen: Seen) -> tuple[Tensor, Tensor]:
        """Return the residual stream and the term that attention adds to it."""
        if self.block == "post":
            return x_BSD, self.scaled(self.attn_norm(self.attention(x_BSD, cos, sin, seen)))
        x_BSD, normed_BSD = self.attn_norm.added(self.attn_norm, x_BSD, None)
        y_BSD = self.attention(normed_BSD, cos, sin, seen)
        return x_BSD, self.scaled(self.attn_out_norm(y_BSD) if self.block == "sandwich" else y_BSD)

    def scaled(self, y: Tensor) -> Tensor:
        return y if self.scale == 1.0 else y * self.scale


class Decoder(nn.Module):
    """Compute all layers, or the consecutive layers of one pipeline stage; the first and the last stage both hold a
    tied matrix."""

    # replaced by run/parts.py in a decoder that holds the modules of several stages
    embed: nn.Embedding | None
    final_norm: Norm | None
    head: Linear | None  # also replaced by bench, which may time layers alone
    last: bool  # replaced by bench and teacher

    def __init__(
        self,
        spec: DenseSpec | MoESpec,
        *,
        part: range | None = None,
        experts: str = DEFAULT,
        compute: torch.dtype = torch.float32,
    ) -> None:
        """Create the layers `part` (None: all), which compute in dtype `compute` with the expert backend `experts`."""
        super().__init__()
        self.moe = spec if isinstance(spec, MoESpec) else None
        self.dense = spec.dense if isinstance(spec, MoESpec) else spec
        self.compute = compute
        d = self.dense
        if d.carried is not None:
            raise ValueError(
                f"our own decoder cannot compute {d.family}, which only transformers' own code trains here; "
                "export it, and evaluate the folder with model=hf"
            )
        part = range(d.layers) if part is None else part
        self.first, self.last = part.start == 0, part.stop == d.layers
        found = None if self.moe is None else backend(experts)
        self.embed = nn.Embedding(d.vocab, d.hidden) if self.first or (self.last and d.tied) else None
        # keyed by number, so that layers of a stage have the same names as in the whole model
        self.layers = nn.ModuleDict({str(i): Layer(d, self.moe, i, found) for i in part})
        self.final_norm = norm(d) if self.last else None
        self.head = Linear(d.hidden, d.vocab) if self.last and not d.tied else None

    def hidden(
        self,
        x: Tensor,
        positions_BS: Tensor | None = None,
        documents_BS: Tensor | None = None,
        length: int | None = None,
    ) -> Tensor:
        """Return the hidden states after this stage's layers; the last stage applies the final norm.

        `x` is tokens [B, S] in the first stage, and hidden states [B, S, D] in later stages. `length` is the length of
        whole sequences if ranks hold shares of them; some rotary frequencies depend on it."""
        x_BSD = self.embedded(x) if self.first else x
        if positions_BS is None:
            positions_BS = torch.arange(x.shape[1], device=x.device)[None]
        turns: dict[int, tuple[Tensor, Tensor] | tuple[None, None]] = {id(None): (None, None)}  # by rope
        seen = self.look(documents_BS, length or positions_BS.shape[1], x.device)
        with fastest_first():
            for name, layer in self.layers.items():
                rope = self.dense.rope_of(int(name))
                if id(rope) not in turns:
                    turns[id(rope)] = angles(self.dense, positions_BS, self.compute, length, rope)
                x_BSD = layer(x_BSD, *turns[id(rope)], seen)
        return x_BSD if self.final_norm is None else self.final_norm(x_BSD)

    def look(self, documents_BS: Tensor | None, length: int, device: torch.device) -> Seen:
        attends = (layer.attention.attend for layer in self.layers.values() if isinstance(layer, Layer))
        windows = [attend.window for attend in attends if isinstance(attend, Sdpa)]
        return look(documents_BS, length, windows, device, self.compute, bool(self.dense.attention_cap))

    def embedded(self, tokens_BS: Tensor) -> Tensor:
        assert self.embed is not None
        x_BSD = functional.embedding(tokens_BS, self.embed.weight).to(self.compute)
        if self.dense.embed_scale != 1.0:  # rounded to the dtype first, as Gemma was trained
            x_BSD = x_BSD * float(torch.tensor(self.dense.embed_scale, dtype=self.compute))
        return x_BSD

    def compile_parts(self) -> None:
        """Compile each layer by itself, so that later layers come from the compile cache, and the last norm."""
        for part in (*self.layers.values(), self.final_norm):
            if part is not None:
                part.compile()

    @property
    def head_weight(self) -> Tensor:
        module = self.embed if self.head is None else self.head
        assert module is not None, "this part of the model has no head"
        weight: Tensor = module.weight
        return weight

    def forward(
        self,
        x: Tensor,
        positions_BS: Tensor | None = None,
        documents_BS: Tensor | None = None,
        labels_BS: Tensor | None = None,
        length: int | None = None,
        lesson: Lesson | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Return hidden states before the last stage, else logits, or with labels the loss.

        With a lesson, return the three numbers of taught_cross_entropy."""
        x_BSD = self.hidden(x, positions_BS, documents_BS, length)
        if not self.last:
            return x_BSD
        weight, scale, cap = self.head_weight, self.dense.logit_scale, self.dense.logit_cap
        if labels_BS is None:
            return capped(functional.linear(x_BSD, weight.to(x_BSD.dtype)) * scale, cap)
        found = taught_cross_entropy(x_BSD.flatten(0, 1), weight, labels_BS.flatten(), scale, cap, lesson)
        return found[0] if lesson is None else found

    def loss(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor,
        positions_BS: Tensor | None = None,
        documents_BS: Tensor | None = None,
        length: int | None = None,
    ) -> Tensor:
        """Return the sum of -log p(label) in nats over labels that are not negative, without storing all logits."""
        # self() instead of self.forward(), so that FSDP's hooks run
        nats: Tensor = self(tokens_BS, positions_BS, documents_BS, labels_BS, length)
        return nats
