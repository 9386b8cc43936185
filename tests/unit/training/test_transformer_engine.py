"""Transformer Engine's parts of a layer, around stand-ins that keep the package's documented contracts: the same model,
the same gradients, the same parameters. tests/gpu/test_transformer_engine_gpu.py has the package itself."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional

from tests.unit.training.test_experts import GroupedLinearStandIn, case
from training.checkpoint import layout
from training.config.schema import ModelConfig, TrainConfig
from training.data.mixture import DataConfig
from training.experts import reference
from training.experts import transformer_engine as experts
from training.model import transformer_engine
from training.model.attention import Seen
from training.model.decoder import Decoder
from training.model.recompute import recompute
from training.parallel.context import attach
from training.parallel.mesh import MeshConfig
from upcycle.arch.spec import DenseSpec, MoESpec

DENSE: dict[str, Any] = {
    "family": "llama", "layers": 2, "hidden": 32, "ffn": 48, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 50,
    "context": 64, "init_std": 0.3,
}  # fmt: skip
SPECS: dict[str, DenseSpec | MoESpec] = {
    "llama": DenseSpec(**DENSE),
    "gemma's norms": DenseSpec(**DENSE | {"norm": "rms1p"}),
    "biases and layer norms": DenseSpec(
        **DENSE
        | {
            "norm": "layernorm1p",
            "qkv_bias": True,
            "out_bias": True,
            "ffn_bias": True,
            "gated": False,
            "activation": "gelu",
        }
    ),
    "norms behind": DenseSpec(**DENSE | {"block": "post", "qk_norm": "full"}),
    "window": DenseSpec(**DENSE | {"window": 5, "window_layers": (1,)}),
    "moe": MoESpec(
        DenseSpec(**DENSE | {"qk_norm": "head"}), (0, 1), (16,) * 4, top_k=2, copies=4, shared=16, shared_gate=True
    ),
}


class LinearStandIn(nn.Module):
    def __init__(self, in_features: int, out_features: int, bias: bool, params_dtype: torch.dtype, device: str) -> None:
        super().__init__()
        assert device == "meta"
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, dtype=params_dtype, device=device))
        self.calls = 0

    def forward(self, inp: Tensor) -> Tensor:
        type(self).calls += 1  # type: ignore[attr-defined]
        return functional.linear(inp, self.weight, getattr(self, "bias", None))


class AttentionStandIn(nn.Module):
    calls = 0

    def __init__(
        self, num_attention_heads: int, kv_channels: int, num_gqa_groups: int, qkv_format: str, attn_mask_type: str,
        window_size: tuple[int, int] | None, softmax_scale: float,
    ) -> None:  # fmt: skip
        super().__init__()
        assert (qkv_format, attn_mask_type) == ("bshd", "causal")
        self.shape, self.window, self.scale = (
            (num_attention_heads, num_gqa_groups, kv_channels),
            window_size,
            softmax_scale,
        )

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        type(self).calls += 1
        assert (query.shape[2], key.shape[2], key.shape[3]) == self.shape
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        at = torch.arange(q.shape[2])
        back = at[:, None] - at
        mask = back >= 0
        if self.window is not None:
            left, right = self.window
            mask = (back <= left) & (back >= -right)  # both ends included
        y = functional.scaled_dot_product_attention(q, k, v, mask, scale=self.scale, enable_gqa=True)
        return y.transpose(1, 2).flatten(2)


def norm_kernels(calls: list[str]) -> dict[str, Any]:
    def hat(x: Tensor, mean: Tensor | None, scale: Tensor) -> Tensor:
        return (x if mean is None else x - mean[:, None]) * scale[:, None]

    def forward(x: Tensor, gain: Tensor, bias: Tensor | None, mean: Tensor | None, eps: float, one: bool) -> Any:
        assert x.ndim == 2 and x.is_contiguous() and gain.dtype == x.dtype
        centred = x if mean is None else x - mean[:, None]
        scale = (centred.square().mean(1) + eps).rsqrt()
        y = hat(x, mean, scale) * (gain + one)
        return [y if bias is None else y + bias, mean, scale]

    def backward(d_y: Tensor, x: Tensor, mean: Tensor | None, scale: Tensor, gain: Tensor, one: bool) -> Any:
        assert d_y.is_contiguous()
        x_hat, d = hat(x, mean, scale), d_y * (gain + one)
        inner = d - x_hat * (d * x_hat).mean(1, keepdim=True)
        d_x = scale[:, None] * (inner if mean is None else inner - d.mean(1, keepdim=True))
        return [d_x, (d_y * x_hat).sum(0), d_y.sum(0)]

    def rmsnorm_fwd(
        x: Tensor, gain: Tensor, eps: float, out: None, quantizer: None, otype: str, margin: int, one: bool
    ) -> Any:
        calls.append("rmsnorm_fwd")
        assert otype == "kind of float64" and margin == 0
        return forward(x, gain, None, None, eps, one)

    def rmsnorm_bwd(d_y: Tensor, x: Tensor, scale: Tensor, gain: Tensor, margin: int, one: bool) -> Any:
        calls.append("rmsnorm_bwd")
        return backward(d_y, x, None, scale, gain, one)[:2]

    def rmsnorm_bwd_add(
        d_y: Tensor, x: Tensor, more: Tensor, scale: Tensor, gain: Tensor, margin: int, one: bool
    ) -> Any:
        calls.append("rmsnorm_bwd_add")
        d_x, d_gain, _ = backward(d_y, x, None, scale, gain, one)
        return [d_x + more, d_gain]

    def layernorm_fwd(
        x: Tensor,
        gain: Tensor,
        bias: Tensor,
        eps: float,
        out: None,
        quantizer: None,
        otype: str,
        margin: int,
        one: bool,
    ) -> Any:
        calls.append("layernorm_fwd")
        return forward(x, gain, bias, x.mean(1), eps, one)

    def layernorm_bwd(d_y: Tensor, x: Tensor, mean: Tensor, scale: Tensor, gain: Tensor, margin: int, one: bool) -> Any:
        calls.append("layernorm_bwd")
        return backward(d_y, x, mean, scale, gain, one)

    return {f.__name__: f for f in (rmsnorm_fwd, rmsnorm_bwd, rmsnorm_bwd_add, layernorm_fwd, layernorm_bwd)}


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of what was called, of the package that is not there."""
    calls: list[str] = []

    @contextmanager
    def autocast(enabled: bool, recipe: str) -> Iterator[None]:
        assert enabled and recipe == "current scaling"
        calls.append("fp8")
        yield

    modules = {
        "transformer_engine.pytorch": {
            "Linear": LinearStandIn, "DotProductAttention": AttentionStandIn, "autocast": autocast,
        },
        "transformer_engine.pytorch.constants": {"TE_DType": {torch.float64: "kind of float64"}},
        "transformer_engine.common.recipe": {"Float8CurrentScaling": lambda: "current scaling"},
        "transformer_engine_torch": norm_kernels(calls),
    }  # fmt: skip
    for name, held in modules.items():
        module = types.ModuleType(name)
        vars(module).update(held)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(transformer_engine, "refusal", lambda *_: "")
    LinearStandIn.calls = AttentionStandIn.calls = 0  # type: ignore[attr-defined]
    for cached in (transformer_engine.template, transformer_engine.core):
        cached.cache_clear()
    yield calls
    for cached in (transformer_engine.template, transformer_engine.core):
        cached.cache_clear()


