"""An MoE with fewer experts, and one with copies by use, against its source in stock transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.activations import ACT2FN

from evaluation.judge.experts import routing
from tests.parity import tiny
from tests.parity.test_grow import logits, trained
from tests.parity.test_targets_parity import TARGETS
from tests.unit.upcycle.plans import load, readable
from training.checkpoint import layout
from training.model.decoder import Decoder
from upcycle.converting import convert, grow
from upcycle.converting.card import table
from upcycle.io import publish
from upcycle.io.checkpoint import Checkpoint
from upcycle.planning.promise import compare
from upcycle.verifying import rebuild, verify

SIGMOID = ("dots1", "glm4_moe", "solar_open")
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
SALIENCY = ([0.2, 0.9, 0.4, 0.3], [0.5, 0.1, 0.4, 0.6])  # the best two: 1 and 2, 0 and 3
KEPT = ([1, 2], [0, 3])


def measured(source: Path, chosen: Sequence[int] = (5, 1, 1, 1), **more: Any) -> Path:
    """A file of `upcycle routing` with numbers of our own."""
    with Checkpoint.open(source) as checkpoint, layout.opened(source) as origin:
        model = layout.load(Decoder(origin.spec), origin)
        found: dict[str, Any] = {"kind": "routing", "source": checkpoint.fingerprint(), "experts": 4, "keep": 0}
    rows = []
    for i, layer in enumerate(model.layers.values()):
        bias: Any = layer.ffn.router.bias  # type: ignore[union-attr]
        row = {"layer": i, "chosen": list(chosen), "saliency": SALIENCY[i]}
        rows.append(row if bias is None else row | {"bias": [float(bias.min()), float(bias.max())]})
    file = source.parent / "routing.json"
    file.write_text(json.dumps(found | {"layers": rows} | more))
    return file


def without(source: Path, kept: Mapping[int, Sequence[int]]) -> Tensor:
    """Logits of stock transformers' model of which all but the kept experts were taken out."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64, experts_implementation="eager").eval()
    for index, layer in enumerate(model.model.layers):
        block = next(part for part in layer.children() if any("experts" in name for name, _ in part.named_children()))
        for name, part in block.named_modules():
            if "shared" in name:
                continue
            for key, tensor in [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]:
                if tensor.shape[0] == 4:
                    new = tensor.data[list(kept[index])]
                    setattr(part, key, nn.Parameter(new) if isinstance(tensor, nn.Parameter) else new)
            for key in (*COUNTS, "num_experts_per_tok"):
                if getattr(part, key, None) == 4 and key in COUNTS:
                    setattr(part, key, len(kept[index]))
    with torch.no_grad():
        out: Tensor = model(tiny.tokens()).logits
    return out


@pytest.mark.parametrize("target", TARGETS)
def test_a_pruned_moe_is_its_source_without_these_experts(target: str, tmp_path: Path) -> None:
    source = trained(target, tmp_path / "source")
    file = measured(source)
    words = (f"source={source}", f"output={tmp_path / 'made'}", "method.name=prune", f"method.by={file}", "experts=2")
    plan, checkpoints = load(*words, "top_k=2")
    assert not plan.promise.exact and (plan.moe.experts, plan.moe.top_k, plan.target) == (2, 2, target)
    assert "keeps 2 of 4 experts" in table(plan) and "keep=2" in table(plan) and "source has 4" in table(plan)
    assert plan.sizes.dense == sum(t.numel() for t in load_file(source / "model.safetensors").values())
    folder = convert.convert(plan, checkpoints, quiet=True)
    want, have = without(source, dict(enumerate(KEPT))), logits(folder)
    assert float((have - want).abs().max() / want.abs().max()) < 1e-6
    others = without(source, {0: (0, 3), 1: (1, 2)})  # the twin: other experts
    assert float((have - others).abs().max() / others.abs().max()) > 1e-3
    file.unlink()  # what was chosen is in the folder
    report = verify.verify(source, folder, count=48, sequence=24)
    assert report.held and "keeps 2 of 4" in report.promised, report
    assert "FFNs" in str(report) or target == "granitemoeshared"
    with layout.online(replace(plan.config, method={**plan.config.method, "by": str(measured(source))})) as origin:
        for stored in origin.tensors:
            assert torch.equal(origin.read(stored.name), load_file(folder / "model.safetensors")[stored.name])


