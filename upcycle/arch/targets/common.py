"""What the targets share: abilities as data and the reasons for a refusal, config.json written (`base_config`) and read
back (`view`), and the tensor names of the Llama line (`llama_slots`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isclose, prod
from typing import Any, Literal, NamedTuple

from upcycle.arch.families.common import Config, windows_by_layer
from upcycle.arch.spec import MAX_EXPERTS, MAX_EXPERTS_IN_ALL, DenseSpec, MoESpec
from upcycle.io import typed
from upcycle.io.strict import short

NO, YES, EITHER = frozenset({False}), frozenset({True}), frozenset({False, True})


class Slot(NamedTuple):
    """One tensor on disk: the roles it holds, stacked along dim 0, then viewed as `shape`. With an `order`: viewed as
    `view`, its dimensions (but the first, of experts) put in this order, and that viewed as `shape`."""

    name: str
    roles: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str = ""  # "": the model's dtype; a correction bias is float32
    view: tuple[int, ...] = ()
    order: tuple[int, ...] = ()


@dataclass(frozen=True)
class Abilities:
    stock: bool = True  # transformers has the architecture, so the folder needs no code of ours
    # -- the dense part
    blocks: frozenset[str] = frozenset({"pre"})
    norms: frozenset[str] = frozenset({"rms"})  # rms1p becomes rms by adding 1, so {"rms"} holds both
    qk_norms: frozenset[str] = frozenset({"none"})
    qkv_bias: frozenset[bool] = NO
    out_bias: frozenset[bool] = NO
    ffn_bias: frozenset[bool] = NO
    activations: frozenset[str] = frozenset({"silu", "gelu", "gelu_tanh", "relu"})
    not_gated: bool = False
    free_head_dim: bool = True  # head_dim need not be hidden / heads
    partial_rotary: bool = False
    windows: Literal["none", "all", "any"] = "none"  # sliding attention: in no layer, in all or none, in any set
    multipliers: bool = False  # embed_scale, residual_scale, logit_scale, attention_scale
    ropes: bool = False  # another rope in layers with a window, or none in some layers
    caps: bool = False  # soft caps of attention and of the logits
    # -- the MoE part
    scores: frozenset[str] = frozenset({"softmax"})
    normalize: frozenset[bool] = YES
    choices: frozenset[str] = frozenset({"any"})
    # widths of a shared expert; multiple: of the routed width; same: the routed width
    shared: Literal["none", "any", "multiple", "same"] = "none"
    mixed: Literal["none", "first-dense", "any"] = "none"  # which sets of layers may stay dense
    output_scale: bool = False  # has routed_scaling_factor
    uneven: bool = False  # experts of different widths
    router_fp32: bool = False  # computes router logits in float32 whatever the model's dtype


def relu2_as_gated(moe: MoESpec, can: Abilities) -> bool:
    """relu(u) * u = relu(u)^2: a gated target with gate = up and act = relu holds squared ReLU exactly."""
    return moe.dense.activation == "relu2" and not moe.dense.gated and not can.not_gated and "relu" in can.activations


def refusals(can: Abilities, moe: MoESpec) -> list[str]:
    """The reasons why the target cannot hold `moe`, as short clauses; empty if it holds `moe` exactly."""
    d = moe.dense
    checks = {
        f"block layout {d.block!r}": d.block in can.blocks,
        f"norm {d.norm!r}": d.norm in can.norms or (d.norm == "rms1p" and "rms" in can.norms),
        f"q/k norm {d.qk_norm!r} (it has {' or '.join(sorted(can.qk_norms))})": d.qk_norm in can.qk_norms,
        "biases on q, k, v" if d.qkv_bias else "q, k, v without biases": d.qkv_bias in can.qkv_bias,
        f"an attention output {'with' if d.out_bias else 'without'} bias": d.out_bias in can.out_bias,
        "biases in the FFN": d.ffn_bias in can.ffn_bias,
        f"activation {d.activation!r}": d.activation in can.activations or relu2_as_gated(moe, can),
        "an FFN without gate": d.gated or can.not_gated or relu2_as_gated(moe, can),
        f"head_dim {d.head_dim} that is not hidden/heads": can.free_head_dim or d.head_dim * d.heads == d.hidden,
        f"partial rotary {d.partial_rotary}": can.partial_rotary or d.partial_rotary == 1.0,
        "sliding windows": windows_fit(can, d),
        "embedding, residual, logit or attention multipliers": can.multipliers or not has_multipliers(d),
        "another rope in the layers with a window": can.ropes or d.window_rope is None,
        f"layers without rotary positions ({len(d.nope_layers)} of {d.layers})": can.ropes or not d.nope_layers,
        "soft caps": can.caps or not (d.attention_cap or d.logit_cap),
        f"{moe.score} scores": moe.score in can.scores,
        f"weights {'' if moe.weights_sum_to_one else 'not '}normalised over the chosen": moe.weights_sum_to_one
        in can.normalize,
        "a choice in each slice": moe.choice in can.choices,
        "a shared expert": not moe.shared or can.shared != "none",
        f"a shared expert of {moe.shared} neurons (a multiple of the routed width it must be)": not moe.shared
        or can.shared not in ("multiple", "same")
        or (moe.uniform and moe.shared % moe.width == 0),
        f"a shared expert of {moe.shared} neurons (as wide as a routed one it must be)": not moe.shared
        or can.shared != "same"
        or (moe.uniform and moe.shared == moe.width),
        f"MoE in only {len(moe.layers)} of {d.layers} layers"
        + (" other than the last ones" if can.mixed == "first-dense" else ""): moe.all_layers
        or can.mixed == "any"
        or (can.mixed == "first-dense" and moe.first_dense is not None),
        "experts of different widths": moe.uniform or can.uneven,
        "a single expert (the router adds up the best two of a group)": moe.experts > 1 or "softmax" in can.scores,
        "an output scale": moe.output_scale == 1.0 or can.output_scale,
    }
    return [reason for reason, fits in checks.items() if not fits]


def has_multipliers(d: DenseSpec) -> bool:
    plain = d.embed_scale == d.residual_scale == d.logit_scale == 1.0
    return not (plain and isclose(d.attention_scale, d.head_dim**-0.5))


def windows_fit(can: Abilities, d: DenseSpec) -> bool:
    if d.window is None or not d.window_layers or d.window >= d.context or can.windows == "any":
        return True
    return can.windows == "all" and d.window_layers == tuple(range(d.layers))


# ---- config.json

HF_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu", "relu2": "relu2"}


def base_config(moe: MoESpec, model_type: str, architecture: str, can: Abilities) -> dict[str, Any]:
    """The keys that every decoder's config.json has."""
    d = moe.dense
    # Loaders older than transformers 5 know only these keys, and without them silently take theta = 10000.
    old_rope: dict[str, Any] = {"rope_theta": d.rope["rope_theta"]}
    if d.rope["rope_type"] != "default":
        old_rope["rope_scaling"] = {key: value for key, value in d.rope.items() if key != "rope_theta"}
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": d.vocab,
        "hidden_size": d.hidden,
        "num_hidden_layers": d.layers,
        "num_attention_heads": d.heads,
        "num_key_value_heads": d.kv_heads,
        "head_dim": d.head_dim,
        "hidden_act": "relu" if relu2_as_gated(moe, can) else HF_ACTIVATIONS[d.activation],
        "max_position_embeddings": d.context,
        "rms_norm_eps": d.norm_eps,
        "rope_parameters": dict(d.rope),
        **old_rope,
        "tie_word_embeddings": d.tied,
        "attention_dropout": 0.0,
        "initializer_range": d.init_std,
        "use_cache": True,
        "dtype": moe.dtype,
        # Some classes default to a token of their own vocabulary, so a model without one must state null.
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **d.tokens,
    }


