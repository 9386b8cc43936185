"""Every target reads a config.json back: its own, as transformers saves it again, and published ones.

`read` gives the target's view. Compared are the uses of a view: the tensors in the folder, the config.json, and what
transformers' own configuration class makes of the same file. Each comparison has a twin that must fail.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

sys.path.append(str(Path(__file__).parents[2] / "parity"))  # as pytest has it when it collects that folder
import test_targets_parity as parity

from tests.unit.upcycle.mutations import keys_read, unreadable
from upcycle import plugin
from upcycle.arch import registry
from upcycle.arch.abilities import refusals
from upcycle.arch.remote.modeling_upcycled import UpcycledConfig
from upcycle.arch.spec import MoESpec
from upcycle.arch.targets.common import Target

logging.set_verbosity_error()
Config = dict[str, Any]


def module(target: str) -> Target:
    return registry.readable(target)


def shapes(target: str, moe: MoESpec) -> dict[str, tuple[tuple[int, ...], str]]:
    return {slot.name: (slot.shape, slot.dtype) for slot in module(target).slots(moe)}


def roles(moe: MoESpec) -> Iterator[str]:
    """Every role of a model built from the spec alone."""
    ffn = set(moe.dense.ffn_shapes())
    for role, _ in moe.dense.roles():
        path = role.split(".", 2)
        if not (path[0] == "layers" and int(path[1]) in moe.layers and path[2] in ffn):
            yield role
    for layer in moe.layers:
        parts = [f"experts.{i}" for i in range(moe.experts)] + ["shared"] * bool(moe.shared)
        yield from (f"layers.{layer}.{part}.{name}" for part in parts for name in ffn)
        yield f"layers.{layer}.router.weight"
        yield from [f"layers.{layer}.router.bias"] * (moe.score == "sigmoid")
        yield from [f"layers.{layer}.shared_gate.weight"] * moe.shared_gate


def saved_again(config: Config, folder: Path) -> Config:
    """config.json as transformers writes it after reading ours."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    chosen = UpcycledConfig if config["model_type"] == "upcycled" else AutoConfig
    chosen.from_pretrained(folder).save_pretrained(folder / "again")
    found: Config = json.loads((folder / "again" / "config.json").read_text())
    return found


# ---- our own folders


def cases() -> Iterator[Any]:
    """Every model that the parity tests convert; for our own target, every variant, in a shape only it can hold."""
    yield from parity.accepted()
    for variant in parity.tiny.VARIANTS:
        yield pytest.param("upcycled", variant, "", id=f"upcycled-{variant}")


def moe_of(target: str, variant: str, shape: str) -> MoESpec:
    spec = parity.spec_of_variant(variant)
    assert spec is not None
    if target != "upcycled":
        return parity.moe_of(spec, target, **parity.SHAPES[shape])
    whole = parity.moe_of(spec, target, shared=16, layers=(1,))
    return replace(
        whole, widths=(47, 33) * 4, score="sigmoid", order="topk-then-softmax", normalize=False, output_scale=2.5
    )


@pytest.mark.parametrize(("target", "variant", "shape"), list(cases()))
def test_the_view_has_our_tensors_and_our_config(target: str, variant: str, shape: str, tmp_path: Path) -> None:
    moe, ours = moe_of(target, variant, shape), module(target)
    written = json.loads(json.dumps(ours.config(moe)))
    view = ours.read(written)
    assert view.dense.family == target
    assert json.loads(json.dumps(ours.config(view))) == written
    assert shapes(target, view) == shapes(target, moe)
    assert ours.read(ours.config(view)) == view
    assert ours.read(saved_again(written, tmp_path)) == view
    assert refusals(ours.can, view) == []
    assert {role for slot in ours.slots(view) for role in slot.roles} == set(roles(view))


