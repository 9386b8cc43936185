"""OLMoE: blocks of Llama with q and k normalised over all heads at once; softmax, top-k, normalised or not.

Every layer is MoE.
"""

from __future__ import annotations

from upcycle.arch.abilities import EITHER, Abilities
from upcycle.arch.families.common import ATTENTION, Family
from upcycle.arch.targets.common import Native
from upcycle.io import typed

NATIVE = Native(
    Family(
        "olmoe",
        context=4096,
        eps=("rms_norm_eps", 1e-5),
        flags=ATTENTION,
        fixed={"qk_norm": "full"},
        eos=50279,
        pad=1,
    ),
    Abilities(qk_norms=frozenset({"full"}), qkv_bias=EITHER, out_bias=EITHER, normalize=EITHER, free_head_dim=False),
    moe=lambda config, dense: {"normalize": typed.flag(config, "norm_topk_prob")},
    width="intermediate_size",
    only={"clip_qkv": None},
)
