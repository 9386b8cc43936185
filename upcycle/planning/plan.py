"""The plan: for every tensor of the MoE checkpoint, which source tensors it needs and which pure function makes it.

A plan is data that `build` makes from the upcycling config, the source's config.json and the headers of its files; no
tensor is read. `upcycle plan` prints it, `convert` makes all of its tensors, a training rank makes the slices it owns,
and `verify` holds the result to the plan's promise.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from upcycle import plugin
from upcycle.arch import siblings
from upcycle.arch.abilities import refusals, relu2_as_gated
from upcycle.arch.families.common import Source
from upcycle.arch.registry import AnyDense, AnyTarget, family, readable, target
from upcycle.arch.slots import Slot
from upcycle.arch.spec import BYTES, DenseSpec, MoESpec
from upcycle.config.reading import byte_size
from upcycle.config.schema import UpcycleConfig
from upcycle.converting import grow
from upcycle.io import disk
from upcycle.io.checkpoint import Checkpoint
from upcycle.planning import request, routers, scale, size
from upcycle.planning.methods import Method
from upcycle.planning.promise import Promise, make_promise

FORMAT = 2  # part of the plan's hash; raised when the converter starts to make other bytes from the same plan
# `target: auto` takes the first of these that holds the model, plainest first; our own target only if none does
PREFERENCE = (
    "mixtral",
    "qwen3_moe",
    "qwen2_moe",
    "flex_olmo",
    "granitemoe",
    "granitemoeshared",
    "glm4_moe",
    "dots1",
    "solar_open",
)


class Recipe(NamedTuple):  # not a dataclass: a large plan has tens of thousands, and these are quicker to make
    """How one part of an output is made.

    keep     the source                             average  the mean of the sources
    expert   matrix `matrix` of expert `expert`     shared   matrix `matrix` of the shared expert
    router   the router's rows                      fill     a constant
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str
    sources: tuple[Source, ...] = ()
    layer: int = -1
    expert: int = -1
    matrix: str = ""
    factor: float = 1.0  # of a shared expert's matrix: 2 undoes a shared gate of sigmoid(0)
    add: float = 0.0  # to every element: 1 where a gain-minus-one norm becomes a plain one; the constant of `fill`

    def __str__(self) -> str:
        def name(source: Source) -> str:
            rows = f"{list(source.rows[0])}" if len(source.rows) == 1 else " (rows)" if source.rows else ""
            return (f"donor {source.donor}: " if source.donor else "") + source.name + rows

        read = " + ".join(map(name, self.sources))
        what = {
            "expert": f"expert {self.expert}'s {self.matrix} of ",
            "shared": f"shared {self.matrix} of ",
            "average": "mean of ",
            "keep": "",
        }
        if self.kind in ("router", "fill"):
            return "router rows" if self.kind == "router" else f"all {self.add:g}"
        factor = f" x {self.factor:g}" if self.factor != 1 else ""
        return f"{what[self.kind]}{read}{factor}{f' + {self.add:g}' if self.add else ''}"