@pytest.mark.parametrize("target", parity.TARGETS)
def test_stock_transformers_saves_the_folder_and_the_view_is_the_same(target: str, tmp_path: Path) -> None:
    """With weights: the tensors that transformers saves are the slots of the view of the config.json that it saves."""
    can, variant, ours = module(target).can, parity.first_variant(target), module(target)
    fits = ("E4G2T4-shared", "last-layer", "E4G2T4")
    moe = next(m for m in (moe_of(target, variant, shape) for shape in fits) if not refusals(can, m))
    tensors = {s.name: torch.randn(s.shape, generator=torch.Generator().manual_seed(0)) for s in ours.slots(moe)}
    folder = parity.write(tmp_path / "ours", ours.config(moe), tensors)
    parity.load(folder).save_pretrained(tmp_path / "theirs")
    theirs = json.loads((tmp_path / "theirs" / "config.json").read_text())
    view = ours.read(theirs)
    assert view == ours.read(ours.config(moe))
    with safe_open(tmp_path / "theirs" / "model.safetensors", "pt") as file:
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert stored == {name: shape for name, (shape, _) in shapes(target, view).items()}


# A key of the config.json and another value for it: the view must differ, or the comparisons above see nothing.
CHANGES: dict[str, Config] = {
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 8, "sliding_window": 4},
    "qwen2_moe": {
        "norm_topk_prob": False, "mlp_only_layers": [0], "decoder_sparse_step": 2, "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8, "intermediate_size": 8,
    },
    "qwen3_moe": {"norm_topk_prob": False, "attention_bias": True, "use_sliding_window": True, "head_dim": 8},
    "flex_olmo": {"norm_topk_prob": False, "attention_bias": True, "rms_norm_eps": 0.1, "num_experts": 3},
    "granitemoe": {
        "attention_multiplier": 1.0, "embedding_multiplier": 2.0, "residual_multiplier": 2.0, "logits_scaling": 2.0,
        "attention_bias": True, "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 7.0},
    },
    "granitemoeshared": {"shared_intermediate_size": 8, "hidden_act": "gelu"},
    "glm4_moe": {
        "first_k_dense_replace": 1, "n_shared_experts": 3, "use_qk_norm": True, "norm_topk_prob": False,
        "routed_scaling_factor": 7.0, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
    },
    "dots1": {"layer_types": ["full_attention", "sliding_attention"], "first_k_dense_replace": 1, "bos_token_id": 9},
    "solar_open": {"n_shared_experts": 3, "norm_topk_prob": False, "dtype": "float16", "vocab_size": 9},
    "upcycled": {
        "block": "post", "norm": "layernorm", "qk_norm": "full", "qkv_bias": True, "mlp_bias": True, "gated": False,
        "moe_layers": [0], "expert_widths": [3, 4], "scoring_func": "sigmoid", "router_order": "topk-then-softmax",
    },
}  # fmt: skip


def test_slices_are_read_and_must_divide() -> None:
    spec = parity.spec_of_variant("llama")
    assert spec is not None
    ours = module("upcycled")
    moe = replace(parity.moe_of(spec, "upcycled", copies=3, parts=2, top_k=4), choice="each-slice")
    view = ours.read(ours.config(moe))
    assert (view.copies, view.granularity, view.slices, view.experts) == (3, 2, 2, 6)
    assert ours.read(ours.config(replace(moe, choice="any"))).slices == 1
    for key, value in {"expert_slices": 4, "num_experts_per_tok": 3}.items():
        with pytest.raises(ValueError, match=r"slices, but 6 experts and top-. must be multiples of that"):
            ours.read(ours.config(moe) | {key: value})
    with pytest.raises(ValueError, match="expert_slices=0"):
        ours.read(ours.config(moe) | {"expert_slices": 0})


@pytest.mark.parametrize(("target", "key"), [(target, key) for target, keys in CHANGES.items() for key in keys])
def test_twin_every_key_counts(target: str, key: str) -> None:
    variant = "llama" if target == "upcycled" else parity.first_variant(target)
    spec = parity.spec_of_variant(variant)
    assert spec is not None
    ours = module(target)
    written = ours.config(parity.moe_of(spec, target, copies=2, parts=1, top_k=1)) | {"sliding_window": 8}
    assert ours.read(written | {key: CHANGES[target][key]}) != ours.read(written)


# ---- published files

