"""The training decoder is transformers' model: logits, every gradient, and folders in and out, for all architectures."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.parity import test_targets_parity as parity
from tests.parity import tiny
from training.checkpoint import layout, standalone
from training.checkpoint.export import export
from training.checkpoint.layout import Origin
from training.config.schema import ModelConfig
from training.model.decoder import Decoder
from training.model.loss import linear_cross_entropy
from upcycle.__main__ import main
from upcycle.config.reading import build, read
from upcycle.config.schema import UpcycleConfig

# (dense variant, target, upcycle words): every target, every form of router, shared experts, mixed layers
SLICES = ["router.choice=each-slice", "router.init.name=independent"]
MOES: dict[str, tuple[str, str, list[str]]] = {
    "mixtral": ("llama", "mixtral", []),
    "mixtral from arcee": ("arcee", "mixtral", []),
    "mixtral, window": ("mistral_window", "mixtral", []),
    "qwen2_moe, shared": ("qwen2", "qwen2_moe", ["shared=1", "layers=[1]"]),
    "qwen2_moe, none shared": ("llama", "qwen2_moe", ["router.normalize=false", "scale=none"]),
    "qwen3_moe": ("qwen3", "qwen3_moe", ["layers=every:2"]),
    "flex_olmo": ("olmo2", "flex_olmo", []),
    "granitemoe": ("granite", "granitemoe", []),
    "granitemoe from gemma": ("gemma", "granitemoe", []),
    "granitemoeshared": ("granite", "granitemoeshared", ["shared=1"]),
    "glm4_moe": ("llama", "glm4_moe", ["router.score=sigmoid", "shared=1", "layers=first-dense:1"]),
    "dots1": ("qwen3", "dots1", ["router.score=sigmoid", "shared=2"]),
    "solar_open": ("qwen2", "solar_open", ["router.score=sigmoid"]),
    "upcycled, nemotron": ("nemotron", "upcycled", ["shared=1"]),
    "upcycled, biases": ("starcoder2", "upcycled", ["router.score=sigmoid", "router.normalize=false", "scale=none"]),
    "upcycled, neox": ("gpt_neox", "upcycled", ["router.order=topk-then-softmax", "layers=[1]"]),
    # rows of their own: with those that a group shares the best of all are the best of each slice
    "upcycled, each slice": ("llama", "upcycled", [*SLICES, "shared=0.25"]),
    "upcycled, each slice by sigmoid": ("qwen3", "upcycled", [*SLICES, "router.score=sigmoid"]),
    "upcycled, norms on both sides": ("gemma2", "upcycled", ["shared=1"]),
    "upcycled, ropes": ("gemma3_text", "upcycled", ["layers=[1]"]),
    "upcycled, windows behind norms": ("olmo3", "upcycled", ["router.score=sigmoid"]),
    "upcycled, no rope": ("smollm3", "upcycled", []),
    "upcycled, uneven": ("llama", "upcycled", ["method.name=split", "granularity=1", "experts=7", "top_k=3"]),
}  # fmt: skip
for target in parity.TARGETS:  # one that has no row is held by a model it can hold, and the plainest words
    if target not in {name for _, name, _ in MOES.values()}:
        score = "softmax" if "softmax" in parity.target_of(target).can.scores else "sigmoid"
        MOES[target] = (parity.first_variant(target), target, [f"router.score={score}"])
BASE = ["method.name=virtual_group", "experts=3", "granularity=2", "top_k=4", "router.init.std=0.3"]


def words(dense: Path, variant: str) -> list[str]:
    _, target, more = MOES[variant]
    return [f"source={dense}", f"target={target}", *BASE, *more]


def labels(ids: Tensor) -> Tensor:
    shifted = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -1)], 1)
    shifted[0, 5] = -1  # a masked one in the middle
    return shifted


def reference(folder: Path) -> Any:
    kind: Any = AutoModelForCausalLM
    if '"upcycled"' in (folder / "config.json").read_text():
        from upcycle.arch.remote.modeling_upcycled import UpcycledForCausalLM as kind
    return kind.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")


def relative(have: Tensor, want: Tensor) -> float:
    return float((have - want).detach().abs().max() / want.detach().abs().max().clamp_min(1e-30))


def gradients_of(model: Any, folder: Path) -> dict[str, Tensor]:
    """transformers' gradients in the layout on disk: they are saved as if they were the weights."""
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    model.save_pretrained(folder)
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


