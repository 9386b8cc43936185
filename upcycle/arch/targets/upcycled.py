"""Our own architecture: it holds any dense model of a family and its MoE, and ships a modelling file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from upcycle.arch.abilities import EITHER, Abilities
from upcycle.arch.families.common import Config, Family, cap, check_window_rope, context_length, layers, rope
from upcycle.arch.slots import Slot, expert_slots, ffn_slots
from upcycle.arch.spec import ORDERS, SCORES, MoESpec
from upcycle.arch.targets import common
from upcycle.io import typed
from upcycle.io.strict import short

MODELING = Path(__file__).parent.parent / "remote" / "modeling_upcycled.py"  # copied into the output folder
CONTEXT = 2048
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,39}")  # of a part
ABILITIES = Abilities(
    stock=False,
    blocks=frozenset({"pre", "post", "parallel", "sandwich"}),
    norms=frozenset({"rms", "rms1p", "layernorm", "layernorm1p"}),
    qk_norms=frozenset({"none", "head", "full"}),
    qkv_bias=EITHER,
    out_bias=EITHER,
    ffn_bias=EITHER,
    activations=frozenset(common.HF_ACTIVATIONS),
    not_gated=True,
    partial_rotary=True,
    windows="any",
    multipliers=True,
    ropes=True,
    caps=True,
    scores=frozenset({"softmax", "sigmoid"}),
    normalize=EITHER,
    choices=frozenset({"any", "each-slice"}),
    shared="any",
    mixed="any",
    output_scale=True,
    uneven=True,
    router_fp32=True,
)
FLAGS = {
    "gated": ("gated", True),
    "qkv_bias": ("qkv_bias", False),
    "out_bias": ("out_bias", False),
    "ffn_bias": ("mlp_bias", False),
}


class Upcycled(common.Target):
    """A target whose config.json states every field of an MoESpec."""

    def config(self, moe: MoESpec) -> dict[str, Any]:
        base = common.base_config(moe, self.name, self.architecture, self.can)
        return {key: value for key, value in base.items() if key != "rms_norm_eps"} | keys(moe)

    def read(self, config: Config) -> MoESpec:
        d = self.dense.read(config)
        widths = tuple(typed.wholes(config, "expert_widths", low=1, high=typed.LARGEST))
        slices = typed.whole(config, "expert_slices", 1)
        moe = MoESpec(
            dense=d,
            layers=tuple(typed.wholes(config, "moe_layers", low=0, high=d.layers - 1)),
            widths=widths,
            top_k=typed.whole(config, "num_experts_per_tok", 2),
            copies=len(widths) // slices,
            granularity=slices,
            choice="each-slice" if slices > 1 else "any",
            shared=typed.whole(config, "shared_expert_intermediate_size", 0, low=0),
            score=typed.word(config, "scoring_func", "softmax", SCORES),
            order=typed.word(config, "router_order", "softmax-then-topk", ORDERS),
            normalize=typed.flag(config, "norm_topk_prob", True),
            output_scale=typed.number(config, "routed_scaling_factor", 1.0),
            dtype=d.dtype,
            parts=parts_of(config, len(widths) // slices),
        )
        return common.checked(moe, self.can) if moe.layers else moe  # a model without MoE layers is a plain dense model

    def notes(self, moe: MoESpec) -> list[str]:
        return [f"the folder ships {MODELING.name}, which transformers runs only with trust_remote_code=True"]


def keys(moe: MoESpec) -> dict[str, Any]:
    d = moe.dense
    return {
        "norm_eps": d.norm_eps,  # not every norm of ours is an RMS norm
        "auto_map": {
            "AutoConfig": f"{MODELING.stem}.UpcycledConfig",
            "AutoModel": f"{MODELING.stem}.UpcycledModel",  # vLLM loads this one
            "AutoModelForCausalLM": f"{MODELING.stem}.UpcycledForCausalLM",
        },
        # AutoTokenizer without trust_remote_code reads this as a config of type "", and warns if it has no such entry
        "tokenizer": {"model_type": ""},
        "intermediate_size": d.ffn,
        "gated": d.gated,
        "block": d.block,
        "norm": d.norm,
        "qk_norm": d.qk_norm,
        "qkv_bias": d.qkv_bias,
        "out_bias": d.out_bias,
        "mlp_bias": d.ffn_bias,
        "sliding_window": d.window if d.window_layers else None,
        "layer_types": common.layer_types(moe),
        "attention_multiplier": d.attention_scale,
        "embedding_multiplier": d.embed_scale,
        "residual_multiplier": d.residual_scale,
        "logit_multiplier": d.logit_scale,
        **({"sliding_rope_parameters": dict(d.window_rope)} if d.window_rope is not None else {}),
        **({"nope_layers": list(d.nope_layers)} if d.nope_layers else {}),
        **({"attn_logit_softcapping": d.attention_cap} if d.attention_cap else {}),
        **({"final_logit_softcapping": d.logit_cap} if d.logit_cap else {}),
        "moe_layers": list(moe.layers),
        "expert_widths": list(moe.widths),
        "shared_expert_intermediate_size": moe.shared,
        "num_experts_per_tok": moe.top_k,
        "scoring_func": moe.score,
        "router_order": moe.order,
        "norm_topk_prob": moe.normalize,
        "routed_scaling_factor": moe.output_scale,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.01,
        **({"expert_slices": moe.slices} if moe.slices > 1 else {}),
        **({"expert_parts": [list(part) for part in moe.parts]} if moe.parts else {}),
    }


def parts_of(config: Config, copies: int) -> tuple[tuple[str, int], ...]:
    """Return the name and the number of copies of each part; raise a ValueError unless they fit a model of `copies`."""
    found = config.get("expert_parts")
    if found is None:
        return ()
    pairs: list[Any] = found if isinstance(found, list) else [None]
    right = [isinstance(pair, list) and list(map(type, pair)) == [str, int] and pair[1] > 0 for pair in pairs]
    if not all(right) or sum(pair[1] for pair in pairs) != copies - 1:
        raise ValueError(
            f"config.json has expert_parts {short(found)}; it must be a list like [['law', 1]] whose numbers add up to "
            f"{copies - 1}, the copies of an FFN without the first"
        )
    return tuple((check_name(name), count) for name, count in pairs)


def check_name(name: str) -> str:
    """Return a part's name; raise a ValueError unless it is a short word."""
    if not NAME.fullmatch(name):
        raise ValueError(
            f"a part is called {short(name)}; a name has 1 to 40 letters, digits, - and _, and begins with a letter"
        )
    return name


