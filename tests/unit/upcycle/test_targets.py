"""MoE targets without transformers: refusals and their reasons, config.json, and the list of tensors."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest

from upcycle import plugin
from upcycle.arch import registry
from upcycle.arch.abilities import refusals
from upcycle.arch.spec import DenseSpec, MoESpec

TARGETS = plugin.names("upcycle.arch.targets")
STOCK = [name for name in TARGETS if registry.readable(name).can.stock]

LLAMA = DenseSpec("llama", layers=4, hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16, vocab=256, context=128)
SIGMOID = {"glm4_moe", "dots1", "solar_open"}
KNOWN = {"mixtral", "qwen2_moe", "qwen3_moe", "flex_olmo", "granitemoe", "granitemoeshared", *SIGMOID}


def moe_for(target: str, dense: dict[str, Any] | None = None, **moe: Any) -> MoESpec:
    """A model that `target` holds (a Llama if it can hold one), with changes to the dense model and to the MoE."""
    can = registry.readable(target).can
    block, qk_norm = (
        plain if plain in held else min(held) for plain, held in (("pre", can.blocks), ("none", can.qk_norms))
    )
    spec = replace(LLAMA, **({"block": block, "qk_norm": qk_norm} | (dense or {})))
    widths = moe.pop("widths", ((spec.ffn - moe.get("shared", 0)) // 2,) * 8)
    score = "softmax" if "softmax" in can.scores else "sigmoid"
    whole = MoESpec(
        dense=spec, layers=tuple(range(spec.layers)), widths=widths, top_k=2, copies=4, granularity=2, score=score
    )  # fmt: skip
    return replace(whole, **moe)


def reasons(target: str, dense: dict[str, Any] | None = None, **moe: Any) -> list[str]:
    return refusals(registry.readable(target).can, moe_for(target, dense, **moe))


@pytest.mark.parametrize("target", TARGETS)
def test_what_a_target_likes_best_is_not_refused(target: str) -> None:
    assert reasons(target) == []


# feature: (changes to the dense model, changes to the MoE, the clause, the stock targets that can)
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any], str, set[str]]] = {
    "parallel block": ({"block": "parallel"}, {}, "block layout 'parallel'", set()),
    "norms on both sides": ({"block": "sandwich"}, {}, "block layout 'sandwich'", set()),
    "another rope behind windows": (
        {"window_rope": {"rope_type": "default", "rope_theta": 1e3}}, {}, "another rope in the layers with a window", set(),
    ),
    "a layer without rope": ({"nope_layers": (1,)}, {}, "layers without rotary positions (1 of 4)", set()),
    "a cap of attention": ({"attention_cap": 50.0}, {}, "soft caps", set()),
    "a cap of the logits": ({"logit_cap": 30.0}, {}, "soft caps", set()),
    "layer norm": ({"norm": "layernorm"}, {}, "norm 'layernorm'", set()),
    "norm + 1": ({"norm": "rms1p"}, {}, "", set(STOCK)),
    "ffn bias": ({"ffn_bias": True}, {}, "biases in the FFN", set()),
    "qkv bias": ({"qkv_bias": True}, {}, "biases on q, k, v", set(STOCK) - {"mixtral"}),
    "out bias": (
        {"out_bias": True}, {}, "an attention output with bias",
        {"qwen3_moe", "dots1", "flex_olmo", "granitemoe", "granitemoeshared"},
    ),
    "squared ReLU": ({"activation": "relu2", "gated": False}, {}, "", set(STOCK)),
    "gated squared ReLU": ({"activation": "relu2"}, {}, "activation 'relu2'", set()),
    "no gate": ({"activation": "gelu", "gated": False}, {}, "an FFN without gate", set()),
    "tanh GELU": ({"activation": "gelu_tanh"}, {}, "", set(STOCK)),
    "partial rotary": (
        {"rope": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, {},
        "partial rotary 0.5", {"glm4_moe"},
    ),
    "window in all layers": (
        {"window": 8, "window_layers": (0, 1, 2, 3)}, {}, "sliding windows", {"mixtral", "qwen3_moe", "dots1"}
    ),
    "window in some layers": ({"window": 8, "window_layers": (1, 3)}, {}, "sliding windows", {"dots1"}),
    "window as long as the context": ({"window": 128, "window_layers": (1, 3)}, {}, "", set(STOCK)),
    "multipliers": ({"embed_scale": 8.0}, {}, "multipliers", {"granitemoe", "granitemoeshared"}),
    "attention scale": ({"attention_scale": 0.1}, {}, "multipliers", {"granitemoe", "granitemoeshared"}),
    "not normalised": (
        {}, {"normalize": False}, "weights not normalised over the chosen",
        {"qwen2_moe", "qwen3_moe", "flex_olmo", *SIGMOID},
    ),
    "top-k, then softmax": ({}, {"score": "softmax", "order": "topk-then-softmax"}, "softmax scores", set(STOCK) - SIGMOID),
    "sigmoid": ({}, {"score": "sigmoid"}, "sigmoid scores", SIGMOID),
    "shared, a multiple": ({}, {"shared": 32}, "a shared expert", {"qwen2_moe", "granitemoeshared", *SIGMOID}),
    "shared, no multiple": ({}, {"shared": 16}, "a shared expert", {"qwen2_moe", "granitemoeshared"}),
    "first layer dense": ({}, {"layers": (1, 2, 3)}, "MoE in only 3 of 4 layers", {"qwen2_moe", "qwen3_moe", "glm4_moe", "dots1"}),
    "every second layer": ({}, {"layers": (1, 3)}, "MoE in only 2 of 4 layers", {"qwen2_moe", "qwen3_moe"}),
    "uneven experts": ({}, {"widths": (47, 49) * 4}, "experts of different widths", set()),
    "output scale": ({}, {"output_scale": 2.0}, "an output scale", SIGMOID),
    "one expert": ({}, {"widths": (96,), "copies": 1, "granularity": 1, "top_k": 1}, "a single expert", set(STOCK) - SIGMOID),
}  # fmt: skip


@pytest.mark.parametrize("target", STOCK)
@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_is_refused_by_its_clause_where_it_does_not_fit(target: str, feature: str) -> None:
    dense, moe, clause, can = FEATURES[feature]
    found = reasons(target, dense, **moe)
    if target in KNOWN:  # a target that is in no table of this file is held to its abilities by the parity tests
        assert (found == []) == (target in can), found
    assert not found or (len(found) == 1 and clause in found[0]), found


@pytest.mark.parametrize("target", TARGETS)
def test_our_own_target_refuses_nothing_and_refusals_are_clauses(target: str) -> None:
    for dense, moe, _, _ in FEATURES.values():
        found = reasons(target, dense, **moe)
        assert found == [] or target in STOCK
        assert all(len(reason) < 90 and not reason.endswith(".") for reason in found)


# ---- config.json


@pytest.mark.parametrize("target", TARGETS)
def test_rope_scaling_passes_through_for_old_and_new_loaders(target: str) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = registry.readable(target).config(moe_for(target, {"rope": rope}))
    extra = {"partial_rotary_factor": 1.0} if target == "glm4_moe" else {}
    assert config["rope_parameters"] == rope | extra
    assert config["rope_scaling"] | {"rope_theta": config["rope_theta"]} == rope | extra


# ---- tensors


def changes(target: str) -> list[MoESpec]:
    """The target's plain model, and that model with each other feature the target can hold."""
    fits = [(d, m) for d, m, _, _ in FEATURES.values() if not reasons(target, d, **m)]
    return [moe_for(target), *(moe_for(target, d, **m) for d, m in fits), moe_for(target, {"tied": True})]


