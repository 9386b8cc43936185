"""Parts of a layer computed by NVIDIA's Transformer Engine, for comparisons or for its FP8 products.

    use(model, ["norm", "linear"])     # before the model is divided over ranks

Only functions are replaced: our modules keep the parameters and their names. Its modules are templates on the meta
device, which functional_call fills for one call. Its norms read their weight in backward too, so this file calls their
kernels directly."""

# Written against Transformer Engine 2.12, and compared with the sources of 2.18: pytorch.Linear, DotProductAttention,
# autocast, and of transformer_engine_torch rmsnorm_fwd, rmsnorm_bwd, rmsnorm_bwd_add, layernorm_fwd, layernorm_bwd.

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from training.experts.common import absent
from training.model.attention import Seen
from training.model.decoder import Decoder, Layer
from training.model.layers import FeedForward, Linear, Norm

PARTS = ("attention", "linear", "linear_fp8", "norm")
ROUND = 16  # sizes of FP8 products must be divisible by this


def known(parts: Sequence[str]) -> None:
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"model.transformer_engine names {part!r}; it can name {', '.join(PARTS)}")
    if {"linear", "linear_fp8"} <= set(parts):
        raise ValueError("model.transformer_engine names linear and linear_fp8; leave one of them out")


def use(model: Decoder, parts: Sequence[str]) -> None:
    if not parts:
        return
    known(parts)
    why_not = refusal(model, parts)
    if why_not:
        raise ValueError(why_not)
    for layer in model.layers.values():
        assert isinstance(layer, Layer)
        if "attention" in parts:
            layer.attention.attend = Fused(layer.attention.attend.window, layer.attention.attend.scale)  # type: ignore[attr-defined]
    for module in model.modules():
        if "norm" in parts and isinstance(module, Norm):
            module.normed, module.added = normed, added
    for linear in linears(model):
        if "linear" in parts or "linear_fp8" in parts:
            linear.product = partial(product, "linear_fp8" in parts)


def linears(model: Decoder) -> list[Linear]:
    """Return the linears of attention, dense FFNs and shared experts, without a shared expert's gate of one output."""
    owners = [layer.attention for layer in model.layers.values() if isinstance(layer, Layer)]
    owners += [module for module in model.modules() if isinstance(module, FeedForward)]  # type: ignore[misc]
    return [module for owner in owners for module in owner.children() if isinstance(module, Linear)]


def refusal(model: Decoder, parts: Sequence[str]) -> str:
    asked = f"model.transformer_engine=[{','.join(parts)}]"
    if model.compute != torch.bfloat16:
        got = str(model.compute).removeprefix("torch.")
        return f"{asked} computes in bfloat16, and model.dtype is {got}; leave the key out or set bfloat16"
    if "linear_fp8" in parts:
        odd = [tuple(linear.weight.shape) for linear in linears(model) if any(n % ROUND for n in linear.weight.shape)]
        if odd:
            return f"linear_fp8 needs matrix sizes divisible by {ROUND}, and one is {odd[0]}; name linear instead"
        if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
            return "linear_fp8 needs a GPU that computes in FP8 (Ada, Hopper or later); name linear instead"
    if "attention" in parts and model.dense.latent is not None:
        return f"{asked} needs values as wide as keys, and this model's latents give other widths; leave attention out"
    if "attention" in parts and model.dense.sinks:
        return f"{asked} does not compute the sinks that this model's heads have; leave attention out"
    if "attention" in parts and model.dense.attention_cap:
        return f"{asked} does not compute the soft cap that this model has; leave attention out"
    return absent(asked, "transformer_engine.pytorch", "leave the key out")


# ---- attention


@dataclass(frozen=True)
class Fused:
    """Attend over whole sequences; documents are refused, because the kernel needs their ends on the host."""

    window: int | None
    scale: float

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(
        self, q_BSHA: Tensor, k_BSGA: Tensor, v_BSGA: Tensor, seen: Seen, sink_H: Tensor | None = None
    ) -> Tensor:
        assert sink_H is None, "refusal() first"
        if seen.documents_BS is not None:
            raise ValueError(
                "model.transformer_engine=[attention] cannot keep documents apart; set data.mask_documents=false, or "
                "leave attention out to use our own, which skips blocks of other documents"
            )
        length, heads, size = q_BSHA.shape[1:]
        window = self.window if self.window is not None and self.window < length else None
        y_BSN: Tensor = core(heads, k_BSGA.shape[2], size, window, self.scale)(q_BSHA, k_BSGA, v_BSGA)
        return y_BSN.view(q_BSHA.shape)


