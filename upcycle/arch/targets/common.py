"""Read the config.json of an MoE architecture and list its tensors (`Native`); write a config.json too (`Target`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from upcycle.arch.abilities import Abilities, refusals, relu2_as_gated
from upcycle.arch.families.common import Config, Family, windows_by_layer
from upcycle.arch.slots import LLAMA, Slot, expert_slots, model_slots
from upcycle.arch.spec import MAX_EXPERTS, MAX_EXPERTS_IN_ALL, DenseSpec, MoESpec
from upcycle.io import typed
from upcycle.io.strict import short

HF_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu", "relu2": "relu2"}


@dataclass(frozen=True)
class Native:
    """An MoE architecture: what it can hold, how its config.json is read, and its tensors.

    A config.json does not say how the experts were made, so `read` counts each expert as a whole copy.
    """

    dense: Family  # everything except the experts
    can: Abilities
    moe: Callable[[Config, DenseSpec], Mapping[str, Any]] = lambda config, dense: {}  # the MoESpec fields that keys set
    block: Callable[[MoESpec, int], Iterator[Slot]] = expert_slots  # the tensors of one MoE block
    width: str = "moe_intermediate_size"  # the key for an expert's width
    only: Mapping[str, Any] = field(default_factory=dict)  # keys that may have only one value, and the value
    names: Mapping[str, str] = field(default_factory=lambda: LLAMA)  # the names of modules
    unties: bool = False  # the folder of a tied model also holds its head

    @property
    def name(self) -> str:
        return self.dense.name

    def read(self, config: Config) -> MoESpec:
        """Return the MoESpec of a config.json; raise a ValueError if the architecture cannot hold its values."""
        dense = self.dense.read(config)
        only(config, self.only)
        experts = count_of_experts(config)
        fields = {
            "layers": tuple(range(dense.layers)),
            "widths": (typed.whole(config, self.width),) * experts,
            "top_k": typed.whole(config, "num_experts_per_tok"),
            "copies": experts,
            "dtype": dense.dtype,
        }
        return checked(MoESpec(dense, **{**fields, **self.moe(config, dense)}), self.can)

    def slots(self, moe: MoESpec) -> Iterator[Slot]:
        """Yield every tensor on disk, in the order of the file."""
        biases = self.biases(moe.dense)
        gate = moe.dense.gated or not self.can.not_gated
        return model_slots(moe, self.block, self.names, gate=gate, untie=self.unties, biases=biases)

    def biases(self, dense: DenseSpec) -> list[str]:
        """Return the biases that attention must have in this architecture, even if the dense model has none."""
        one_switch = len({self.dense.flags.get(name, name) for name in ("qkv_bias", "out_bias")}) == 1
        switched = one_switch and (dense.qkv_bias or dense.out_bias)
        qkv = ["q.bias", "k.bias", "v.bias"] if switched or self.dense.fixed.get("qkv_bias") else []
        return qkv + (["o.bias"] if switched else [])


@dataclass(frozen=True)
class Target(Native):
    """An MoE architecture that a dense model can become."""

    architecture: str = ""  # the name of the class
    keys: Callable[[MoESpec], Mapping[str, Any]] = lambda moe: {}  # the keys of config.json on the experts
    warns: Callable[[MoESpec], Mapping[str, bool]] = lambda moe: {}  # a sentence for the plan -> whether it applies
    least: Callable[[MoESpec], int] = lambda moe: 0  # neurons of a mandatory shared expert; 0 if it is not mandatory
    modeling: Path | None = None  # code that the folder needs; None: transformers has it

    def config(self, moe: MoESpec) -> dict[str, Any]:
        """Return the config.json that transformers reads."""
        return {**base_config(moe, self.name, self.architecture, self.can), **self.keys(moe)}

    def forced(self, moe: MoESpec) -> int:
        """Return the zero neurons of the shared expert that each MoE layer must have although the model has none."""
        return 0 if moe.shared else self.least(moe)

    def notes(self, moe: MoESpec) -> list[str]:
        """Return the sentences that a user should read before choosing this target."""
        tied = {"the tied head is written out: vLLM never ties this architecture": moe.dense.tied and self.unties}
        instead = "; target=upcycled has none"
        return notes(moe, self.can, {**self.warns(moe), **tied}, self.forced(moe), instead)


# ---- config.json, written


def base_config(moe: MoESpec, model_type: str, architecture: str, can: Abilities) -> dict[str, Any]:
    """Return the keys that every decoder's config.json has."""
    d = moe.dense
    # Loaders older than transformers 5 know only these keys; without them they silently assume theta = 10000.
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
        # Some classes have a token of their own as default, so a model without such a token must state null.
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **d.tokens,
    }


def attention_bias(moe: MoESpec) -> bool:
    """Return the value of the one switch for all four biases of attention."""
    return moe.dense.qkv_bias or moe.dense.out_bias


def window_of_all(moe: MoESpec) -> int | None:
    """Return the sliding window if every layer has one."""
    return moe.dense.window if moe.dense.window_layers == tuple(range(moe.dense.layers)) else None


