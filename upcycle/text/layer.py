"""Compute a layer of a dense model in plain torch.

The modelling file computes the same, but it imports transformers, which takes seconds of the start of a run.

Shapes: B sequences, S positions, D hidden size, H query heads, A dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from upcycle.arch.ffn import FFN
from upcycle.arch.rope import angles
from upcycle.arch.spec import DenseSpec

Read = Callable[[str], Tensor]  # a role (see spec.py) -> its tensor


@dataclass(frozen=True)
class Layer:
    spec: DenseSpec
    index: int
    read: Read  # returns tensors of the inputs' dtype, on their device

    def __call__(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output of the layer, and the input of its FFN."""
        block = self.spec.block
        if block == "post":
            x_BSD = x_BSD + self.scaled(self.norm("attn_norm", self.attention(x_BSD)))
            return x_BSD + self.scaled(self.norm("ffn_norm", self.ffn(x_BSD))), x_BSD
        attended_BSD = self.attention(self.norm("attn_norm", x_BSD))
        if block == "parallel":
            read_BSD = self.norm("ffn_norm", x_BSD)
            return self.scaled(self.ffn(read_BSD)) + self.scaled(attended_BSD) + x_BSD, read_BSD
        sandwich = block == "sandwich"
        x_BSD = x_BSD + self.scaled(self.norm("attn_out_norm", attended_BSD) if sandwich else attended_BSD)
        read_BSD = self.norm("ffn_norm", x_BSD)
        y_BSD = self.ffn(read_BSD)
        return x_BSD + self.scaled(self.norm("ffn_out_norm", y_BSD) if sandwich else y_BSD), read_BSD

    def scaled(self, y: Tensor) -> Tensor:
        return y if self.spec.residual_scale == 1.0 else y * self.spec.residual_scale

    def weight(self, part: str, kind: str = "weight") -> Tensor:
        return self.read(f"layers.{self.index}.{part}.{kind}")

    def norm(self, part: str, x: Tensor, kind: str = "") -> Tensor:
        kind, eps = kind or self.spec.norm, self.spec.norm_eps
        gain = self.weight(part) + 1.0 if kind.endswith("1p") else self.weight(part)
        if kind.startswith("layernorm"):
            return functional.layer_norm(x, gain.shape, gain, self.weight(part, "bias"), eps)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain

    def linear(self, part: str, x: Tensor, bias: bool) -> Tensor:
        return functional.linear(x, self.weight(part), self.weight(part, "bias") if bias else None)

    def ffn(self, x: Tensor) -> Tensor:
        return layer_ffn(self.spec, self.read, self.index)(x, self.spec.activation)

    def attention(self, x_BSD: Tensor) -> Tensor:
        spec = self.spec
        q, k, v = (self.linear(part, x_BSD, spec.qkv_bias) for part in "qkv")
        if spec.qk_norm == "full":
            q, k = self.qk_normed(q, k)
        q, k, v = (part.unflatten(2, (-1, spec.head_dim)) for part in (q, k, v))  # type: ignore[no-untyped-call]
        if spec.qk_norm == "head":
            q, k = self.qk_normed(q, k)
        rope = spec.rope_of(self.index)
        if rope is not None:
            cos, sin = angles(spec, torch.arange(x_BSD.shape[1], device=x_BSD.device)[None], x_BSD.dtype, rope=rope)
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        k, v = (part.repeat_interleave(spec.heads // spec.kv_heads, dim=2) for part in (k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return self.linear("o", self.attended(q, k, v).transpose(1, 2).flatten(2), spec.out_bias)

    def qk_normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        kind = "rms1p" if self.spec.norm == "rms1p" else "rms"
        return self.norm("q_norm", q, kind), self.norm("k_norm", k, kind)

    def attended(self, q_BHSA: Tensor, k_BHSA: Tensor, v_BHSA: Tensor) -> Tensor:
        spec, length, seen_SS = self.spec, q_BHSA.shape[2], None
        window = spec.window if self.index in spec.window_layers else None
        if spec.attention_cap or (window is not None and window < length):
            seen_SS = torch.ones(length, length, dtype=torch.bool, device=q_BHSA.device).tril()
            seen_SS = seen_SS if window is None else seen_SS.triu(1 - window)
        if not spec.attention_cap:
            return functional.scaled_dot_product_attention(
                q_BHSA, k_BHSA, v_BHSA, seen_SS, is_causal=seen_SS is None, scale=spec.attention_scale
            )
        assert seen_SS is not None
        score_BHSS = q_BHSA @ k_BHSA.transpose(2, 3) * spec.attention_scale
        score_BHSS = spec.attention_cap * torch.tanh(score_BHSS / spec.attention_cap)
        return score_BHSS.masked_fill(~seen_SS, -torch.inf).softmax(-1) @ v_BHSA


def layer_ffn(spec: DenseSpec, read: Read, layer: int) -> FFN:
    """Return the dense FFN of a layer, whose matrices are read when they are used."""

    def read_matrix(matrix: str) -> Tensor:
        part, _, bias = matrix.partition("_")
        return read(f"layers.{layer}.{part}.{bias or 'weight'}")

    return FFN(spec.ffn, spec.hidden, spec.ffn_matrices, read_matrix)


def rotated(x_BSHA: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first dimensions of each head by the angles, dimension i with i + n / 2, and keep the others."""
    first, second, rest = x_BSHA.tensor_split((cos.shape[-1], 2 * cos.shape[-1]), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
