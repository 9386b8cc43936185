"""Read the config keys that families share, with transformers' defaults, and name tensors as Llama does.

Every default, here and in a family, is the default of transformers' configuration class, because some versions of
save_pretrained left out values equal to the default, and hand-written configs still do. Read keys with `typed`, so that
a wrong type or value gives an error of one sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from upcycle.arch.slots import LLAMA
from upcycle.arch.spec import Activation, DenseSpec
from upcycle.io import typed
from upcycle.io.strict import short

Config = typed.Config
MAX_LAYERS, MAX_HEADS = 10_000, 65_536  # a higher number is a typing error, and listing so many would take seconds
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
# Keys that any config.json may have but no DenseSpec can hold: key -> what to do instead.
REFUSED = {
    "quantization_config": "upcycling needs the weights themselves, so give an unquantised checkpoint",
    "per_layer_config": "every layer must have the same sizes, so give a model whose layers are all the same",
}


@dataclass(frozen=True)
class Source:
    """A tensor of the checkpoint, or ranges of its rows in the order of use; without ranges, all rows."""

    name: str
    rows: tuple[tuple[int, int], ...] = ()
    donor: int = 0


# field of a DenseSpec -> the key of config.json that switches it on, and the default of the key
ATTENTION: Mapping[str, tuple[str, bool]] = {
    "qkv_bias": ("attention_bias", False), "out_bias": ("attention_bias", False),
}  # fmt: skip
ALL_BIASES: Mapping[str, tuple[str, bool]] = {**ATTENTION, "ffn_bias": ("mlp_bias", False)}


@dataclass(frozen=True)
class Family:
    """A dense architecture: its fields of a DenseSpec, its defaults for absent keys, and the names of its tensors."""

    name: str
    context: int
    kv_heads: int | None = None
    head_dim: int | None = None
    tied: bool = False
    eps: tuple[str, float] = ("rms_norm_eps", 1e-6)  # the key and its default
    act: str = "silu"
    init_std: float = 0.02
    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    flags: Mapping[str, tuple[str, bool]] = field(default_factory=dict)  # in the form of ATTENTION
    rope: Mapping[str, Any] = field(default_factory=dict)  # arguments of the function `rope`
    fixed: Mapping[str, Any] = field(default_factory=dict)  # fields that no key can change
    own: Callable[[Config], Mapping[str, Any]] = lambda config: {}  # fields from keys that only this family has
    adapt: Callable[[Config], Config] = lambda config: config  # renames keys to the names that every family has
    names: Mapping[str, str] = field(default_factory=dict)  # the modules whose names differ from Llama's
    model: str = "model"
    parts: Callable[[DenseSpec], Mapping[str, Source]] = lambda spec: {}  # roles that share a tensor
    ignored: tuple[str, ...] = ROTARY_BUFFERS  # regular expressions for tensors that are not weights

    def read(self, config: Config) -> DenseSpec:
        """Return the DenseSpec of a config.json; raise a ValueError if no model of this family can have its values."""
        config = self.adapt(config)
        refuse_foreign(config)
        hidden, heads = typed.whole(config, "hidden_size"), typed.whole(config, "num_attention_heads", high=MAX_HEADS)
        # if absent, these two have the default of the family; if null, they follow from other keys
        kv_heads = self.kv_heads if "num_key_value_heads" not in config else None
        head_dim = self.head_dim if "head_dim" not in config else None
        fields: dict[str, Any] = {
            "layers": layers(config),
            "hidden": hidden,
            "ffn": typed.whole(config, "intermediate_size"),
            "heads": heads,
            "kv_heads": typed.whole(config, "num_key_value_heads", kv_heads or heads),
            "head_dim": typed.whole(config, "head_dim", head_dim or max(hidden // heads, 1)),
            "vocab": typed.whole(config, "vocab_size"),
            "context": context_length(config, self.context),
            "norm_eps": typed.number(config, *self.eps, low=0, high=1),
            "tied": typed.flag(config, "tie_word_embeddings", self.tied),
            "dtype": dtype(config),
            "tokens": tokens(config, bos=self.bos, eos=self.eos, pad=self.pad),
            "init_std": typed.number(config, "initializer_range", self.init_std, low=0),
        }
        fields |= {name: typed.flag(config, *key) for name, key in self.flags.items()}
        fields |= {**self.fixed, **self.own(config)}
        if "activation" not in fields:
            fields["activation"] = activation(config, default=self.act)
        if "rope" not in fields:
            fields["rope"] = rope(config, context=fields["context"], **self.rope)
        spec = DenseSpec(family=self.name, **fields)
        spec.check()
        check_rotation(spec)
        return spec

    def sources(self, spec: DenseSpec) -> dict[str, Source]:
        """Return the tensor of the checkpoint that holds each role of `spec`."""
        module = {**LLAMA, **self.names}
        out = {}
        for role, _ in spec.roles():
            *layer, part, kind = role.split(".")
            prefix = f"{self.model}.layers.{layer[1]}." if layer else ""
            out[role] = Source(f"{prefix}{module[part]}.{kind}")
        return {**out, **self.parts(spec)}


def refuse_foreign(config: Config) -> None:
    for key, advice in REFUSED.items():
        if config.get(key):
            raise ValueError(f"config.json has {key!r}, which is not supported: {advice}")
    for name in typed.names(config, "architectures", []):
        if not name.endswith("ForCausalLM"):
            raise ValueError(
                f"config.json says architectures={short(name)}; a model to upcycle must be a ...ForCausalLM, "
                "which has a language-model head"
            )


def layers(config: Config) -> int:
    return typed.whole(config, "num_hidden_layers", high=MAX_LAYERS)


def context_length(config: Config, default: int) -> int:
    return typed.whole(config, "max_position_embeddings", default)


def activation(config: Config, key: str = "hidden_act", default: str = "silu") -> Activation:
    return ACTIVATION_NAMES[typed.word(config, key, default, ACTIVATION_NAMES)]


def dtype(config: Config) -> str:
    key = "torch_dtype" if config.get("dtype") is None else "dtype"
    return typed.text(config, key, "float32").removeprefix("torch.")


def tokens(config: Config, *, bos: int | None = None, eos: int | None = None, pad: int | None = None) -> dict[str, Any]:
    """Return the special tokens that config.json states, or this family's defaults.

    The result always has all three keys (None: no token), because the class of a target has its own default for an
    absent key, which is another token.
    """
    defaults = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}
    for key in defaults:
        value, several = config.get(key), key == "eos_token_id"
        ids = value if several and isinstance(value, list) and value else [value]
        if value is not None and not all(typed.is_whole(i, -1, typed.LARGEST) for i in ids):  # -1 means none
            raise typed.wrong(config, key, "a token's number" + (" or a list of them" if several else ""))
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
    """Return rope_parameters as transformers 5 writes them, from a config.json of transformers 4 or 5.

    transformers 4 wrote rope_theta, partial_rotary_factor and rope_scaling at the top level, and its older versions
    called rope_type `type`. partial: this family's default share of rotated dimensions; None if it always rotates whole
    heads. original: this family's default for original_max_position_embeddings at the top level.
    """
    out = stated_rope(config)
    old_name = out.pop("type", "default")
    kind: str = out.setdefault("rope_type", old_name)
    odd = "" if isinstance(kind, str) and kind in ROPE_TYPES else f"rope_type={short(kind)}"
    # mrope_section means positions in several dimensions; a mapping as a value means a rope for each layer type
    odd = odd or ", ".join(k for k, v in out.items() if k == "mrope_section" or isinstance(v, Mapping))
    if odd:
        raise ValueError(
            f"config.json's rope has {odd}, which is not supported; give a model with one rope for all layers, and "
            f"with one of the types {', '.join(ROPE_TYPES)}"
        )
    missing = [key for key in ROPE_TYPES[kind] if out.get(key) is None]
    if missing:
        raise ValueError(f"config.json's rope of type {kind!r} has no {', '.join(missing)}; is the file complete?")
    if out.get("rope_theta") is None:
        out["rope_theta"] = 10000.0 if config.get(theta_key) is None else config[theta_key]
    stated = out.pop("partial_rotary_factor", None)
    stated = config.get(partial_key) if stated is None else stated
    keys = {"model_type": config.get("model_type"), "partial_rotary_factor": stated}
    share = typed.number(keys, "partial_rotary_factor", partial or 1.0, low=0, high=1)
    if share != 1.0:
        if partial is None:
            raise ValueError(
                f"config.json has partial_rotary_factor={share}, but a {config.get('model_type')} model rotates "
                "whole heads; remove it or set it to 1"
            )
        out["partial_rotary_factor"] = share
    if kind in ("yarn", "longrope", "llama3"):
        # as in transformers, the key at the top level overrides the key inside the rope
        top = config.get("original_max_position_embeddings", original)
        length = out.get("original_max_position_embeddings") if top is None else top
        out["original_max_position_embeddings"] = context if length is None else length
    check_rope(config, out)
    return out


def stated_rope(config: Config) -> dict[str, Any]:
    """Return a copy of the keys under rope_scaling or rope_parameters; it is empty if there are none."""
    for key in ("rope_scaling", "rope_parameters"):
        if config.get(key) is not None and not isinstance(config[key], Mapping):
            raise typed.wrong(config, key, "keys and values like rope_type and rope_theta")
    return dict(config.get("rope_scaling") or config.get("rope_parameters") or {})


def check_rope(config: Config, rope: Mapping[str, Any]) -> None:
    """Check types and ranges in a rope, because a wrong number would fail only when the converted model first runs."""
    keys = {"model_type": config.get("model_type"), **rope}
    typed.number(keys, "rope_theta", low=2, high=1e15)  # code divides by its logarithm
    for key in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"):
        typed.number(keys, key, 1.0)
    for key in ("mscale", "mscale_all_dim"):
        typed.number(keys, key, 1.0, low=0)
    for key in ("short_factor", "long_factor"):
        typed.numbers(keys, key, [])
    typed.flag(keys, "truncate")
    typed.whole(keys, "original_max_position_embeddings", 2, low=2)
    if rope["rope_type"] == "llama3" and not keys["low_freq_factor"] < keys["high_freq_factor"]:
        raise typed.wrong(keys, "high_freq_factor", f"above low_freq_factor={keys['low_freq_factor']}")


def check_rotation(spec: DenseSpec) -> None:
    """Check the number of rotated dimensions of a head and the lengths of longrope's factors."""
    rotated = int(spec.rotary_dim * spec.partial_rotary)
    if rotated < 1:
        raise ValueError(
            f"config.json of this {spec.family} model has head_dim={spec.rotary_dim} and rotates a share of "
            f"{spec.partial_rotary:g} of it; that must be one dimension or more"
        )
    for key in ("short_factor", "long_factor") if spec.rope["rope_type"] == "longrope" else ():
        got = spec.rope[key]
        if got is None or len(got) != rotated // 2:
            raise ValueError(
                f"config.json's rope {key} must be a list of {rotated // 2} numbers, half the rotated dimensions of a "
                f"head; got {short(got)}"
            )


