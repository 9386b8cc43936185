"""Where every parameter lies: one table, by which shard.py places parameters and memory.py counts their bytes.

A parameter is divided twice. First tensor or expert parallel cuts one of its dimensions; then FSDP shards what that
leaves over the ranks that see other tokens but hold the same part. It is of one of three kinds, see shard.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from upcycle.arch.spec import DenseSpec

Kind = Literal["tokens", "tensor", "experts"]
# the axes that FSDP shards each kind over, and the axis of that kind's copies
FSDP: Mapping[Kind, tuple[tuple[str, ...], str]] = {
    "tokens": (("dp_shard", "cp", "tp"), "dp_replicate"),
    "tensor": (("dp_shard", "cp"), "dp_replicate"),
    "experts": (("edp_shard",), "edp_replicate"),
}


@dataclass(frozen=True)
class Rule:
    kind: Kind
    cuts: tuple[tuple[str, int | None], ...] = ()  # (axis, the dimension it cuts; None: each of its ranks has all)
    exact: bool = False  # gathered as it is, in float32; else in the dtype that the model computes in

    def part(self, shape: Sequence[int], sizes: Mapping[str, int]) -> list[int]:
        """The shape that the cuts leave on a rank."""
        left = list(shape)
        for axis, dim in self.cuts:
            if dim is not None:
                left[dim] //= sizes[axis]
        return left

    def ranks(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        """(how many ranks FSDP shards the parameter over, how many such sets of ranks hold a copy)"""
        shards, copies = FSDP[self.kind]
        return math.prod(sizes[axis] for axis in shards), sizes[copies]


# the first line that fits a parameter's name
RULES: tuple[tuple[str, Rule], ...] = (
    # adapters are small: each rank of tp and etp has all of them, and sums their gradients
    ("*.experts.*lora_?", Rule("experts", (("ep", 0), ("etp", None)))),
    ("*.router.*", Rule("tokens", exact=True)),
    ("*.lora_?", Rule("tensor")),
    # neurons are dimension 2 of up (N, 2, F, D), of up_bias (N, 2, F) and of down (N, D, F)
    ("*.experts.down_bias", Rule("experts", (("ep", 0), ("etp", None)))),
    ("*.experts.*", Rule("experts", (("ep", 0), ("etp", 2)))),
    ("*.attention.[qkv].*", Rule("tensor", (("tp", 0),))),
    ("*.attention.q_b.*", Rule("tensor", (("tp", 0),))),  # of latents, which every rank of tp makes whole
    ("*.attention.kv_b.*", Rule("tensor", (("tp", 0),))),
    ("*.attention.sinks.*", Rule("tensor", (("tp", 0),))),
    ("*.attention.[qk]_norm.*", Rule("tensor", (("tp", 0),))),  # over all heads together; see rule()
    ("*.attention.o.weight", Rule("tensor", (("tp", 1),))),
    ("*.attention.*", Rule("tensor")),
    ("*.gate.*", Rule("tensor", (("tp", 0),))),
    ("*.up.*", Rule("tensor", (("tp", 0),))),
    ("*.down.weight", Rule("tensor", (("tp", 1),))),
    ("*.down.*", Rule("tensor")),
    ("layers.*", Rule("tokens", exact=True)),  # the router stays float32, and so do norms, which are as small
    ("final_norm.*", Rule("tokens", exact=True)),
    ("*", Rule("tokens")),  # embedding and head
)


def rule(name: str, dense: DenseSpec) -> Rule:
    """The rule for a parameter of the decoder, by its name there; or for one of transformers' own model, of which FSDP
    and expert parallel alone divide anything."""
    if dense.carried is not None and not fnmatchcase(name, "*.experts.*"):
        return Rule("tokens", exact="router" in name.split("."))
    found = next(rule for pattern, rule in RULES if fnmatchcase(name, pattern))
    of_each_head = dense.qk_norm == "head" and fnmatchcase(name, "*.attention.[qk]_norm.*")
    return Rule(found.kind) if of_each_head else found  # one gain serves all heads: no axis cuts it


def sharded_dim(part: Sequence[int], ranks: int) -> int:
    """The dimension that FSDP shards: the first; but where the ranks do not divide the number of experts, the hidden
    one, which they practically always divide."""
    if part[0] % ranks == 0 or len(part) < 3:
        return 0
    return 3 if len(part) == 4 else 1