def layer_types(moe: MoESpec) -> list[str]:
    kinds = ("full_attention", "sliding_attention")
    return [kinds[moe.dense.window is not None and i in moe.dense.window_layers] for i in range(moe.dense.layers)]


# ---- config.json, read


def count_of_experts(config: Config) -> int:
    """Return the number of experts; its key differs between classes and versions of transformers."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    stated = next((name for name in names if config.get(name) is not None), names[0])
    return typed.whole(config, stated, high=MAX_EXPERTS)


def checked(moe: MoESpec, can: Abilities) -> MoESpec:
    """Return `moe` unchanged; raise a ValueError with all reasons if the target cannot hold it."""
    reasons = refusals(can, moe)
    if not moe.layers:
        reasons.append("no MoE layer")
    if moe.experts % moe.slices or moe.top_k % moe.slices:
        reasons.append(f"{moe.slices} slices, but {moe.experts} experts and top-{moe.top_k} must be multiples of that")
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


def only(config: Config, held: Mapping[str, Any]) -> None:
    """Raise a ValueError if a key has another value than in `held`; the key may be absent or null."""
    for key, value in held.items():
        if config.get(key) not in (None, value):
            raise ValueError(
                f"config.json of this {typed.model_type(config)} model has {key}={short(config[key])}, "
                f"but only {value!r} can be read; give a model with that value"
            )


def refuse_quantised(config: Config, advice: str) -> None:
    if config.get("quantization_config"):
        raise ValueError(
            f"config.json of this {typed.model_type(config)} model has 'quantization_config', and training needs the "
            f"weights themselves; {advice}"
        )


def some_windows(config: Config) -> dict[str, Any]:
    """Return the fields of windows for a class without the switch use_sliding_window."""
    sliding = windows_by_layer({**config, "use_sliding_window": True})
    return sliding if sliding["window_layers"] else {}


# ---- Qwen's MoE layers


def stepped_keys(moe: MoESpec) -> dict[str, Any]:
    return {
        "norm_topk_prob": moe.weights_sum_to_one,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer in range(moe.dense.layers) if layer not in moe.layers],
    }


def stepped_moe(config: Config, dense: DenseSpec) -> dict[str, Any]:
    """Return the fields of Qwen's MoE: every decoder_sparse_step-th layer, except those in mlp_only_layers."""
    step = typed.whole(config, "decoder_sparse_step", 1)
    plain = set(typed.wholes(config, "mlp_only_layers", [], low=0, high=typed.LARGEST))
    layers = tuple(layer for layer in range(step - 1, dense.layers, step) if layer not in plain)
    return {"layers": layers, "normalize": typed.flag(config, "norm_topk_prob")}


# ---- DeepSeek-V3 and its kin: sigmoid scores, a correction bias, shared experts, an output scale

SIGMOID = {"scoring_func": "sigmoid", "moe_layer_freq": 1, "tie_word_embeddings": False}  # the slots include the head
# with more groups the router first chooses a few groups, which could split a copy
ONE_GROUP = {"n_group": 1, "topk_group": 1}


def sigmoid_keys(moe: MoESpec) -> dict[str, Any]:
    return {
        "intermediate_size": moe.dense.ffn,
        "moe_intermediate_size": moe.width,
        "n_routed_experts": moe.experts,
        "n_shared_experts": (moe.shared or moe.width) // moe.width,
        "num_experts_per_tok": moe.top_k,
        "norm_topk_prob": moe.normalize,
        "routed_scaling_factor": float(moe.output_scale),
        **ONE_GROUP,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "output_router_logits": False,
    }


def sigmoid_moe(
    config: Config,
    dense: DenseSpec,
    *,
    normalize: bool,
    shared: int | None,
    first_dense: int | None = None,
    scale: float = 1.0,
) -> dict[str, Any]:
    """Return the fields of an MoE like DeepSeek-V3.

    The arguments are the defaults of the class. If first_dense is None, the class has no such key.
    """
    first = 0 if first_dense is None else typed.whole(config, "first_k_dense_replace", first_dense, low=0)
    return {
        "layers": tuple(range(min(first, dense.layers), dense.layers)),
        "shared": typed.whole(config, "moe_intermediate_size") * typed.whole(config, "n_shared_experts", shared),
        "score": "sigmoid",
        "normalize": typed.flag(config, "norm_topk_prob", normalize),
        "output_scale": typed.number(config, "routed_scaling_factor", scale),
    }


# ---- notes


def notes(moe: MoESpec, can: Abilities, more: Mapping[str, bool], forced: int, instead: str = "") -> list[str]:
    """Return the sentences that apply: general ones, `more`, and one on a mandatory shared expert of zeros."""
    d = moe.dense
    sentences = {
        "squared ReLU is held as relu(gate) * up with gate = up: exact, at +50 % FFN parameters": relu2_as_gated(
            moe, can
        ),
        "vLLM runs this architecture with silu only; use transformers": d.activation != "silu",
        "vLLM drops the attention output's bias in this architecture; use transformers": d.out_bias,
        **more,
        f"this target always computes a shared expert: {forced} zero neurons a layer are written, and stay zero"
        f"{instead}": forced > 0,
    }
    return [sentence for sentence, applies in sentences.items() if applies]
