"""LoRA: what adapters compute, that they alone learn, and that an export has them merged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from evaluation.judge.experts import routing
from tests.parallel import models
from tests.parity import tiny
from tests.unit.training.test_frozen import first_batches
from tests.unit.training.test_plan import ALL, NORM, NORMS, ROUTER, M
from tests.unit.training.test_plan import CONFIG as PLAN
from tests.unit.training.test_train import Stopped, config, losses, stops_before
from tests.unit.training.test_train import place as place
from training import export
from training.checkpoint import layout
from training.checkpoint.export import Weights
from training.checkpoint.peft import adapters
from training.data.mixture import DataConfig
from training.estimating.memory import memory
from training.model.decoder import Decoder
from training.model.lora import LoraConfig, attach, is_adapter, pairs
from training.model.moe import MoE
from training.parallel.mesh import MeshConfig
from training.run import step as step_module
from training.run.build import begin, start
from training.run.loop import train
from training.run.preflight import preflight
from training.run.saving import checkpoints_of
from training.run.step import gradients
from upcycle.__main__ import main as upcycle
from upcycle.io.checkpoint import Checkpoint
from upcycle.io.publish import MANIFEST

LORA = LoraConfig(rank=3, alpha=5.0)
WORDS = ["lora.rank=3", "lora.alpha=5", "schedule.peak=1e-2", "data.valid=[]"]


def adapted(name: str, experts: str, dtype: torch.dtype = torch.float64) -> Decoder:
    """A model of tests/parallel/models.py with adapters, none of them zero."""
    model = models.make(name, dtype, experts=experts)
    attach(model, LORA)
    model.to(dtype)
    draw = torch.Generator().manual_seed(0)
    for key, parameter in model.named_parameters():
        if is_adapter(key):
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=draw, dtype=dtype)
        parameter.requires_grad_(is_adapter(key))
    for layer in model.layers.values():
        if isinstance(layer.ffn, MoE):
            padding = torch.arange(8)[None] >= torch.tensor(layer.ffn.spec.widths)[:, None]  # of uneven experts
            halves = 2 if layer.ffn.experts.gated else 1
            layer.ffn.experts.down_lora_a.data[padding] = 0
            layer.ffn.experts.up_lora_b.data[padding.repeat(1, halves)] = 0
    return model


def learned(model: Decoder) -> tuple[float, dict[str, Tensor]]:
    part = models.batch(2)
    loss = model.loss(part.tokens, part.labels, part.positions, part.documents)
    loss.backward()
    assert all((p.grad is not None) == is_adapter(name) for name, p in model.named_parameters())
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["moe", "odd", "parallel", "dense"])
def test_adapters_are_a_matrix_that_is_added(name: str) -> None:
    """Loss and gradients, of both backends of experts, are those of W + scale * B A, by autograd."""
    whole = models.make(name, experts="reference")
    like = adapted(name, "reference")
    draws = {id(p): p.detach().clone().requires_grad_() for key, p in like.named_parameters() if is_adapter(key)}
    names = {id(p): key for key, p in like.named_parameters()}
    sums = {}
    for matrix, a, b, scale in pairs(like):
        a_, b_ = draws[id(a)], draws[id(b)]
        if matrix.ndim == 2:
            added = b_ @ a_
        else:
            added = torch.stack([q @ p.T for p, q in zip(a_, b_, strict=True)]).view_as(matrix)
        sums[names[id(matrix)]] = whole.get_parameter(names[id(matrix)]).detach() + 5 / 3 * added
        assert scale == 5 / 3
    part = models.batch(2)
    given = (part.tokens, part.positions, part.documents, part.labels)
    loss = torch.func.functional_call(whole, sums, given)
    loss.backward()
    for experts in ("reference", "grouped"):
        found, slopes = learned(adapted(name, experts))
        assert found == pytest.approx(float(loss.detach()), rel=1e-12)
        for key, p in like.named_parameters():
            if is_adapter(key):
                want = draws[id(p)].grad
                assert want is not None and float(want.abs().max()) > 0
                torch.testing.assert_close(slopes[key], want, rtol=1e-9, atol=1e-12, msg=f"{experts} {key}")


def test_adapters_begin_as_the_model_and_alone_learn(place: Path, tmp_path: Path) -> None:
    found = []
    for words in ([], WORDS[:2]):
        with start(config(place, tmp_path / "x", *words), torch.device("cpu")) as run:
            begin(run)
            found.append(gradients(run, first_batches(run)))
            slopes = {name: p.grad for name, p in run.model.named_parameters()}
    assert torch.equal(*found)
    assert any(map(is_adapter, slopes)) and all((p is not None) == is_adapter(name) for name, p in slopes.items())
    for name, slope in slopes.items():  # of A it is zero, because B is; what is shared here is all zeros
        assert slope is None or "shared" in name or bool(slope.any()) == name.endswith("lora_b"), name


def test_a_run_is_resumed_bitwise_and_exported_merged(place: Path, tmp_path: Path) -> None:
    whole = train(config(place, tmp_path / "whole", *WORDS, f"export={tmp_path / 'a'}", steps=4))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(step_module, "train_step", stops_before(4))
        train(config(place, tmp_path / "parts", *WORDS, steps=4))
    parts = train(config(place, tmp_path / "parts", *WORDS, f"export={tmp_path / 'b'}", steps=4))
    assert losses(whole) == losses(parts)
    export(whole, tmp_path / "c")
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert all(torch.equal(a[name], b[name]) and torch.equal(a[name], c[name]) for name in a)
    # the exported model computes what the run's does
    with start(config(place, tmp_path / "whole", *WORDS, steps=4), torch.device("cpu")) as run:
        checkpoints_of(run).load(run.state)
        batch = first_batches(run)[0]
        have = run.model.loss(batch.tokens, batch.labels).detach()
        moved = max(float(b.detach().abs().max()) for _, _, b, _ in pairs(run.model))
    with layout.opened(tmp_path / "a") as origin:
        want = layout.load(Decoder(origin.spec), origin).loss(batch.tokens, batch.labels).detach()
    assert moved > 1e-3 and float(have) == pytest.approx(float(want), rel=1e-6)
    # and what its routers and experts do is measured with the adapters, as of the exported model
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "batches", lambda *_: batch.tokens)
        for folder in (whole, tmp_path / "a"):
            found.append(routing.measure(routing.RoutingConfig(str(folder), texts=("some.txt",), granularity=2)))
    assert found[0]["load"] == found[1]["load"]
    for one, other in zip(*(each["layers"] for each in found), strict=True):
        assert one["saliency"] == pytest.approx(other["saliency"], rel=1e-4)
        assert one["spread"] == pytest.approx(other["spread"], rel=1e-4) and max(one["spread"]) > 1e-4


@pytest.mark.parametrize("name", ["moe", "odd", "parallel"])
def test_merging_is_exact(name: str) -> None:
    model, plain = adapted(name, "reference"), models.make(name)
    merged = Weights(model)
    for key, tensor in layout.roles(plain).items():
        matrix, index = tensor
        matrix.data[index] = merged.role(key)
    part = models.batch(2)
    with torch.no_grad():
        have, want = (m.loss(part.tokens, part.labels, part.positions, part.documents) for m in (plain, model))
    assert float(have) == pytest.approx(float(want), rel=1e-12)


def test_the_plan_counts_what_adapters_learn() -> None:
    """Weights of all, gradients and moments of the adapters: of two layers' q and o of 4 x 4, k and v of 2 x 4, of a
    dense FFN's three matrices of 6 x 4, of a router of 4 x 4, and of 4 experts with up of 6 x 4 and down of 4 x 3."""
    settings = replace(PLAN, data=DataConfig(sequence=8), lora=LoraConfig(rank=1), mesh=MeshConfig())
    found, plain = memory(M, settings, 1), memory(M, replace(settings, lora=LoraConfig()), 1)
    adapters = 2 * (2 * (4 + 4) + 2 * (2 + 4)) + 3 * (6 + 4) + (4 + 4) + 4 * ((6 + 4) + (4 + 3))
    assert plain.weights == 4 * ALL
    narrow = ALL - NORM - 2 * NORMS - ROUTER  # which all never learn: in bfloat16, as the model is
    assert found.weights == 2 * narrow + 4 * (ALL - narrow + adapters) and M.dtype == "bfloat16"
    assert found.gathered == 2 * (adapters - 8), "no copies but of adapters, of which the router's stay float32"
    wide = memory(M, replace(settings, model=replace(settings.model, frozen="float32")), 1)
    assert wide.weights == 4 * (ALL + adapters) and wide.total > found.total
    assert found.gradients == 4 * adapters and found.moments == 8 * adapters
    assert plain.loss - found.loss == (4 + 2) * 10 * 4  # the head learns nothing