def own(config: Config) -> dict[str, Any]:
    windows = {"sliding_window": None, "max_window_layers": config.get("num_hidden_layers"), **config}
    return {
        "block": typed.word(config, "block", "pre", ABILITIES.blocks),
        "norm": typed.word(config, "norm", "rms", ABILITIES.norms),
        "qk_norm": typed.word(config, "qk_norm", "none", ABILITIES.qk_norms),
        "attention_scale": typed.number(config, "attention_multiplier", 0.0, low=0),
        "embed_scale": typed.number(config, "embedding_multiplier", 1.0),
        "residual_scale": typed.number(config, "residual_multiplier", 1.0),
        "logit_scale": typed.number(config, "logit_multiplier", 1.0),
        "attention_cap": cap(config, "attn_logit_softcapping", None),
        "logit_cap": cap(config, "final_logit_softcapping", None),
        "window_rope": sliding_rope(config),
        "nope_layers": tuple(typed.wholes(config, "nope_layers", [], low=0, high=layers(config) - 1)),
        **common.some_windows(windows),
    }


def sliding_rope(config: Config) -> dict[str, Any] | None:
    if config.get("sliding_rope_parameters") is None:
        return None
    stated = {**config, "rope_scaling": None, "rope_parameters": config["sliding_rope_parameters"]}
    found = rope(stated, context=context_length(config, CONTEXT), partial=1.0)
    check_window_rope(found)
    return found


def block(moe: MoESpec, layer: int) -> Iterator[Slot]:
    gate = moe.dense.gated
    yield from expert_slots(moe, layer, bias=moe.score == "sigmoid", gate=gate)
    if moe.shared:
        yield from ffn_slots(moe, f"model.layers.{layer}.mlp.shared_experts", f"layers.{layer}.shared", gate=gate)


TARGET = Upcycled(
    Family(
        "upcycled",
        context=CONTEXT,
        kv_heads=4,
        head_dim=16,
        eps=("norm_eps", 1e-6),
        flags=FLAGS,
        rope={"partial": 1.0},
        own=own,
    ),
    ABILITIES,
    block=block,
    architecture="UpcycledForCausalLM",
    modeling=MODELING,
)
