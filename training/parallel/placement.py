"""The table of where every parameter lies: shard.py places parameters by it, and memory.py counts their bytes.

A parameter is divided twice. First tensor or expert parallel cuts one of its dimensions. Then FSDP shards the rest over
the ranks that hold the same part and see other tokens. shard.py explains the three kinds of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from upcycle.arch.spec import DenseSpec

Kind = Literal["tokens", "tensor", "experts"]
# the axes over which FSDP shards each kind, and the axis of its copies
FSDP: Mapping[Kind, tuple[tuple[str, ...], str]] = {
    "tokens": (("dp_shard", "cp", "tp"), "dp_replicate"),
    "tensor": (("dp_shard", "cp"), "dp_replicate"),
    "experts": (("edp_shard",), "edp_replicate"),
}


@dataclass(frozen=True)
class Rule:
    kind: Kind
    cuts: tuple[tuple[str, int | None], ...] = ()  # (axis, the dimension that it cuts; None: every rank has all)
    exact: bool = False  # gathered in float32; else in the compute dtype

    def part(self, shape: Sequence[int], sizes: Mapping[str, int]) -> list[int]:
        """Return the shape that the cuts leave on a rank."""
        left = list(shape)
        for axis, dim in self.cuts:
            if dim is not None:
                left[dim] //= sizes[axis]
        return left

    def ranks(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        """Return (ranks that FSDP shards the parameter over, copies of it)."""
        shards, copies = FSDP[self.kind]
        return math.prod(sizes[axis] for axis in shards), sizes[copies]


# the first line that matches a parameter's name counts
RULES: tuple[tuple[str, Rule], ...] = (
    # adapters are small: each rank of tp and etp has all of them and sums their gradients
    ("*.experts.*lora_?", Rule("experts", (("ep", 0), ("etp", None)))),
    ("*.experts.*_codes.*", Rule("experts")),  # on one GPU alone
    ("*.router.*", Rule("tokens", exact=True)),
    ("*.lora_?", Rule("tensor")),
    # neurons are dimension 2 of up (N, 2, F, D), of up_bias (N, 2, F) and of down (N, D, F)
    ("*.experts.down_bias", Rule("experts", (("ep", 0), ("etp", None)))),
    ("*.experts.*", Rule("experts", (("ep", 0), ("etp", 2)))),
    ("*.attention.[qkv].*", Rule("tensor", (("tp", 0),))),
    ("*.attention.q_b.*", Rule("tensor", (("tp", 0),))),  # of latents, which every rank of tp computes whole
    ("*.attention.kv_b.*", Rule("tensor", (("tp", 0),))),
    ("*.attention.sinks.*", Rule("tensor", (("tp", 0),))),
    ("*.attention.[qk]_norm.*", Rule("tensor", (("tp", 0),))),  # over all heads together; see rule()
    ("*.attention.o.weight", Rule("tensor", (("tp", 1),))),
    ("*.attention.*", Rule("tensor")),
    ("*.gate.*", Rule("tensor", (("tp", 0),))),
    ("*.up.*", Rule("tensor", (("tp", 0),))),
    ("*.down.weight", Rule("tensor", (("tp", 1),))),
    ("*.down.*", Rule("tensor")),
    ("layers.*", Rule("tokens", exact=True)),  # routers and norms stay float32; they are small
    ("final_norm.*", Rule("tokens", exact=True)),
    ("*", Rule("tokens")),  # embedding and head
)


def rule(name: str, dense: DenseSpec) -> Rule:
    """Return the rule for a parameter of the decoder, by its name there, or of a transformers model, which only FSDP
    and expert parallel divide."""
    if dense.carried is not None and not fnmatchcase(name, "*.experts.*"):
        return Rule("tokens", exact="router" in name.split("."))
    found = next(rule for pattern, rule in RULES if fnmatchcase(name, pattern))
    of_each_head = dense.qk_norm == "head" and fnmatchcase(name, "*.attention.[qk]_norm.*")
    return Rule(found.kind) if of_each_head else found  # one gain serves all heads, so no axis cuts it


def sharded_dim(part: Sequence[int], ranks: int) -> int:
    """Return the dimension that FSDP shards: the first, or the hidden one if the ranks do not divide the number of
    experts."""
    if part[0] % ranks == 0 or len(part) < 3:
        return 0
    return 3 if len(part) == 4 else 1