@functools.cache  # the module has no weights, so calls can share it
def core(heads: int, groups: int, size: int, window: int | None, scale: float) -> nn.Module:
    module: nn.Module = engine().DotProductAttention(
        heads,
        size,
        num_gqa_groups=groups,
        qkv_format="bshd",
        attn_mask_type="causal",
        window_size=None if window is None else (window - 1, 0),  # visible keys before the query, and after it
        softmax_scale=scale,
    )
    return module


# ---- products


@torch.compiler.disable  # type: ignore[untyped-decorator]
def product(fp8: bool, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    given = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    module = template(weight.shape[0], weight.shape[1], bias is not None, weight.dtype)
    with scaled() if fp8 else nullcontext():
        y: Tensor = torch.func.functional_call(module, given, (x,))
    return y


@functools.cache  # the module has shapes but no weights, so calls can share it
def template(outputs: int, inputs: int, bias: bool, dtype: torch.dtype) -> nn.Module:
    module: nn.Module = engine().Linear(inputs, outputs, bias=bias, params_dtype=dtype, device="meta")
    return module


def scaled() -> Any:
    """Return a context that computes in FP8 with each tensor's current scale, so that no history must be saved."""
    recipe = importlib.import_module("transformer_engine.common.recipe")
    return engine().autocast(enabled=True, recipe=recipe.Float8CurrentScaling())


# ---- norms


def normed(norm: Norm, x: Tensor) -> Tensor:
    y: Tensor = added(norm, x, None)[1]
    return y


@torch.compiler.disable  # type: ignore[untyped-decorator]
def added(norm: Norm, stream: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute Norm.added with the package's kernels. They add the 1 of a gain of 1 + w themselves, so that w is not
    rounded together with the 1."""
    one = norm.kind.endswith("1p")
    gain = norm.gain(norm, torch.promote_types(stream.dtype, torch.float32)) - (1.0 if one else 0.0)
    bias = None if norm.bias is None else norm.bias.to(stream.dtype)
    x, y = _Norm.apply(stream, delta, gain.to(stream.dtype), bias, norm.eps, one)  # type: ignore[no-untyped-call]
    return x, y


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, stream: Tensor, delta: Tensor | None, gain_D: Tensor, bias_D: Tensor | None, eps: float, one: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        x = stream.view_as(stream) if delta is None else stream + delta
        x_TD, dtype = x.reshape(-1, x.shape[-1]).contiguous(), constants().TE_DType[x.dtype]
        if bias_D is None:
            y, mean_T, scale_T = kernels().rmsnorm_fwd(x_TD, gain_D, eps, None, None, dtype, 0, one)
        else:
            y, mean_T, scale_T = kernels().layernorm_fwd(x_TD, gain_D, bias_D, eps, None, None, dtype, 0, one)
        ctx.save_for_backward(x_TD, gain_D, mean_T, scale_T)
        ctx.one, ctx.shift, ctx.added = one, bias_D is not None, delta is not None
        return x, y.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: Tensor | None, d_y: Tensor | None) -> tuple[Tensor | None, ...]:
        if d_y is None:
            return d_x, d_x if ctx.added else None, None, None, None, None
        x_TD, gain_D, mean_T, scale_T = ctx.saved_tensors
        d_y_TD, d_bias_D = d_y.reshape(x_TD.shape).contiguous(), None
        if ctx.shift:
            total, d_gain_D, d_bias_D = kernels().layernorm_bwd(d_y_TD, x_TD, mean_T, scale_T, gain_D, 0, ctx.one)
            total = total if d_x is None else total + d_x.reshape(x_TD.shape)
        elif d_x is None:
            total, d_gain_D = kernels().rmsnorm_bwd(d_y_TD, x_TD, scale_T, gain_D, 0, ctx.one)
        else:
            d_x_TD = d_x.reshape(x_TD.shape).contiguous()
            total, d_gain_D = kernels().rmsnorm_bwd_add(d_y_TD, x_TD, d_x_TD, scale_T, gain_D, 0, ctx.one)
        total = total.view(d_y.shape)
        return total, total if ctx.added else None, d_gain_D, d_bias_D, None, None


# ---- the package, imported only when it is used


def engine() -> Any:
    return importlib.import_module("transformer_engine.pytorch")


def constants() -> Any:
    return importlib.import_module("transformer_engine.pytorch.constants")


def kernels() -> Any:
    return importlib.import_module("transformer_engine_torch")