def same_model(folder: Path, scratch: Path, origin: Origin) -> None:
    """Logits, loss and all gradients of our decoder against transformers' on one folder."""
    model, theirs, ids = (
        layout.load(Decoder(origin.spec, experts="reference"), origin),
        reference(folder),
        tiny.tokens(),
    )
    want = theirs(ids).logits
    assert relative(model(ids), want) < 2e-6
    target = labels(ids)
    loss = torch.nn.functional.cross_entropy(want.flatten(0, 1), target.flatten(), ignore_index=-1, reduction="sum")
    ours = model.loss(ids, target)
    assert relative(ours, loss) < 1e-6
    loss.backward()
    ours.backward()
    grads = gradients_of(theirs, scratch / "gradients")
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    views = layout.views(model)
    largest = max(float(g.abs().max()) for g in grads.values())
    for stored in origin.tensors:
        if stored.roles[0][0].endswith("router.bias"):
            continue  # learns from counts, not from gradients
        mine, hers = layout.joined(stored, views), grads[stored.name]
        # float32 sums in another order: relative to the tensor, or to the largest gradient where a tensor's is rounding
        assert float((mine - hers).abs().max()) < 2e-5 * max(float(hers.abs().max()), 1e-2 * largest), stored.name


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_a_dense_model_is_transformers_model_and_exports_its_own_bytes(variant: str, tmp_path: Path) -> None:
    folder = tiny.make_variant(variant, tmp_path / "dense")
    with layout.opened(folder) as origin:
        same_model(folder, tmp_path, origin)
        model = layout.load(Decoder(origin.spec), origin)
        out = export(model, origin, tmp_path / "out")
    before, after = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() - {"lm_head.weight"} <= after.keys() <= before.keys()
    assert all(torch.equal(before[name], after[name]) for name in after)
    assert torch.equal(tiny.logits(out, tiny.tokens()), tiny.logits(folder, tiny.tokens()))


@pytest.mark.parametrize("case", MOES)
def test_an_moe_is_transformers_model_online_and_from_disk(case: str, tmp_path: Path) -> None:
    dense = tiny.make_variant(MOES[case][0], tmp_path / "dense")
    folder = tmp_path / "moe"
    assert main(["convert", f"output={folder}", *words(dense, case)]) == 0
    with layout.opened(folder) as origin:
        same_model(folder, tmp_path, origin)
        offline = layout.load(Decoder(origin.spec, experts="reference"), origin)
    with layout.online(read(UpcycleConfig, "", words(dense, case))) as origin:
        online = layout.load(Decoder(origin.spec, experts="reference"), origin)
        out = export(online, origin, tmp_path / "out")
        standalone.keep(tmp_path / "run", origin, ModelConfig(upcycle={"source": str(dense)}))
    kept = standalone.kept(tmp_path / "run")  # all that a run needs of it but the weights
    assert (kept.spec, kept.tensors) == (origin.spec, origin.tensors)
    assert kept.config == json.loads((folder / "config.json").read_text())
    for (name, a), (_, b) in zip(offline.state_dict().items(), online.state_dict().items(), strict=True):
        assert torch.equal(a, b), f"{name} differs between online and converted"
    before, after = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in after)
    assert relative(reference(out)(tiny.tokens()).logits, online(tiny.tokens())) < 2e-6


