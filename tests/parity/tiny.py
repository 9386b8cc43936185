"""Tiny dense models with random weights, one per family and more for what a family may vary.

The weights are made so that nothing is neutral: norm gains differ from 1, biases from 0, and the matrices are large
enough that a wrong rotation, a missing multiplier or a swapped gate is seen in the logits.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from upcycle import plugin

FAMILIES = plugin.names("upcycle.arch.families")
ONE_PLUS = ("gemma", "gemma2", "gemma3_text", "nemotron")  # a norm's stored weight is its gain minus one
LENGTH = 24  # of the sequences tokens() gives; every window and original context of VARIANTS is shorter, unless noted

SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 32},  # not hidden / heads
    "gemma": {"head_dim": 32},
    "granite": {
        "embedding_multiplier": 6.0, "attention_multiplier": 0.4, "residual_multiplier": 0.5, "logits_scaling": 3.0,
    },
    "gpt_neox": {"num_key_value_heads": None},
    "seed_oss": {"head_dim": 24},
    # two layers that differ in all that layers of the family may differ in
    "smollm3": {"no_rope_layers": [1, 0], "tie_word_embeddings": False},
    "olmo3": {
        "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            "full_attention": {
                "rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 32,
            },
        },
    },
    # caps that logits of this size reach
    "gemma2": {
        "head_dim": 32, "sliding_window": 6, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 1.0,
        "final_logit_softcapping": 2.0,
    },
    "gemma3_text": {
        "head_dim": 32, "sliding_window": 6, "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        },
    },
}  # fmt: skip

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


def longrope(share: float) -> dict[str, Any]:
    n = int(16 * share) // 2
    return {
        "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": share,
        "short_factor": [1.0 + 0.1 * i for i in range(n)], "long_factor": [1.5 + 0.5 * i for i in range(n)],
    }  # fmt: skip


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {family: (family, {}) for family in FAMILIES} | {
    "llama_llama3_rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama_linear_rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}}),
    # the frequencies change only beyond max_position_embeddings, so that is shorter than the sequences
    "llama_dynamic_rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "max_position_embeddings": 16},
    ),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_mha": ("llama", {"num_key_value_heads": 4}),
    "llama_head_dim": ("llama", {"head_dim": 24}),
    "llama_gelu": ("llama", {"hidden_act": "gelu"}),
    "mistral_window": ("mistral", {"sliding_window": 6}),
    "mistral_no_window": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen2_window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen2_layer_types": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen3_bias": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3_window": ("qwen3", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0}),
    "olmo2_bias": ("olmo2", {"attention_bias": True}),
    "granite_tied": ("granite", {"tie_word_embeddings": True}),
    "granite_bias": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "gemma_mqa": ("gemma", {"num_key_value_heads": 1, "hidden_act": "gelu"}),
    "gemma_untied_bias": ("gemma", {"tie_word_embeddings": False, "attention_bias": True}),
    "phi3_window": ("phi3", {"sliding_window": 6}),
    "phi3_partial": ("phi3", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75}}),
    "phi3_longrope": ("phi3", {"rope_parameters": longrope(1.0), "original_max_position_embeddings": 16}),
    "phi3_longrope_partial": ("phi3", {"rope_parameters": longrope(0.75), "original_max_position_embeddings": 16}),
    # the sequences are shorter than the original context, so the short factors count
    "phi3_longrope_short": ("phi3", {"rope_parameters": longrope(1.0), "original_max_position_embeddings": 32}),
    "nemotron_bias": ("nemotron", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "nemotron_whole_rotary": ("nemotron", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}}),
    "arcee_yarn": ("arcee", {"rope_parameters": YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0}}),
    "arcee_bias": ("arcee", {"attention_bias": True, "mlp_bias": True}),
    "gpt_neox_sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "gpt_neox_no_attention_bias": ("gpt_neox", {"attention_bias": False, "tie_word_embeddings": True}),
    "gpt_neox_whole_rotary": ("gpt_neox", {"rope_parameters": {"rope_theta": 1e3, "partial_rotary_factor": 1.0}}),
    "starcoder2_window": ("starcoder2", {"sliding_window": 6}),
    "starcoder2_no_bias": ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
}


def build(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """The model in memory. `overrides` are keys of its configuration class."""
    settings = {k: v for k, v in (SIZES | OWN.get(family, {}) | overrides).items() if k != "num_key_value_heads" or v}
    config = AutoConfig.for_model(family, **settings)
    with torch.random.fork_rng(devices=[]):  # transformers' own initialisation, all of it overwritten below
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    randomize(model, seed)
    return model.to(dtype).eval()


@torch.no_grad()
def randomize(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    neutral = 0.0 if model.config.model_type in ONE_PLUS else 1.0  # of a norm's stored weight
    for name, p in sorted(model.named_parameters()):
        noise = torch.randn(p.shape, generator=generator)
        if name.endswith(".bias"):
            p.copy_(0.2 * noise)
        elif name.endswith("sinks"):
            p.copy_(noise)
        elif p.dim() == 1:
            assert "norm" in name, name
            p.copy_(neutral + 0.25 * noise)
        else:
            p.copy_(noise * (0.3 if "embed" in name else 0.15))


def make(
    family: str, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, shards: int = 1, **overrides: Any
) -> Path:
    """Save a tiny model as a checkpoint folder of at least `shards` safetensors files; no tokenizer."""
    model = build(family, seed=seed, dtype=dtype, **overrides)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    limit = {"max_shard_size": math.ceil(size / shards)} if shards > 1 else {}
    model.save_pretrained(folder, **limit)
    return folder


def make_variant(name: str, folder: Path, **more: Any) -> Path:
    family, overrides = VARIANTS[name]
    return make(family, folder, **overrides | more)


def tokens(batch: int = 2, length: int = LENGTH, *, seed: int = 0, vocab: int = 256) -> Tensor:
    return torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: Path | Any, tokens_BT: Tensor) -> Tensor:
    """Logits of a model, or of the one in a folder, in the dtype it is stored in."""
    if isinstance(model, Path):
        model = AutoModelForCausalLM.from_pretrained(model, dtype="auto", attn_implementation="eager").eval()
    out: Tensor = model(tokens_BT).logits
    return out


def loaded(folder: Path, dtype: torch.dtype) -> Any:
    """The whole model of a folder; one of our own architecture is loaded by the package's copy of its file."""
    from upcycle.arch.remote.modeling_upcycled import UpcycledForCausalLM

    ours = json.loads((folder / "config.json").read_text())["model_type"] == "upcycled"
    model, info = (UpcycledForCausalLM if ours else AutoModelForCausalLM).from_pretrained(
        folder, dtype=dtype, output_loading_info=True, attn_implementation="eager", experts_implementation="eager"
    )
    assert not any(info.values()), info
    return model.eval()
