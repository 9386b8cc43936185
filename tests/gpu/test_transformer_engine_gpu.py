"""On a GPU with Transformer Engine: a model with its parts is as close to the same model in float32 as without them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.unit.training.test_transformer_engine import DENSE
from training.checkpoint.layout import initialise
from training.model import transformer_engine
from training.model.decoder import Decoder
from training.model.recompute import recompute
from upcycle.arch.spec import DenseSpec, MoESpec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICE = torch.device("cuda")
WIDE = DenseSpec(**DENSE | {"hidden": 256, "ffn": 512, "heads": 4, "head_dim": 64, "context": 512, "init_std": 0.06})
SPECS: dict[str, DenseSpec | MoESpec] = {
    "llama": WIDE,
    "gemma's norms": replace(WIDE, norm="rms1p"),
    "biases and layer norms": replace(
        WIDE, norm="layernorm1p", qkv_bias=True, out_bias=True, ffn_bias=True, gated=False, activation="gelu"
    ),
    "norms behind": replace(WIDE, block="post", qk_norm="full"),
    "window": replace(WIDE, window=50, window_layers=(1,)),
    "moe": MoESpec(replace(WIDE, qk_norm="head"), (0, 1), (128,) * 4, top_k=2, copies=4, shared=128, shared_gate=True),
}


@pytest.fixture(autouse=True)
def package() -> None:
    with torch.device("meta"):
        reason = transformer_engine.refusal(Decoder(WIDE, compute=torch.bfloat16), ["norm"])
    if reason:
        pytest.skip(reason)


def step(
    name: str, parts: list[str], compute: torch.dtype = torch.bfloat16, mode: str = "none", compiled: bool = False,
    experts: str = "grouped", waiting: str = "error",
) -> dict[str, Tensor]:  # fmt: skip
    """Loss and gradients of the second of two steps, which must not wait for the device."""
    model = initialise(Decoder(SPECS[name], experts=experts, compute=compute).to(DEVICE))
    transformer_engine.use(model, parts)
    recompute(model, mode)
    if compiled:
        model.compile_parts()
    tokens, labels = torch.randint(50, (2, 2, 256), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for warm in (True, False):
        model.zero_grad(set_to_none=True)
        torch.cuda.set_sync_debug_mode("default" if warm else waiting)
        try:
            loss = model.loss(tokens, labels)
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def far(have: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Over all gradients together: a router's are few, and a token that chooses anew moves them by much."""
    assert have.keys() == want.keys()
    names = [name for name in want if "router" not in name]
    square = sum(float((have[n].double() - want[n].double()).square().sum()) for n in names)
    return float((square / sum(float(want[n].double().square().sum()) for n in names)) ** 0.5)


@pytest.mark.parametrize("parts", [["attention"], ["linear"], ["norm"], ["attention", "linear", "norm"]], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_parts_are_as_close_to_float32_as_ours(name: str, parts: list[str]) -> None:
    want = step(name, [], torch.float32, waiting="default")
    ours, theirs = far(step(name, [], waiting="default"), want), far(step(name, parts), want)
    assert theirs < 1.3 * ours + 1e-3, (theirs, ours)
    assert ours < 0.1


def test_a_wrong_part_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    want = step("window", [], torch.float32, waiting="default")
    right = far(step("window", ["attention"]), want)
    made = transformer_engine.Fused
    monkeypatch.setattr(transformer_engine, "Fused", lambda window, scale: made(window and window - 10, scale))
    assert far(step("window", ["attention"]), want) > 2 * right + 1e-3


@pytest.mark.parametrize("name", ["llama", "moe"])
def test_fp8_is_a_few_percent_away(name: str) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU that computes in FP8")
    want = step(name, [], torch.float32, waiting="default")
    ours = far(step(name, [], waiting="default"), want)
    assert ours < far(step(name, ["linear_fp8"]), want) < 0.25


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_compiled_and_recomputed(mode: str) -> None:
    torch._dynamo.reset()
    parts = ["attention", "linear", "norm"]
    want = step("moe", [], torch.float32, waiting="default")
    assert far(step("moe", parts, mode=mode, compiled=True), want) < 1.3 * far(step("moe", []), want) + 1e-3


def test_its_experts_are_ours() -> None:
    want = step("moe", [], torch.float32, waiting="default")
    theirs = step("moe", ["norm"], experts="transformer_engine", waiting="default")
    assert far(theirs, want) < 1.3 * far(step("moe", []), want) + 1e-3
