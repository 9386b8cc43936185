"""What the families share: config keys with transformers' defaults, and the tensor names of the Llama line.

A family is a call of `dense()`, which reads the keys that every architecture has; the arguments say how this one
differs. A default here or in a family is that of transformers' configuration class, because save_pretrained has at
times left out values that equal the default, and hand-written configs still do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from upcycle.spec import Activation, DenseSpec

Config = Mapping[str, Any]
ROTARY_BUFFERS = (r".*rotary_emb\.inv_freq", r".*rotary_emb\.(cos|sin)_cached")
ACTIVATION_NAMES: Mapping[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu", "relu": "relu", "relu2": "relu2",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_python_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "gelu_accurate": "gelu_tanh",
}  # fmt: skip
# rope_type -> the keys it requires
ROPE_TYPES: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
# Keys that any config.json may have and no DenseSpec can hold: key -> what to do instead.
REFUSED = {
    "quantization_config": "upcycling needs the weights themselves, so give an unquantised checkpoint",
    "per_layer_config": "every layer must have the same sizes here, so give a model whose layers are alike",
}


@dataclass(frozen=True)
class Source:
    """A tensor of the checkpoint, or ranges of its rows in the order of use; no ranges mean all rows."""

    name: str
    rows: tuple[tuple[int, int], ...] = ()
    donor: int = 0


def dense(
    config: Config,
    family: str,
    *,
    context: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    tied: bool = False,
    eps: tuple[str, float] = ("rms_norm_eps", 1e-6),
    act: str = "silu",
    init_std: float = 0.02,
    bos: int | None = None,
    eos: int | None = None,
    pad: int | None = None,
    **different: Any,
) -> DenseSpec:
    """The DenseSpec of `config`. The named arguments are this family's defaults for absent keys (`eps` with the key's
    name); `different` are DenseSpec fields that are set directly."""
    refuse_foreign(config)
    hidden, heads = need(config, "hidden_size"), need(config, "num_attention_heads")
    fields: dict[str, Any] = {
        "layers": need(config, "num_hidden_layers"),
        "hidden": hidden,
        "ffn": need(config, "intermediate_size"),
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads", kv_heads) or heads,
        "head_dim": config.get("head_dim", head_dim) or hidden // heads,
        "vocab": need(config, "vocab_size"),
        "context": config.get("max_position_embeddings") or context,
        "norm_eps": config.get(eps[0], eps[1]),
        "tied": bool(config.get("tie_word_embeddings", tied)),
        "dtype": dtype(config),
        "tokens": tokens(config, bos=bos, eos=eos, pad=pad),
        "init_std": config.get("initializer_range", init_std),
    } | different
    if "activation" not in fields:
        fields["activation"] = activation(config, default=act)
    if "rope" not in fields:
        fields["rope"] = rope(config, context=fields["context"])
    spec = DenseSpec(family=family, **fields)
    spec.check()
    check_long_factors(spec)
    return spec


def refuse_foreign(config: Config) -> None:
    for key, advice in REFUSED.items():
        if config.get(key):
            raise ValueError(f"config.json has {key!r}, which is not supported: {advice}")
    for name in config.get("architectures") or ():
        if not name.endswith("ForCausalLM"):
            raise ValueError(
                f"config.json says architectures={name!r}; a model to upcycle must be a ...ForCausalLM, "
                "which has a language-model head"
            )


def need(config: Config, key: str) -> Any:
    if config.get(key) is None:
        raise ValueError(
            f"config.json of this {config.get('model_type')} model has no {key!r}, "
            "which every such model states; is the file complete?"
        )
    return config[key]


def activation(config: Config, key: str = "hidden_act", default: str = "silu") -> Activation:
    name = config.get(key) or default
    if name not in ACTIVATION_NAMES:
        raise ValueError(f"config.json has {key}={name!r}; known are {', '.join(ACTIVATION_NAMES)}")
    return ACTIVATION_NAMES[name]


def dtype(config: Config) -> str:
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")


def tokens(config: Config, *, bos: int | None = None, eos: int | None = None, pad: int | None = None) -> dict[str, Any]:
    """The special tokens of the file, or else this family's defaults. All three keys are always there (None: no token),
    because for an absent key a target's class takes its own default, which is another token."""
    defaults = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}
    return {key: config.get(key, default) for key, default in defaults.items()}


