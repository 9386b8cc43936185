"""Rebuild the plan of a converted folder from its dense source, and compare the folder with it.

`plan_of` rebuilds the plan of the manifest, `faults` compares everything except weights, and `weights` computes tensors
again and compares their bits. `Rounded` rounds the dense model as the converted model was rounded, so that the two
functions can be compared without the rounding.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from upcycle.arch import registry, tokenizer
from upcycle.arch.ffn import FFN, NEURON_DIM, scale
from upcycle.arch.slots import Slot
from upcycle.config import reading as config
from upcycle.config.schema import UpcycleConfig
from upcycle.converting import grow
from upcycle.converting.convert import changed, in_flight
from upcycle.converting.make import Maker, Piece
from upcycle.io.checkpoint import Checkpoint, load_checked
from upcycle.io.publish import MANIFEST, MEASURED, digest
from upcycle.planning import rng
from upcycle.planning.outputs import Output, Recipe
from upcycle.planning.plan import UpcyclePlan, build
from upcycle.planning.promise import moe_output

BUDGET = 2 << 30  # bytes of weights to compute again
SLICE = 64 << 20  # bytes to compare of one tensor
OLD_TOLERANCE = 1e-5  # in manifests of older versions


# ---- the plan


@contextmanager
def sources(dense: Checkpoint, manifest: Mapping[str, Any]) -> Iterator[list[Checkpoint]]:
    """Open the manifest's donors; yield `dense` and the donors; raise a ValueError if a fingerprint has changed."""
    with ExitStack() as stack:
        checkpoints = [dense, *(stack.enter_context(Checkpoint.open(name)) for name in manifest["donors"])]
        if [c.fingerprint() for c in checkpoints] != manifest["source"]:
            raise ValueError(
                f"{dense.folder} is not the model that the MoE was made from, or it has changed (its content does not "
                f"match {MANIFEST}); give that model, or tolerance=NUMBER to compare any two models"
            )
        yield checkpoints


def plan_of(folder: Path, manifest: Mapping[str, Any], checkpoints: Sequence[Checkpoint]) -> UpcyclePlan:
    settings = config.build(UpcycleConfig, config.of_manifest(manifest))
    settings = replace(settings, source=str(checkpoints[0].folder) if settings.source else "", output=str(folder))
    plan = build(settings, checkpoints, load_checked(folder / MEASURED) if grow.asked(settings) else {})
    if not plan.needs_text:
        return plan
    if not (folder / MEASURED).is_file():
        raise ValueError(f"{folder} has no {MEASURED}, which holds the measurements on text; convert again")
    from upcycle.text import measure

    return replace(plan, observed=measure.read(folder / MEASURED, plan))


