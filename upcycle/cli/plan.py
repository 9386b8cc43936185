"""Show what a conversion would make: tensors, sizes, exactness. It reads headers only and writes nothing.

usage: upcycle plan [CONFIG] [SOURCE] [key=value ...]

CONFIG is a YAML file or the name of a ready config (configs/upcycle); SOURCE is a folder or org/name, the key `source`.

  upcycle plan ./llama
  upcycle plan tiny ./llama
  upcycle plan meta-llama/Llama-3.1-8B experts=8 top_k=2
  upcycle plan ./llama method.name=virtual_group target=upcycled    # 16 copies of 4 slices, top-4, as we recommend
  upcycle plan llama3-8b-e8t2 ./llama layers=every:2 target=auto
  upcycle plan ./llama router.normalize=false scale=published       # shows how inexact that is
  upcycle plan ./llama tensors=true | grep experts.0

keys of the plan, with defaults and meaning: docs/config.md
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from upcycle.cli import frame


@dataclass(frozen=True)
class PlanKeys:
    tensors: bool = False  # also list every output tensor with its sources and recipe
    json: bool = False  # print one JSON object


@frame.command()
def main(words: Sequence[str]) -> int:
    from upcycle.api import plan
    from upcycle.config.reading import config_and_source, read, read_own
    from upcycle.config.schema import UpcycleConfig
    from upcycle.converting import card

    options, rest = read_own(PlanKeys, words)
    made = plan(read(UpcycleConfig, *config_and_source(rest)))
    if options.json:
        print(json.dumps(as_json(made, tensors=options.tensors), indent=1, default=str))
        return 0
    print(made)
    if options.tensors:
        print("\n" + "\n".join(card.tensors(made)))
    return 0


def as_json(plan: Any, *, tensors: bool) -> dict[str, Any]:
    """Return a plan as a JSON object."""
    from upcycle.arch import engines
    from upcycle.converting import card
    from upcycle.planning import size

    flops, zeros = plan.flops()
    per_token = {"moe": flops, "zeros": zeros, "dense": size.dense_flops(plan.dense, plan.config.sequence)}
    found = {
        "plan": plan.hash, "target": plan.target, "why": plan.why, "promise": asdict(plan.promise),
        "parameters": asdict(plan.sizes), "flops_per_token": per_token, "bytes": plan.bytes, "files": len(plan.shards),
        "config": card.settings(plan), "config.json": plan.hf_config,
        "runs_on": engines.sentence(plan.target, plan.hf_config), "notes": plan.notes, "warnings": plan.warnings,
        "dropped": dict(plan.dropped),
    }  # fmt: skip
    if tensors:
        found["tensors"] = [
            {"name": o.name, "shape": o.shape, "dtype": o.dtype, "recipe": [str(part) for part in o.parts]}
            for o in plan.outputs
        ]
    return found