def rope(
    config: Config,
    *,
    context: int,
    theta_key: str = "rope_theta",
    partial_key: str = "partial_rotary_factor",
    partial: float | None = None,
    original: int | None = None,
) -> dict[str, Any]:
    """rope_parameters as transformers 5 writes them, from either generation of config.json.

    transformers 4 wrote rope_theta, partial_rotary_factor and rope_scaling (with `type` before `rope_type`) at the top
    level. partial: this family's default share of rotated dimensions; None if it always rotates whole heads.
    original: this family's default of the top-level original_max_position_embeddings.
    """
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"config.json's rope is {given!r}; it must be keys and values like rope_type and rope_theta")
    out: dict[str, Any] = dict(given)
    old_name = out.pop("type", "default")
    kind: str = out.setdefault("rope_type", old_name)
    odd = "" if kind in ROPE_TYPES else f"rope_type={kind!r}"
    # mrope_section: positions in several dimensions; a mapping as value: a rope for each layer type
    odd = odd or ", ".join(k for k, v in out.items() if k == "mrope_section" or isinstance(v, Mapping))
    if odd:
        raise ValueError(
            f"config.json's rope has {odd}, which is not supported; give a model with one rope for all layers, "
            f"of one of the types {', '.join(ROPE_TYPES)}"
        )
    missing = [key for key in ROPE_TYPES[kind] if key not in out]
    if missing:
        raise ValueError(f"config.json's rope of type {kind!r} has no {', '.join(missing)}; is the file complete?")
    out.setdefault("rope_theta", config.get(theta_key) or 10000.0)
    stated = out.pop("partial_rotary_factor", None) or config.get(partial_key)
    share = stated or partial or 1.0
    if share != 1.0:
        if partial is None:
            raise ValueError(
                f"config.json has partial_rotary_factor={share}, but a {config.get('model_type')} model rotates "
                "whole heads; remove it or set it to 1"
            )
        out["partial_rotary_factor"] = share
    if kind in ("yarn", "longrope", "llama3"):
        # as in transformers, the top-level key wins over the one inside the rope
        length = config.get("original_max_position_embeddings", original) or out.get("original_max_position_embeddings")
        out["original_max_position_embeddings"] = length or context
    return out


def check_long_factors(spec: DenseSpec) -> None:
    """Check the lengths of longrope's factors: a wrong one would fail only in the first forward pass of the result."""
    want = int(spec.head_dim * spec.partial_rotary) // 2
    for key in ("short_factor", "long_factor") if spec.rope["rope_type"] == "longrope" else ():
        got = spec.rope[key]
        if not isinstance(got, list) or len(got) != want:
            raise ValueError(
                f"config.json's rope {key} must be a list of {want} numbers, half the rotated dimensions of a head; "
                f"got {got!s:.60}"
            )


def windows(config: Config, layers: int, *, default: int | None) -> dict[str, Any]:
    """DenseSpec's window fields for a family where `sliding_window`, unless null, holds in all layers (Mistral)."""
    window = config.get("sliding_window", default)
    return {"window": window, "window_layers": tuple(range(layers)) if window is not None else ()}


def windows_by_layer(config: Config, layers: int) -> dict[str, Any]:
    """DenseSpec's window fields for Qwen 2 and 3: a switch, and either layer_types or the first layer with a window."""
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", 28) if window is not None else layers
        return {"window": window, "window_layers": tuple(range(first, layers))}
    if len(types) != layers or not set(types) <= {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"config.json's layer_types must be {layers} times full_attention or sliding_attention; "
            f"got {len(types)} of {', '.join(sorted(set(types)))}"
        )
    sliding = tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")
    if sliding and window is None:
        raise ValueError(
            f"config.json's layer_types has sliding_attention in layers {sliding}, but no window is on; "
            "set use_sliding_window and sliding_window, or make all layers full_attention"
        )
    return {"window": window, "window_layers": sliding}


def llama_sources(spec: DenseSpec, names: Mapping[str, str] | None = None, model: str = "model") -> dict[str, Source]:
    """The Source of every role of `spec`, by Llama's tensor names; `names` overrides module names."""
    module = {
        "embed": f"{model}.embed_tokens", "final_norm": f"{model}.norm", "head": "lm_head",
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
        "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
        "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
        "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
    } | dict(names or {})  # fmt: skip
    out = {}
    for role, _ in spec.roles():
        *layer, part, kind = role.split(".")
        prefix = f"{model}.layers.{layer[1]}." if layer else ""
        out[role] = Source(f"{prefix}{module[part]}.{kind}")
    return out