def window_of_all(moe: MoESpec) -> int | None:
    """The sliding window if every layer has one."""
    return moe.dense.window if moe.dense.window_layers == tuple(range(moe.dense.layers)) else None


def sigmoid_config(moe: MoESpec) -> dict[str, Any]:
    """The keys of the DeepSeek-V3 line: sigmoid scores, a correction bias, shared experts, an output scale."""
    return {
        "intermediate_size": moe.dense.ffn,
        "moe_intermediate_size": moe.width,
        "n_routed_experts": moe.experts,
        "n_shared_experts": shared_width(moe, moe.width) // moe.width,
        "num_experts_per_tok": moe.top_k,
        "norm_topk_prob": moe.normalize,
        "routed_scaling_factor": float(moe.output_scale),
        # one group: with more, the router first narrows the choice to a few groups, which could split a copy
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "output_router_logits": False,
    }


# ---- config.json, read back


def view(
    config: Config,
    can: Abilities,
    dense: DenseSpec,
    *,
    width: str = "moe_intermediate_size",
    layers: Iterable[int] | None = None,
    **different: Any,
) -> MoESpec:
    """The MoESpec of `config` as its target sees it; a ValueError for what the target cannot hold.

    `width`: the target's key for the width of an expert; `layers`: the MoE layers, by default all; `different`: MoESpec
    fields that are set directly. A config.json does not say how the experts were made, so each counts as a whole copy.
    """
    # the key differs between classes and between transformers 4 and 5, and every class reads several of them
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = typed.whole(
        config, next((name for name in names if config.get(name) is not None), names[0]), high=MAX_EXPERTS
    )
    moe = MoESpec(
        dense=dense,
        layers=tuple(range(dense.layers) if layers is None else layers),
        widths=(typed.whole(config, width),) * experts,
        top_k=typed.whole(config, "num_experts_per_tok"),
        copies=experts,
        dtype=dense.dtype,
        **different,
    )
    return checked(moe, can)