TARGETS: dict[str, dict[str, Any]] = {
    "mixtral": {}, "upcycled": {"shared": 1, "granularity": 2, "method": "virtual_group"},
    "glm4_moe": {"granularity": 2, "method": "virtual_group", "router": {"score": "sigmoid"}}, "qwen3_moe": {},
    "qwen2_moe": {}, "dense": {},
    "upcycled of nemotron": {"granularity": 2, "method": "virtual_group"},  # whose experts are modules
}  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
def test_peft_loads_the_adapters_onto_the_model(target: str, place: Path, tmp_path: Path) -> None:
    """Its logits and its gradients are ours, and what it merges is what we export."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from transformers import AutoModelForCausalLM

    base, merged, alone = (tmp_path / name for name in ("base", "merged", "alone"))
    start_from = place / "dense"
    kind, _, family = target.partition(" of ")
    if target == "qwen3_moe" or family:
        start_from = tiny.make(family or "qwen3", tmp_path / "donor", vocab_size=400)
    keys = {"source": str(start_from), "target": kind, "experts": 4, "top_k": 2, "dtype": "float32"}
    words = [f"{key}={json.dumps(value)}" for key, value in (keys | TARGETS[target]).items()]
    if target == "dense":
        base = start_from
    else:
        assert upcycle(["convert", f"output={base}", *words]) == 0
    trained = config(
        place, tmp_path / "run", *WORDS, "model.upcycle=", f"model.source={base}", "balance.bias_rate=0",
        "schedule.warmup=0", "balance.aux_weight=0", f"lora.export={alone}", f"export={merged}", steps=2,
    )  # fmt: skip
    train(trained)
    options = {"trust_remote_code": True, "dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(base, **options)
    theirs = peft.PeftModel.from_pretrained(model, alone, is_trainable=True)
    ours = AutoModelForCausalLM.from_pretrained(merged, **options)
    tokens = torch.arange(40).view(2, 20) * 7 % 400
    logits = theirs(tokens).logits
    with torch.no_grad():
        want, plain = (m(tokens).logits for m in (ours, AutoModelForCausalLM.from_pretrained(base, **options)))
    assert float((want - plain).abs().max()) > 1e-2
    torch.testing.assert_close(logits.detach(), want, rtol=0, atol=2e-5)
    said, wanted = (m.generate(tokens[:1], max_new_tokens=12, do_sample=False) for m in (theirs, ours))
    assert torch.equal(said, wanted) and said.shape == (1, 32)
    labels = tokens.roll(-1, 1)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    with start(trained, torch.device("cpu")) as run:
        checkpoints_of(run).load(run.state)
        run.model.loss(tokens, labels).backward()
        for parameter in run.model.parameters():
            parameter.data = parameter.grad if parameter.grad is not None else parameter.data
        slopes = {(n, b): (x, y) for n, b, x, y in adapters(Weights(run.model), run.origin)}
    count = 0
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            path = name.removeprefix("base_model.model.").replace(".default.weight", "")
            path, _, kind = path.rpartition(".")
            inner = path.endswith(".base_layer")
            keys_ = [(path, False), (f"{path}.weight", True), (f"{path}.down_proj", True)]
            keys_ = [(path.replace("base_layer", "gate_up_proj"), True)] if inner else keys_
            have = next(slopes[key] for key in keys_ if key in slopes)[kind == "lora_B"]
            assert parameter.grad is not None
            torch.testing.assert_close(have, parameter.grad, rtol=1e-3, atol=2e-5, msg=name)
            count += 1
    assert count > 10
    named, listed = (json.loads((alone / file).read_text()) for file in ("adapter_config.json", MANIFEST))
    assert named["base_model_name_or_path"] == str(base) and listed["from"] == str(start_from)
    assert listed["source"] == [Checkpoint(start_from).fingerprint()] and listed["trained"][0]["steps"] == 2
    if target != "dense":  # onto whose attention they would fit
        dense = AutoModelForCausalLM.from_pretrained(start_from)
        with pytest.raises(ValueError, match="not a valid target"):
            peft.PeftModel.from_pretrained(dense, alone)
    whole = theirs.merge_and_unload().state_dict()
    for name, tensor in ours.state_dict().items():
        torch.testing.assert_close(whole[name], tensor, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["lora.rank=-1"], r"lora\.rank is -1"),
        (["lora.export=x"], r"lora\.rank is 0; write a rank"),
        (
            ["lora.rank=4", "mesh.pp=2", "lora.match=[layers.0]"],
            r"mesh\.pp=2 makes a stage of layers 1 to 1, in which lora\.match=layers\.0 adapts nothing",
        ),
        (["lora.rank=4", "model.expert_backend=quack"], r"model\.expert_backend=quack, which has no adapters"),
        (["lora.rank=4", "lora.match=[atention]"], r"'atention', which matches no module.*did you mean 'attention'"),
        (["lora.rank=4", "lora.match=[router]", "optim.router_lr=0"], r"freezes every parameter"),
    ],
)
def test_what_cannot_be_adapted_is_a_sentence(
    place: Path, tmp_path: Path, words: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "mesh.pp=2" in words:
        monkeypatch.setenv("WORLD_SIZE", "2")  # a mesh that the processes cannot make is refused before
    with pytest.raises(ValueError, match=says):
        preflight(config(place, tmp_path / "run", *words))
