"""Our modelling file in the hands of transformers' users: found by auto_map, in a pipeline, with a cache and batches,
placed by accelerate, saved again, and adapted by peft."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
from transformers.utils import logging

import upcycle
from tests.parity import tiny
from tests.unit.training.test_data import make_tokenizer, texts

logging.disable_progress_bar()
OPTIONS: dict[str, Any] = {"trust_remote_code": True, "dtype": torch.float32}
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
TOLERANCE = 1e-5  # of a logit: the same sums in another order


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Virtual groups chosen in each slice and a shared expert, which no stock architecture holds."""
    place = tmp_path_factory.mktemp("remote")
    make_tokenizer(tiny.make("qwen2", place / "dense", vocab_size=400), bos=False)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<eos>"}
    (place / "dense" / "tokenizer_config.json").write_text(json.dumps(settings))
    keys = {"experts": 4, "granularity": 2, "top_k": 2, "method": "virtual_group", "shared": 1}
    router = {"choice": "each-slice", "init": {"std": 0.3}}
    return upcycle.convert(keys, source=place / "dense", router=router, output=place / "moe", quiet=True)


def loaded(folder: Path, **more: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **OPTIONS | more).eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model(tiny.tokens()).logits
    return found


@torch.no_grad()
def test_a_pipeline_writes_what_the_model_does_one_token_at_a_time(folder: Path) -> None:
    tokenizer, prompts = AutoTokenizer.from_pretrained(folder, padding_side="left"), [t[:40] for t in texts(3, 3)]
    made = pipeline("text-generation", model=str(folder), tokenizer=tokenizer, batch_size=3, **OPTIONS)
    assert type(made.model).__name__ == "UpcycledForCausalLM" and made.model.config.expert_slices == 2
    written = [row[0]["generated_text"] for row in made(prompts, return_full_text=True, **GREEDY)]
    lengths = set()
    for prompt, text in zip(prompts, written, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        lengths.add(ids.shape[1])
        for _ in range(GREEDY["max_new_tokens"]):  # no cache, no batch, no padding
            ids = torch.cat([ids, made.model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        assert text == tokenizer.decode(ids[0], skip_special_tokens=True)
    assert len(lengths) > 1, "no prompt was padded"


def test_accelerate_places_it(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    want = logits(loaded(folder))
    auto = loaded(folder, device_map="auto")
    assert (logits(auto) - want).abs().max() < TOLERANCE
    half = loaded(folder, device_map={"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu",
                                      "model.rotary_emb": "cpu", "lm_head": "cpu"}, offload_folder=tmp_path)  # fmt: skip
    assert any(p.is_meta for p in half.parameters()), "nothing lies on the disk"
    assert (logits(half) - want).abs().max() < TOLERANCE
    assert torch.equal(half.generate(tiny.tokens(), **GREEDY), auto.generate(tiny.tokens(), **GREEDY))


@torch.no_grad()
def test_a_cache_says_where_a_text_goes_on(folder: Path) -> None:
    """Without position_ids, which generate() always gives."""
    model = loaded(folder)
    first = model(tiny.tokens()[:, :7], use_cache=True)
    rest = model(tiny.tokens()[:, 7:], past_key_values=first.past_key_values)
    assert (torch.cat([first.logits, rest.logits], 1) - logits(model)).abs().max() < TOLERANCE


@torch.no_grad()
def test_each_expert_has_the_weight_of_its_own_choice(folder: Path) -> None:
    moe = loaded(folder).model.layers[0].mlp.double()
    generator = torch.Generator().manual_seed(0)
    moe.gate.weight.normal_(generator=generator)  # no groups of equal rows, whose weights are equal in each choice
    for i, expert in enumerate(moe.experts):
        expert.down_proj.weight *= 1 + i
    x_TD = torch.randn(9, moe.gate.weight.shape[1], generator=generator, dtype=torch.float64)
    weight_TK, expert_TK = moe.gate(x_TD)
    assert (weight_TK.amax(1) > 1.1 * weight_TK.amin(1)).all()
    choices = zip(x_TD, weight_TK, expert_TK.tolist(), strict=True)
    want = [
        sum(w * moe.experts[e](x) for w, e in zip(weights, experts, strict=True)) for x, weights, experts in choices
    ]
    assert (moe(x_TD) - moe.shared_experts(x_TD) - torch.stack(want)).abs().max() < 1e-10


def test_accelerate_keeps_a_layer_whole(folder: Path, tmp_path: Path) -> None:
    """Two devices in one layer cannot add up its residual stream."""
    pytest.importorskip("accelerate")
    parts = {name: sum(p.nbytes for p in part.parameters()) for name, part in loaded(folder).model.named_children()}
    room = parts["embed_tokens"] + parts["layers"] * 7 // 8  # of the two layers, one and three quarters
    placed = loaded(folder, device_map="auto", max_memory={"cpu": room}, offload_folder=tmp_path).hf_device_map
    assert set(placed.values()) == {"cpu", "disk"}
    assert not any(re.match(r"model\.layers\.\d+\.", name) for name in placed), placed


def test_it_is_saved_with_its_code(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "first")
    model = loaded(tmp_path / "first")
    model.save_pretrained(tmp_path / "again")
    shutil.rmtree(tmp_path / "first")
    assert (tmp_path / "again" / "modeling_upcycled.py").is_file()
    assert torch.equal(logits(loaded(tmp_path / "again")), logits(model))


def test_peft_adapts_it(folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = logits(loaded(folder))
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(loaded(folder), config)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert any(".experts.7." in name for name in trained) and any("shared_experts" in name for name in trained)
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):  # LoRA's second factor starts at zero
        model(tiny.tokens(), labels=tiny.tokens()).loss.backward()
        optimiser.step()
    adapted = logits(model.eval())
    assert (adapted - base).abs().max() > 1e-2
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(loaded(folder), tmp_path / "adapter")
    assert torch.equal(logits(again), adapted)
    assert (logits(again.merge_and_unload()) - adapted).abs().max() < 10 * TOLERANCE  # merged weights are rounded
