"""Growth: a mixture of experts with each of its experts m times, which computes what it computed.

The m copies of an expert share its router row, so where the model took k experts it takes all copies of the same k:
top_k becomes m * k, each copy has the m-th part of its expert's weight, and the sum is the same whatever the router is.
That holds for weights that are normalised over the chosen and for a softmax over all experts. Trained on, the copies
part (published: 2604.19835). The plan is of `keep` recipes alone: every number of the result is one of the source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from upcycle import request
from upcycle.checkpoint import Checkpoint
from upcycle.config import Router, UpcycleConfig
from upcycle.families.common import Source
from upcycle.spec import MAX_EXPERTS, MoESpec
from upcycle.targets.common import Slot

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # keys for the number of experts, by architecture
# keys of UpcycleConfig that say how a dense FFN is cut, and the one value that growing has
ONLY: Mapping[str, Any] = {
    "granularity": 1, "shared": 0, "layers": "all", "scale": "exact", "donors": (), "target": "auto", "router": Router()
}  # fmt: skip


def check(config: UpcycleConfig, moe: MoESpec, name: str) -> None:
    """Raise a ValueError unless `config` grows `moe` exactly."""
    other = [key for key, value in ONLY.items() if getattr(config, key) != value]
    other += ["method"] if request.read_method(config, 0).name != "copy" else []
    if name == "upcycled":
        raise ValueError("the source is a mixture of experts already (upcycled), and only stock ones can be grown")
    if other:
        raise ValueError(
            f"the source is a mixture of experts already ({name}), which can only be grown, experts={config.experts} "
            f"copies of each expert: leave {', '.join(other)} as by default"
        )
    if config.experts < 1 or moe.experts * config.experts > MAX_EXPERTS:
        raise ValueError(
            f"experts={config.experts} copies of each of {moe.experts} experts; write experts=1 to "
            f"{MAX_EXPERTS // moe.experts}"
        )
    if config.top_k != moe.top_k * config.experts:
        raise ValueError(
            f"the source is a mixture of experts already ({name}, top-{moe.top_k} of {moe.experts}); grown to "
            f"{config.experts} copies of each expert it computes the same with all copies of the chosen ones, so write "
            f"top_k={moe.top_k * config.experts} (got {config.top_k})"
        )
    if not (moe.normalize or moe.score == "softmax"):
        raise ValueError(
            f"this {name} model has sigmoid scores that are not normalised (norm_topk_prob=false), so copies of its "
            "experts would add up to more than they are; growing it is not supported"
        )


def grown_config(config: Mapping[str, Any], moe: MoESpec, copies: int, dtype: str) -> dict[str, Any]:
    """The source's config.json with the new counts."""
    left_out = ("_name_or_path", "transformers_version", "torch_dtype", "auto_map")
    out: dict[str, Any] = {key: value for key, value in config.items() if key not in left_out}
    out |= {key: moe.experts * copies for key in COUNTS if config.get(key) is not None}
    return out | {"num_experts_per_tok": moe.top_k * copies, "dtype": dtype}


def parts(slot: Slot, source: Mapping[str, Slot], copies: int) -> Iterator[tuple[Source, tuple[int, ...], int]]:
    """(where it lies in the source, its shape, its expert or -1) of what a tensor of the grown model is stacked of.

    Expert i is a copy of expert i // copies, and so are its row of the router and of what is stacked by expert.
    """
    one = slot.roles[0].split(".")
    if len(slot.roles) == 1 and "experts" in one:
        role = ".".join([*one[:3], str(int(one[3]) // copies), *one[4:]])
        yield Source(source[role].name), slot.shape, int(one[3])
    elif "experts" in one or one[2:3] == ["router"]:
        for i in range(slot.shape[0]):
            rows = ((i // copies, i // copies + 1),)
            expert = i if "experts" in one else -1
            yield Source(source[slot.roles[0]].name, rows), (1, *slot.shape[1:]), expert
    else:
        yield Source(source[slot.roles[0]].name), slot.shape, -1


def check_source(slots: Mapping[str, Slot], checkpoint: Checkpoint) -> None:
    """Raise a ValueError unless the checkpoint has exactly the tensors that its config.json promises."""
    names = {slot.name: slot.shape for slot in slots.values()}
    for name, shape in names.items():
        entry = checkpoint.entries.get(name)
        if entry is None or entry.shape != shape:
            have = "no such tensor" if entry is None else f"shape {list(entry.shape)}"
            raise ValueError(
                f"config.json of {checkpoint.folder} promises {name!r} of shape {list(shape)}, the files have {have}; "
                "is the download complete?"
            )
    unknown = sorted(checkpoint.entries.keys() - names.keys())
    if unknown:
        raise ValueError(
            f"{checkpoint.folder} has a tensor {unknown[0]!r} that its config.json does not promise; growing would "
            "lose it"
        )