V4 = {"torch_dtype": "bfloat16", "use_cache": True, "hidden_act": "silu", "initializer_range": 0.02}
# name: (config.json as published, in the words of transformers 4; parameters of the file's model, known from the hub)
PUBLISHED: dict[str, tuple[Config, int]] = {
    "Mixtral-8x7B-v0.1": (
        V4 | {
            "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "bos_token_id": 1, "eos_token_id": 2,
            "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
            "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
            "num_local_experts": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None,
            "tie_word_embeddings": False, "vocab_size": 32000,
        },
        46_702_792_704,
    ),
    "Qwen1.5-MoE-A2.7B": (
        V4 | {
            "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "bos_token_id": 151643,
            "eos_token_id": 151643, "decoder_sparse_step": 1, "hidden_size": 2048, "intermediate_size": 5632,
            "max_position_embeddings": 8192, "max_window_layers": 21, "moe_intermediate_size": 1408,
            "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
            "num_hidden_layers": 24, "num_key_value_heads": 16, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
            "shared_expert_intermediate_size": 5632, "sliding_window": 32768, "tie_word_embeddings": False,
            "use_sliding_window": False, "vocab_size": 151936,
        },
        14_315_784_192,
    ),
    "Qwen3-30B-A3B": (
        V4 | {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False,
            "bos_token_id": 151643, "eos_token_id": 151645, "decoder_sparse_step": 1, "head_dim": 128,
            "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
            "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
            "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None,
            "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
        },
        30_532_122_624,
    ),
    "GLM-4.5-Air": (
        V4 | {
            "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True,
            "attention_dropout": 0.0, "eos_token_id": [151329, 151336, 151338], "first_k_dense_replace": 1,
            "head_dim": 128, "hidden_size": 4096, "intermediate_size": 10944, "max_position_embeddings": 131072,
            "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
            "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46,
            "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "pad_token_id": 151329,
            "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
            "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1, "use_qk_norm": False,
            "vocab_size": 151552,
        },
        106_852_251_264,
    ),
    "granite-3.0-1b-a400m-base": (
        V4 | {
            "architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe", "attention_bias": False,
            "attention_dropout": 0.1, "attention_multiplier": 0.015625, "bos_token_id": 0, "eos_token_id": 0,
            "embedding_multiplier": 12.0, "hidden_size": 1024, "intermediate_size": 512, "logits_scaling": 6.0,
            "max_position_embeddings": 4096, "num_attention_heads": 16, "num_experts_per_tok": 8,
            "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "pad_token_id": 0,
            "residual_multiplier": 0.22, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000,
            "tie_word_embeddings": True, "vocab_size": 49155,
        },
        1_334_628_352,
    ),
    "Solar-Open-100B": (  # what it leaves out is what a class of transformers 5 fills in
        V4 | {
            "architectures": ["SolarOpenForCausalLM"], "model_type": "solar_open", "partial_rotary_factor": 1.0,
            "hidden_size": 4096, "num_hidden_layers": 48, "num_attention_heads": 64, "head_dim": 128,
            "num_key_value_heads": 8, "vocab_size": 196608, "intermediate_size": 10240, "moe_intermediate_size": 1280,
            "rms_norm_eps": 1e-05, "rope_theta": 1000000, "max_position_embeddings": 131072, "n_routed_experts": 128,
            "n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "num_experts_per_tok": 8,
            "tie_word_embeddings": False, "first_k_dense_replace": 0,
            "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 65536},
        },
        0,  # not known
    ),
}  # fmt: skip

