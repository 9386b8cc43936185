"""The parts of a layer except the experts: linear, norm, attention, dense FFN."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.kernels import norm as norm_kernel
from training.kernels import rotary, swiglu
from training.model.attention import Attend, Sdpa, Seen
from upcycle.arch.ffn import ACTIVATIONS
from upcycle.arch.spec import DenseSpec

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # arguments: x, weight, bias
# Maps a function to a function that is called in its place and that keeps its results for backward or recomputes them.
# A region returns a function instead of calling it: after a graph break, torch.compile would compile a caller of ours
# as one frame for inputs of different dimensions, their sizes would be symbols, and kernels cannot be chosen by symbols
Region = Callable[[Callable[..., Any]], Callable[..., Any]]


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function unchanged, so that autograd keeps everything for backward."""
    return function


def uncompiled(region: Region) -> Region:
    """Return the same region, excluded from torch.compile."""

    def run(function: Callable[..., Any], *inputs: Any) -> Any:
        return region(function)(*inputs)

    alone = torch.compiler.disable(run)  # type: ignore[no-untyped-call]
    return lambda function: partial(alone, function)


class Linear(nn.Module):
    """Compute x W^T + b in x's dtype; with adapters, add low * (x A^T) B^T."""

    product: Product  # replaced by transformer_engine with its own product
    # replaced by shard: this rank's part of a divided weight
    matrix: Callable[[Linear, torch.dtype], tuple[Tensor, Tensor | None]]
    pair: Callable[[Linear, torch.dtype], tuple[Tensor, Tensor]]  # replaced by shard: this rank's part of the adapters
    low: float = 0.0  # scale of the product of lora_a and lora_b; lora sets all three
    lora_a: Tensor
    lora_b: Tensor

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.product, self.matrix, self.pair = functional.linear, whole_matrix, whole_pair

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x, *self.matrix(self, x.dtype))
        return y + adapted(self, x) if self.low else y