def checked(moe: MoESpec, can: Abilities) -> MoESpec:
    """`moe` itself; a ValueError with all reasons if the target cannot hold it."""
    reasons = refusals(can, moe)
    if not moe.layers:
        reasons.append("no MoE layer")
    if moe.experts % moe.slices or moe.top_k % moe.slices:
        reasons.append(f"{moe.slices} slices, which {moe.experts} experts and top-{moe.top_k} are no multiple of")
    if len(moe.layers) * moe.experts > MAX_EXPERTS_IN_ALL:
        reasons.append(f"{len(moe.layers)} layers of {moe.experts} experts, more than {MAX_EXPERTS_IN_ALL} in all")
    if moe.groups > 1 and (moe.experts % moe.groups or moe.experts < 2 * moe.groups or moe.group_top_k > moe.groups):
        reasons.append(f"the best {moe.group_top_k} of {moe.groups} groups of {moe.experts} experts")
    elif moe.top_k > moe.choosable:
        reasons.append(f"{moe.top_k} experts for each token, of {moe.choosable}")
    if reasons:
        raise ValueError(
            f"config.json says of this {moe.dense.family} model: {', '.join(reasons)}; that cannot be read, "
            "so give a model without it"
        )
    return moe


def only(config: Config, **held: Any) -> None:
    """Raise a ValueError if a key of `config` has another value than in `held`, the only one that slots() and MoESpec
    can represent. An absent key or null is fine."""
    for key, value in held.items():
        if config.get(key) not in (None, value):
            raise ValueError(
                f"config.json of this {typed.model_type(config)} model has {key}={short(config[key])}, "
                f"but only {value!r} can be read; give a model that has it so"
            )


def some_windows(config: Config) -> dict[str, Any]:
    """DenseSpec's window fields for a class without the switch use_sliding_window."""
    sliding = windows_by_layer({**config, "use_sliding_window": True})
    return sliding if sliding["window_layers"] else {}


