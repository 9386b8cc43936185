"""Pair dense architectures of transformers with a mixture of experts that is built the same way (a sibling).

A conversion changes only FFNs. If the two architectures are the same in everything else, this code does not need to
understand the rest: it copies every other tensor under its own name, and copies config.json with the keys of the MoE
blocks added. Each row of PAIRS is one pair. Such a model is planned, converted and verified like any other. The decoder
of `training` cannot compute it, because that decoder needs a complete DenseSpec.

From a row, `Dense` does the job of a file in families/, and `MoE` the job of a file in targets/.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from upcycle.arch.abilities import Abilities, refusals
from upcycle.arch.families.common import ROTARY_BUFFERS, Config, Family, Source, layers, refuse_foreign
from upcycle.arch.slots import GATED, PARTS, Slot, ffn_slots, one, shared_slots
from upcycle.arch.spec import Carried, DenseSpec, MoESpec
from upcycle.arch.targets import common, granitemoe
from upcycle.io import typed
from upcycle.io.checkpoint import Entry

LEAST = 64  # neurons of zeros where a shared expert is mandatory and the plan has none
ROPE = {"rope_type": "default", "rope_theta": 10000.0}  # a stand-in: the real rope stays in config.json
# keys that do not describe the model, or describe the dense one
LEFT_OUT = ("architectures", "auto_map", "torch_dtype", "transformers_version", "_name_or_path")
# keys whose values may differ between donors
FREE = {
    *LEFT_OUT, "dtype", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "max_position_embeddings",
    "use_cache",
}  # fmt: skip
PREFIXES = ("model.", "model.language_model.")  # of the decoder's tensors; the second is for models with images


def width_stated(config: Config) -> int:
    return typed.whole(config, "intermediate_size")


def width_of_lfm2(config: Config) -> int:
    """Return the FFN width; by default it is two thirds of the stated width, rounded up."""
    width = typed.whole(config, "block_ff_dim" if config.get("block_ff_dim") is not None else "intermediate_size")
    if not typed.flag(config, "block_auto_adjust_ff_dim", True):
        return width
    multiple = typed.whole(config, "block_multiple_of", 256)
    width = int(typed.number(config, "block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
    return max(multiple * -(-width // multiple), 1)


def width_of_granite(config: Config) -> int:
    """Return the FFN width; config.json calls it the width of the shared expert."""
    if typed.whole(config, "num_local_experts", 8, low=0):
        raise ValueError(
            f"config.json of this granitemoehybrid model has {config.get('num_local_experts', 8)} experts "
            "(num_local_experts), so it is a mixture of experts already; give one with num_local_experts=0"
        )
    return typed.whole(config, "shared_intermediate_size", 1024)


def lfm2_layers(text: Config) -> list[str]:
    count = layers(text)
    full = typed.wholes(text, "full_attn_idxs", list(range(count)), low=0, high=count)
    return typed.names(text, "layer_types", ["full_attention" if i in full else "conv" for i in range(count)])


@dataclass(frozen=True)
class Pair:
    dense: str  # model_type of the dense architecture
    moe: str  # model_type of its sibling
    architecture: str  # the sibling's class
    can: Abilities  # only the fields on MoE blocks matter; the dense part is copied
    keys: Callable[[MoESpec, Config], dict[str, Any]]  # keys added to the sibling's config.json (or text_config)
    kv_heads: int | None = None  # the default for an absent key
    head_dim: int | None = None  # the default for an absent key
    without: tuple[str, ...] = ()  # keys of the dense model that its sibling does not have
    only: Mapping[str, Any] = field(default_factory=dict)  # keys with the one value that the sibling can hold
    width: Callable[[Config], int] = width_stated  # reads the width of the dense FFN
    # names of tensors, under model.layers.L.
    dense_block: str = "mlp"
    names: tuple[str, str, str] = GATED  # gate, up and down; if the third is empty, the first holds gate and up
    block: str = "mlp"
    router: str = "gate.weight"
    bias: str = ""  # zeros in float32 for the choice of experts
    bias_dims: int = 1
    shared: str = ""  # the shared expert, under `block`
    shared_gate: str = ""
    least: Callable[[MoESpec], int] = lambda moe: 0  # neurons of a mandatory shared expert
    fused: bool = False  # two tensors hold all experts, as in granitemoe
    wrapped: str = ""  # model_type of the sibling's text_config, if the model has an image encoder


def first_dense(moe: MoESpec) -> int:
    assert moe.first_dense is not None  # Abilities.mixed
    return moe.first_dense


QWEN3_5 = Pair(
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    Abilities(shared="any"),
    lambda moe, config: {
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.width,
        "shared_expert_intermediate_size": moe.shared or LEAST,
    },
    kv_heads=4,
    head_dim=256,
    without=("intermediate_size",),
    shared="shared_expert",
    shared_gate="shared_expert_gate.weight",
    least=lambda moe: LEAST,
)
PAIRS = (
    Pair(
        "ernie4_5",
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        Abilities(shared="multiple", mixed="first-dense", router_fp32=True),
        lambda moe, config: {
            "moe_num_experts": moe.experts,
            "moe_k": moe.top_k,
            "moe_intermediate_size": moe.width,
            "moe_num_shared_experts": moe.shared // moe.width,
            "moe_layer_start_index": first_dense(moe),
            "moe_layer_end_index": moe.dense.layers - 1,
            "moe_layer_interval": 1,
        },
        kv_heads=2,
        head_dim=128,
        only={"use_bias": False},
        bias="moe_statics.e_score_correction_bias",
        bias_dims=2,
        shared="shared_experts",
    ),
    Pair(
        "hunyuan_v1_dense",
        "hunyuan_v1_moe",
        "HunYuanMoEV1ForCausalLM",
        Abilities(shared="same"),
        lambda moe, config: {"num_experts": moe.experts, "moe_topk": moe.top_k, "intermediate_size": moe.width},
        router="gate.wg.weight",
        shared="shared_mlp",
        least=lambda moe: moe.width,
    ),
    Pair(
        "cohere2",
        "cohere2_moe",
        "Cohere2MoeForCausalLM",
        Abilities(scores=frozenset({"softmax", "sigmoid"}), shared="multiple", mixed="any"),
        lambda moe, config: {
            "num_experts": moe.experts,
            "num_experts_per_tok": moe.top_k,
            "num_shared_experts": moe.shared // moe.width,
            "shared_expert_combination_strategy": "sum",
            "expert_selection_fn": moe.score,
            "norm_topk_prob": True,
            "intermediate_size": moe.width,
            "prefix_dense_intermediate_size": moe.dense.ffn,
            "mlp_layer_types": ["sparse" if i in moe.layers else "dense" for i in range(moe.dense.layers)],
            "head_dim": moe.dense.hidden // moe.dense.heads,  # the dense class always has this value
        },
        shared="shared_experts",
    ),
    Pair(
        "lfm2",
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        Abilities(scores=frozenset({"sigmoid"}), mixed="first-dense", output_scale=True),
        lambda moe, config: {
            "num_experts": moe.experts,
            "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": moe.width,
            "intermediate_size": moe.dense.ffn,
            "num_dense_layers": first_dense(moe),
            "norm_topk_prob": True,
            "routed_scaling_factor": float(moe.output_scale),
            "use_expert_bias": True,
            "layer_types": lfm2_layers(config),
        },
        kv_heads=8,
        without=(
            "block_ff_dim", "block_auto_adjust_ff_dim", "block_multiple_of", "block_ffn_dim_multiplier",
            "full_attn_idxs",
        ),
        only={"hidden_act": "silu"},
        width=width_of_lfm2,
        dense_block="feed_forward",
        names=("w1", "w3", "w2"),
        block="feed_forward",
        bias="expert_bias",
    ),
    Pair(  # Granite 4 without experts, with or without Mamba layers: one class holds dense and MoE
        "granitemoehybrid",
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        Abilities(shared="any"),
        lambda moe, config: {
            "num_local_experts": moe.experts,
            "num_experts_per_tok": moe.top_k,
            "intermediate_size": moe.width,
            "shared_intermediate_size": moe.shared or LEAST,
        },
        width=width_of_granite,
        dense_block="shared_mlp",
        names=("input_linear", "output_linear", ""),
        block="block_sparse_moe",
        router="router.layer.weight",
        shared="shared_mlp",
        least=lambda moe: LEAST,
        fused=True,
    ),
    QWEN3_5,
    replace(QWEN3_5, dense="qwen3_5", moe="qwen3_5_moe", wrapped="qwen3_5_moe_text"),
)  # fmt: skip
DENSE = {pair.dense: pair for pair in PAIRS}
MOE = {pair.moe: pair for pair in PAIRS}


def target_of(moe: MoESpec, asked: str) -> tuple[str, str]:
    """Return the target of a dense model in PAIRS, and why it was chosen.

    Raise a ValueError if the user asked for another target, or if this target cannot hold the experts.
    """
    pair = DENSE[moe.dense.family]
    if asked not in ("auto", pair.moe):
        raise ValueError(
            f"target is {asked}, but all of a {pair.dense} model except its FFNs is copied by name, and only its "
            f"sibling {pair.moe} can hold that; write target=auto"
        )
    reasons = refusals(pair.can, moe)
    if reasons:
        scores = "" if moe.score in pair.can.scores else f"; write router.score={' or '.join(sorted(pair.can.scores))}"
        raise ValueError(
            f"target {pair.moe}, the only target for a {pair.dense} model, cannot hold {'; nor '.join(reasons)}{scores}"
        )
    return pair.moe, f"the sibling of {pair.dense} in transformers: all except the FFNs is copied by name, exactly"


def text_of(config: Config) -> Config:
    """Return the part of config.json that describes the language model: all of it, or its text_config."""
    if config.get("text_config") is None:
        return config
    if not isinstance(config["text_config"], Mapping):
        raise typed.wrong(config, "text_config", "keys and values")
    found: Config = config["text_config"]
    return found


@dataclass(frozen=True)
class Dense:
    """A dense architecture of PAIRS; it has the interface of a Family."""

    pair: Pair
    ignored: tuple[str, ...] = ROTARY_BUFFERS

    def read(self, config: Config) -> DenseSpec:
        pair, text = self.pair, text_of(config)
        if (text is config) == bool(pair.wrapped):
            raise typed.wrong(config, "text_config", "keys and values" if pair.wrapped else "absent")
        refuse_foreign({key: value for key, value in config.items() if key != "architectures"})
        common.only(text, pair.only)
        named = {"intermediate_size": pair.width(text), "architectures": None}
        fixed = {"rope": ROPE, "carried": Carried(config)}
        family = Family(pair.dense, context=4096, kv_heads=pair.kv_heads, head_dim=pair.head_dim, fixed=fixed)
        spec = family.read({**text, **named})
        pair.keys(self.plainest(spec), text)  # checks keys that otherwise only the writing of config.json reads
        return spec

    @staticmethod
    def plainest(spec: DenseSpec) -> MoESpec:
        return MoESpec(spec, tuple(range(spec.layers)), (spec.ffn,), top_k=1, copies=1)

    def carry(self, spec: DenseSpec, entries: Mapping[str, Entry]) -> DenseSpec:
        """Return `spec` with the name, shape and dtype of every tensor that is not part of an FFN."""
        assert spec.carried is not None
        first = {prefix: self.names(prefix, 0)["gate"].name for prefix in PREFIXES}
        prefix = next((p for p in PREFIXES if first[p] in entries), PREFIXES[0])
        ffns = {s.name for layer in range(spec.layers) for s in self.names(prefix, layer).values()}
        tensors = {
            name: (entry.shape, entry.dtype)
            for name, entry in entries.items()
            if name not in ffns and not any(re.fullmatch(pattern, name) for pattern in self.ignored)
        }
        layer = re.compile(rf"{re.escape(prefix)}layers\.([0-9]+)\.")
        beyond = [name for name in tensors if (found := layer.match(name)) and int(found[1]) >= spec.layers]
        if beyond:
            raise ValueError(
                f"the checkpoint has a tensor {beyond[0]!r}, but config.json says {spec.layers} layers (0 to "
                f"{spec.layers - 1}); give a folder whose files belong together"
            )
        return replace(spec, carried=replace(spec.carried, tensors=tensors, prefix=prefix))

    def names(self, prefix: str, layer: int, ffn: int = 0) -> dict[str, Source]:
        """Return where the checkpoint holds gate, up and down of a layer."""
        block, (one, two, three) = f"{prefix}layers.{layer}.{self.pair.dense_block}", self.pair.names
        if three:
            names = zip(PARTS, (one, two, three), strict=True)
            return {matrix: Source(f"{block}.{name}.weight") for matrix, name in names}
        rows = {"gate": ((0, ffn),), "up": ((ffn, 2 * ffn),)}
        fused = {matrix: Source(f"{block}.{one}.weight", found) for matrix, found in rows.items()}
        return {**fused, "down": Source(f"{block}.{two}.weight")}

    def sources(self, spec: DenseSpec) -> dict[str, Source]:
        assert spec.carried is not None
        out = {f"carried.{name}": Source(name) for name in spec.carried.tensors}
        for layer in range(spec.layers):
            found = self.names(spec.carried.prefix, layer, spec.ffn)
            out |= {f"layers.{layer}.{matrix}.weight": source for matrix, source in found.items()}
        return out


@dataclass(frozen=True)
class MoE:
    """The MoE architecture of a row of PAIRS; it has the interface of a Target."""

    pair: Pair

    modeling = None

    @property
    def can(self) -> Abilities:
        return self.pair.can

    @property
    def name(self) -> str:
        return self.pair.moe

    def config(self, moe: MoESpec) -> dict[str, Any]:
        pair, d = self.pair, moe.dense
        assert d.carried is not None
        whole = {key: value for key, value in d.carried.config.items() if key not in LEFT_OUT}
        text = {key: value for key, value in text_of(whole).items() if key not in (*pair.without, *LEFT_OUT)}
        heads = {"num_key_value_heads": d.kv_heads, "head_dim": d.head_dim}
        text |= heads | pair.keys(moe, text_of(whole)) | {"dtype": moe.dtype, "output_router_logits": False}
        own = {"architectures": [pair.architecture], "model_type": pair.moe, "dtype": moe.dtype}
        if not pair.wrapped:
            return text | own
        if isinstance(whole.get("vision_config"), Mapping):
            whole["vision_config"] = {**whole["vision_config"], "model_type": f"{pair.moe}_vision"}
        own["architectures"] = [pair.architecture.replace("ForCausalLM", "ForConditionalGeneration")]
        return whole | {"text_config": text | {"model_type": pair.wrapped}} | own

    def slots(self, moe: MoESpec) -> Iterator[Slot]:
        """Yield the copied tensors outside of layers, then for each layer its copied tensors and its FFN."""
        pair, carried = self.pair, moe.dense.carried
        assert carried is not None
        start = re.compile(rf"{re.escape(carried.prefix)}layers\.([0-9]+)\.")
        layers: dict[int, list[Slot]] = {}
        for name, (shape, dtype) in carried.tensors.items():
            found = start.match(name)
            own = "" if dtype == moe.dense.dtype else dtype  # a bfloat16 model may have a few float32 tensors
            layers.setdefault(int(found[1]) if found else -1, []).append(Slot(name, (f"carried.{name}",), shape, own))
        yield from layers.get(-1, [])
        for layer in range(moe.dense.layers):
            yield from layers.get(layer, [])
            for slot in self.ffn(moe, f"{carried.prefix}layers.{layer}", layer):
                if slot.name in carried.tensors:
                    raise ValueError(f"the source has a tensor {slot.name!r}, but no dense {pair.dense} model has one")
                yield slot

    def ffn(self, moe: MoESpec, prefix: str, layer: int) -> Iterator[Slot]:
        pair = self.pair
        if layer not in moe.layers:
            return ffn_slots(moe, f"{prefix}.{pair.dense_block}", f"layers.{layer}", pair.names)
        return fused_slots(moe, prefix, layer) if pair.fused else self.block(moe, prefix, layer)

    def block(self, moe: MoESpec, prefix: str, layer: int) -> Iterator[Slot]:
        pair, role, block = self.pair, f"layers.{layer}", f"{prefix}.{self.pair.block}"
        yield one(moe, f"{block}.{pair.router}", f"{role}.router.weight")
        if pair.bias:
            shape = (1,) * (pair.bias_dims - 1) + (moe.experts,)
            yield Slot(f"{block}.{pair.bias}", (f"{role}.router.bias",), shape, "float32")
        for i in range(moe.experts):
            yield from ffn_slots(moe, f"{block}.experts.{i}", f"{role}.experts.{i}", pair.names)
        if moe.shared or pair.least(moe):
            yield from shared_slots(moe, f"{block}.{pair.shared}", layer, pair.least(moe), pair.names)
        if pair.shared_gate:
            yield one(moe, f"{block}.{pair.shared_gate}", f"{role}.shared_gate.weight")

    def routers(self, entries: Mapping[str, Entry]) -> dict[int, str]:
        """Return the name of the router's tensor in each MoE layer of a folder."""
        name = re.compile(rf".*layers\.([0-9]+)\.{re.escape(f'{self.pair.block}.{self.pair.router}')}")
        return dict(sorted((int(found[1]), found[0]) for found in map(name.fullmatch, entries) if found))

    def forced(self, moe: MoESpec) -> int:
        """Return the zero neurons of the shared expert that each MoE layer must have although the model has none."""
        return 0 if moe.shared else self.pair.least(moe)

    def notes(self, moe: MoESpec) -> list[str]:
        pair, carried = self.pair, moe.dense.carried
        assert carried is not None
        sentence = (
            f"training computes {pair.moe} by the code of transformers, with FSDP and mesh.ep only; our own evaluation "
            "cannot compute it: evaluate it with model=hf"
            if not pair.wrapped
            else f"plan, convert and verify support {pair.moe}; training and our own evaluation do not: use other tools"
        )
        mtp = "the layers for multi-token prediction (mtp.) are copied and stay dense; transformers ignores them"
        found = common.notes(moe, pair.can, {}, self.forced(moe))
        return [sentence, *found, *([mtp] if any(name.startswith("mtp.") for name in carried.tensors) else [])]


def fused_slots(moe: MoESpec, prefix: str, layer: int) -> Iterator[Slot]:
    """Yield the slots of one MoE block of granitemoehybrid: the experts of granitemoe, and always a shared expert."""
    yield from granitemoe.fused_slots(moe, prefix, layer)
    if not moe.shared:
        for name, shape in {"input": (2 * LEAST, moe.dense.hidden), "output": (moe.dense.hidden, LEAST)}.items():
            yield Slot(f"{prefix}.shared_mlp.{name}_linear.weight", (f"layers.{layer}.shared.down.weight",), shape)