class Output(NamedTuple):
    """One tensor on disk: its parts, stacked along dim 0 and viewed as `shape`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[Recipe, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * BYTES[self.dtype]


@dataclass(frozen=True)
class UpcyclePlan:
    config: UpcycleConfig
    dense: DenseSpec
    moe: MoESpec
    target: str
    why: str  # why this target
    method: Method
    scale: str | float
    outputs: tuple[Output, ...]
    dropped: tuple[tuple[str, str], ...]  # dense tensors not used: (name, why)
    hf_config: Mapping[str, Any]
    promise: Promise
    notes: tuple[str, ...]
    warnings: tuple[str, ...]  # what evidence says against this plan
    # measured on text before the first expert is made, empty until then: 'layers.L.mass', '.rows', '.order' (measure)
    # or, of a plan whose source is an MoE, which experts it chose: 'layers.L.experts', ... (grow.choose)
    observed: Mapping[str, Tensor] = field(default_factory=dict)
    source_experts: int = 0  # of an MoE whose experts are made more or fewer; 0: the source is dense

    @property
    def needs_text(self) -> bool:
        measured = self.scale == "calibrated" or self.config.router.init.name in routers.MEASURED
        return measured or bool(self.method.needs.order)

    @property
    def grown(self) -> bool:
        """True if the source is an MoE already, whose experts are made more or fewer (grow.py)."""
        return bool(self.source_experts)

    @property
    def gated(self) -> bool:
        """True if the target's experts have a gate, be it the donor's or one that equals `up`."""
        return self.dense.gated or relu2_as_gated(self.moe, target(self.target).can)

    def factors(self, layer: int) -> dict[str, float]:
        """The factor of each matrix of this layer's routed experts."""
        mass = self.observed.get(f"layers.{layer}.mass")
        c = scale.gain(self.moe, self.scale, None if mass is None else float(mass))
        assert c is not None, "measure() comes before the first tensor"
        return scale.weight_factors(self.moe, self.scale, c, gated=self.gated)

    @cached_property
    def by_name(self) -> dict[str, Output]:
        return {output.name: output for output in self.outputs}

    @cached_property
    def shards(self) -> list[tuple[str, list[Output]]]:
        """(file name, outputs) of every file, in order."""
        return disk.shards(self.outputs, byte_size(self.config.max_shard))

    @cached_property
    def bytes(self) -> int:
        return sum(output.bytes for output in self.outputs)

    @cached_property
    def hash(self) -> str:
        """A digest: equal hashes on equal sources give equal bytes. Paths (source, donors, output) are not hashed."""
        settings = {k: v for k, v in asdict(self.config).items() if k not in ("source", "output", "donors", "sequence")}
        del settings["router"]["choice"]  # in hf_config already; plans made before there was a choice keep their hashes
        digest = hashlib.sha256(
            json.dumps([FORMAT, settings, self.target, self.hf_config], sort_keys=True, default=str).encode()
        )
        for output in self.outputs:
            digest.update(repr((output.name, output.shape, output.dtype, output.parts)).encode())
        return digest.hexdigest()


def read_dense(source_family: AnyDense, checkpoint: Checkpoint) -> DenseSpec:
    spec = source_family.read(checkpoint.config)
    return source_family.carry(spec, checkpoint.entries) if isinstance(source_family, siblings.Dense) else spec


def build(
    config: UpcycleConfig,
    checkpoints: Sequence[Checkpoint],
    observed: Mapping[str, Tensor] | None = None,
    *,
    text: bool = False,
) -> UpcyclePlan:
    """Plan every tensor and check all that can be checked before the first write. `checkpoints`: base, then donors.
    `observed`: what was measured on text, if it was: then the text is not looked for. `text`: whether there is some
    that the config does not name.

    A ValueError says in one sentence what cannot be done and what can.
    """
    base = checkpoints[0]
    if base.config.get("model_type") in plugin.names("upcycle.arch.targets"):
        return grown(config, base, observed or {})
    source_family = family(base.config.get("model_type"))
    grow.check_dense(config, base.folder)
    dense = read_dense(source_family, base)
    stored = check_sources(dense, source_family, checkpoints)
    dense = replace(dense, dtype=stored_dtype(base))
    method = request.read_method(config, len(checkpoints) - 1)
    moe, why_score = scored(config, request.moe_spec(config, dense, method))
    known = any(name.endswith(".rows") for name in observed or {})
    config = request.with_rows(config, moe, text=(text or known) and dense.carried is None)
    kind = scale.parse(config.scale)
    request.check_router(config, moe, kind)
    name, why = choose_target(config, moe)
    why += why_score
    chosen = target(name)
    moe = place_scale(config, moe, kind, chosen)
    sources = [
        {r: replace(s, donor=i) for r, s in source_family.sources(dense).items()} for i in range(len(checkpoints))
    ]
    make_recipe = Recipes(moe, method, sources, chosen)
    outputs = tuple(make_recipe.output(slot) for slot in make_recipe.slots)
    check_outputs(outputs)
    promise = make_promise(config, moe, method, kind, chosen, stored)
    plan = UpcyclePlan(
        config,
        dense,
        moe,
        name,
        why,
        method,
        kind,
        outputs,
        dropped(source_family, dense, base),
        chosen.config(moe),
        promise,
        (*chosen.notes(moe), *stays_whole(moe), *drawn(config, moe), *padded(moe)),
        tuple(warnings(moe, method)),
        observed or {},
    )
    if plan.needs_text and dense.carried is not None:
        raise ValueError(
            f"this config measures text, which our own decoder runs, and that has no {dense.family}; write "
            "scale=exact, router.init.name=normal and a method that measures nothing"
        )
    if plan.needs_text and observed is None:
        request.check_text(config, kind, method, base.folder, text=text)
    return plan