def stepped_layers(config: Config, layers: int) -> tuple[int, ...]:
    """Qwen's MoE layers: every decoder_sparse_step-th, except those in mlp_only_layers."""
    step = typed.whole(config, "decoder_sparse_step", 1)
    dense = set(typed.wholes(config, "mlp_only_layers", [], low=0, high=typed.LARGEST))
    return tuple(layer for layer in range(step - 1, layers, step) if layer not in dense)


def sigmoid_view(
    config: Config,
    can: Abilities,
    dense: DenseSpec,
    *,
    normalize: bool,
    shared: int | None,
    layers: Iterable[int],
    scale: float = 1.0,
    **different: Any,
) -> MoESpec:
    """The MoESpec of a config of the DeepSeek-V3 line (sigmoid_config). normalize, shared, scale: the class's
    defaults; different: as of `view`."""
    only(
        config,
        scoring_func="sigmoid",
        moe_layer_freq=1,
        tie_word_embeddings=False,  # slots() always has the head
        # with more, the choice is first narrowed to a few groups of experts
        **({} if "groups" in different else {"n_group": 1, "topk_group": 1}),
    )
    return view(
        config,
        can,
        dense,
        layers=layers,
        shared=typed.whole(config, "moe_intermediate_size") * typed.whole(config, "n_shared_experts", shared),
        score="sigmoid",
        normalize=typed.flag(config, "norm_topk_prob", normalize),
        output_scale=typed.number(config, "routed_scaling_factor", scale),
        **different,
    )


# ---- notes


def notes(moe: MoESpec, can: Abilities, more: Mapping[str, bool] | None = None) -> list[str]:
    """Sentences that a user should read before choosing this target; `more` maps a sentence to whether it applies."""
    relu2, d = relu2_as_gated(moe, can), moe.dense
    sentences = {
        "squared ReLU is held as relu(gate) * up with gate = up: exact, at +50 % FFN parameters": relu2,
        "vLLM runs this architecture with silu only; use transformers": d.activation != "silu",
        "vLLM drops the attention output's bias in this architecture; use transformers": d.out_bias,
    } | dict(more or {})
    return [sentence for sentence, applies in sentences.items() if applies]


def untied_note(moe: MoESpec) -> dict[str, bool]:
    return {"the tied head is written out: vLLM never ties this architecture": moe.dense.tied}


def empty_shared_note(moe: MoESpec, width: int) -> dict[str, bool]:
    sentence = (
        f"a shared expert is mandatory here: without one, {width} zero neurons a layer are written, and stay zero"
    )
    return {sentence: not moe.shared}


# ---- tensors