def test_verify_sees_another_expert_and_another_ffn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = trained("glm4_moe", tmp_path / "source")
    words = ("method.name=prune", f"method.by={measured(source)}", "experts=3", "top_k=2")  # so that the bias chooses
    plan, checkpoints = load(f"source={source}", f"output={tmp_path / 'made'}", *words)
    folder = convert.convert(plan, checkpoints, quiet=True)
    assert convert.convert(plan, checkpoints, quiet=True) == folder  # there already
    tensors = load_file(folder / "model.safetensors")
    one = "model.layers.1.mlp.experts.1.down_proj.weight"
    save_file(tensors | {one: tensors[one].flip(0).contiguous()}, folder / "model.safetensors", {"format": "pt"})
    report = verify.verify(source, folder, count=48, sequence=24)
    assert not report.held and f"{one} differs from the tensor that the plan computes" in str(report)
    # the FFN's own check, where bits are not compared
    monkeypatch.setattr(rebuild, "weights", lambda *_: rebuild.Compared(0, 0.0, ()))
    monkeypatch.setattr(verify, "NEAR", (1e-6, 1 + 1e-6))
    report = verify.verify(source, folder, count=48, sequence=24)
    assert [f for f in report.faults if "layer 1" in f] and not [f for f in report.faults if "layer 0" in f]
    observed = load_file(folder / publish.MEASURED)
    observed["layers.0.experts"] = torch.tensor([1, 1, 2])
    save_file(observed, folder / publish.MEASURED)
    with pytest.raises(ValueError, match="does not say which experts layer 0 has"):
        verify.verify(source, folder, count=48, sequence=24)


@pytest.mark.parametrize("target", ["qwen2_moe", "glm4_moe"])
def test_saliency_and_what_pruning_costs_are_measured_on_text(target: str, tmp_path: Path) -> None:
    source, text = readable(trained(target, tmp_path / "trained"), tmp_path)
    text.write_text("a b c d e f g h i j k l m n o p q r s t u v w x y z " * 4)
    settings = routing.RoutingConfig(str(source), (str(text),), tokens=96, sequence=24, keep=3)
    found = routing.measure(settings)
    file = tmp_path / "found.json"
    file.write_text(json.dumps(found))
    # once more, by stock transformers and its experts one by one
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64, experts_implementation="eager").eval()
    seen: list[Tensor] = []
    block = model.model.layers[0].mlp
    block.register_forward_hook(lambda _, given, out: seen.append(given[0].flatten(0, 1)))
    ids = torch.tensor([[ord(c) - 97 for c in text.read_text().split()]][:1]).flatten()[:96].view(4, 24)
    with torch.no_grad():
        model(ids)
    weight_TK, expert_TK = chosen_by(block, seen[0])
    for i, (count, saliency) in enumerate(
        zip(found["layers"][0]["chosen"], found["layers"][0]["saliency"], strict=True)
    ):
        token, slot = (expert_TK == i).nonzero(as_tuple=True)
        gate, up = (seen[0][token] @ block.experts.gate_up_proj[i].T).chunk(2, -1)
        y = (ACT2FN[model.config.hidden_act](gate) * up) @ block.experts.down_proj[i].T
        norm = (weight_TK[token, slot, None] * y).norm(dim=1)
        assert count == len(token) and saliency == pytest.approx(
            float(norm.mean().nan_to_num().detach()), rel=1e-4, abs=1e-9
        )
    words = (f"source={source}", f"output={tmp_path / 'made'}", f"method={{name: prune, by: {file}}}", "experts=3")
    plan, checkpoints = load(*words, "top_k=2")
    with torch.no_grad():
        folder = convert.convert(plan, checkpoints, quiet=True)
        small = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").eval()
        out, want = (m.model.layers[0].mlp(seen[0][None]) for m in (small, model))
    right = compare(*(y[0] if isinstance(y, tuple) else y for y in (out, want)))
    assert found["layers"][0]["pruned"] == pytest.approx((right.error, right.gain, right.cosine), rel=1e-3)
    assert right.error > 0.01
    errors = sorted(row["pruned"][0] for row in found["layers"])
    assert f"error {sum(errors) / 2:.2g}" in table(plan) and f"largest error is {errors[1]:.2g}" in table(plan)
    assert verify.verify(source, folder, count=48, sequence=24).held


