"""List the tensors of an MoE on disk as Slots; names follow Llama unless a caller gives others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import NamedTuple

from upcycle.arch.spec import MoESpec

LLAMA: Mapping[str, str] = {
    "embed": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_out_norm": "attention_out_layernorm", "ffn_out_norm": "mlp_out_layernorm",  # only in `upcycled`
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
PARTS = ("gate", "up", "down")
GATED = ("gate_proj", "up_proj", "down_proj")


class Slot(NamedTuple):
    """One tensor on disk.

    It stacks the tensors of `roles` along dim 0 and views the result as `shape`. With an `order`, it first views the
    stack as `view`, permutes the dimensions by `order`, and views that as `shape`.
    """

    name: str
    roles: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str = ""  # "" means the model's dtype; a correction bias is float32
    view: tuple[int, ...] = ()
    order: tuple[int, ...] = ()


def one(moe: MoESpec, name: str, role: str, dtype: str = "") -> Slot:
    """Return a slot for one role, with the role's shape."""
    return Slot(name, (role,), moe.shape(role), dtype)


def stack(moe: MoESpec, name: str, roles: Iterable[str], shape: tuple[int, ...]) -> Slot:
    """Return a slot that stacks several roles and views them as `shape`."""
    slot = Slot(name, tuple(roles), shape)
    assert sum(prod(moe.shape(role)) for role in slot.roles) == prod(shape), name
    return slot


def ffn_slots(
    moe: MoESpec, prefix: str, role: str, names: tuple[str, str, str] = GATED, *, gate: bool = True
) -> Iterator[Slot]:
    """Yield the slots of one FFN: dense (role 'layers.L'), expert ('layers.L.experts.I') or shared ('layers.L.shared').

    The FFN gets a gate even if the dense model has none (see abilities.relu2_as_gated), unless `gate` is False.
    """
    for part, name in list(zip(PARTS, names, strict=True))[not gate :]:
        yield one(moe, f"{prefix}.{name}.weight", f"{role}.{part}.weight")
        if moe.dense.ffn_bias:
            yield one(moe, f"{prefix}.{name}.bias", f"{role}.{part}.bias")


def expert_slots(moe: MoESpec, layer: int, *, bias: bool = False, gate: bool = True) -> Iterator[Slot]:
    """Yield the slots of the router and the routed experts, by the names that most architectures share.

    `bias`: the router has a bias, which affects only the choice of experts.
    """
    prefix, role = f"model.layers.{layer}.mlp", f"layers.{layer}"
    yield one(moe, f"{prefix}.gate.weight", f"{role}.router.weight")
    if bias:
        yield one(moe, f"{prefix}.gate.e_score_correction_bias", f"{role}.router.bias", "float32")
    for i in range(moe.experts):
        yield from ffn_slots(moe, f"{prefix}.experts.{i}", f"{role}.experts.{i}", gate=gate)


def shared_slots(
    moe: MoESpec, prefix: str, layer: int, least: int, names: tuple[str, str, str] = GATED
) -> Iterator[Slot]:
    """Yield the slots of a mandatory shared expert; if the model has none, write `least` neurons of zeros.

    Tensors of size 0 would work too, but vLLM refuses them.
    """
    width, hidden = moe.shared or least, moe.dense.hidden
    for part, name in zip(PARTS, names, strict=True):
        shape = (hidden, width) if part == "down" else (width, hidden)
        yield Slot(f"{prefix}.{name}.weight", (f"layers.{layer}.shared.{part}.weight",), shape)


def sigmoid_slots(moe: MoESpec, layer: int) -> Iterator[Slot]:
    """Yield the slots of one MoE block as in DeepSeek-V3."""
    yield from expert_slots(moe, layer, bias=True)
    yield from shared_slots(moe, f"model.layers.{layer}.mlp.shared_experts", layer, moe.width)


def model_slots(
    moe: MoESpec,
    block: Callable[[MoESpec, int], Iterable[Slot]],
    names: Mapping[str, str],
    *,
    gate: bool,
    untie: bool,
    biases: Iterable[str],
) -> Iterator[Slot]:
    """Yield the slots of a whole Llama-like model; `block(moe, layer)` yields the slots of one MoE block.

    `untie`: write the head of a tied model too. `biases`: roles to write even if the dense model has none.
    """
    d = moe.dense
    shapes = [*d.global_shapes(), *(["head.weight"] if d.tied and untie else [])]
    attention = d.attention_shapes()
    attention_roles = [*attention, *(role for role in biases if role not in attention)]
    for role in shapes:
        part, kind = role.rsplit(".", 1)
        yield one(moe, f"{names[part]}.{kind}", role)
    for layer in range(d.layers):
        for role in attention_roles:
            part, kind = role.rsplit(".", 1)
            yield one(moe, f"model.layers.{layer}.{names[part]}.{kind}", f"layers.{layer}.{role}")
        if layer in moe.layers:
            yield from block(moe, layer)
        else:
            yield from ffn_slots(moe, f"model.layers.{layer}.mlp", f"layers.{layer}", gate=gate)