def test_what_copies_of_a_slice_hold_is_made_once(tmp_path: Path) -> None:
    dense = tiny.make_variant("llama", tmp_path / "dense")
    config = {"source": str(dense), "experts": 8, "granularity": 2, "top_k": 2, "method": "virtual_group"}
    made: list[str] = []
    with layout.online(build(UpcycleConfig, config | {"target": "upcycled"})) as origin:

        def counted(name: str, rows: tuple[int, int] | None = None) -> Tensor:
            made.append(name)
            return origin.read(name, rows)

        want = layout.load(Decoder(origin.spec), replace(origin, alike=lambda _: None, read=counted))
        each = sum(".experts." in name for name in made)
        made.clear()
        have = layout.load(Decoder(origin.spec), replace(origin, read=counted))
    assert sum(".experts." in name for name in made) == each / 8 > 0
    for (name, a), (_, b) in zip(have.state_dict().items(), want.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_the_twin_fails(tmp_path: Path) -> None:
    folder = tiny.make_variant("qwen3", tmp_path / "dense")
    with layout.opened(folder) as origin:
        model = layout.load(Decoder(origin.spec), origin)
        want, chance = tiny.logits(folder, tiny.tokens()), torch.Generator().manual_seed(0)
        for role, tensor in layout.views(model).items():
            with torch.no_grad():
                before = tensor.clone()
                tensor += 0.02 * tensor.abs().mean() * torch.randn(tensor.shape, generator=chance)
                assert relative(model(tiny.tokens()), want) > 1e-5, f"{role} has no say in the logits"
                tensor.copy_(before)
    assert relative(model(tiny.tokens()), want) < 2e-6


def test_documents_do_not_see_each_other(tmp_path: Path) -> None:
    folder = tiny.make_variant("llama", tmp_path / "dense")
    with layout.opened(folder) as origin:
        model = layout.load(Decoder(origin.spec), origin)
    ids = tiny.tokens(1)
    length = ids.shape[1]
    documents = (torch.arange(length) >= 10).int()[None]
    positions = torch.cat([torch.arange(10), torch.arange(length - 10)])[None]
    packed = model(ids, positions, documents)
    apart = torch.cat([model(ids[:, :10]), model(ids[:, 10:])], 1)
    assert relative(packed, apart) < 1e-6
    assert relative(model(ids), apart) > 1e-3, "the mask has nothing to hide"


@pytest.mark.parametrize("cap", [0.0, 0.7])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_chunked_cross_entropy_has_the_plain_ones_value_and_gradients(
    scale: float, cap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from training.model import loss

    monkeypatch.setattr(loss, "LOGITS", 4 * 3 * 37)  # three tokens a chunk
    g = torch.Generator().manual_seed(0)
    x = torch.randn(11, 8, dtype=torch.float64, generator=g, requires_grad=True)
    w = torch.randn(37, 8, dtype=torch.float64, generator=g, requires_grad=True)
    label = torch.randint(0, 37, (11,), generator=g)
    label[4] = -1
    ours = linear_cross_entropy(x, w, label, scale, cap)
    got = torch.autograd.grad(3 * ours, (x, w))
    logits = scale * x @ w.T
    logits = cap * torch.tanh(logits / cap) if cap else logits
    plain = torch.nn.functional.cross_entropy(logits, label, ignore_index=-1, reduction="sum")
    want = torch.autograd.grad(3 * plain, (x, w))
    assert relative(ours, plain) < 1e-12
    assert all(relative(a, b) < 1e-12 for a, b in zip(got, want, strict=True))
    assert torch.autograd.gradcheck(lambda x, w: linear_cross_entropy(x, w, label, scale, cap), (x, w))


def test_one_chunk_of_logits_is_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from training.model import loss

    held: list[weakref.ref[Tensor]] = []
    nats_ = loss.cross_entropy.nats_

    def watched(logits: Tensor, *rest: Any) -> Tensor:
        assert len(logits) == 3 and not any(before() is not None for before in held)
        held.append(weakref.ref(logits))
        return nats_(logits, *rest)

    monkeypatch.setattr(loss, "LOGITS", 4 * 3 * 20)  # a fourth of it without the kernel
    monkeypatch.setattr(loss.cross_entropy, "nats_", watched)
    x, w = torch.randn(9, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    linear_cross_entropy(x, w, torch.arange(9)).backward()
    assert len(held) == 3


def test_a_loss_without_a_backward_makes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation's: the weight's gradient is a product as large as the loss itself, and a float32 copy of the head."""
    made: list[Tensor] = []
    monkeypatch.setattr("training.model.loss.add_product_", lambda total, *factors: made.append(total))
    x, w = torch.randn(5, 8), torch.randn(20, 8, requires_grad=True)
    label = torch.randint(20, (5,))
    with torch.no_grad():
        quiet = linear_cross_entropy(x, w, label)
    assert not made and not quiet.requires_grad
    assert torch.equal(linear_cross_entropy(x, w, label).detach(), quiet) and len(made) == 1