def whole_matrix(linear: Linear, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return (weight, bias) in `dtype`."""
    return linear.weight.to(dtype), None if linear.bias is None else linear.bias.to(dtype)


def whole_pair(linear: Linear, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the adapters (A, B) in `dtype`."""
    return linear.lora_a.to(dtype), linear.lora_b.to(dtype)


def adapted(linear: Linear, x: Tensor) -> Tensor:
    """Return the term that the adapters add to the output for x."""
    a, b = linear.pair(linear, x.dtype)
    return functional.linear(functional.linear(x, a), b) * linear.low


def merged_matrix(linear: Linear, dtype: torch.dtype) -> Tensor:
    """Return the weight in `dtype` with its adapters merged."""
    weight = linear.matrix(linear, dtype)[0]
    if not linear.low:
        return weight
    a, b = linear.pair(linear, linear.lora_a.dtype)
    return weight + linear.low * (b @ a).to(dtype)


def joint(x: Tensor, linears: Sequence[Linear]) -> Tensor:
    """Return the concatenated outputs of several linears; one product computes them, so x gets one gradient."""
    weights, biases = zip(*[linear.matrix(linear, x.dtype) for linear in linears], strict=True)
    y = linears[0].product(x, torch.cat(weights), None if biases[0] is None else torch.cat(biases))
    if not any(linear.low for linear in linears):
        return y
    parts = zip(linears, weights, strict=True)
    return y + torch.cat([adapted(a, x) if a.low else x.new_zeros(*x.shape[:-1], len(w)) for a, w in parts], -1)


class Norm(nn.Module):
    """Compute one of the four norms of spec.Norm; with `last`, an rms norm multiplies by the gain before rounding."""

    gain: Callable[[Norm, torch.dtype], Tensor]  # replaced by shard: one gain for heads that are on several ranks
    normed: Callable[[Norm, Tensor], Tensor]  # replaced by transformer_engine, and by shard for heads on several ranks
    added: Callable[[Norm, Tensor, Tensor | None], tuple[Tensor, Tensor]]  # replaced by transformer_engine: one kernel
    region: Region  # replaced by recompute

    def __init__(self, kind: str, size: int, eps: float, *, last: bool) -> None:
        super().__init__()
        self.kind, self.eps, self.last = kind, eps, last or kind == "rms1p"
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if kind.startswith("layernorm") else None
        self.gain, self.normed, self.added, self.region = stored_gain, normed, added, once

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.region(self.normed)(self, x)
        return y


def stored_gain(norm: Norm, dtype: torch.dtype) -> Tensor:
    return norm.weight.to(dtype) + 1.0 if norm.kind.endswith("1p") else norm.weight.to(dtype)


def normed(norm: Norm, x: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    if norm.bias is None and norm_kernel.on_kernel(x):
        return norm_kernel.rms_norm(x, None, norm.gain(norm, torch.float32), norm.eps)[1]
    gain = norm.gain(norm, wide)
    if norm.bias is not None:
        return functional.layer_norm(x.to(wide), gain.shape, gain, norm.bias.to(wide), norm.eps).to(x.dtype)
    y = x.to(wide)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + norm.eps)
    return (y * gain).to(x.dtype) if norm.last else y.to(x.dtype) * gain.to(x.dtype)


def added(norm: Norm, stream: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return x = stream + delta and its norm; use the returned x from here on, so that x gets one gradient."""
    if norm.bias is None and norm_kernel.on_kernel(stream):
        return norm_kernel.rms_norm(stream, delta, norm.gain(norm, torch.float32), norm.eps)
    x = stream if delta is None else stream + delta
    return x, norm(x)


def norm(spec: DenseSpec, size: int | None = None, kind: str | None = None) -> Norm:
    return Norm(kind or spec.norm, size or spec.hidden, spec.norm_eps, last=spec.block == "post")


class Sinks(nn.Module):
    """Hold one extra softmax logit for each head, which belongs to no key (DenseSpec.sinks)."""

    own: Callable[[Sinks], Tensor]  # replaced by shard: the sinks of this rank's heads

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))
        self.own = stored_sinks

    def forward(self) -> Tensor:
        return self.own(self)


def stored_sinks(sinks: Sinks) -> Tensor:
    return sinks.weight


class Attention(nn.Module):
    """Compute grouped-query attention; the attributes of the projections have the names of their roles."""

    attend: Attend  # replaced by context, transformer_engine and, during evaluation, by evaluation's engine

    def __init__(self, spec: DenseSpec, layer: int) -> None:
        super().__init__()
        self.spec = spec
        window = spec.window if layer in spec.window_layers else None
        self.attend = Sdpa(window, spec.attention_scale, cap=spec.attention_cap)
        d, q, kv = spec.hidden, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.q, self.k, self.v = (Linear(d, size, bias=spec.qkv_bias) for size in (q, kv, kv))
        self.o = Linear(q, d, bias=spec.out_bias)
        self.sinks = Sinks(spec.heads) if spec.sinks else None
        self.q_norm: Norm | None = None
        self.k_norm: Norm | None = None
        if spec.qk_norm != "none":
            kind = "rms1p" if spec.norm == "rms1p" else "rms"
            full = spec.qk_norm == "full"
            self.q_norm = norm(spec, q if full else spec.head_dim, kind)
            self.k_norm = norm(spec, kv if full else spec.head_dim, kind)

    def forward(self, x_BSD: Tensor, cos: Tensor | None, sin: Tensor | None, seen: Seen) -> Tensor:
        q, k, v = self.heads(joint(x_BSD, (self.q, self.k, self.v)), cos, sin)
        y = self.attend(q, k, v, seen, None if self.sinks is None else self.sinks())
        out: Tensor = self.o(y.flatten(2))
        return out

    def heads(self, qkv_BSN: Tensor, cos: Tensor | None, sin: Tensor | None) -> Iterable[Tensor]:
        """Return queries, keys and values; queries and keys are normed, and rotated unless cos and sin are None."""
        width, spec = self.spec.head_dim, self.spec
        groups = spec.heads // spec.kv_heads
        kv = qkv_BSN.shape[2] // (width * (groups + 2))  # key/value heads of this rank
        counts = (groups * kv, kv, kv)
        if cos is not None and sin is not None and rotary.on_kernel(qkv_BSN) and spec.qk_norm != "full":
            norms = (self.q_norm, self.k_norm)
            gains = [None if norm is None else norm.gain(norm, torch.float32) for norm in norms]
            return rotary.norm_rotate(qkv_BSN, counts, gains, spec.norm_eps, cos, sin)
        q, k, v = qkv_BSN.split([count * width for count in counts], dim=2)  # type: ignore[no-untyped-call]
        if spec.qk_norm == "full":
            q, k = self.normed(q, k)
        q, k, v = (part.unflatten(2, (-1, width)) for part in (q, k, v))
        if spec.qk_norm == "head":
            q, k = self.normed(q, k)
        if cos is None or sin is None:
            return q, k, v
        return rotary.rotate(q, cos, sin), rotary.rotate(k, cos, sin), v

    def normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        assert self.q_norm is not None and self.k_norm is not None
        return self.q_norm(q), self.k_norm(k)


class LatentAttention(nn.Module):
    """Compute multi-head latent attention (spec.Latent): each head computes its keys and values from one latent.

    When `absorbed`, queries attend to the latents themselves: the same product in another order, with one wide key for
    each token."""

    attend: Attend  # see Attention
    absorbed: bool  # set by evaluation's engine, which caches only the latent of each token

    def __init__(self, spec: DenseSpec, layer: int) -> None:
        super().__init__()
        assert spec.latent is not None
        self.spec, self.latent, self.absorbed = spec, spec.latent, False
        window = spec.window if layer in spec.window_layers else None
        self.attend = Sdpa(window, spec.attention_scale, cap=spec.attention_cap)
        shapes = spec.latent_shapes(spec.latent)
        has_q = bool(spec.latent.q_rank)
        self.q_a = linear_of(shapes["q_a.weight"]) if has_q else None
        self.q_a_norm = Norm("rms", spec.latent.q_rank, spec.latent.norm_eps, last=False) if has_q else None
        self.q_b, self.kv_a, self.kv_b, self.o = (
            linear_of(shapes[f"{n}.weight"]) for n in ("q_b", "kv_a", "kv_b", "o")
        )
        self.kv_a_norm = Norm("rms", spec.latent.kv_rank, spec.latent.norm_eps, last=False)

    def forward(self, x_BSD: Tensor, cos: Tensor | None, sin: Tensor | None, seen: Seen) -> Tensor:
        q, c_BSR, turned = self.latents(x_BSD)
        q_BSHA = q.unflatten(2, (-1, self.spec.head_dim))  # type: ignore[no-untyped-call]
        own_BSHA, q_turned = self.split(q_BSHA)
        k_turned = turned[:, :, None]
        if cos is not None and sin is not None:
            q_turned, k_turned = (rotary.rotate(self.halves(part), cos, sin) for part in (q_turned, k_turned))
        way = self.over_latents if self.absorbed else self.over_heads
        out: Tensor = self.o(way(own_BSHA, q_turned, c_BSR, k_turned, seen).flatten(2))
        return out

    def latents(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, the latent of keys and values, and the shared key part before its rotation."""
        widths = [self.latent.kv_rank, self.latent.rope]
        if self.q_a is None or self.q_a_norm is None:
            c, turned = self.kv_a(x_BSD).split(widths, dim=2)
            return self.q_b(x_BSD), self.kv_a_norm(c), turned
        low, c, turned = joint(x_BSD, (self.q_a, self.kv_a)).split([self.latent.q_rank, *widths], dim=2)  # type: ignore[no-untyped-call]
        return self.q_b(self.q_a_norm(low)), self.kv_a_norm(c), turned

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Split the last dimension into a head's own part and the rest."""
        own = self.spec.head_dim - self.latent.rope
        return x[..., :own], x[..., own:]

    def halves(self, x: Tensor) -> Tensor:
        """Reorder rotated dimensions from pairs (2i, 2i + 1) to halves (i, i + n/2)."""
        if not self.latent.pairs:
            return x
        pairs: Tensor = x.unflatten(-1, (-1, 2))  # type: ignore[no-untyped-call]
        return pairs.transpose(-1, -2).flatten(-2)

    def over_heads(self, own_BSHA: Tensor, q_turned: Tensor, c_BSR: Tensor, k_turned: Tensor, seen: Seen) -> Tensor:
        width = self.spec.head_dim - self.latent.rope + self.latent.value
        k, v = self.split(self.kv_b(c_BSR).unflatten(2, (-1, width)))
        k = torch.cat((k, k_turned.expand(-1, -1, k.shape[2], -1)), -1)
        return self.attend(torch.cat((own_BSHA, q_turned), -1), k, v, seen)

    def over_latents(self, own_BSHA: Tensor, q_turned: Tensor, c_BSR: Tensor, k_turned: Tensor, seen: Seen) -> Tensor:
        weight = merged_matrix(self.kv_b, c_BSR.dtype).unflatten(0, (own_BSHA.shape[2], -1))  # type: ignore[no-untyped-call]
        of_keys_HAR, of_values_HVR = weight.split([own_BSHA.shape[3], self.latent.value], dim=1)
        q_BSHR = torch.einsum("bsha,har->bshr", own_BSHA, of_keys_HAR)
        c_BS1R = c_BSR[:, :, None]
        y = self.attend(torch.cat((q_BSHR, q_turned), -1), torch.cat((c_BS1R, k_turned), -1), c_BS1R, seen)
        return torch.einsum("bshr,hvr->bshv", y, of_values_HVR)


def linear_of(shape: tuple[int, ...]) -> Linear:
    outputs, inputs = shape
    return Linear(inputs, outputs)


class FeedForward(nn.Module):
    """Compute a dense FFN or a shared expert."""

    region: Region  # replaced by recompute: around the whole FFN
    neurons_region: Region  # replaced by recompute: around the activation between the products

    def __init__(self, spec: DenseSpec, width: int) -> None:
        super().__init__()
        self.activation = spec.activation
        self.gate = Linear(spec.hidden, width, bias=spec.ffn_bias) if spec.gated else None
        self.up = Linear(spec.hidden, width, bias=spec.ffn_bias)
        self.down = Linear(width, spec.hidden, bias=spec.ffn_bias)
        self.region = self.neurons_region = once

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.region(self.whole)(x)
        return y

    def whole(self, x: Tensor) -> Tensor:
        gate = None if self.gate is None else self.gate(x)
        y: Tensor = self.down(self.neurons_region(self.neurons)(self.up(x), gate))
        return y

    def neurons(self, up: Tensor, gate: Tensor | None) -> Tensor:
        return ACTIVATIONS[self.activation](up) if gate is None else swiglu.gated(gate, up, self.activation)
