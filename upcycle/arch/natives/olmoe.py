"""OLMoE: queries and keys normalised over all heads at once, in blocks that are otherwise Llama's; softmax over all
experts, the weights of the chosen normalised or not; every layer MoE."""

from __future__ import annotations

from collections.abc import Iterator

from upcycle.arch.families.common import Config, dense
from upcycle.arch.spec import MoESpec
from upcycle.arch.targets import common
from upcycle.arch.targets.common import EITHER, Abilities, Slot
from upcycle.io import typed

ABILITIES = Abilities(
    qk_norms=frozenset({"full"}), qkv_bias=EITHER, out_bias=EITHER, normalize=EITHER, free_head_dim=False
)


def read(config: Config) -> MoESpec:
    common.only(config, clip_qkv=None)
    bias = typed.flag(config, "attention_bias")
    d = dense(
        config,
        "olmoe",
        context=4096,
        eps=("rms_norm_eps", 1e-5),
        qk_norm="full",
        qkv_bias=bias,
        out_bias=bias,
        eos=50279,
        pad=1,
    )
    return common.view(config, ABILITIES, d, width="intermediate_size", normalize=typed.flag(config, "norm_topk_prob"))


def slots(moe: MoESpec) -> Iterator[Slot]:
    return common.llama_slots(moe, lambda layer: common.expert_slots(moe, layer))