LLAMA = {
    "embed": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_out_norm": "attention_out_layernorm", "ffn_out_norm": "mlp_out_layernorm",  # in `upcycled` alone
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip


def one(moe: MoESpec, name: str, role: str, dtype: str = "") -> Slot:
    """A slot of one role, in the role's shape."""
    return Slot(name, (role,), moe.shape(role), dtype)


def stack(moe: MoESpec, name: str, roles: list[str], shape: tuple[int, ...]) -> Slot:
    """A slot of several roles, stacked and viewed as `shape`."""
    assert sum(prod(moe.shape(role)) for role in roles) == prod(shape), name
    return Slot(name, tuple(roles), shape)


def global_slots(moe: MoESpec, names: Mapping[str, str] = LLAMA, *, untie: bool = False) -> Iterator[Slot]:
    """Slots of embedding, last norm and head. untie: write the head of a tied model too."""
    for role in moe.dense.global_shapes():
        part, kind = role.rsplit(".", 1)
        yield one(moe, f"{names[part]}.{kind}", role)
    if moe.dense.tied and untie:
        yield one(moe, f"{names['head']}.weight", "head.weight")


def attention_slots(
    moe: MoESpec,
    layer: int,
    names: Mapping[str, str] = LLAMA,
    *,
    zero_qkv_bias: bool = False,
    zero_out_bias: bool = False,
) -> Iterator[Slot]:
    """Slots of norms and attention of one layer. zero_*_bias: write these biases even if the donor has none."""
    roles = list(moe.dense.attention_shapes())
    if zero_qkv_bias and not moe.dense.qkv_bias:
        roles += ["q.bias", "k.bias", "v.bias"]
    if zero_out_bias and not moe.dense.out_bias:
        roles += ["o.bias"]
    for role in roles:
        part, kind = role.rsplit(".", 1)
        yield one(moe, f"model.layers.{layer}.{names[part]}.{kind}", f"layers.{layer}.{role}")


def ffn_slots(
    moe: MoESpec,
    prefix: str,
    role: str,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    *,
    gate: bool | None = None,
) -> Iterator[Slot]:
    """Slots of one FFN: dense (role 'layers.L'), expert ('layers.L.experts.I') or shared ('layers.L.shared').

    gate=True writes a gate even if the donor has none (see relu2_as_gated).
    """
    parts = ("gate", "up", "down") if (moe.dense.gated if gate is None else gate) else ("up", "down")
    name_of = dict(zip(("gate", "up", "down"), names, strict=True))
    for part in parts:
        yield one(moe, f"{prefix}.{name_of[part]}.weight", f"{role}.{part}.weight")
        if moe.dense.ffn_bias:
            yield one(moe, f"{prefix}.{name_of[part]}.bias", f"{role}.{part}.bias")


def expert_slots(moe: MoESpec, layer: int) -> Iterator[Slot]:
    """Slots of router and routed experts, by the names that most architectures share."""
    prefix, role = f"model.layers.{layer}.mlp", f"layers.{layer}"
    yield one(moe, f"{prefix}.gate.weight", f"{role}.router.weight")
    for i in range(moe.experts):
        yield from ffn_slots(moe, f"{prefix}.experts.{i}", f"{role}.experts.{i}", gate=True)


def shared_width(moe: MoESpec, least: int) -> int:
    """The width of a mandatory shared expert: `least` neurons of zeros if the model has none.

    Tensors of size 0 would do as well, but vLLM refuses them.
    """
    return moe.shared or least


def shared_slots(moe: MoESpec, layer: int, name: str, least: int) -> Iterator[Slot]:
    """Slots of the mandatory shared expert (shared_width)."""
    width, hidden = shared_width(moe, least), moe.dense.hidden
    for part, shape in {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}.items():
        file_name = f"model.layers.{layer}.mlp.{name}.{part}_proj.weight"
        yield Slot(file_name, (f"layers.{layer}.shared.{part}.weight",), shape)


def sigmoid_slots(moe: MoESpec, layer: int) -> Iterator[Slot]:
    """Slots of one MoE block of the DeepSeek-V3 line."""
    router, *experts = expert_slots(moe, layer)
    yield router
    yield one(moe, f"model.layers.{layer}.mlp.gate.e_score_correction_bias", f"layers.{layer}.router.bias", "float32")
    yield from experts
    yield from shared_slots(moe, layer, "shared_experts", moe.width)


def llama_slots(
    moe: MoESpec,
    moe_layer: Callable[[int], Iterable[Slot]],
    *,
    untie: bool = False,
    zero_qkv_bias: bool = False,
    zero_out_bias: bool = False,
    names: Mapping[str, str] = LLAMA,
    gate: bool | None = None,
) -> Iterator[Slot]:
    """Slots of a whole Llama-like model; `moe_layer(layer)` yields those of one MoE block."""
    yield from global_slots(moe, names, untie=untie)
    for layer in range(moe.dense.layers):
        yield from attention_slots(moe, layer, names, zero_qkv_bias=zero_qkv_bias, zero_out_bias=zero_out_bias)
        if layer in moe.layers:
            yield from moe_layer(layer)
        else:
            yield from ffn_slots(moe, f"model.layers.{layer}.mlp", f"layers.{layer}", gate=gate)
