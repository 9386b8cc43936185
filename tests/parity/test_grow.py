"""An MoE grown to more experts computes what it did: every stock target, with stock transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.parity.test_targets_parity import TARGETS, first_variant, moe_of, spec_of_variant
from tests.unit.upcycle.mutations import unreadable, written
from tests.unit.upcycle.plans import load
from training.checkpoint import layout
from upcycle.arch import registry
from upcycle.arch.spec import MoESpec
from upcycle.converting.card import table
from upcycle.converting.convert import convert
from upcycle.converting.make import Maker
from upcycle.verifying.verify import verify


@torch.no_grad()
def trained(target: str, folder: Path) -> Path:
    """A tiny MoE whose experts and router rows are all different: 4 experts, top-2."""
    spec = spec_of_variant(first_variant(target))
    assert spec is not None
    moe = moe_of(spec, target, copies=4, parts=1, top_k=2)
    config = AutoConfig.for_model(**registry.readable(target).config(moe))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for name, p in sorted(model.named_parameters()):
        noise = torch.randn(p.shape, generator=generator)
        p.copy_(1 + 0.25 * noise if "norm" in name else 0.15 * noise)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # chooses other experts than the scores would
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


def logits(folder: Path) -> torch.Tensor:
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    with torch.no_grad():
        out: torch.Tensor = model.eval()(tiny.tokens()).logits
    return out


@pytest.mark.parametrize("target", TARGETS)
def test_a_grown_moe_gives_the_logits_of_its_source(target: str, tmp_path: Path) -> None:
    source, m = trained(target, tmp_path / "source"), 3
    plan, checkpoints = load(f"source={source}", f"output={tmp_path / 'grown'}", f"experts={m}", f"top_k={2 * m}")
    assert plan.promise.exact and plan.moe.experts == 12 and plan.moe.top_k == 6 and plan.target == target
    assert "rows of the source" in table(plan) and "the source" in table(plan)
    folder, wanted = convert(plan, checkpoints, quiet=True), logits(source)
    error = float((logits(folder) - wanted).abs().max() / wanted.abs().max())
    assert error < 1e-6, error
    loss = [
        torch.nn.functional.cross_entropy(x.flatten(0, 1)[:-1], tiny.tokens().flatten()[1:])
        for x in (wanted, logits(folder))
    ]
    assert abs(loss[0] - loss[1]) < 1e-6
    assert verify(source, folder, count=48, sequence=24).held
    maker = Maker(plan, checkpoints)  # online is offline
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert torch.equal(maker.slice(name, (slice(1, 3),)), tensor[1:3]), name
    with layout.online(plan.config) as origin:
        assert isinstance(origin.spec, MoESpec) and (origin.spec.experts, origin.spec.top_k) == (12, 6)
    assert plan.sizes.dense == sum(t.numel() for t in load_file(source / "model.safetensors").values())
    # twins: the top-k of before, and experts that are not beside their rows
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 5}))
    assert (logits(folder) - wanted).abs().max() / wanted.abs().max() > 1e-3
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    ends = ("experts.1.down_proj.weight", "experts.1.w2.weight", "block_sparse_moe.output_linear.weight")
    down = next(name for name in tensors if name.endswith(ends))
    tensors[down] = tensors[down].flip(-1).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert (logits(folder) - wanted).abs().max() / wanted.abs().max() > 1e-3
    assert not verify(source, folder, count=48, sequence=24).held


def test_what_cannot_be_grown_is_refused(tmp_path: Path) -> None:
    source = trained("qwen3_moe", tmp_path / "source")
    for words, says in [
        (("experts=2", "top_k=2"), "(qwen3_moe, top-2 of 4); with 2 copies of each expert, a token must take all copies of its "
         "experts, so write top_k=4 (got 2)"),
        (("experts=2", "top_k=4", "granularity=2", "method.name=virtual_group"), "leave granularity, method at the default"),
        (("experts=2", "top_k=4", "router.init.std=0.1"), "leave router at the default"),
        (("experts=2", "top_k=4", f"donors=[{source}]"), "leave donors at the default"),
        (("experts=9999", "top_k=19998"), "write experts=1 to 4096"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(says)):
            load(f"source={source}", *words)
    tensors = load_file(source / "model.safetensors")
    gone = tensors.pop("model.layers.1.mlp.experts.3.up_proj.weight")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"experts.3.up_proj.weight' of shape \[96, 64\], but the files have no such tensor"
    ):
        load(f"source={source}", "experts=2", "top_k=4")
    save_file(
        tensors | {"model.layers.1.mlp.experts.3.up_proj.weight": gone, "more": gone.clone()},
        source / "model.safetensors",
    )
    with pytest.raises(ValueError, match=r"tensor 'more' that its config.json does not promise"):
        load(f"source={source}", "experts=2", "top_k=4")
    glm = trained("glm4_moe", tmp_path / "glm")
    config = json.loads((glm / "config.json").read_text())
    (glm / "config.json").write_text(json.dumps(config | {"norm_topk_prob": False}))
    with pytest.raises(ValueError, match="sigmoid scores that are not normalized"):
        load(f"source={glm}", "experts=2", "top_k=4")


@pytest.mark.parametrize("target", ["mixtral", "glm4_moe", "granitemoe"])
def test_any_value_of_any_key_is_planned_or_refused_in_one_sentence(target: str, tmp_path: Path) -> None:
    source = trained(target, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())

    def plan(mutant: dict[str, Any]) -> None:
        load(f"source={written(source, mutant)}", "experts=2", "top_k=4")

    assert unreadable(config, ["num_experts", "num_local_experts", "n_routed_experts"], plan, share=0.1) == []