def window(config: Config, default: int | None) -> int | None:
    """Return sliding_window; None if it is null."""
    stated = config.get("sliding_window", default)
    return None if stated is None else typed.whole(config, "sliding_window", default)


def windows(config: Config, *, default: int | None) -> dict[str, Any]:
    """Return the window fields of a DenseSpec if `sliding_window`, unless null, applies to all layers (Mistral)."""
    width = window(config, default)
    return {"window": width, "window_layers": tuple(range(layers(config))) if width is not None else ()}


def windows_by_layer(config: Config) -> dict[str, Any]:
    """Return the window fields of a DenseSpec as Qwen 2 and 3 state them.

    They have a switch, and either layer_types or the number of the first layer with a window.
    """
    count, width = layers(config), window(config, 4096) if typed.flag(config, "use_sliding_window") else None
    if config.get("layer_types") is None:
        first = typed.whole(config, "max_window_layers", 28, low=0) if width is not None else count
        return {"window": width, "window_layers": tuple(range(first, count))}
    types = typed.names(config, "layer_types")
    if len(types) != count or not set(types) <= {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"config.json's layer_types must be {count} times full_attention or sliding_attention; "
            f"got {len(types)} of {short(sorted(set(types)))}"
        )
    sliding = tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")
    if sliding and width is None:
        raise ValueError(
            f"config.json's layer_types has sliding_attention in layers {sliding}, but no window is on; "
            "set use_sliding_window and sliding_window, or make all layers full_attention"
        )
    return {"window": width, "window_layers": sliding}


