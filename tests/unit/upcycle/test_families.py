"""Every dense family reads its config as transformers does and finds every tensor that transformers wrote."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from functools import cache
from math import inf, prod
from pathlib import Path
from types import NoneType
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.parity import tiny
from tests.unit.upcycle.mutations import keys_read, unreadable, written
from tests.unit.upcycle.plans import load
from upcycle.arch import registry
from upcycle.arch.families.common import Source
from upcycle.arch.spec import DenseSpec


def family(name: str) -> Any:
    return registry.family(name)


def config_of(folder: Path) -> dict[str, Any]:
    out: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return out


def spec_of(folder: Path) -> DenseSpec:
    config = config_of(folder)
    spec: DenseSpec = family(config["model_type"]).read(config)
    return spec


def tensors(folder: Path) -> dict[str, Tensor]:
    out = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as f:
            out |= {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 (it is no mapping)
    return out


def rows_of(whole: Tensor, source: Source) -> Tensor:
    return torch.cat([whole[a:b] for a, b in source.rows]) if source.rows else whole


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda name: tiny.make_variant(name, tmp_path_factory.mktemp(name)))


# ---- tensors


def problems(spec: DenseSpec, found: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield every mismatch between a family's sources and the tensors of a checkpoint."""
    module = family(spec.family)
    sources, shapes = module.sources(spec), dict(spec.roles())
    if sources.keys() != shapes.keys():
        yield f"roles differ: {sources.keys() ^ shapes.keys()}"
    taken: dict[str, list[tuple[int, int]]] = {}
    for role, source in sources.items():
        if source.name not in found:
            yield f"{role}: no tensor {source.name}"
            continue
        whole = found[source.name]
        taken.setdefault(source.name, []).extend(source.rows or [(0, len(whole))])
        if any(not 0 <= a < b <= len(whole) for a, b in source.rows):
            yield f"{role}: rows {source.rows} are outside {source.name}"
        elif rows_of(whole, source).shape != shapes[role]:
            yield f"{role}: {source.name} gives {tuple(rows_of(whole, source).shape)}, want {shapes[role]}"
    for name, ranges in taken.items():  # each row of a fused tensor belongs to exactly one role
        edges = [0, *(edge for pair in sorted(ranges) for edge in pair), len(found[name])]
        if edges[::2] != edges[1::2]:
            yield f"{name}: rows {sorted(ranges)} overlap or leave a gap"
    tied_head = {module.sources(replace(spec, tied=False))["head.weight"].name} if spec.tied else set()
    for name in found.keys() - taken.keys() - tied_head:
        if not any(re.fullmatch(pattern, name) for pattern in module.ignored):
            yield f"{name} is not used"


@pytest.mark.parametrize("name", tiny.VARIANTS)
def test_sources_are_the_tensors_of_the_checkpoint(name: str, checkpoint: Any) -> None:
    folder = checkpoint(name)
    spec, found = spec_of(folder), tensors(folder)
    assert list(problems(spec, found)) == []

    # the same check notices a missing tensor, one too many, and one of a wrong shape
    for victim in found:
        assert list(problems(spec, {k: v for k, v in found.items() if k != victim})), victim
        assert list(problems(spec, found | {victim: found[victim][:-1]})), victim
    assert list(problems(spec, found | {"model.layers.0.stranger.weight": torch.zeros(1)}))


@pytest.mark.parametrize("name", tiny.VARIANTS)
def test_parameters_are_counted(name: str, checkpoint: Any) -> None:
    folder = checkpoint(name)
    spec, truth = spec_of(folder), AutoModelForCausalLM.from_pretrained(folder).num_parameters()
    assert parameters(spec) == truth
    assert parameters(replace(spec, ffn=spec.ffn + 1)) != truth


def parameters(spec: DenseSpec) -> int:
    return sum(prod(shape) for _, shape in spec.roles())


# ---- config.json


