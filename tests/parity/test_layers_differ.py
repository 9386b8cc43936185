"""Norms on both sides, soft caps, and layers that rotate in their own way or not at all: our decoder is transformers'
model in float64, in the logits, the loss and every gradient; and with one of them wrong it is not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tests.parity import tiny
from training.checkpoint import layout
from training.model.decoder import Decoder
from upcycle.__main__ import main
from upcycle.arch import registry
from upcycle.arch.spec import DenseSpec
from upcycle.cli.verify import PROMISE_BROKEN

FAMILIES = ("smollm3", "olmo3", "gemma2", "gemma3_text")
Roles = Mapping[str, str]  # role -> the role whose weights it is given


class Wide(TorchFunctionMode):
    """Computes in float64 where a model says float32, as norms, softmaxes and angles do whatever the model's dtype."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is torch.Tensor.float:
            return args[0].double()
        if func in (torch.Tensor.to, functional.softmax):
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            named = {name: torch.float64 if arg is torch.float32 else arg for name, arg in named.items()}
        return func(*args, **named)


@contextmanager
def pair(family: str, change: Mapping[str, Any], given: Roles) -> Iterator[tuple[Any, Decoder, dict[str, str]]]:
    """transformers' model, ours with `change` in its spec and the weights of other roles where `given` says so, and the
    names of transformers' parameters by role."""
    theirs = tiny.build(family, dtype=torch.float64)
    module = registry.family(family)
    spec: DenseSpec = module.read(theirs.config.to_dict())
    names = {role: source.name for role, source in module.sources(spec).items()}
    weights = dict(theirs.named_parameters())
    model = Decoder(replace(spec, **change), compute=torch.float64).double()
    with torch.no_grad():
        for role, tensor in layout.views(model).items():
            layer = role.split(".")[1] if role.startswith("layers.") else ""
            other = given.get(role.removeprefix(f"layers.{layer}."))
            tensor.copy_(weights[names[f"layers.{layer}.{other}" if other else role]])
    with Wide():
        yield theirs, model, names


def relative(have: Tensor, want: Tensor, floor: float = 0.0) -> float:
    return float((have - want).detach().abs().max() / want.detach().abs().max().clamp_min(floor))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_loss_and_all_gradients_in_float64(family: str) -> None:
    with pair(family, {}, {}) as (theirs, model, names):
        ids = tiny.tokens()
        label = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -1)], 1)
        want = theirs(ids).logits
        assert relative(model(ids), want) < 1e-10
        loss = functional.cross_entropy(want.flatten(0, 1), label.flatten(), ignore_index=-1, reduction="sum")
        ours = model.loss(ids, label)
        assert relative(ours, loss) < 1e-10
        loss.backward()
        ours.backward()
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    floor = 1e-3 * max(float(gradient.abs().max()) for gradient in expected.values())
    roles = layout.roles(model)
    assert len(roles) == len(expected), "every one of them"
    for role, (parameter, _) in roles.items():
        assert parameter.grad is not None
        assert relative(parameter.grad, expected[names[role]], floor) < 1e-10, role


NORMS = (("attn_norm", "attn_out_norm"), ("ffn_norm", "ffn_out_norm"), ("attn_out_norm", "ffn_norm"))
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
TWINS: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("smollm3", {"nope_layers": ()}, {}),
    ("smollm3", {"nope_layers": (0,)}, {}),
    ("smollm3", {"nope_layers": (0, 1)}, {}),
    ("olmo3", {"window_rope": None}, {}),
    ("olmo3", {"window_layers": (1,)}, {}),
    ("olmo3", {"window": 7}, {}),
    ("olmo3", {"rope": {"rope_type": "default", "rope_theta": 5e5}}, {}),
    ("gemma2", {"attention_cap": 0.0}, {}),
    ("gemma2", {"attention_cap": 1.1}, {}),
    ("gemma2", {"logit_cap": 0.0}, {}),
    ("gemma2", {"logit_cap": 2.2}, {}),
    ("gemma2", {"attention_scale": 32**-0.5}, {}),
    ("gemma2", {"window_layers": (0, 1)}, {}),
    ("gemma3_text", {"window_rope": None}, {}),
    ("gemma3_text", {"window_rope": PLAIN}, {}),
    ("gemma3_text", {"rope": PLAIN}, {}),
    ("gemma3_text", {"qk_norm": "none"}, {}),
    *(
        (family, {}, {f"{a}.weight": f"{b}.weight", f"{b}.weight": f"{a}.weight"})
        for family in ("gemma2", "gemma3_text")
        for a, b in NORMS
    ),
]  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize(("family", "change", "given"), TWINS, ids=str)
def test_the_twin_fails(family: str, change: dict[str, Any], given: dict[str, str]) -> None:
    with pair(family, change, given) as (theirs, model, _):
        assert relative(model(tiny.tokens()), theirs(tiny.tokens()).logits) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversion_is_verified(family: str, tmp_path: Path) -> None:
    dense, moe = tiny.make(family, tmp_path / "dense"), tmp_path / "moe"
    words = ["method.name=virtual_group", "experts=2", "granularity=2", "top_k=2"]
    assert main(["convert", f"source={dense}", f"output={moe}", *words]) == 0
    config = json.loads((moe / "config.json").read_text())
    assert config["model_type"] == "upcycled"
    verify = ["verify", str(dense), str(moe), "tokens=64", "sequence=32"]
    assert main(verify) == 0
    for key in WRITTEN[family]:
        (moe / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != key}))
        assert main(verify) == PROMISE_BROKEN, key


# the keys of an upcycled config.json that only such models have
WRITTEN = {
    "smollm3": ["nope_layers"],
    "olmo3": ["sliding_rope_parameters"],
    "gemma2": ["attn_logit_softcapping", "final_logit_softcapping"],
    "gemma3_text": ["sliding_rope_parameters"],
}