@pytest.mark.parametrize("target", TARGETS)
def test_slots_are_unique_and_as_large_as_their_roles(target: str) -> None:
    for moe in changes(target):
        slots = list(registry.readable(target).slots(moe))
        assert len({slot.name for slot in slots}) == len(slots)
        for slot in slots:
            if ".shared." in slot.roles[0] and not moe.shared:
                assert slot.roles[0].startswith("layers.") and 0 not in slot.shape  # a mandatory shared expert of zeros
            else:
                assert prod(slot.shape) == sum(prod(moe.shape(role)) for role in slot.roles), slot.name
            assert slot.dtype == ("float32" if slot.roles[0].endswith("router.bias") else "")


@pytest.mark.parametrize("target", TARGETS)
def test_every_dense_weight_has_a_place_and_every_expert_is_there(target: str) -> None:
    for moe in changes(target):
        roles = [role for slot in registry.readable(target).slots(moe) for role in slot.roles]
        assert len(set(roles)) == len(roles)
        for role, _ in moe.dense.roles():
            path = role.split(".")
            ffn = path[0] == "layers" and path[2] in ("gate", "up", "down")
            if not (ffn and int(path[1]) in moe.layers):
                assert role in roles
        for layer in moe.layers:
            assert f"layers.{layer}.router.weight" in roles
            for part in ("up", "down"):
                assert f"layers.{layer}.experts.{moe.experts - 1}.{part}.weight" in roles
                if moe.shared:
                    assert f"layers.{layer}.shared.{part}.weight" in roles


def names(target: str, dense: dict[str, Any] | None = None, **moe: Any) -> set[str]:
    return {slot.name for slot in registry.readable(target).slots(moe_for(target, dense, **moe))}


def test_heads_are_written_where_vllm_never_ties() -> None:
    tied = {target for target in KNOWN if "lm_head.weight" not in names(target, {"tied": True})}
    assert tied == KNOWN - SIGMOID
    for target in SIGMOID:
        config = registry.readable(target).config(moe_for(target, {"tied": True}))
        assert config["tie_word_embeddings"] is False


def test_one_switch_for_four_biases_fills_the_missing_ones() -> None:
    for target in ("qwen3_moe", "dots1", "flex_olmo", "granitemoe"):
        assert "model.layers.0.self_attn.o_proj.bias" in names(target, {"qkv_bias": True})
        assert "model.layers.0.self_attn.q_proj.bias" in names(target, {"out_bias": True})
        assert not any(name.endswith("proj.bias") for name in names(target))
    assert "model.layers.0.self_attn.q_proj.bias" in names("qwen2_moe")
    assert "model.layers.0.self_attn.o_proj.bias" not in names("glm4_moe", {"qkv_bias": True})


# ---- notes


def notes(target: str, dense: dict[str, Any] | None = None, **moe: Any) -> str:
    return " ".join(registry.readable(target).notes(moe_for(target, dense, **moe)))


def test_notes_say_what_a_user_must_know() -> None:
    for target in KNOWN:
        squared = notes(target, {"activation": "relu2", "gated": False})
        assert "+50 %" in squared and "silu only" in squared
        assert "silu" not in notes(target)
        mandatory = target in SIGMOID | {"qwen2_moe"}
        assert ("zero neurons" in notes(target)) == mandatory
        assert ("tied head" in notes(target, {"tied": True})) == (target in SIGMOID)
    # vLLM 0.32 reads it right: upcycle/engines.json, "dots1 shared, scale"
    assert "routed_scaling_factor" not in notes("dots1", shared=32, output_scale=2.0)
    assert "head_dim" in notes("granitemoe", {"head_dim": 32}) and "head_dim" not in notes("mixtral", {"head_dim": 32})