def as_transformers_4(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the same model as transformers 4 wrote it."""
    out = dict(config)
    out["torch_dtype"] = out.pop("dtype")
    rope = dict(out.pop("rope_parameters"))
    if "full_attention" in rope:  # a rope of each layer type
        out["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = dict(rope["full_attention"])
    neox = config["model_type"] == "gpt_neox"
    out["rotary_emb_base" if neox else "rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        out["rotary_pct" if neox else "partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    out["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    return out


def other_theta(config: dict[str, Any]) -> dict[str, Any]:
    """A config of transformers 4 with another rope_theta."""
    if config["model_type"] == "olmo3":  # of which the two generations disagree what it is of
        with pytest.raises(ValueError, match="state rope_parameters with full_attention and sliding_attention"):
            family("olmo3").read(config | {"rope_theta": 1234.0})
        parts = {kind: {"rope_theta": 1234.0} for kind in ("full_attention", "sliding_attention")}
        return config | {"rope_parameters": parts}
    return config | {"rotary_emb_base" if config["model_type"] == "gpt_neox" else "rope_theta": 1234.0}


@pytest.mark.parametrize("name", tiny.VARIANTS)
def test_both_generations_of_config_give_one_spec(name: str, checkpoint: Any) -> None:
    new = config_of(checkpoint(name))
    old = as_transformers_4(new)
    assert "rope_parameters" not in old and "dtype" not in old
    read = family(new["model_type"]).read
    assert read(old) == read(new)
    assert read(other_theta(old)) != read(new)


SIZES = {
    "vocab_size": 320, "hidden_size": 512, "intermediate_size": 640, "num_hidden_layers": 3, "num_attention_heads": 32,
}  # fmt: skip
# Keys that the official checkpoints of each family have, as transformers 4 spells them.
REAL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 3.1": (
        "llama",
        {
            "num_key_value_heads": 8, "rope_theta": 500000.0, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                             "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        },
    ),
    "llama, linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}, "num_key_value_heads": None}),
    "mistral 7B v0.2": ("mistral", {"num_key_value_heads": 8, "rope_theta": 1e6, "sliding_window": None}),
    "mistral nemo": ("mistral", {"num_key_value_heads": 8, "head_dim": 128, "sliding_window": None}),
    "qwen2.5": (
        "qwen2",
        {"num_key_value_heads": 8, "sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 2},
    ),
    "qwen2, windows on": (
        "qwen2", {"num_key_value_heads": 8, "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2},
    ),
    "qwen2.5, yarn": (
        "qwen2",
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
         "max_position_embeddings": 131072},
    ),
    "yarn without original": ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0}}),
    "qwen3": ("qwen3", {"num_key_value_heads": 8, "head_dim": 128, "max_window_layers": 3, "rope_theta": 1000000}),
    "olmo2": ("olmo2", {"num_key_value_heads": None, "rope_theta": 500000, "rms_norm_eps": 1e-6}),
    "granite": (
        "granite",
        {"attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "logits_scaling": 8.0,
         "residual_multiplier": 0.22, "num_key_value_heads": 8, "tie_word_embeddings": True},
    ),
    "gemma 2b": ("gemma", {"head_dim": 256, "hidden_act": "gelu", "hidden_activation": None, "num_key_value_heads": 1}),
    "phi3 mini 4k": ("phi3", {"sliding_window": 2047, "rope_scaling": None, "original_max_position_embeddings": 4096}),
    "phi3 mini 128k": (
        "phi3",
        # transformers 5 accepts "su" only with original_max_position_embeddings, which the files lacked; we do not need it
        {"rope_scaling": {"type": "su", "short_factor": [1.1] * 8, "long_factor": [2.0] * 8,
                          "original_max_position_embeddings": 4096},
         "sliding_window": 262144, "max_position_embeddings": 131072, "original_max_position_embeddings": 4096},
    ),
    "phi3 as yarn": ("phi3", {"rope_scaling": {"type": "yarn", "short_factor": [1.1] * 8, "long_factor": [2.0] * 8}}),
    "phi4 mini": (
        "phi3",
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6},
         "partial_rotary_factor": 0.75, "max_position_embeddings": 131072, "tie_word_embeddings": True,
         "num_key_value_heads": 8, "original_max_position_embeddings": 4096},
    ),
    "minitron": ("nemotron", {"num_key_value_heads": 8, "head_dim": 128, "partial_rotary_factor": 0.5}),
    "minitron, share unsaid": ("nemotron", {"num_key_value_heads": 8}),
    "afm 4.5B": (
        "arcee",
        {"num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 65536,
         "rope_scaling": {"rope_type": "yarn", "factor": 20.0, "mscale": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
                          "original_max_position_embeddings": 4096}},
    ),
    "pythia": ("gpt_neox", {"rotary_emb_base": 10000, "rotary_pct": 0.25, "use_parallel_residual": True}),
    "neox, other rotation": ("gpt_neox", {"rotary_emb_base": 5000, "rotary_pct": 0.5, "use_parallel_residual": False}),
    "starcoder2": ("starcoder2", {"num_key_value_heads": 2, "sliding_window": 4096, "use_bias": True}),
    "smollm3 3B": (
        "smollm3",
        {"num_key_value_heads": 4, "no_rope_layer_interval": 2, "no_rope_layers": [1, 0, 1], "rope_theta": 5e6,
         "layer_types": ["full_attention"] * 3, "sliding_window": None, "use_sliding_window": False},
    ),
    "smollm3, windows on": (
        "smollm3", {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 64},
    ),
    "olmo3 7B": (
        "olmo3",
        {"num_key_value_heads": 32, "rope_theta": 500000, "max_position_embeddings": 65536, "sliding_window": 4096,
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
         "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192,
                          "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0}},
    ),
    "gemma 2 9b": (
        "gemma2",
        {"head_dim": 256, "num_key_value_heads": 8, "hidden_act": "gelu_pytorch_tanh", "sliding_window": 4096,
         "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0,
         "final_logit_softcapping": 30.0},
    ),
    "gemma2, no caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma 3 1b": (
        "gemma3_text",
        {"head_dim": 256, "num_key_value_heads": 1, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
         "rope_scaling": None, "sliding_window": 512, "sliding_window_pattern": 2, "query_pre_attn_scalar": 256,
         "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma 3, stretched": (
        "gemma3_text",
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
         "sliding_window_pattern": 3, "final_logit_softcapping": 30.0},
    ),
} | {f"{name}, sizes alone": (name, {}) for name in tiny.FAMILIES if name != "qwen3"}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_a_short_old_config_means_what_transformers_makes_of_it(name: str) -> None:
    """transformers fills every default and renames every old key; reading its result must change nothing."""
    kind, keys = REAL[name]
    config = {"model_type": kind, **SIZES, **keys}
    if kind == "nemotron" and "num_key_value_heads" not in keys:
        config["num_key_value_heads"] = 4  # the class itself has no default that works
    full = AutoConfig.for_model(**copy.deepcopy(config)).to_dict()  # for_model changes its arguments
    assert len(full) > len(config) + 10
    read = family(kind).read
    mine, theirs = read(config), read(full)
    assert mine == theirs
    assert read(full | {"max_position_embeddings": 77}) != mine
    assert read(config | {"initializer_range": 0.5}) != theirs


def test_head_dim_of_qwen3_defaults_to_128() -> None:
    config = {"model_type": "qwen3", **SIZES}
    assert family("qwen3").read(config) == family("qwen3").read(AutoConfig.for_model(**config).to_dict())
    assert family("qwen3").read(config).head_dim == 128


def test_su_is_longrope_with_the_original_context_from_the_top_level() -> None:
    factors = {"short_factor": [1.1] * 8, "long_factor": [2.0] * 8}
    config = {"model_type": "phi3", **SIZES, "max_position_embeddings": 131072}
    rope = family("phi3").read(config | {"rope_scaling": {"type": "su", **factors}}).rope
    assert rope["rope_type"] == "longrope" and rope["original_max_position_embeddings"] == 4096
    assert "type" not in rope and {k: rope[k] for k in factors} == factors
    top = {"rope_scaling": {"type": "su", **factors}, "original_max_position_embeddings": 8192}
    assert family("phi3").read(config | top).rope["original_max_position_embeddings"] == 8192


LONG = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "quantised": ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config.*unquantised"),
    "quantised neox": ("gpt_neox", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    "uneven layers": ("llama", {"per_layer_config": {"0": {"intermediate_size": 3}}}, "per_layer_config"),
    "classifier": ("qwen2", {"architectures": ["Qwen2ForSequenceClassification"]}, "Qwen2ForSequenceClassification"),
    "bare model": ("llama", {"architectures": ["LlamaModel"]}, "LlamaModel.*language-model head"),
    "no size": ("llama", {"hidden_size": None}, "no 'hidden_size'"),
    "zero layers": ("llama", {"num_hidden_layers": 0}, "layers=0"),
    "kv heads": ("llama", {"num_key_value_heads": 5}, "32 heads and 5 key/value heads"),
    "activation": ("llama", {"hidden_act": "quick_gelu"}, "hidden_act='quick_gelu'; it must be one of gelu, "),
    "mrope by type": ("qwen2", {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}, "rope_type='mrope'"),
    "mrope by key": ("qwen2", {"rope_scaling": {"type": "default", "mrope_section": [1]}}, "rope has mrope_section"),
    "rope per layer type": ("qwen3", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention"),
    "linear, no factor": ("llama", {"rope_scaling": {"type": "linear"}}, "'linear' has no factor"),
    "longrope, no factors": ("phi3", {"rope_scaling": {"type": "longrope"}}, "no short_factor, long_factor"),
    "longrope, wrong length": ("phi3", {"rope_scaling": LONG, "partial_rotary_factor": 0.5}, "list of 4 numbers"),
    "phi3 with linear": ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'default' or 'longrope'"),
    "partial llama": ("llama", {"partial_rotary_factor": 0.5}, "rotates whole heads"),
    "layer types, too few": ("qwen2", {"layer_types": ["full_attention"]}, "3 times full_attention or sliding"),
    "layer types, unknown": ("qwen2", {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
    "layer types, no window": ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "no window is on"),
    "gemma, two acts": ("gemma", {"hidden_act": "gelu", "hidden_activation": "silu"}, "make them equal"),
    "gemma, both ways": ("gemma", {"use_bidirectional_attention": True}, "only causal"),
    "smollm3, a rotation for each layer": ("smollm3", {"no_rope_layers": [1, 0]}, "0 for each of 3 layers"),
    "smollm3, no interval": ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval=0"),
    "olmo3, one rope": ("olmo3", {"rope_parameters": {"rope_theta": 1e4}}, "a rope for each layer type"),
    "olmo3, a rope that grows": (
        "olmo3",
        {"rope_parameters": {"sliding_attention": {"rope_type": "dynamic", "factor": 2.0}}},
        "whose rope there does not depend on the length",
    ),
    "gemma2, a cap of zero": ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping=0; it must be"),
    "gemma2, both ways": ("gemma2", {"use_bidirectional_attention": True}, "only causal"),
    "gemma3, a cap that is ignored": ("gemma3_text", {"attn_logit_softcapping": 50.0}, "transformers ignores"),
    "neox heads": ("gpt_neox", {"num_attention_heads": 24}, "must divide"),
    "neox, another head_dim": ("gpt_neox", {"head_dim": 64}, "head_dim=64; in a gpt_neox model it must be hidden"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_one_sentence(name: str) -> None:
    kind, change, message = REFUSED[name]
    fine = {"model_type": kind, **SIZES, "num_key_value_heads": 8, "head_dim": 16}
    family(kind).read(fine)  # so the change below is the only reason for a refusal
    with pytest.raises(ValueError, match=message) as error:
        family(kind).read(fine | change)
    assert "\n" not in str(error.value)


# ---- the tiny models themselves: what the parity tests can see


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_every_weight_of_a_tiny_model_is_seen_in_its_logits(name: str) -> None:
    model = tiny.build(name, dtype=torch.float64)
    x = tiny.tokens()
    right = tiny.logits(model, x)
    assert torch.equal(tiny.logits(model, x), right)
    for key, p in model.named_parameters():
        kept = p.data
        p.data = kept.flip(0)
        assert (tiny.logits(model, x) - right).abs().max() > 1e-2, key
        p.data = kept


def test_tiny_models_are_reproducible_and_sharded(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    one = tiny.make("qwen2", tmp_path / "one", seed=3, dtype=torch.bfloat16)
    many = tiny.make("qwen2", tmp_path / "many", seed=3, dtype=torch.bfloat16, shards=3)
    other = tiny.make("qwen2", tmp_path / "other", seed=4, dtype=torch.bfloat16)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert len(list(many.glob("*.safetensors"))) >= 3 and (many / "model.safetensors.index.json").is_file()
    a, b, c = tensors(one), tensors(many), tensors(other)
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == torch.bfloat16 for k in a)
    assert not any(torch.equal(a[k], c[k]) for k in a)
    assert spec_of(one).dtype == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(many, dtype="auto", attn_implementation="eager")
    assert torch.equal(tiny.logits(one, tiny.tokens()), tiny.logits(loaded, tiny.tokens()))


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_any_value_of_any_key_is_read_or_refused_in_one_sentence(name: str, checkpoint: Any) -> None:
    """None, words, lists, zeros, negative, huge and infinite numbers, for each key of the file and of the family."""
    longrope = {"phi3": "phi3_longrope", "llama": "llama_llama3_rope", "arcee": "arcee_yarn"}
    for variant in {name, longrope.get(name, name)}:
        config, keys = config_of(checkpoint(variant)), keys_read("families", name)
        assert len(keys) > 20 and {"hidden_size", "rope_theta"} < {*keys}

        def read(mutant: dict[str, Any]) -> None:
            spec = family(name).read(mutant)
            for key, kind in {"int": int, "bool": bool, "float": (int, float), "int | None": (int, NoneType)}.items():
                values = [getattr(spec, field.name) for field in fields(spec) if field.type == key]
                assert values and all(isinstance(value, kind) and value not in (inf, -inf) for value in values)

        assert unreadable(config, keys, read, share=0.2) == []
        assert unreadable(as_transformers_4(config), keys, read, share=0.2) == []


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_a_slice_of_the_same_as_files_is_planned_or_refused(name: str, checkpoint: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint(name), tmp_path / "dense")
    config, keys = config_of(folder), keys_read("families", name)
    assert unreadable(config, keys, lambda mutant: load(f"source={written(folder, mutant)}"), share=0.006) == []


def test_the_fuzz_sees_what_it_looks_for() -> None:
    def read(config: Mapping[str, Any]) -> None:
        if config["a"] == 0:
            raise ZeroDivisionError
        if config["b"]["c"] == "a\nb":
            raise ValueError(config["b"]["c"])

    found = unreadable({"a": 1, "b": {"c": 2}}, [], read)
    assert [line.split(": ")[0] for line in found if "TypeError" not in line] == [
        "a=0", "a=-0.0", "a=False", "b={}", "b={'x'", "b.c='a\\nb'",
    ]  # fmt: skip
