"""What the families share: reading a config key, and the tensor names of the Llama line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from upcycle.spec import DenseSpec

Config = Mapping[str, Any]
ROTARY_BUFFERS = (r".*rotary_emb\.inv_freq", r".*rotary_emb\.(cos|sin)_cached")
ACTIVATION_NAMES = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "relu": "relu", "relu2": "relu2",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A tensor of the checkpoint, or some of its rows: ranges in the order they are wanted, none meaning all."""

    name: str
    rows: tuple[tuple[int, int], ...] = ()
    donor: int = 0


def need(config: Config, key: str) -> Any:
    if config.get(key) is None:
        raise ValueError(f"config.json of this {config.get('model_type')} model has no {key!r}, which every such model states; is the file complete?")
    return config[key]


def activation(config: Config, key: str = "hidden_act", default: str = "silu") -> Any:
    name = config.get(key) or default
    if name not in ACTIVATION_NAMES:
        raise ValueError(f"config.json has {key}={name!r}; known are {', '.join(ACTIVATION_NAMES)}")
    return ACTIVATION_NAMES[name]


def dtype(config: Config) -> str:
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")


def tokens(config: Config) -> dict[str, Any]:
    return {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if k in config}


def rope(config: Config, theta: float = 10000.0, partial: float = 1.0) -> dict[str, Any]:
    """rope_parameters as transformers 5 writes them, from either generation of config.json.

    transformers 4 wrote rope_theta and rope_scaling (with `type` before `rope_type`) at the top level.
    """
    if config.get("rope_parameters"):
        out = dict(config["rope_parameters"])
    else:
        out = {k: v for k, v in (config.get("rope_scaling") or {}).items()}
        if "type" in out:
            out["rope_type"] = out.pop("type")
    out.setdefault("rope_type", "default")
    out.setdefault("rope_theta", config.get("rope_theta") or theta)
    share = out.pop("partial_rotary_factor", config.get("partial_rotary_factor") or partial)
    if share != 1.0:
        out["partial_rotary_factor"] = share
    return out


def llama_sources(spec: DenseSpec, names: Mapping[str, str] | None = None) -> dict[str, Source]:
    """Every role of `spec` under the names of Llama and its many relatives; `names` overrides module names."""
    module = {
        "embed": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head",
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
        "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
        "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
        "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
    } | dict(names or {})  # fmt: skip
    out = {}
    for role, _ in spec.roles():
        *layer, part, kind = role.split(".")
        prefix = f"model.layers.{layer[1]}." if layer else ""
        out[role] = Source(f"{prefix}{module[part]}.{kind}")
    return out