def grown(config: UpcycleConfig, base: Checkpoint, known: Mapping[str, Tensor]) -> UpcyclePlan:
    """The plan of an MoE with more or fewer experts than the source, an MoE too (grow.py)."""
    name = str(base.config["model_type"])
    chosen, dtype = readable(name), config.dtype or stored_dtype(base)
    if dtype not in BYTES:
        raise refused_dtype(base, dtype)
    view: MoESpec = chosen.read(base.config)
    grow.check(config, view, name)
    method, observed = grow.read_method(config), grow.choose(config, view, base, known)
    experts = grow.Experts(config, view, observed)
    hf_config = grow.grown_config(base.config, experts.count, experts.top_k, dtype)
    moe: MoESpec = replace(chosen.read(hf_config), dtype=dtype)
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
        "what the source is; " + chosen_experts(method.name, view, moe, config.experts),
        method,
        "exact",
        tuple(outputs),
        (),
        hf_config,
        grown_promise(method, view, dtype, base, observed),
        (*chosen.notes(moe), *waiting(observed)),
        (),
        observed,
        view.experts,
    )


def chosen_experts(method: str, view: MoESpec, moe: MoESpec, copies: int) -> str:
    if method == "copy":
        return f"each of its {view.experts} experts {copies} times, top-{view.top_k} made top-{moe.top_k}"
    what = "the most salient" if method == "prune" else "in copies by their use, all"
    return f"{what} of its {view.experts} experts in each layer, {moe.experts} now, top-{moe.top_k} as it was"


def grown_promise(
    method: Method, view: MoESpec, dtype: str, base: Checkpoint, observed: Mapping[str, Tensor]
) -> Promise:
    stored = sorted({entry.dtype for entry in base.entries.values()})
    rounded = next((d for d in stored if BYTES[d] > BYTES[dtype] or {d, dtype} == {"bfloat16", "float16"}), "")
    if not method.exact:
        kept = len(next(iter(observed.values())))
        return Promise(False, (grow.cost(view, kept, observed),), None, 1e-5)
    reasons = (f"exact but for the rounding of {rounded} weights to {dtype}",) if rounded else ()
    return Promise(True, reasons, None, 1e-5)


def waiting(observed: Mapping[str, Tensor]) -> Iterator[str]:
    waits = [float(tensor) for name, tensor in observed.items() if name.endswith(".wait")]
    if waits:
        yield (
            f"all copies of an expert but the first wait: their selection bias is {min(waits):.3g} to {max(waits):.3g} "
            "lower, so no token takes them until balance.bias_rate has raised it, within some 1 / rate steps"
        )


def warnings(moe: MoESpec, method: Method) -> Iterator[str]:
    """Sentences on what was measured of such a model and speaks against it; docs/study.md has the runs."""
    whole = moe.copies_of_slices and not moe.disjoint and moe.top_k % moe.granularity == 0
    if whole and moe.slices == 1 and moe.top_k < moe.experts:
        yield (
            "a router that learns takes virtual groups apart; measured on a real checkpoint (SmolLM2-135M): choices "
            "stop being whole FFNs, 0.26 nats behind the dense control after 26 M tokens; "
        ) + (
            "use target=upcycled, whose router chooses in each slice (no stock target holds that; it was ahead of the "
            "control by 0.019), or stay stock with a frozen router: optim.router_lr=0 in training"
            if moe.dense.carried is None
            else "freeze the router where you train it"
        )
    if moe.slices > 1 and not moe.weights_sum_to_one:
        yield (
            "weights that are not divided by their sum are not exact and ended behind: on SmolLM2-135M by 0.025 nats "
            "after 13 M tokens, two seeds of two, with a calibrated scale; use router.normalize=true"
        )
    if method.evidence:
        yield method.evidence


def stays_whole(moe: MoESpec) -> Iterator[str]:
    if moe.slices > 1:
        yield (
            "no stock target, mixtral and qwen3_moe among them, holds router.choice=each-slice; what stays stock and "
            "whole is router.choice=any with a frozen router: optim.router_lr=0 in training"
        )


def drawn(config: UpcycleConfig, moe: MoESpec) -> Iterator[str]:
    if moe.slices > 1 and config.router.init.name == "normal":
        yield (
            "routers begin with rows drawn at random; name calibration.texts and leave router.init.name out, and they "
            "divide that text evenly from the first step, which was worth 0.004 nats on a real model (docs/study.md)"
        )


def padded(moe: MoESpec) -> Iterator[str]:
    if moe.padding:
        yield (
            f"grouped kernels, transformers' among them, want rows of whole 16 bytes, which {moe.cut_widths[0]} "
            f"neurons in {moe.dtype} are not: each expert is filled up with {moe.padding} zero neurons, which change "
            "nothing and do not learn"
        )