def step(model: Decoder) -> dict[str, Tensor]:
    tokens, labels = torch.randint(50, (2, 3, 12), generator=torch.Generator().manual_seed(1))
    loss = model.loss(tokens, labels)
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def made(name: str) -> Decoder:
    return layout.initialise(Decoder(SPECS[name], experts="reference", compute=torch.float64).double())


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize(
    "parts", [["attention"], ["linear"], ["linear_fp8"], ["norm"], ["attention", "linear", "norm"]], ids=str
)
@pytest.mark.parametrize("name", SPECS)
def test_the_model_is_the_same(name: str, parts: list[str], mode: str, called: list[str]) -> None:
    model, want = made(name), step(made(name))
    names = [n for n, _ in model.named_parameters()]
    transformer_engine.use(model, parts)
    recompute(model, mode)
    have = step(model)
    assert [n for n, _ in model.named_parameters()] == names
    assert have.keys() == want.keys()
    for key, value in want.items():
        assert torch.allclose(have[key], value, rtol=1e-10, atol=1e-10 * float(value.abs().max())), key
    assert (AttentionStandIn.calls > 0) == ("attention" in parts)
    assert (LinearStandIn.calls > 0) == bool({"linear", "linear_fp8"} & set(parts))  # type: ignore[attr-defined]
    assert ("fp8" in called) == ("linear_fp8" in parts)
    layer = "layernorm" if name.startswith("biases") else "rmsnorm"
    assert (f"{layer}_fwd" in called) == ("norm" in parts)
    assert ("rmsnorm_bwd_add" in called) == ("norm" in parts and layer == "rmsnorm" and not name.endswith("behind"))


def test_only_what_is_named_is_replaced(called: list[str]) -> None:
    model = made("moe")
    transformer_engine.use(model, [])
    step(model)
    assert not called and not AttentionStandIn.calls and not LinearStandIn.calls  # type: ignore[attr-defined]
    transformer_engine.use(model, ["linear"])
    step(model)
    # two layers of: queries, keys and values in one; output; gate, up and down of the shared expert
    assert LinearStandIn.calls == 2 * 5  # type: ignore[attr-defined]


def test_a_wrong_window_is_seen(called: list[str]) -> None:
    want = step(made("window"))
    model = made("window")
    transformer_engine.use(model, ["attention"])
    attention = model.layers["1"].attention
    attention.attend = transformer_engine.Fused(6, attention.attend.scale)  # type: ignore[union-attr]
    assert not torch.allclose(step(model)["loss"], want["loss"], rtol=1e-6)