# The fewest keys that each class accepts: everything else is its default.
LEAST = {
    "vocab_size": 100352, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 64, "num_experts_per_tok": 2,
}  # fmt: skip
SIZES: dict[str, Config] = {
    "mixtral": {"intermediate_size": 48, "num_local_experts": 4},
    "qwen2_moe": {
        "intermediate_size": 80, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 40, "num_experts": 4,
    },
    "qwen3_moe": {"intermediate_size": 80, "moe_intermediate_size": 48, "num_experts": 4},
    "flex_olmo": {"intermediate_size": 48, "num_experts": 4},
    "granitemoe": {"intermediate_size": 48, "num_local_experts": 4},
    "granitemoeshared": {"intermediate_size": 48, "num_local_experts": 4},
    "glm4_moe": {"intermediate_size": 80, "moe_intermediate_size": 48, "n_routed_experts": 4},
    "dots1": {"intermediate_size": 80, "moe_intermediate_size": 48, "n_routed_experts": 4, "n_shared_experts": 2},
    "solar_open": {"moe_intermediate_size": 48, "n_routed_experts": 4},
    "upcycled": {"intermediate_size": 80, "moe_layers": [1, 2], "expert_widths": [48, 40, 32]},
}  # fmt: skip
# Keys as written by hand and by transformers 4, each with another value than the default.
BY_HAND: list[Config] = [
    {"rope_theta": 5e5, "torch_dtype": "float16"},
    {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 7e4},
    # head_dim, because Mixtral's class of transformers 5.23 cannot do YaRN without
    {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}, "max_position_embeddings": 512, "head_dim": 8},
    {"num_key_value_heads": 4, "head_dim": 8, "rms_norm_eps": 1e-4, "tie_word_embeddings": False},
    {"attention_bias": True, "norm_topk_prob": True, "use_qk_norm": True},
    {"first_k_dense_replace": 2, "decoder_sparse_step": 2, "routed_scaling_factor": 2.5},
    {"mlp_only_layers": [1], "decoder_sparse_step": 1, "use_sliding_window": False, "sliding_window": 16},
    {"bos_token_id": 5, "eos_token_id": [6, 7], "pad_token_id": None},
]


def theirs(config: Config) -> Any:
    """The configuration object that the class of transformers makes of a file."""
    rest = deepcopy(config)  # the class changes the rope in its arguments
    target = rest.pop("model_type")
    return UpcycledConfig(**rest) if target == "upcycled" else AutoConfig.for_model(target, **rest)


def stated(config: Config) -> Config:
    """The config with every default written out."""
    found: Config = json.loads(theirs(config).to_json_string(use_diff=False))
    return found


def count(target: str, moe: MoESpec) -> int:
    return sum(prod(shape) for shape, _ in shapes(target, moe).values())


def count_of_theirs(config: Config) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs(config), dtype=torch.bfloat16)
    biases = [b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]
    return sum(p.numel() for p in [*model.parameters(), *biases])


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_means_what_transformers_makes_of_it(name: str) -> None:
    config, parameters = PUBLISHED[name]
    target = config["model_type"]
    view = module(target).read(config)
    assert view == module(target).read(stated(config))
    assert count(target, view) == count_of_theirs(config) == (parameters or count_of_theirs(config))
    assert view.dtype == "bfloat16" and view.dense.context == config["max_position_embeddings"]


@pytest.mark.parametrize("target", SIZES)
def test_defaults_are_those_of_the_class(target: str) -> None:
    window = [{"use_sliding_window": True}] if target == "qwen3_moe" else []
    for by_hand in [{}, *BY_HAND, *window]:
        config = {"model_type": target} | LEAST | SIZES[target] | by_hand
        view = module(target).read(config)
        assert view == module(target).read(stated(config)), by_hand
        if target != "upcycled":
            assert count(target, view) == count_of_theirs(config)


@pytest.mark.parametrize("target", plugin.names("upcycle.arch.targets"))
def test_what_a_config_leaves_out_is_what_the_class_takes_for_it(target: str) -> None:
    """A converted model's config without one of its keys is refused, or read as transformers reads it."""
    spec = parity.spec_of_variant("llama" if target == "upcycled" else parity.first_variant(target))
    assert spec is not None
    written = module(target).config(replace(parity.moe_of(spec, target), dtype="bfloat16"))
    read = []
    for keys in [*((key,) for key in written.keys() - {"model_type"}), ("rope_theta", "rope_parameters")]:
        left = {key: value for key, value in written.items() if key not in keys}
        try:
            view = module(target).read(left)
        except ValueError as refusal:
            assert "\n" not in str(refusal)
            continue
        assert view == module(target).read(stated(left)), keys
        read.append(keys)
    assert len(read) > len(written) // 2