# ---- which architecture


def place_scale(config: UpcycleConfig, moe: MoESpec, kind: str | float, chosen: AnyTarget) -> MoESpec:
    """`moe` with c as its output_scale where the target has one; elsewhere c goes into the weights (plan.factors)."""
    if config.scale_in not in ("auto", "weights", "output"):
        raise ValueError(f"scale_in is {config.scale_in!r}; write auto, weights or output")
    fits = chosen.can.output_scale and kind not in ("published", "calibrated")
    if config.scale_in == "output" and not fits:
        raise ValueError(
            "scale_in=output needs a target with an output scale and one number for all layers, got "
            f"{chosen.name} with scale={kind}"
        )
    c = scale.gain(moe, kind, None)
    return replace(moe, output_scale=c) if fits and config.scale_in != "weights" and c is not None else moe


def rank(name: str) -> tuple[int, str]:
    """Sort key: a target's place in PREFERENCE; unlisted targets come last, by name."""
    return (PREFERENCE.index(name) if name in PREFERENCE else len(PREFERENCE), name)


def stock_targets(config: UpcycleConfig, moe: MoESpec) -> dict[str, list[str]]:
    """Why each stock target that the config leaves to choose from cannot hold `moe`; an empty list if it can."""
    if moe.dense.carried is not None:
        pair = siblings.DENSE[moe.dense.family]
        return {pair.moe: refusals(pair.can, moe)}
    names = plugin.names("upcycle.arch.targets") if config.target == "auto" else [config.target]
    return {name: refusals(target(name).can, moe) for name in names if target(name).can.stock}


def scored(config: UpcycleConfig, moe: MoESpec) -> tuple[MoESpec, str]:
    """`moe` with sigmoid scores if router.score=auto and they alone keep it stock and exact; words that say so."""
    if config.router.score != "auto":
        return moe, ""
    sigmoid, soft = replace(moe, score="sigmoid"), stock_targets(config, moe)
    if [] in soft.values() or [] not in stock_targets(config, sigmoid).values() or not sigmoid.weights_sum_to_one:
        return moe, "; router.score=auto is softmax"
    nearest = min(soft, key=lambda name: (len(soft[name]), rank(name)))
    return sigmoid, (
        f"; router.score=auto is sigmoid, which alone keeps it stock and exact (with softmax, {nearest} has no "
        f"{' and no '.join(soft[nearest])})"
    )


def choose_target(config: UpcycleConfig, moe: MoESpec) -> tuple[str, str]:
    """(target, why this one). A ValueError if the config names a target that cannot hold the model."""
    if moe.dense.carried is not None:
        return siblings.target_of(moe, config.target)
    reasons = {name: refusals(target(name).can, moe) for name in plugin.names("upcycle.arch.targets")}
    holding = sorted((n for n in reasons if not reasons[n]), key=rank)
    if config.target != "auto":
        target(config.target)  # an unknown name is refused here
        if reasons[config.target]:
            instead = "".join(f". Or: {line}" for line in stays_whole(moe))
            raise ValueError(
                f"target {config.target} cannot hold {'; nor '.join(reasons[config.target])}; targets that can: "
                f"{', '.join(holding)}{instead}"
            )
        return config.target, "asked for"
    stock = [n for n in holding if target(n).can.stock]
    if stock:
        best, *rest = stock
        # a bf16 router has ties, which split virtual groups; stock targets of one score all route in the same precision
        half = moe.dtype in ("bfloat16", "float16")
        fp32 = " and routes in float32" if half and moe.granularity > 1 and target(best).can.router_fp32 else ""
        others = f"; {', '.join(rest)} would too" if rest else ""
        adds_one = half and moe.dense.norm == "rms1p" and "rms1p" not in target(best).can.norms
        held = f"but for rounding norm weights + 1 to {moe.dtype}" if adds_one else "exactly"
        return best, f"stock transformers, holds this model {held}{fp32}{others}"
    close = sorted((n for n in reasons if target(n).can.stock), key=lambda n: (len(reasons[n]), rank(n)))[:2]
    return holding[0], "no stock architecture holds it: " + "; ".join(
        f"{n} has no {' and no '.join(reasons[n])}" for n in close
    )


# ---- which tensors


# What a shared gate is filled with. Its sigmoid is exactly 1/2, as of zeros, but llama.cpp computes it as silu(x) / x,
# which is NaN for x = 0. (In float16 it is zero.)
TINY = 1e-20


