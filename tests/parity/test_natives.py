"""MoE architectures that are trained as they are: our decoder is transformers' model, and so is the folder it exports.

Each number of a variant is one that a wrong reading would be seen by; the twins at the end break one thing each.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from evaluation.__main__ import main as evaluate
from evaluation.ask.engine import Engine
from tests.parity import asked, tiny
from tests.parity.test_decoder import reference, relative, same_model
from training.__main__ import main as train
from training.checkpoint import layout
from training.checkpoint.export import export
from training.cli.prepare import main as prepare
from training.model import attention
from training.model.decoder import Decoder
from training.observe.metrics import read as read_metrics
from upcycle import plugin
from upcycle.arch import ffn
from upcycle.arch.spec import MoESpec
from upcycle.planning.size import moe_flops

LATENT: dict[str, Any] = {
    "num_hidden_layers": 3, "num_key_value_heads": 4, "first_k_dense_replace": 1, "q_lora_rank": 20,
    "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10, "moe_intermediate_size": 24,
    "n_routed_experts": 8, "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3,
    "rms_norm_eps": 0.03,  # the latents' norms do not have it
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.9,
        "original_max_position_embeddings": 32,
    },
}  # fmt: skip
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("deepseek_v3", LATENT),
    # as Moonlight has it, and rotated as other models are
    "deepseek_v3, no latent of queries": (
        "deepseek_v3",
        LATENT | {
            "q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_interleave": False, "norm_topk_prob": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}, "routed_scaling_factor": 0.7,
        },
    ),
    # a window, then none; halves that reach the limits; a stretched rope as it is by default
    "gpt_oss": (
        "gpt_oss",
        {
            "head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    # norms of all heads at once, of fewer keys than queries; weights as they are
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "rms_norm_eps": 0.03, "attention_bias": True}),
    "olmoe, tied and normalised": (
        "olmoe",
        {
            "num_experts": 5, "num_experts_per_tok": 3, "norm_topk_prob": True, "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
        },
    ),
}  # fmt: skip
SAME = {"kimi_k2": "deepseek_v3"}  # natives that transformers has under another name


def test_every_native_has_a_variant() -> None:
    assert {family for family, _ in VARIANTS.values()} | set(SAME) == set(plugin.names("upcycle.arch.natives"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    tokenizer = asked.make(tmp_path_factory.mktemp("tokenizer"))

    @cache
    def make(name: str) -> Path:
        family, keys = VARIANTS[name]
        settings = tiny.SIZES | {"vocab_size": asked.VOCAB} | keys
        with torch.random.fork_rng(devices=[]):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings), dtype=torch.float32)
        tiny.randomize(model, 0)
        for part_name, part in model.named_parameters():
            if part_name.endswith("gate_up_proj") and family == "gpt_oss":
                part.data *= 5  # which reaches the limits
        draw = torch.Generator().manual_seed(1)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):  # decides, beside scores of about a half
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=draw))
        folder = tmp_path_factory.mktemp("natives") / family
        model.save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tokenizer / file, folder)
        return folder

    return make


@pytest.mark.parametrize("name", VARIANTS)
def test_a_native_is_transformers_model_and_exports_its_own_bytes(
    name: str, made: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = made(name)
    with layout.opened(folder) as origin:
        same_model(folder, tmp_path, origin)
        model = layout.load(Decoder(origin.spec), origin)
        out = export(model, origin, tmp_path / "out")
    before, after = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[each], after[each]) for each in after)
    assert relative(reference(out)(tiny.tokens()).logits, model(tiny.tokens())) < 2e-6


def test_another_name_is_the_same_model(made: Callable[[str], Path], tmp_path: Path) -> None:
    for name, known in SAME.items():
        folder = shutil.copytree(made(known), tmp_path / name)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"model_type": name}))
        with layout.opened(folder) as origin, layout.opened(made(known)) as twin:
            assert (origin.spec, origin.tensors) == (twin.spec, twin.tensors)


@pytest.mark.parametrize("name", [name for name in VARIANTS if "," not in name])
def test_a_native_is_trained_exported_and_looked_into(
    name: str, made: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, text = made(name), tmp_path / "text.jsonl"
    text.write_text(
        "".join(json.dumps({"text": f"Tom had {n} red balls. They played all day."}) + "\n" for n in range(60))
    )
    assert prepare([str(tmp_path / "data"), f"tokenizer={folder}", f"sources=[{text}]"]) == 0
    out, run = tmp_path / "out", tmp_path / "run"
    words = [f"model.source={folder}", f"data.train=[{tmp_path / 'data'}]", "data.sequence=32", "batch=2", "steps=4"]
    words += ["micro_batch=1", "log_every=1", "schedule.warmup=0", "schedule.peak=3e-3", "model.dtype=float32"]
    assert train([*words, f"output={run}", f"export={out}"]) == 0
    losses = [row["loss"] for row in read_metrics(run) if "loss" in row]
    assert len(losses) == 4 and losses[-1] < losses[0]
    reference(out)(tiny.tokens())
    assert evaluate(["routing", str(out), str(text), f"start={folder}", f"output={tmp_path / 'routing.json'}"]) == 0
    layers = json.loads((tmp_path / "routing.json").read_text())["layers"]
    assert all(0 < max(layer["moved"]) < 0.2 for layer in layers), layers[0]
    assert evaluate(["run", "tiny", str(run), f"output={tmp_path / 'results.json'}", "dtype=float32"]) == 0
    assert "nan" not in capsys.readouterr().out


# ---- twins


def dense_twin(**changes: Any) -> Callable[[MoESpec], MoESpec]:
    return lambda moe: replace(moe, dense=replace(moe.dense, **changes))


def latent_twin(**changes: Any) -> Callable[[MoESpec], MoESpec]:
    def change(moe: MoESpec) -> MoESpec:
        assert moe.dense.latent is not None
        return replace(moe, dense=replace(moe.dense, latent=replace(moe.dense.latent, **changes)))

    return change


def moe_twin(**changes: Any) -> Callable[[MoESpec], MoESpec]:
    return lambda moe: replace(moe, **changes)


# what a reader could get wrong, each of which must be seen in the logits
TWINS: dict[str, dict[str, Callable[[MoESpec], MoESpec]]] = {
    "deepseek_v3": {
        "norms of latents as other norms": latent_twin(norm_eps=0.03),
        "dimensions paired as elsewhere": latent_twin(pairs=False),
        "no mscale": dense_twin(attention_scale=20**-0.5),
        "every group": moe_twin(groups=1, group_top_k=1),
        "one group fewer": moe_twin(group_top_k=1, top_k=2),
        "one group more": moe_twin(group_top_k=3),
        "no output scale": moe_twin(output_scale=1.0),
        "not normalised": moe_twin(normalize=False),
        "plain rope": lambda moe: dense_twin(rope=dict(moe.dense.rope, rope_type="default"))(moe),
    },
    "deepseek_v3, no latent of queries": {
        "dimensions in pairs": latent_twin(pairs=True),
        "normalised": moe_twin(normalize=True),
    },
    "gpt_oss": {
        "no sinks": dense_twin(sinks=False),
        "no window": dense_twin(window_layers=()),
        "a window everywhere": dense_twin(window_layers=(0, 1)),
        "plain rope": lambda moe: dense_twin(rope=dict(moe.dense.rope, rope_type="default"))(moe),
        "all before the choice": moe_twin(order="softmax-then-topk"),
    },
    "olmoe": {
        "normalised": moe_twin(normalize=True),
        "the chosen alone": moe_twin(order="topk-then-softmax"),
        "no norms of queries and keys": dense_twin(qk_norm="none"),
        "another epsilon": dense_twin(norm_eps=1e-5),
        "no biases": dense_twin(qkv_bias=False, out_bias=False),
    },
    "olmoe, tied and normalised": {
        "not normalised": moe_twin(normalize=False),
        "another theta": lambda moe: dense_twin(rope=dict(moe.dense.rope, rope_theta=1e4))(moe),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_twin_fails(name: str, made: Callable[[str], Path]) -> None:
    folder, ids = made(name), tiny.tokens(16)  # so many that each expert is chosen
    want = tiny.logits(folder, ids)
    with layout.opened(folder) as origin, torch.no_grad():
        assert isinstance(origin.spec, MoESpec)
        for what, twin in TWINS[name].items():
            broken = layout.load(Decoder(twin(origin.spec)), origin)
            assert relative(broken(ids), want) > 1e-3, what
        model, chance = layout.load(Decoder(origin.spec), origin), torch.Generator().manual_seed(0)
        for role, tensor in layout.views(model).items():
            before = tensor.clone()
            tensor += 0.1 * tensor.abs().mean() * torch.randn(tensor.shape, generator=chance)
            assert relative(model(ids), want) > 1e-5, f"{role} has no say in the logits"
            tensor.copy_(before)
        assert relative(model(ids), want) < 2e-6


@pytest.mark.parametrize(("key", "other"), [("LIMIT", 1e9), ("ALPHA", 1.0)])
def test_twin_of_the_clamped_product_fails(
    key: str, other: float, made: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made("gpt_oss")
    with layout.opened(folder) as origin:
        model = layout.load(Decoder(origin.spec), origin)
    monkeypatch.setattr(ffn, key, other)
    assert relative(model(tiny.tokens()), tiny.logits(folder, tiny.tokens())) > 1e-3


# ---- evaluation


@pytest.mark.parametrize("name", VARIANTS)
def test_the_engine_says_what_transformers_says(name: str, made: Callable[[str], Path]) -> None:
    folder, draw = made(name), np.random.default_rng(0)
    theirs = reference(folder)
    with layout.opened(folder) as origin:
        model = layout.load(Decoder(origin.spec), origin)
    shared = draw.integers(256, size=300)  # so long that it pays to compute it once
    pairs = [(np.concatenate([shared, draw.integers(256, size=n)]), draw.integers(256, size=3)) for n in (2, 9, 5)]
    pairs += [(draw.integers(256, size=4), draw.integers(256, size=20))]
    engine = Engine(model, budget=1 << 12, progress=False)
    scores: dict[int, tuple[float, bool]] = {}
    written: dict[int, Any] = {}
    kept: set[int] = set()  # bytes of a token in a layer

    def watched(text: object) -> bool:
        for keys, values in engine.memory.own.values():
            held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (keys, values)}
            kept.add(sum(held.values()) // keys[..., 0, 0].numel())
        return False

    with engine.open():
        engine.score(pairs, scores.update)
        engine.write([context for context, _ in pairs], 6, watched, written.update)
    for number, (context, ending) in enumerate(pairs):
        ids = torch.from_numpy(np.concatenate([context, ending]))[None]
        with torch.no_grad():
            logp = theirs(ids).logits[0].log_softmax(-1)
        want = sum(float(logp[len(context) - 1 + i, token]) for i, token in enumerate(ending))
        assert scores[number][0] == pytest.approx(want, rel=1e-5)
        said = theirs.generate(torch.from_numpy(context)[None], max_new_tokens=6, do_sample=False, eos_token_id=None)
        assert said[0, len(context) :].tolist() == list(written[number])
    latent = model.dense.latent
    a_token = model.dense.kv_heads * 2 * model.dense.head_dim if latent is None else latent.kv_rank + latent.rope
    assert kept == {4 * a_token}


# ---- numbers


@pytest.mark.parametrize("name", VARIANTS)
def test_flops_are_those_that_torch_counts(
    name: str, made: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, a third of all: products with weights, and attention, which torch counts as a whole square."""
    monkeypatch.setattr(attention, "BACKENDS", [SDPBackend.MATH])  # of the CPU's flash kernel torch counts nothing
    with layout.opened(made(name)) as origin:
        model = layout.load(Decoder(origin.spec, experts="reference"), origin)
    assert isinstance(origin.spec, MoESpec)
    ids = tiny.tokens()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids)
    moe = replace(origin.spec, dense=replace(origin.spec.dense, window_layers=()))  # masks hide, and count
    routers = 2 * moe.dense.hidden * moe.experts * len(moe.layers)
    want = moe_flops(moe, 2 * ids.shape[1], gated=True) / 3 + routers
    assert counter.get_total_flops() == pytest.approx(ids.numel() * want, rel=1e-9)