@pytest.mark.parametrize(
    ("target", "key", "wrong"),
    [
        ("glm4_moe", "partial_rotary_factor", 1.0),
        ("glm4_moe", "first_k_dense_replace", 0),
        ("glm4_moe", "norm_topk_prob", False),
        ("qwen3_moe", "norm_topk_prob", True),
        ("qwen2_moe", "norm_topk_prob", True),
        ("dots1", "norm_topk_prob", True),
        ("mixtral", "rope_theta", 1e4),
        ("solar_open", "rope_theta", 1e4),
        ("solar_open", "head_dim", 2),
        ("flex_olmo", "rope_theta", 1e4),
        ("granitemoe", "attention_multiplier", 2**-0.5),
        ("qwen3_moe", "num_key_value_heads", 32),
        ("flex_olmo", "pad_token_id", None),
    ],
)
def test_twin_another_default_would_be_seen(target: str, key: str, wrong: Any) -> None:
    config = {"model_type": target} | LEAST | SIZES[target]
    assert module(target).read(config | {key: wrong}) != module(target).read(stated(config))


# ---- refusals

REFUSED: list[tuple[str, Config, str]] = [
    ("glm4_moe", {"n_group": 4}, "n_group=4"),
    ("dots1", {"topk_group": 2}, "topk_group=2"),
    ("solar_open", {"n_group": 8, "topk_group": 4}, "n_group=8"),
    ("dots1", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
    ("dots1", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
    ("dots1", {"n_shared_experts": None}, "n_shared_experts"),
    ("glm4_moe", {"n_shared_experts": 0}, "n_shared_experts=0"),
    ("glm4_moe", {"tie_word_embeddings": True}, "tie_word_embeddings=True"),
    ("glm4_moe", {"first_k_dense_replace": 3}, "no MoE layer"),
    ("solar_open", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ("qwen2_moe", {"qkv_bias": False}, "qkv_bias=False"),
    ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window=True"),
    ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size=0"),
    ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}, "no MoE layer"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
    ("qwen3_moe", {"moe_intermediate_size": None}, "moe_intermediate_size"),
    ("mixtral", {"num_local_experts": None}, "num_experts"),
    ("mixtral", {"num_experts_per_tok": 5}, "5 experts for each token, of 4"),
    ("mixtral", {"hidden_act": "relu2"}, "activation 'relu2'"),
    ("mixtral", {"num_hidden_layers": 10_000, "num_local_experts": 1000}, "10000 layers of 1000 experts, more than"),
    ("mixtral", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ("granitemoe", {"rope_scaling": {"type": "mystery"}}, "mystery"),
    ("upcycled", {"block": "sideways"}, "block='sideways'"),
    ("upcycled", {"expert_widths": None}, "expert_widths"),
]


@pytest.mark.parametrize(("target", "keys", "said"), REFUSED)
def test_what_a_spec_cannot_say_is_refused_in_one_sentence(target: str, keys: Config, said: str) -> None:
    config = {"model_type": target} | LEAST | SIZES[target]
    module(target).read(config)
    with pytest.raises(ValueError) as refusal:
        module(target).read(config | keys)
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value) and not str(refusal.value).endswith(".")


@pytest.mark.parametrize("target", SIZES)
def test_any_value_of_any_key_is_read_or_refused_in_one_sentence(target: str) -> None:
    ours, keys = module(target), keys_read("targets", target)

    def tensors(config: Config) -> None:
        view = ours.read(config)
        if view.dense.layers * view.experts < 1000:  # of a larger one the folder would have to have as many
            assert list(ours.slots(view)) and ours.config(view)

    config = {"model_type": target} | LEAST | SIZES[target]
    assert unreadable(config, keys, tensors, share=0.2) == []
    spec = parity.spec_of_variant("llama" if target == "upcycled" else parity.first_variant(target))
    assert spec is not None
    assert unreadable(ours.config(parity.moe_of(spec, target)), keys, tensors, share=0.2) == []