class Recipes:
    """Turns a target's slots into outputs with recipes. `dense` says what fills a role that the donor lacks."""

    def __init__(self, moe: MoESpec, method: Method, sources: list[dict[str, Source]], chosen: AnyTarget) -> None:
        self.moe, self.needs, self.sources = moe, method.needs, sources
        self.one_p = moe.dense.norm == "rms1p" and "rms1p" not in chosen.can.norms
        self.slots: list[Slot] = list(chosen.slots(moe))
        self.shared_factor = 2.0 if any(".shared_gate." in role for slot in self.slots for role in slot.roles) else 1.0

    def output(self, slot: Slot) -> Output:
        dtype, single = slot.dtype or self.moe.dtype, len(slot.roles) == 1
        parts = (self.recipe(role, slot.shape if single else self.moe.shape(role), dtype) for role in slot.roles)
        return Output(slot.name, slot.shape, dtype, tuple(parts))

    def recipe(self, role: str, shape: tuple[int, ...], dtype: str) -> Recipe:
        path = role.split(".")
        layer, part = (int(path[1]), path[2]) if path[0] == "layers" else (-1, path[0])
        if part == "router" and path[-1] == "weight":
            return Recipe("router", shape, dtype, layer=layer)
        if part == "experts":
            return self.neurons(role, shape, dtype, layer, int(path[3]))
        if part == "shared" and self.moe.shared and path[-2:] != ["down", "bias"]:  # the routed experts add that bias
            return self.neurons(role, shape, dtype, layer, -1)
        return self.dense(role, shape, dtype, layer, part)

    def neurons(self, role: str, shape: tuple[int, ...], dtype: str, layer: int, index: int) -> Recipe:
        """A matrix of a routed expert (index >= 0) or of the shared one."""
        *_, matrix, kind = role.split(".")
        key = f"layers.{layer}.{self.donor_matrix(matrix)}.{kind}"
        name = matrix if kind == "weight" else f"{matrix}_bias"
        if index >= 0:
            donor = {"source": 0, "own": 1 + index // self.moe.granularity}
            sources = tuple(self.sources[donor[which]][key] for which in self.needs.donors)
            return Recipe("expert", shape, dtype, sources, layer, index, name)
        factor = self.shared_factor if matrix == "down" else 1.0
        return Recipe("shared", shape, dtype, self.rest(key), layer, -1, name, factor)

    def dense(self, role: str, shape: tuple[int, ...], dtype: str, layer: int, part: str) -> Recipe:
        key = role
        if role not in self.sources[0]:
            if role == "head.weight":
                key = "embed.weight"  # a tied model in a target that does not tie
            elif part == "gate" and role.endswith(".weight"):
                key = role.replace(".gate.", f".{self.donor_matrix('gate')}.")
            else:  # a tensor that the target requires and the donor lacks is made of zeros, which change nothing
                assert role.endswith(".bias") or part in ("shared", "shared_gate"), role
                return Recipe("fill", shape, dtype, layer=layer, add=TINY if part == "shared_gate" else 0.0)
        add = 1.0 if self.one_p and "norm" in part else 0.0
        sources = self.rest(key)
        return Recipe("average" if len(sources) > 1 else "keep", shape, dtype, sources, layer, add=add)

    def donor_matrix(self, matrix: str) -> str:
        return "up" if matrix == "gate" and not self.moe.dense.gated else matrix  # relu2_as_gated

    def rest(self, key: str) -> tuple[Source, ...]:
        return tuple(s[key] for s in self.sources[1:]) if self.needs.rest == "mean" else (self.sources[0][key],)


# ---- checks before any write


FREE = ("dtype", "tokens", "init_std", "context")  # the fields of DenseSpec in which donors may differ


def same(name: str, spec: DenseSpec, other: DenseSpec) -> bool:
    if spec.carried is None or name != "carried":
        return bool(getattr(spec, name) == getattr(other, name))
    assert other.carried is not None
    one, two = (c.config.keys() for c in (spec.carried, other.carried))
    differing = {key for key in one | two if spec.carried.config.get(key) != other.carried.config.get(key)}
    return spec.carried.tensors == other.carried.tensors and not differing - siblings.FREE


def stored_dtype(checkpoint: Checkpoint) -> str:
    """The dtype of most weights, by the headers: config.json may say something else."""
    count: dict[str, int] = {}
    for entry in checkpoint.entries.values():
        count[entry.dtype] = count.get(entry.dtype, 0) + prod(entry.shape)
    dtype = max(count, key=lambda d: count[d])
    if dtype not in BYTES:
        raise refused_dtype(checkpoint, dtype)
    return dtype


def refused_dtype(checkpoint: Checkpoint, dtype: str) -> ValueError:
    return ValueError(
        f"{checkpoint.folder} stores its weights as {dtype}; give a checkpoint in {', '.join(BYTES)} "
        "(dequantise it first)"
    )


def check_sources(dense: DenseSpec, source_family: AnyDense, checkpoints: Sequence[Checkpoint]) -> set[str]:
    """Check that every tensor of the family is there in the right shape and that all donors have one architecture.

    Returns the dtypes of the tensors; raises a ValueError otherwise.
    """
    stored: set[str] = set()
    for checkpoint in checkpoints:
        if checkpoint.config.get("model_type") != checkpoints[0].config.get("model_type"):
            raise ValueError(
                f"{checkpoint.folder} is not a {dense.family} model; all donors must have one architecture"
            )
        spec = read_dense(source_family, checkpoint)
        differing = [f.name for f in fields(spec) if f.name not in FREE and not same(f.name, spec, dense)]
        if differing:
            raise ValueError(
                f"{checkpoint.folder} and {checkpoints[0].folder} differ in {', '.join(differing)}; all donors "
                "must have one architecture"
            )
        if spec.layers > len(checkpoint.entries):
            raise ValueError(
                f"config.json of {checkpoint.folder} promises {spec.layers} layers, and there are only "
                f"{len(checkpoint.entries)} tensors; is the download complete?"
            )
        sources, main = source_family.sources(spec), stored_dtype(checkpoint)
        for role, shape in spec.roles():
            source = sources[role]
            entry = checkpoint.entries.get(source.name)
            if entry is None:
                raise ValueError(
                    f"{checkpoint.folder} has no tensor {source.name!r}, which config.json promises ({role}); "
                    "is the download complete?"
                )
            rows = (
                sum(stop - start for start, stop in source.rows)
                if source.rows
                else entry.shape[0]
                if entry.shape
                else 0
            )
            beyond = any(stop > entry.shape[0] for _, stop in source.rows)
            if beyond or (rows, *entry.shape[1:]) != shape:
                raise ValueError(
                    f"{source.name} in {checkpoint.folder} has shape {list(entry.shape)}, config.json promises "
                    f"{list(shape)} for {role}; do the two belong together?"
                )
            if entry.dtype not in BYTES:
                raise refused_dtype(checkpoint, entry.dtype)
            if not role.startswith("carried.") or entry.dtype == main:  # what is carried keeps another dtype
                stored.add(entry.dtype)
    return stored


def check_outputs(outputs: Sequence[Output]) -> None:
    """Assert that each output is made once and that its parts fill it exactly."""
    names: set[str] = set()
    for out in outputs:
        assert out.name not in names, f"{out.name} is made twice"
        names.add(out.name)
        assert sum(prod(part.shape) for part in out.parts) == prod(out.shape), out.name


def dropped(source_family: AnyDense, dense: DenseSpec, base: Checkpoint) -> tuple[tuple[str, str], ...]:
    """(name, reason) of every unused tensor of the base. One without a reason is a ValueError: it would be lost."""
    sources = source_family.sources(dense)
    used = {source.name for source in sources.values()}
    untied = source_family.sources(replace(dense, tied=False))
    head = untied["head.weight"].name if dense.carried is None else ""
    out = []
    for name in base.entries:
        if name in used:
            continue
        if name == head:  # unused, so the model is tied
            out.append((name, "tied to the embedding"))
        elif any(re.fullmatch(pattern, name) for pattern in source_family.ignored):
            out.append((name, "a buffer, not a weight"))
        else:
            raise ValueError(
                f"{base.folder} has a tensor {name!r} that no {dense.family} model has; converting would lose it"
            )
    return tuple(out)


def sizes(plan: UpcyclePlan) -> size.Sizes:
    parts = [part for output in plan.outputs for part in output.parts]
    found = size.measure(plan.moe, [("expert" if part.expert >= 0 else part.kind, prod(part.shape)) for part in parts])
    if not plan.grown:
        return found
    multiplied = sum(prod(part.shape) for part in parts if part.expert >= 0 or part.sources[0].rows)
    return replace(found, dense=found.total - multiplied + multiplied * plan.source_experts // plan.moe.experts)
