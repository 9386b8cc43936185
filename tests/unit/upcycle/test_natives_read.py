"""config.json of MoE architectures that are trained as they are: what cannot be held is one sentence, whatever it is."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.upcycle.mutations import keys_read, unreadable
from upcycle import plugin
from upcycle.arch import registry
from upcycle.arch.registry import family

DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
    "moe_intermediate_size": 24, "num_hidden_layers": 3, "first_k_dense_replace": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3, "n_group": 4,
    "topk_group": 2, "vocab_size": 99, "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32},
}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_size": 64, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 5,
    "num_experts_per_tok": 2, "vocab_size": 99, "sliding_window": 6, "rope_theta": 150000, "attention_bias": True,
    "layer_types": ["sliding_attention", "full_attention"], "swiglu_limit": 7.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "truncate": False, "beta_fast": 32.0},
}  # fmt: skip
OLMOE: dict[str, Any] = {
    "model_type": "olmoe", "architectures": ["OlmoeForCausalLM"], "hidden_size": 64, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 5,
    "num_experts_per_tok": 2, "norm_topk_prob": False, "clip_qkv": None, "vocab_size": 99, "rope_theta": 10000.0,
    "rope_scaling": None,
}  # fmt: skip
NATIVES: dict[str, dict[str, Any]] = {
    "deepseek_v3": DEEPSEEK, "kimi_k2": DEEPSEEK | {"model_type": "kimi_k2"}, "gpt_oss": GPT_OSS,
    "olmoe": OLMOE,
}  # fmt: skip


def tensors(config: dict[str, Any]) -> int:
    native = registry.native(str(config["model_type"]))
    moe = native.read(config)
    large = moe.experts * moe.dense.layers > 1000  # to be listed for each mutant
    return 0 if large else len(list(native.slots(moe)))


@pytest.mark.parametrize("name", plugin.names("upcycle.arch.natives"))
def test_a_changed_key_is_read_or_one_sentence(name: str) -> None:
    assert tensors(NATIVES[name]) > 0
    keys = keys_read("natives", name) + keys_read("targets", "dots1")
    assert unreadable(NATIVES[name], keys, tensors, share=0.2) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"quantization_config": {"quant_method": "mxfp4"}}, r"Mxfp4Config\(dequantize=True\)"),
        ({"swiglu_limit": 5.0}, "swiglu_limit=5.0, but only 7.0 can be read"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True, but only False"),
        ({"num_experts_per_tok": 6}, "6 experts for each token, of 5"),
    ],
    ids=str,
)
def test_what_gpt_oss_cannot_be_is_said(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        tensors(GPT_OSS | change)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "cast them to bfloat16 first"),
        ({"num_key_value_heads": 2}, "num_key_value_heads=2, but only 4 can be read"),
        ({"n_group": 3}, "the best 2 of 3 groups of 8 experts"),
        ({"n_group": 8}, "the best 2 of 8 groups of 8 experts"),
        ({"topk_group": 1}, "3 experts for each token, of 2"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim=7; it must be even"),
        ({"attention_bias": True}, "attention_bias=True, but only False can be read"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax', but only 'sigmoid' can be read"),
    ],
    ids=str,
)
def test_what_it_cannot_hold_is_said(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        tensors(DEEPSEEK | change)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"clip_qkv": 8.0}, "clip_qkv=8.0, but only None can be read"),
        ({"head_dim": 32}, "head_dim 32 that is not hidden/heads"),
        ({"num_experts_per_tok": 6}, "6 experts for each token, of 5"),
    ],
    ids=str,
)
def test_what_olmoe_cannot_be_is_said(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        tensors(OLMOE | change)
    assert "\n" not in str(error.value)


def test_no_dense_model_is_one() -> None:
    for name in plugin.names("upcycle.arch.natives"):
        with pytest.raises(ValueError, match="a mixture of experts already; give a dense model"):
            family(name)