def chosen_by(block: nn.Module, x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """(weights, experts) of a stock router, whose classes return them in orders of their own."""
    with torch.no_grad():
        out = (
            block.route_tokens_to_experts(block.gate(x_TD))
            if hasattr(block, "route_tokens_to_experts")
            else block.gate(x_TD)
        )  # type: ignore[operator]
    if hasattr(block, "route_tokens_to_experts"):
        expert, weight = out
        return weight, expert
    return out[1], out[2]


# ---- copies by use


@pytest.mark.parametrize("target", SIGMOID)
def test_copies_by_use_compute_what_the_source_does(target: str, tmp_path: Path) -> None:
    source = trained(target, tmp_path / "source")
    words = (f"source={source}", f"output={tmp_path / 'made'}", "method.name=utility", "experts=9", "top_k=2")
    plan, checkpoints = load(*words, f"method.by={measured(source, (60, 10, 20, 0))}")
    assert plan.promise.exact and (plan.moe.experts, plan.moe.top_k) == (9, 2)
    assert plan.observed["layers.0.experts"].tolist() == [0] * 5 + [1] + [2] * 2 + [3]
    assert "only the first copy" in table(plan) and "copies the most used" in table(plan)
    folder, wanted = convert.convert(plan, checkpoints, quiet=True), logits(source)
    assert float((logits(folder) - wanted).abs().max() / wanted.abs().max()) < 1e-6
    assert verify.verify(source, folder, count=48, sequence=24).held
    # twins: no copy waits; and none waits long enough for scores that are 0 or 1
    tensors = load_file(folder / "model.safetensors")
    biases = [name for name in tensors if name.endswith("e_score_correction_bias")]
    sources = load_file(source / "model.safetensors")
    of = plan.observed["layers.0.experts"]
    save_file(tensors | {n: sources[n][of] for n in biases}, folder / "model.safetensors", {"format": "pt"})
    assert float((logits(folder) - wanted).abs().max() / wanted.abs().max()) > 1e-3
    for name in biases:
        waits = tensors[name] < sources[name].min() - 1
        assert waits.tolist() == [bool(i) and of[i] == of[i - 1] for i in range(9)]


def test_shares_are_by_use_and_every_expert_has_one() -> None:
    assert grow.shares([60, 10, 20, 0], 9) == [5, 1, 2, 1]
    assert grow.shares([1, 1, 1], 6) == [2, 2, 2] and grow.shares([0, 0], 5) == [3, 2]
    assert grow.kept([0.1, 0.3, 0.3, 0.2], 2) == [1, 2] and grow.kept([1.0, 1.0, 1.0], 2) == [0, 1]


# ---- refused


def test_what_cannot_be_pruned_or_copied_by_use_is_refused(tmp_path: Path) -> None:
    source = trained("qwen3_moe", tmp_path / "source")
    file = measured(source)
    base = ("method.name=prune", f"method.by={file}")
    for words, says in [
        ((*base, "experts=4", "top_k=2"), "write experts=2 to 3 (got 4)"),
        ((*base, "experts=1", "top_k=2"), "write experts=2 to 3 (got 1)"),
        ((*base, "experts=3", "top_k=1"), "top_k cannot change; write top_k=2 (got 1)"),
        ((*base, "experts=3", "top_k=2", "shared=1"), "leave shared at the default"),
        (("method.name=prune", "experts=3", "top_k=2"), "method.by is empty"),
        (("method.name=prune", "method.keep=3", "experts=3", "top_k=2"), "unknown key 'method.keep'"),
        (("method.name=utility", f"method.by={file}", "experts=6", "top_k=2"), "only with a selection bias, which its softmax scores do not have"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(says)):
            load(f"source={source}", *words)
    with pytest.raises(ValueError, match=r"method prune needs a mixture of experts, and .* is a dense model"):
        load(f"source={tiny.make('llama', tmp_path / 'dense')}", *base)
    glm = trained("glm4_moe", tmp_path / "glm")
    with pytest.raises(ValueError, match=r"write experts=5 to 16384 \(got 4\)"):
        load(f"source={glm}", "method.name=utility", f"method.by={file}", "experts=4", "top_k=2")
    words = (f"source={source}", *base, "experts=3", "top_k=2")
    found = json.loads(file.read_text())
    for change, says in [
        ({"source": "0" * 64}, "was measured on another model"),
        ({"source": ""}, "was measured on a training run (export it first)"),
        ({"kind": "x"}, "routing.json.kind is 'x'"),
        ({"layers": found["layers"][:1]}, "are not the 2 MoE layers of the source"),
        ({"layers": [found["layers"][0], found["layers"][1] | {"saliency": [1.0]}]}, "of each of 4 experts"),
        ({"layers": [found["layers"][0], found["layers"][1] | {"bias": [0.0, 1.0]}]}, "of each of 4 experts"),
    ]:
        file.write_text(json.dumps(found | change))
        with pytest.raises(ValueError, match=re.escape(says)):
            load(*words)
    with pytest.raises(
        ValueError, match=re.escape("keep is 4, and the model has 4 experts and a token takes 2; write keep=2 to 3")
    ):
        routing.measure(routing.RoutingConfig(str(source), ("x.txt",), keep=4))