def windows_by_type(config: Config, *, every: int) -> dict[str, Any]:
    """Return the window fields of a DenseSpec if layer_types names the layers with a window.

    `sliding_window` is 4096 unless stated. Without layer_types, all layers have a window except each `every`-th.
    """
    types = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers(config))]
    stated = types if config.get("layer_types") is None else config["layer_types"]
    sliding = windows_by_layer({**config, "layer_types": stated, "use_sliding_window": True})
    return sliding if sliding["window_layers"] else {}


def layers_by_type(config: Config, *, every: int, thetas: tuple[float, float], context: int) -> dict[str, Any]:
    """Return the windows and ropes of a DenseSpec for a family with a rope for each layer type.

    `thetas` are the defaults of rope_theta, first for layers without a window, then for layers with one.
    """
    types, stated = ("full_attention", "sliding_attention"), config.get("rope_parameters")
    stated = {} if stated is None else stated
    if not isinstance(stated, Mapping) or not set(stated) <= set(types):
        raise typed.wrong(config, "rope_parameters", f"a rope for each layer type, {' and '.join(types)}")
    found, ropes = windows_by_type(config, every=every), []
    for kind, theta in zip(types, thetas, strict=True):
        part = stated_rope({**config, "rope_scaling": None, "rope_parameters": stated.get(kind)})
        if kind == "full_attention":  # as transformers 4 wrote it
            part |= stated_rope({**config, "rope_parameters": None})
        if part.get("rope_theta") is None:
            part["rope_theta"] = theta
        # a length at the top level does not belong to one of several ropes
        alone = {**config, "rope_scaling": None, "rope_parameters": part, "original_max_position_embeddings": None}
        ropes.append(rope(alone, context=context_length(config, context)))
    if found and ropes[0] != ropes[1]:
        check_window_rope(ropes[1])
        found["window_rope"] = ropes[1]
    return {**found, "rope": ropes[0]}


def check_window_rope(rope: Mapping[str, Any]) -> None:
    if rope["rope_type"] in ("dynamic", "longrope"):
        raise ValueError(
            f"config.json's rope of layers with a window has rope_type={rope['rope_type']!r}, which is not supported; "
            "give a model whose rope there does not depend on the length"
        )


def cap(config: Config, key: str, default: float | None) -> float:
    """Return a soft cap; 0 if it is null."""
    return 0.0 if config.get(key, default) is None else float(typed.number(config, key, default))
