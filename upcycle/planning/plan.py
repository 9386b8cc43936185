"""The plan: for every tensor of the MoE checkpoint, the source tensors and the pure function that compute it.

A plan is data. `build` creates it from the upcycling config, the source's config.json and the headers of its files; it
reads no tensor. `upcycle plan` prints the plan, `convert` computes all of its tensors, a training rank computes the
slices that it owns, and `verify` checks the result against the plan's promise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

from torch import Tensor

from upcycle import plugin
from upcycle.arch import tokenizer
from upcycle.arch.abilities import relu2_as_gated
from upcycle.arch.registry import TARGETS, family, readable, target
from upcycle.arch.spec import BYTES, DenseSpec, MoESpec
from upcycle.config.reading import byte_size
from upcycle.config.schema import SizedConfig, UpcycleConfig
from upcycle.converting import grow
from upcycle.io import disk
from upcycle.io.checkpoint import Checkpoint
from upcycle.planning import notes, request, routers, scale, size
from upcycle.planning.choice import choose_target, place_scale, scored
from upcycle.planning.methods import Method
from upcycle.planning.outputs import Output, Recipe, Recipes, check_outputs
from upcycle.planning.promise import Promise, grown_promise, make_promise
from upcycle.planning.sources import check_sources, dropped, read_dense, refused_dtype, stored_dtype

FORMAT = 2  # part of the plan's hash; increase it when the converter writes other bytes for the same plan


@dataclass(frozen=True)
class UpcyclePlan:
    config: SizedConfig
    dense: DenseSpec
    moe: MoESpec
    target: str
    why: str  # the reason for this target
    method: Method
    scale: str | float
    outputs: tuple[Output, ...]
    dropped: tuple[tuple[str, str], ...]  # dense tensors not used: (name, why)
    hf_config: Mapping[str, Any]
    promise: Promise
    notes: tuple[str, ...]
    warnings: tuple[str, ...]  # measurements that speak against this plan
    # dense source: measured on text before the first expert is computed, empty until then: 'layers.L.mass', '.rows',
    # '.order' (text.measure); MoE source: the experts that were chosen: 'layers.L.experts', ... (grow.choose)
    observed: Mapping[str, Tensor] = field(default_factory=dict)
    source_experts: int = 0  # number of experts of an MoE source; 0: the source is dense

    @property
    def needs_text(self) -> bool:
        measured = self.scale == "calibrated" or self.config.router.init.name in routers.MEASURED
        return measured or bool(self.method.needs.order)

    @property
    def grown(self) -> bool:
        """Return True if the source is already an MoE, and the plan changes its number of experts (grow.py)."""
        return bool(self.source_experts)

    @property
    def tokenizer_class(self) -> str:
        """Return the class that the copy of tokenizer_config.json names, or "" for the dense model's word."""
        return tokenizer.CLASSES.get(self.dense.family, "") if self.target == "upcycled" else ""

    @property
    def gated(self) -> bool:
        """Return True if the target's experts have a gate: the donor's own, or a copy of `up`."""
        return self.dense.gated or relu2_as_gated(self.moe, target(self.target).can)

    def flops(self) -> tuple[float, float]:
        """Return the FLOPs per token of the model that is written, and how many of them a shared expert of zeros takes.

        Some targets always compute a shared expert."""
        least = size.moe_flops(self.moe, self.config.sequence, gated=self.gated)
        forced = target(self.target).forced(self.moe)
        whole = size.moe_flops(self.moe, self.config.sequence, gated=self.gated, forced=forced)
        return whole, whole - least

    def factors(self, layer: int) -> dict[str, float]:
        """Return the factor of each matrix of this layer's routed experts."""
        mass = self.observed.get(f"layers.{layer}.mass")
        c = scale.gain(self.moe, self.scale, None if mass is None else float(mass))
        assert c is not None, "call measure() before computing tensors"
        return scale.weight_factors(self.moe, self.scale, c, gated=self.gated)

    @cached_property
    def by_name(self) -> dict[str, Output]:
        return {output.name: output for output in self.outputs}

    @cached_property
    def shards(self) -> list[tuple[str, list[Output]]]:
        """Return (file name, outputs) of every file, in order."""
        return disk.shards(self.outputs, byte_size(self.config.max_shard))

    @cached_property
    def bytes(self) -> int:
        return sum(output.bytes for output in self.outputs)

    @cached_property
    def sizes(self) -> size.Sizes:
        parts = [part for output in self.outputs for part in output.parts]
        kinds = [("expert" if part.expert >= 0 else part.kind, prod(part.shape)) for part in parts]
        found = size.measure(self.moe, kinds)
        if not self.grown:
            return found
        multiplied = sum(prod(part.shape) for part in parts if part.expert >= 0 or part.sources[0].rows)
        return replace(found, dense=found.total - multiplied + multiplied * self.source_experts // self.moe.experts)

    @cached_property
    def hash(self) -> str:
        """Return a digest without paths; plans with equal digests write equal bytes from equal sources."""
        settings = {k: v for k, v in asdict(self.config).items() if k not in ("source", "output", "donors", "sequence")}
        # plans made before these keys were renamed must keep their hashes; hf_config already has router.choice
        del settings["router"]["choice"]
        settings["calibration"]["length"] = settings["calibration"].pop("sequence")
        digest = hashlib.sha256(
            json.dumps([FORMAT, settings, self.target, self.hf_config], sort_keys=True, default=str).encode()
        )
        for output in self.outputs:
            digest.update(repr((output.name, output.shape, output.dtype, output.parts)).encode())
        return digest.hexdigest()


def build(
    asked: UpcycleConfig,
    checkpoints: Sequence[Checkpoint],
    observed: Mapping[str, Tensor] | None = None,
    *,
    text: bool = False,
) -> UpcyclePlan:
    """Plan every tensor, and check everything that can be checked before the first write.

    `checkpoints`: the base, then the donors. `observed`: the measurements on text; if given, text files are not
    required. `text`: True if the caller has text that the config does not name. A failed check raises a ValueError of
    one sentence.
    """
    base = checkpoints[0]
    grows = base.config.get("model_type") in plugin.names(TARGETS)
    if not grows:
        grow.check_dense(asked, base.folder)
    config, by_default = request.sized(asked)
    if grows:
        return grown(config, base, observed or {})
    source_family = family(base.config.get("model_type"))
    dense = read_dense(source_family, base)
    stored = check_sources(dense, source_family, checkpoints)
    dense = replace(dense, dtype=stored_dtype(base))
    method = request.read_method(config, len(checkpoints) - 1)
    moe, why_score = scored(config, request.moe_spec(config, dense, method))
    known = text or any(name.endswith(".rows") for name in observed or {})
    config = request.with_rows(config, moe, text=known and dense.carried is None)
    kind = scale.parse(config.scale)
    request.check_router(config, moe, kind)
    name, why = choose_target(config, moe)
    chosen = target(name)
    moe = place_scale(config, moe, kind, chosen)
    roles = source_family.sources(dense)
    sources = [{role: replace(s, donor=i) for role, s in roles.items()} for i in range(len(checkpoints))]
    plan = UpcyclePlan(
        config,
        dense,
        moe,
        name,
        why + why_score,
        method,
        kind,
        Recipes(moe, method, sources, chosen).outputs(),
        dropped(source_family, dense, base),
        chosen.config(moe),
        make_promise(config, moe, method, kind, chosen, stored),
        tuple(filter(None, (by_default, *chosen.notes(moe), *notes.of(config, moe)))),
        tuple(notes.warnings(config, moe, method)),
        observed or {},
    )
    if plan.needs_text:
        request.check_decoder(dense)
        if observed is None:
            request.check_text(config, kind, method, base.folder, text=text)
    return plan


def grown(config: SizedConfig, base: Checkpoint, known: Mapping[str, Tensor]) -> UpcyclePlan:
    """Return the plan that changes the number of experts of an MoE source (grow.py)."""
    name = str(base.config["model_type"])
    chosen, dtype = readable(name), config.dtype or stored_dtype(base)
    if dtype not in BYTES:
        raise refused_dtype(base, dtype)
    view = chosen.read(base.config)
    grow.check(config, view, name)
    method, observed = grow.read_method(config), grow.choose(config, view, base, known)
    experts = grow.Experts(config, view, observed)
    hf_config = grow.grown_config(base.config, experts.count, experts.top_k, dtype)
    moe = replace(chosen.read(hf_config), dtype=dtype)
    source = {role: slot for slot in chosen.slots(view) for role in slot.roles}
    grow.check_source(source, base)
    outputs = []
    for slot in chosen.slots(moe):
        kept = slot.dtype or dtype
        found = grow.parts(slot, source, experts)
        recipes = tuple(Recipe("keep", p.shape, kept, (p.source,), expert=p.expert, add=p.add) for p in found)
        outputs.append(Output(slot.name, slot.shape, kept, recipes))
    check_outputs(outputs)
    return UpcyclePlan(
        config,
        replace(view.dense, dtype=stored_dtype(base)),
        replace(moe, copies=config.experts, output_scale=1.0),
        name,
        f"the architecture of the source; {notes.grown(method.name, view, moe, config.experts)}",
        method,
        "exact",
        tuple(outputs),
        (),
        hf_config,
        grown_promise(method, view, dtype, base, observed),
        (*chosen.notes(moe), *notes.waiting(observed)),
        (),
        observed,
        view.experts,
    )