def faults(
    plan: UpcyclePlan, checkpoints: Sequence[Checkpoint], made: Checkpoint, manifest: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a sentence for each difference between a plan and its converted folder, except in weights."""
    if manifest["sum"] != digest(manifest):
        yield f"{MANIFEST} has changed since it was written: its sum differs"
    if plan.hash != manifest["plan"]:
        yield f"{MANIFEST} names a different plan than its config and the dense model give"
    promise = manifest["promise"]  # its reasons are sentences, which may differ between versions
    if promise["exact"] != plan.promise.exact or promise["tolerance"] not in (plan.promise.tolerance, OLD_TOLERANCE):
        yield f"{MANIFEST} has a different promise than its plan"
    want, have = jsonable(plan.hf_config), dict(made.config)
    for key in sorted(want.keys() | have.keys()):
        if key not in have or key not in want or want[key] != have[key]:
            yield f"config.json has {key}={have.get(key)!r}, but the plan has {want.get(key)!r}"
    for path in checkpoints[0].copied_files():
        copy = made.folder / path.name
        if not copy.is_file() or copy.read_bytes() != tokenizer.read(path, plan.tokenizer_class):
            yield f"{path.name} differs from the copy of the dense model's that convert writes"
    if manifest["sources"] != [c.stamps() for c in checkpoints]:
        what = changed(manifest["read"], checkpoints, dict[Piece, str]())
        if what:
            yield f"{what} has changed since the MoE was made from it"
    missing = sorted(plan.by_name.keys() - made.entries.keys())
    extra = sorted(made.entries.keys() - plan.by_name.keys())
    if missing or extra:
        yield f"{len(missing)} tensors of the plan are missing and {len(extra)} are not in it: {(missing + extra)[0]}"
    for name in plan.by_name.keys() & made.entries.keys():
        entry, output = made.entries[name], plan.by_name[name]
        if (entry.shape, entry.dtype) != (output.shape, output.dtype):
            yield f"{name} is {entry.dtype} {list(entry.shape)}, but the plan has {output.dtype} {list(output.shape)}"


def jsonable(value: Any) -> Any:
    """Return the value as JSON would store it: tuples become lists, keys become strings."""
    return json.loads(json.dumps(value))


# ---- the weights


@dataclass(frozen=True)
class Compared:
    tensors: int
    share: float  # of the plan's bytes
    wrong: tuple[str, ...]


def weights(plan: UpcyclePlan, checkpoints: Sequence[Checkpoint], made: Checkpoint) -> Compared:
    """Compute tensors of the plan again and compare them bit for bit.

    All tensors of a model of up to BUDGET bytes; otherwise random tensors, at least one of each kind. Tensors larger
    than SLICE bytes are compared in a random slice.
    """
    maker, wrong, done = layer_maker(plan, checkpoints), [], 0
    chosen = sample(plan)
    for output, rows in tqdm(chosen, desc="made again", unit="tensor", delay=2):
        entry = made.entries.get(output.name)
        if entry is None or (entry.shape, entry.dtype) != (output.shape, output.dtype):
            continue  # `faults` reports it
        have = made.read(output.name, rows, check=False)
        want = maker.tensor(output.name) if rows is None else maker.slice(output.name, (slice(*rows),))
        done += have.nbytes
        if not torch.equal(have.flatten().view(torch.uint8), want.flatten().view(torch.uint8)):
            wrong.append(f"{output.name} differs from the tensor that the plan computes from the dense model")
    return Compared(len(chosen), done / plan.bytes, tuple(wrong))


def layer_maker(plan: UpcyclePlan, checkpoints: Sequence[Checkpoint]) -> Maker:
    """Return a Maker whose cache holds only one layer's FFN."""
    return Maker(plan, checkpoints, in_flight(plan, 1)[1])


def sample(plan: UpcyclePlan) -> list[tuple[Output, tuple[int, int] | None]]:
    """Draw outputs and the rows of each (None: all), in the plan's order, so that little is read twice."""
    generator = rng.generator(plan.config.seed, "rebuild", plan.hash)
    order = torch.randperm(len(plan.outputs), generator=generator).tolist()
    first: dict[tuple[str, str], int] = {}
    for i in order:
        first.setdefault((plan.outputs[i].parts[0].kind, plan.outputs[i].parts[0].matrix), i)
    room, chosen = BUDGET, {}
    for i in [*first.values(), *order]:
        output = plan.outputs[i]
        size = min(output.bytes, SLICE)
        if i in chosen or (room < size and i not in first.values()):
            continue
        room -= size
        rows = None
        if output.bytes > SLICE:
            count = max(1, SLICE // (output.bytes // output.shape[0]))
            start = int(torch.randint(0, output.shape[0] - count + 1, (), generator=generator))
            rows = (start, start + count)
        chosen[i] = (output, rows)
    return [chosen[i] for i in sorted(chosen)]


# ---- the outputs of the experts


class Reference:
    """A function (layer, x_TD) -> output of the layer's MoE block, with weights computed again from the plan."""

    def __init__(self, plan: UpcyclePlan, checkpoints: Sequence[Checkpoint], dtype: torch.dtype) -> None:
        self.plan, self.maker, self.room = plan, layer_maker(plan, checkpoints), BUDGET
        self.dtype = torch.promote_types(dtype, torch.float32)  # computes in this dtype
        self.recipes: dict[tuple[int, str, int, str], Recipe] = {}
        for part in (part for output in plan.outputs for part in output.parts):
            if part.kind in ("expert", "shared", "router"):
                self.recipes[part.layer, part.kind, part.expert, part.matrix] = part

    def may_make(self, layer: int) -> bool:
        """Return True if a layer may be computed again: the first always, others up to BUDGET bytes in all."""
        return self.within(sum(4 * prod(r.shape) for key, r in self.recipes.items() if key[0] == layer))

    def within(self, size: int) -> bool:
        first, self.room = self.room == BUDGET, self.room - size
        return first or self.room >= 0

    def __call__(self, layer: int, x_TD: Tensor) -> Tensor:
        plan, moe, x_TD = self.plan, self.plan.moe, x_TD.to(self.dtype)
        activation = "relu" if plan.gated and not moe.dense.gated else moe.dense.activation
        rows = self.maker.part(self.recipes[layer, "router", -1, ""]).to(self.dtype)
        y_TD = moe_output(x_TD, moe, rows, [self.ffn(layer, "expert", i) for i in range(moe.experts)], activation)
        if moe.shared:
            shared = self.ffn(layer, "shared", -1)
            y_TD = y_TD + shared(x_TD, activation) / self.recipes[layer, "shared", -1, "down"].factor
        return y_TD

    def ffn(self, layer: int, kind: str, index: int) -> FFN:
        """Return an expert whose matrices are computed on use, so that only one expert is in memory at a time."""
        own = {key[3]: recipe for key, recipe in self.recipes.items() if key[:3] == (layer, kind, index)}
        width = own["up"].shape[0]
        return FFN(
            width, self.plan.dense.hidden, tuple(own), lambda matrix: self.maker.part(own[matrix]).to(self.dtype)
        )


class FewerExperts(Reference):
    """The Reference of a plan whose source is an MoE: it finds tensors by the roles of the target's slots."""

    def __init__(self, plan: UpcyclePlan, checkpoints: Sequence[Checkpoint], dtype: torch.dtype) -> None:
        super().__init__(plan, checkpoints, dtype)
        architecture = registry.readable(plan.target)
        self.moe = architecture.read(plan.hf_config)
        self.slots = {role: (slot, i) for slot in architecture.slots(self.moe) for i, role in enumerate(slot.roles)}
        self.held: dict[str, Tensor] = {}  # fused tensors of one layer; each expert has a part

    def may_make(self, layer: int) -> bool:
        return self.within(sum(4 * prod(slot.shape) for slot in self.slots_of(layer).values()))

    def slots_of(self, layer: int) -> dict[str, Slot]:
        start = f"layers.{layer}."
        return {slot.name: slot for role, (slot, _) in self.slots.items() if role.startswith(start)}

    def __call__(self, layer: int, x_TD: Tensor) -> Tensor:
        moe, x_TD, start = self.moe, x_TD.to(self.dtype), f"layers.{layer}"
        self.held = {
            slot.name: self.maker.tensor(slot.name) for slot in self.slots_of(layer).values() if len(slot.roles) > 1
        }
        bias = self.role(f"{start}.router.bias") if f"{start}.router.bias" in self.slots else None
        experts = [self.block(f"{start}.experts.{i}", width) for i, width in enumerate(moe.widths)]
        activation = moe.dense.activation
        y_TD = moe_output(x_TD, moe, self.role(f"{start}.router.weight"), experts, activation, bias)
        if moe.shared:
            shared_TD = self.block(f"{start}.shared", moe.shared)(x_TD, activation)
            gate = self.role(f"{start}.shared_gate.weight") if moe.shared_gate else None
            y_TD = y_TD + (shared_TD if gate is None else shared_TD * (x_TD @ gate.T).sigmoid())
        return y_TD

    def block(self, prefix: str, width: int) -> FFN:
        names = self.moe.dense.ffn_matrices
        return FFN(width, self.moe.dense.hidden, names, lambda matrix: self.role(f"{prefix}.{matrix}.weight"))

    def role(self, role: str) -> Tensor:
        slot, i = self.slots[role]
        whole = self.held[slot.name] if len(slot.roles) > 1 else self.maker.tensor(slot.name)
        return whole.reshape(len(slot.roles), *self.moe.shape(role))[i].to(self.dtype)


# ---- rounding


class Rounded:
    """A function (name, tensor) -> the dense tensor, rounded as the MoE's weights are.

    An exact plan that narrows the dtype rounds each weight: `round(w * factor)`. The dense model with
    `round(w * factor) / factor` is then the same function, except for the order of sums.
    """

    def __init__(self, plan: UpcyclePlan, dtype: torch.dtype) -> None:
        self.plan, self.dtype = plan, torch.promote_types(dtype, torch.float32)  # divides in this dtype
        self.recipes: dict[str, list[Recipe]] = {}
        seen = set()
        for recipe in (part for output in plan.outputs for part in output.parts if part.sources):
            source, factor = recipe.sources[0], self.factor(recipe)
            key = (source, recipe.kind, factor)
            if key not in seen:
                seen.add(key)
                self.recipes.setdefault(source.name, []).append(recipe)

    def factor(self, recipe: Recipe) -> float:
        if recipe.kind == "expert":
            return self.plan.factors(recipe.layer).get(recipe.matrix, 1.0)
        return recipe.factor

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self.recipes:
            return tensor  # unused, for instance a buffer
        out = tensor.to(torch.promote_types(tensor.dtype, self.dtype), copy=True)
        for recipe in self.recipes[name]:
            index = torch.cat([torch.arange(*rows) for rows in recipe.sources[0].rows or [(0, len(tensor))]])
            out[index] = self.rounded(recipe, tensor[index], out[index])
        return out

    def rounded(self, recipe: Recipe, w: Tensor, so_far: Tensor) -> Tensor:
        dtype, factor, cut = getattr(torch, recipe.dtype), self.factor(recipe), self.plan.moe.cut_shared
        if recipe.add:
            return (w.to(torch.float32) + recipe.add).to(dtype).to(so_far.dtype) - recipe.add
        held = scale(w, factor).to(dtype).to(so_far.dtype) / factor
        dim = NEURON_DIM.get(recipe.matrix)
        if recipe.kind not in ("expert", "shared") or dim is None or not cut:
            return held
        # shared and routed experts have different neurons, so round only this recipe's neurons
        order = self.plan.observed.get(f"layers.{recipe.layer}.order", torch.arange(self.plan.dense.ffn))
        mine = order[:cut] if recipe.kind == "shared" else order[cut:]
        return so_far.index_copy(dim, mine, held.index_select(dim, mine))