def test_documents_are_refused(called: list[str]) -> None:
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match=r"cannot keep documents apart; set data\.mask_documents=false"):
        transformer_engine.Fused(None, 1.0)(q, q, q, Seen(torch.zeros(1, 4)))


def test_a_soft_cap_is_refused_where_it_counts() -> None:
    with torch.device("meta"):
        model = Decoder(DenseSpec(**DENSE | {"attention_cap": 50.0}), compute=torch.bfloat16)
    with pytest.raises(ValueError, match=r"\[attention\] does not compute the soft cap that this model has; leave"):
        transformer_engine.use(model, ["attention"])
    assert "soft cap" not in transformer_engine.refusal(model, ["norm"])


@pytest.mark.parametrize(
    ("parts", "compute", "words"),
    [
        (["norm"], torch.float32, "computes in bfloat16, and model.dtype is float32"),
        (["linear_fp8"], torch.bfloat16, r"divisible by 16, and one is \(40, 32\); name linear instead"),
        (["norm"], torch.bfloat16, r"\[norm\] needs the transformer_engine package, which is not installed"),
        (["norms"], torch.bfloat16, "names 'norms'; it can name attention, linear, linear_fp8, norm"),
        (["linear", "linear_fp8"], torch.bfloat16, "leave one of them out"),
    ],
)
def test_what_cannot_be_is_one_sentence(parts: list[str], compute: torch.dtype, words: str) -> None:
    with torch.device("meta"):
        model = Decoder(DenseSpec(**DENSE | {"ffn": 40}), compute=compute)
    if sys.modules.get("transformer_engine") or ("not installed" in words and torch.cuda.is_available()):
        pytest.skip("the package may be here")
    with pytest.raises(ValueError, match=words) as error:
        transformer_engine.use(model, parts)
    assert "\n" not in str(error.value)


def test_configs_are_checked_before_anything_is_read() -> None:
    def config(parts: tuple[str, ...], **more: Any) -> TrainConfig:
        return TrainConfig(model=ModelConfig(source="x", transformer_engine=parts), **more)

    apart = DataConfig(mask_documents=False)
    assert config(("attention", "norm"), data=apart).model.transformer_engine == ("attention", "norm")
    for parts, more, words in [
        (("attention",), {}, "does not go with data.mask_documents=true"),
        (("attention",), {"data": apart, "mesh": MeshConfig(pp=2)}, "does not go with mesh.pp=2"),
        (("linear", "linear_fp8"), {}, "leave one of them out"),
    ]:
        with pytest.raises(ValueError, match=words):
            config(parts, **more)


def test_attention_over_shares_of_a_sequence_is_not_its(called: list[str]) -> None:
    model = made("llama")
    transformer_engine.use(model, ["attention"])
    with pytest.raises(ValueError, match=r"mesh\.cp=2 replaces attention"):
        attach(model, types.SimpleNamespace(size=lambda: 2), "ring")  # type: ignore[arg-type]


def test_a_norm_that_nobody_looks_at_passes_the_streams_gradient_on(called: list[str]) -> None:
    norm = made("llama").layers["0"].ffn_norm
    stream, delta = (torch.randn(2, 3, 32, dtype=torch.float64, requires_grad=True) for _ in range(2))
    x, _ = transformer_engine.added(norm, stream, delta)  # type: ignore[arg-type]
    d_stream, d_delta = torch.autograd.grad(x.square().sum(), (stream, delta))
    assert torch.equal(d_stream, 2 * (stream + delta)) and torch.equal(d_delta, d_stream)


def test_a_compiled_layer_calls_them_too(called: list[str]) -> None:
    model, want = made("moe"), step(made("moe"))
    transformer_engine.use(model, ["attention", "linear", "norm"])
    recompute(model, "full")
    torch._dynamo.reset()
    for layer in model.layers.values():
        layer.compile(backend="eager")
    have = step(model)
    for key, value in want.items():
        assert torch.allclose(have[key], value, rtol=1e-10, atol=1e-10 * float(value.abs().max())), key
    assert AttentionStandIn.calls and LinearStandIn.calls and "rmsnorm_bwd_add" in called  # type: ignore[attr-defined]


def test_its_experts_stay_outside_of_a_compiled_layers_graph(
    called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["transformer_engine.pytorch"], "GroupedLinear", GroupedLinearStandIn, raising=False)
    monkeypatch.setattr(experts, "only_bfloat16", lambda *_: None)
    experts.template.cache_clear()
    given = case((3, 0, 2), 1)
    counter = CompileCounter()
    torch._dynamo.reset()
    y = torch.compile(lambda *x: experts.experts(*x, "silu") * 2, backend=counter)(*given)
    experts.template.cache_clear()
    assert counter.frame_count == 1 and counter.op_count == 1, "the product with 2"
    assert torch.allclose(y, 2 * reference.experts(*given, "silu"), rtol=1e-10, atol=1e-10)
