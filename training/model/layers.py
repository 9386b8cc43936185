"""Linear, norm, attention, dense FFN: what a layer is made of besides experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.kernels import norm as norm_kernel
from training.kernels import rotary
from training.model.attention import Attend, Sdpa, Seen
from upcycle.ffn import ACTIVATIONS
from upcycle.spec import DenseSpec

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # of x, a weight and a bias


class Linear(nn.Module):
    """y = x W^T + b in x's dtype, whatever the parameters' dtype is."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.product: Product = functional.linear

    def matrix(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """(weight, bias) to compute with; of a divided one, this rank's."""
        return self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, *self.matrix(x.dtype))


def joint(x: Tensor, linears: Sequence[Linear]) -> Tensor:
    """What they make of x, side by side, by one product: back, it makes one gradient of x instead of a sum of several.
    Copying the weights together costs a hundredth of it."""
    weights, biases = zip(*(linear.matrix(x.dtype) for linear in linears), strict=True)
    return linears[0].product(x, torch.cat(weights), None if biases[0] is None else torch.cat(biases))


class Norm(nn.Module):
    """The four norms of spec.Norm. `last`: an rms norm's gain comes before the rounding, not after (see spec.py)."""

    def __init__(self, kind: str, size: int, eps: float, *, last: bool) -> None:
        super().__init__()
        self.kind, self.eps, self.last = kind, eps, last or kind == "rms1p"
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if kind.startswith("layernorm") else None

    def gain(self, dtype: torch.dtype) -> Tensor:
        return self.weight.to(dtype) + 1.0 if self.kind.endswith("1p") else self.weight.to(dtype)

    def added(self, stream: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """(x, this norm of x) of x = stream + delta; use this x from here on, for the sake of its gradient."""
        if self.bias is None and norm_kernel.on_kernel(stream):
            return norm_kernel.rms_norm(stream, delta, self.gain(torch.float32), self.eps)
        x = stream if delta is None else stream + delta
        return x, self(x)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        if self.bias is None and norm_kernel.on_kernel(x):
            return norm_kernel.rms_norm(x, None, self.gain(torch.float32), self.eps)[1]
        gain = self.gain(wide)
        if self.bias is not None:
            return functional.layer_norm(x.to(wide), gain.shape, gain, self.bias.to(wide), self.eps).to(x.dtype)
        y = x.to(wide)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * gain).to(x.dtype) if self.last else y.to(x.dtype) * gain.to(x.dtype)


def norm(spec: DenseSpec, size: int | None = None, kind: str | None = None) -> Norm:
    return Norm(kind or spec.norm, size or spec.hidden, spec.norm_eps, last=spec.block == "post")


class Attention(nn.Module):
    """Grouped-query attention. Its parts are parameters of the layer itself, so that they keep their roles' names."""

    def __init__(self, spec: DenseSpec, layer: int) -> None:
        super().__init__()
        self.spec = spec
        # what parallel and cached attention put something else in the place of
        self.attend: Attend = Sdpa(spec.window if layer in spec.window_layers else None, spec.attention_scale)
        d, q, kv = spec.hidden, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.q, self.k, self.v = (Linear(d, size, bias=spec.qkv_bias) for size in (q, kv, kv))
        self.o = Linear(q, d, bias=spec.out_bias)
        self.q_norm: Norm | None = None
        self.k_norm: Norm | None = None
        if spec.qk_norm != "none":
            kind = "rms1p" if spec.norm == "rms1p" else "rms"
            full = spec.qk_norm == "full"
            self.q_norm = norm(spec, q if full else spec.head_dim, kind)
            self.k_norm = norm(spec, kv if full else spec.head_dim, kind)

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor, seen: Seen) -> Tensor:
        q, k, v = self.heads(joint(x_BSD, (self.q, self.k, self.v)), cos, sin)
        y = self.attend(q, k, v, seen)
        out: Tensor = self.o(y.flatten(2))
        return out

    def heads(self, qkv_BSN: Tensor, cos: Tensor, sin: Tensor) -> Iterable[Tensor]:
        """Queries, keys and values; the first two normed and turned."""
        width, spec = self.spec.head_dim, self.spec
        groups = spec.heads // spec.kv_heads
        kv = qkv_BSN.shape[2] // (width * (groups + 2))  # of this rank
        counts = (groups * kv, kv, kv)
        if rotary.on_kernel(qkv_BSN) and spec.qk_norm != "full":
            norms = (self.q_norm, self.k_norm)
            gains = [None if norm is None else norm.gain(torch.float32) for norm in norms]
            return rotary.norm_rotate(qkv_BSN, counts, gains, spec.norm_eps, cos, sin)
        q, k, v = qkv_BSN.split([count * width for count in counts], dim=2)  # type: ignore[no-untyped-call]
        if spec.qk_norm == "full":
            q, k = self.normed(q, k)
        q, k, v = (part.unflatten(2, (-1, width)) for part in (q, k, v))
        if spec.qk_norm == "head":
            q, k = self.normed(q, k)
        return rotary.rotate(q, cos, sin), rotary.rotate(k, cos, sin), v

    def normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        assert self.q_norm is not None and self.k_norm is not None
        return self.q_norm(q), self.k_norm(k)


class FeedForward(nn.Module):
    """A dense FFN or a shared expert."""

    def __init__(self, spec: DenseSpec, width: int) -> None:
        super().__init__()
        self.act = ACTIVATIONS[spec.activation]
        self.gate = Linear(spec.hidden, width, bias=spec.ffn_bias) if spec.gated else None
        self.up = Linear(spec.hidden, width, bias=spec.ffn_bias)
        self.down = Linear(width, spec.hidden, bias=spec.ffn_bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.neurons(self.up(x), None if self.gate is None else self.gate(x)))
        return y

    def neurons(self, up: Tensor, gate: Tensor | None) -> Tensor:
        return self.act(up) if gate is None else self.act(gate) * up
