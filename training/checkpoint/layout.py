"""Map parameters to tensors of Hugging Face folders, for loading and exporting.

A model starts from a checkpoint folder, dense or MoE, or *online* from a dense checkpoint and an upcycle config.
Online, the converter's Maker makes every tensor, so the weights equal those of `upcycle convert` bit for bit, without
an MoE on disk. export.py writes the same layout again at any time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby, zip_longest
from math import prod
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from tqdm import tqdm

from training.checkpoint import stock
from training.model.decoder import Decoder
from training.model.lora import A, is_adapter
from training.model.moe import MoE
from training.model.names import plain_name
from training.model.stock.model import Stock, known
from training.parallel.collectives import box, local
from upcycle import plugin
from upcycle.arch import registry
from upcycle.arch.families.common import Source
from upcycle.arch.slots import Slot
from upcycle.arch.spec import BYTES, DenseSpec, MoESpec
from upcycle.config.schema import UpcycleConfig
from upcycle.converting import card
from upcycle.converting.make import Maker
from upcycle.io import publish
from upcycle.io.checkpoint import Checkpoint, pinned
from upcycle.io.publish import MANIFEST
from upcycle.io.strict import short
from upcycle.planning.plan import UpcyclePlan, build
from upcycle.text import measure
from upcycle.verifying.inspect import in_slices, read_manifest, source_names

T = TypeVar("T")


@dataclass(frozen=True)
class Stored:
    """A tensor on disk: its roles, each with its rows in the tensor (none: the roles are stacked in order)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    roles: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]
    view: tuple[int, ...] = ()  # see targets.common.Slot
    order: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        return prod(self.shape) * BYTES[self.dtype]


Read = Callable[..., Tensor]  # takes a tensor's name and optionally `rows`: [first, last) of dimension 0


@dataclass(frozen=True)
class Past:
    """The base models of a model, and its earlier training."""

    base: Mapping[str, str] = field(default_factory=dict)  # folder or Hub id of each model -> its fingerprint
    trained: tuple[card.Training, ...] = ()
    start: str = ""  # the folder or Hub id of the model itself, if it was loaded whole
    start_sum: str = ""  # of the manifest in that folder


@dataclass(frozen=True)
class Origin:
    """Where a model comes from: its spec, its tensors, and the other files of its folder."""

    spec: DenseSpec | MoESpec
    tensors: tuple[Stored, ...]
    read: Read
    config: Mapping[str, Any]  # config.json
    files: tuple[Path, ...]  # tokenizer and the like
    tokenizer_class: str = ""  # the class that a copy of tokenizer_config.json names, if not the one in `files`
    plan: UpcyclePlan | None = None  # if it is upcycled while it loads
    settings: Mapping[str, Any] | None = None  # settings of the plan that made it, if known
    past: Past = field(default_factory=Past)
    terms: Mapping[str, str] = field(default_factory=dict)  # licence and similar, of the first of past.base
    # tensor name -> key that is equal for tensors with equal numbers, or None if unknown
    alike: Callable[[str], Hashable | None] = lambda _: None

    @property
    def dense(self) -> DenseSpec:
        return self.spec.dense if isinstance(self.spec, MoESpec) else self.spec


# ---- origins


@contextmanager
def opened(source: str | Path) -> Iterator[Origin]:
    """Open the Origin of a checkpoint folder or Hub id, dense or MoE."""
    with Checkpoint.open(source) as checkpoint:
        entries = {name: (entry.shape, entry.dtype) for name, entry in checkpoint.entries.items()}
        manifest, files = read_manifest(checkpoint.folder) or {}, checkpoint.copied_files()
        check_listed(checkpoint.folder, manifest)
        settings = manifest.get("config")
        origin = described(source, checkpoint.config, checkpoint.read, files, settings, entries)
        for stored in origin.tensors:
            shape, _ = entries.get(stored.name, (stored.shape, ""))
            if shape != stored.shape:
                raise ValueError(
                    f"{stored.name} has shape {list(shape)}, config.json promises {list(stored.shape)}; "
                    "do the two belong together?"
                )
        yield replace(origin, past=past_of(source, checkpoint, manifest), terms=card.terms(checkpoint.folder))


def check_listed(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raise a ValueError if a folder's manifest has changed, and warn of changed files next to the weights, which a
    person may have edited."""
    if "sum" in manifest:
        publish.unsigned(manifest, folder / MANIFEST, "copy the folder again")
    small = {name: line for name, line in manifest.get("files", {}).items() if not name.endswith(".safetensors")}
    for said in publish.damages(folder / MANIFEST, small) if manifest else ():
        warnings.warn(f"{said}; it is used as it is", stacklevel=2)


def past_of(source: str | Path, checkpoint: Checkpoint, manifest: Mapping[str, Any]) -> Past:
    """Return where a folder's model comes from, by its manifest; without one the model is a base itself."""
    start = pinned(source, checkpoint.folder)
    if not manifest:
        return Past({start: checkpoint.fingerprint()}, start=start)
    base = dict(zip_longest(source_names(manifest), manifest.get("source", ()), fillvalue=""))
    return Past(base, tuple(manifest.get("trained", ())), start, manifest.get("sum", ""))


Observe = Callable[[UpcyclePlan, Sequence[Checkpoint]], Mapping[str, Tensor]]


def named(key: str, source: str) -> Checkpoint:
    """Open a dense model; name the key in the error if there is none."""
    try:
        return Checkpoint.open(source)
    except ValueError as error:
        raise ValueError(f"model.upcycle.{key}: {error}") from None


@contextmanager
def online(
    config: UpcycleConfig, observe: Observe = measure.measure, *, text: bool = False, reads: bool = True
) -> Iterator[Origin]:
    """Open the Origin of what `upcycle convert` would write, made while it is read. `observe`: returns measurements on
    text, if the plan needs them. `text`: whether `observe` works although the config names no text; then
    router.init.name=auto may be clusters, else such a plan is an error. `reads`: False if `observe` reads no text."""
    if not (config.source or config.donors):
        raise ValueError("model.upcycle names no dense model; write model.upcycle.source=FOLDER, or a hub id")
    with ExitStack() as stack:
        names = [config.source or config.donors[0], *config.donors]
        keys = ["source" if config.source else "donors", *("donors" for _ in config.donors)]
        checkpoints = [stack.enter_context(named(key, name)) for key, name in zip(keys, names, strict=True)]
        plan = build(config, checkpoints, None if reads else {}, text=text)
        if plan.needs_text:
            plan = replace(plan, observed=observe(plan, checkpoints))
        maker = Maker(plan, checkpoints)

        def read(name: str, rows: tuple[int, int] | None = None) -> Tensor:
            return maker.tensor(name) if rows is None else maker.slice(name, (slice(*rows),))

        files = checkpoints[0].copied_files()
        entries = {each.name: (each.shape, each.dtype) for each in plan.outputs}
        origin = described(names[0], plan.hf_config, read, files, card.settings(plan), entries)
        base = {pinned(name, each.folder): each.fingerprint() for name, each in zip(names, checkpoints, strict=True)}
        terms = card.terms(checkpoints[0].folder)
        origin = replace(origin, tokenizer_class=plan.tokenizer_class)
        yield replace(origin, plan=plan, alike=maker.alike, past=Past(base), terms=terms)


def described(
    source: str | Path,
    config: Mapping[str, Any],
    read: Read,
    files: Iterable[Path],
    settings: Mapping[str, Any] | None = None,
    entries: stock.Entries | None = None,
) -> Origin:
    """Return the Origin that a config.json describes. `read` returns its tensors, and `files` are next to it.
    `settings`: of the plan that made the model, from upcycle.json. `entries`: its tensors, whose names matter for
    models that transformers computes."""
    model_type, files = str(config.get("model_type")), tuple(files)
    families, targets, natives = map(plugin.names, (registry.FAMILIES, registry.TARGETS, registry.NATIVES))
    if model_type in families:
        family = registry.family(model_type)
        dense = family.read(config)
        return Origin(dense, dense_tensors(dense, family.sources(dense)), read, config, files)
    if model_type in targets:
        target = registry.readable(model_type)
        moe = target.read(config)
        # without a record, only a router that chooses in each slice shows that experts are copies
        moe = replace(moe, disjoint=moe.slices == 1) if settings is None else in_slices(moe, settings)
        code = target.modeling
        files += (code,) if code is not None and code.name not in {file.name for file in files} else ()
        return Origin(moe, stored_slots(moe, target.slots(moe)), read, config, files, settings=settings)
    if model_type in natives:
        native = registry.native(model_type)
        moe = replace(native.read(config), disjoint=True)  # an MoE that no dense model becomes
        return Origin(moe, stored_slots(moe, native.slots(moe)), read, config, files)
    if entries is not None and known(model_type):
        spec, found = stock.read(config, entries)
        tensors = tuple(Stored(*each[:3], tuple((role, ()) for role in each[3])) for each in found)
        return Origin(spec, tensors, read, config, files, settings=settings)
    raise ValueError(
        f"{source} has model_type {short(model_type)}; training knows the dense families {', '.join(families)} "
        f"and the MoE architectures {', '.join([*targets, *natives])}, and architectures that transformers has"
    )


def stored_slots(moe: MoESpec, slots: Iterable[Slot]) -> tuple[Stored, ...]:
    return tuple(
        Stored(s.name, s.shape, s.dtype or moe.dtype, tuple((role, ()) for role in s.roles), s.view, s.order)
        for s in slots
    )


def dense_tensors(dense: DenseSpec, sources: Mapping[str, Source]) -> tuple[Stored, ...]:
    """Return a dense model's tensors on disk; one tensor may hold several roles (phi3's gate_up, gpt_neox's
    query_key_value)."""
    held: dict[str, list[tuple[str, tuple[tuple[int, int], ...]]]] = {}
    shapes = dict(dense.roles())
    for role, source in sources.items():
        held.setdefault(source.name, []).append((role, source.rows))
    out = []
    for name, roles in held.items():
        rows = sum(shapes[role][0] for role, _ in roles)
        out.append(Stored(name, (rows, *shapes[roles[0][0]][1:]), dense.dtype, tuple(roles)))
    return tuple(out)


# ---- roles in the model

Index = tuple[int | slice, ...]
Box = list[tuple[int, int]]


@dataclass(frozen=True)
class Piece:
    """This rank's part of a role's tensor."""

    shape: tuple[int, ...]  # shape of the whole
    slices: tuple[slice, ...]  # this rank's part
    part: Tensor  # a view of the model: writing to it writes to the model


def roles(model: Decoder) -> dict[str, tuple[Tensor, Index]]:
    """Return for each role its parameter or buffer, and its place there."""
    out: dict[str, tuple[Tensor, Index]] = {}
    if isinstance(model, Stock):
        out |= {role: (tensor, ()) for role, tensor in model.tensors().items() if ".experts." not in role}
        for name, module in model.named_modules():
            out |= expert_roles(module, f"{plain_name(name)}.experts") if isinstance(module, MoE) else {}
        return out
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        role = plain_name(name).replace(".attention.", ".").replace(".ffn.", ".")
        if ".experts." not in role and not is_adapter(role):
            out[role] = tensor, ()
    for index, layer in model.layers.items():
        if isinstance(layer.ffn, MoE):
            out |= expert_roles(layer.ffn, f"layers.{index}.experts")
    return out


def expert_roles(block: MoE, prefix: str) -> dict[str, tuple[Tensor, Index]]:
    out: dict[str, tuple[Tensor, Index]] = {}
    experts = block.experts
    halves = ("gate", "up") if experts.gated else ("up",)
    for number, width in enumerate(block.spec.widths):
        first = experts.anchor is not None and number < block.spec.anchors
        stack, i = (experts.anchor, number) if first else (experts, number - block.spec.anchors)
        assert stack is not None
        for half, matrix in enumerate(halves):
            out[f"{prefix}.{number}.{matrix}.weight"] = stack.up, (i, half, slice(width))
            if stack.up_bias is not None:
                out[f"{prefix}.{number}.{matrix}.bias"] = stack.up_bias, (i, half, slice(width))
        out[f"{prefix}.{number}.down.weight"] = stack.down, (i, slice(None), slice(width))
        if stack.down_bias is not None:
            out[f"{prefix}.{number}.down.bias"] = stack.down_bias, (i,)
    return out


def views(model: Decoder) -> dict[str, Tensor]:
    """Return this rank's part of each role as a view of the model; an undivided model has all."""
    return {role: piece.part for role, piece in pieces(model).items()}


def pieces(model: Decoder) -> dict[str, Piece]:
    return {role: piece(tensor, index) for role, (tensor, index) in roles(model).items()}


def piece(tensor: Tensor, index: Index) -> Piece:
    """Return this rank's part of tensor[index]."""
    tensor, held, role = tensor.detach(), box(tensor), bounds(tensor.shape, index)
    both = [(max(a, low), min(b, high)) for (a, b), (low, high) in zip(role, held, strict=True)]
    kept = [dim >= len(index) or not isinstance(index[dim], int) for dim in range(tensor.ndim)]
    shape = tuple(b - a for (a, b), keep in zip(role, kept, strict=True) if keep)
    if any(first >= last for first, last in both):
        return Piece(shape, (slice(0),) * len(shape), local(tensor).new_empty(0))
    slices = tuple(slice(f - a, t - a) for (f, t), (a, _), keep in zip(both, role, kept, strict=True) if keep)
    places = (slice(f - a, t - a) if keep else f - a for (f, t), (a, _), keep in zip(both, held, kept, strict=True))
    return Piece(shape, slices, local(tensor)[tuple(places)])


def bounds(size: Sequence[int], index: Index) -> list[tuple[int, int]]:
    """Return [first, last) of each dimension of tensor[index], for a tensor of this size."""
    index += (slice(None),) * (len(size) - len(index))
    return [(e, e + 1) if isinstance(e, int) else e.indices(n)[:2] for e, n in zip(index, size, strict=True)]


# ---- weights in, weights out


@torch.no_grad()
def load(model: Decoder, origin: Origin, *, exact: bool = False) -> Decoder:
    """Fill every parameter from the origin; none may be missing. If the model is divided, each rank reads or makes only
    the rows that it needs. `exact`: raise instead of rounding.

    The weights of a slice are made once and copied to its other copies within the model, because transfers to a busy
    GPU wait."""
    target = pieces(model)
    first = WeakValueDictionary[Hashable, Tensor]()  # without those of a layer that is encoded since
    left = set(target)
    for tensor in model.parameters():
        tensor.zero_()  # the padding of uneven experts
    tensors = with_room(model, target, origin.tensors, lambda stored: stored.roles[0][0])
    for stored in tqdm(tensors, "weights", len(origin.tensors), delay=2):
        here = [role for role, _ in stored.roles if role in target]
        left.difference_update(here)
        if not any(target[role].part.numel() for role in here):
            continue
        alike = origin.alike(stored.name) if len(stored.roles) == 1 else None
        if alike is not None:
            piece = target[here[0]]
            alike = alike, piece.part.dtype, *((each.start, each.stop) for each in piece.slices)
            if alike in first:
                piece.part.copy_(first[alike])
                continue
            first[alike] = piece.part
        copy(origin, stored, target, exact)
    assert not left, f"no tensor for {sorted(left)[:3]}"
    return model


def with_room(
    model: Decoder, target: MutableMapping[str, Piece], items: Iterable[T], role: Callable[[T], str]
) -> Iterator[T]:
    """Yield the items, a layer's experts together if these are codes of 4 bits. Their pieces in `target` then have room
    for numbers, which are encoded after the last one."""
    blocks: dict[str, MoE] = {}
    for index, layer in model.layers.items():
        if isinstance(layer.ffn, MoE) and layer.ffn.experts.up_codes is not None:
            blocks[f"layers.{index}.experts"] = layer.ffn
    owners = {each: prefix for prefix, block in blocks.items() for each in expert_roles(block, prefix)}

    def owner(item: T) -> str:
        return owners.get(role(item), "")

    for prefix, group in groupby(sorted(items, key=owner), owner):
        if not prefix:
            yield from group
            continue
        with blocks[prefix].experts.wide():
            target.update({each: piece(*place) for each, place in expert_roles(blocks[prefix], prefix).items()})
            yield from group
        target.update({each: piece(*place) for each, place in expert_roles(blocks[prefix], prefix).items()})


def copy(origin: Origin, stored: Stored, target: Mapping[str, Piece], exact: bool = False) -> None:
    """Copy a tensor on disk to this rank's pieces of its roles, reading only the needed rows."""
    if stored.order:
        copy_experts(origin, stored, target)
        return
    flat, width = 0, prod(stored.shape[1:])
    for role, ranges in stored.roles:
        piece, size = target[role], prod(target[role].shape)
        if piece.part.numel():
            rows = piece.slices[0]
            if ranges:  # several ranges for interleaved heads of q, k and v
                part = torch.cat([origin.read(stored.name, each) for each in within(ranges, rows)])
            else:  # stacked one after the other, whatever the shape on disk
                first, last = (flat + end * (size // piece.shape[0]) for end in (rows.start, rows.stop))
                top = first // width
                read = origin.read(stored.name, (top, -(-last // width)))
                part = read.flatten()[first - top * width : last - top * width]
            part = part.view(-1, *piece.shape[1:])[(slice(None), *piece.slices[1:])]
            if part.dtype.itemsize < piece.part.dtype.itemsize:
                part = part.to(piece.part.device)  # fewer bytes to send, and a GPU widens faster than the host
            piece.part.copy_(part)
            if exact and piece.part.dtype.itemsize < part.dtype.itemsize:
                raise ValueError(
                    f"{stored.name} is {str(part.dtype).removeprefix('torch.')} and config.json says {stored.dtype}, "
                    "so the frozen weight would be rounded; write model.frozen=float32, or bfloat16"
                )
        flat += size


def within(ranges: Iterable[tuple[int, int]], rows: slice) -> Iterator[tuple[int, int]]:
    """Yield where some rows of a role lie on disk, given the role's ranges there."""
    first, last = rows.start, rows.stop
    for a, b in ranges:
        if first < b - a and last > 0:
            yield a + max(first, 0), a + min(last, b - a)
        first, last = first - (b - a), last - (b - a)


def copy_experts(origin: Origin, stored: Stored, target: Mapping[str, Piece]) -> None:
    """Copy a tensor whose dimensions have another order, one expert at a time."""
    each = len(stored.roles) // stored.shape[0]
    for expert in range(stored.shape[0]):
        roles = [role for role, _ in stored.roles[expert * each : (expert + 1) * each]]
        if not any(target[role].part.numel() for role in roles):
            continue
        flat = stacked(origin.read(stored.name, (expert, expert + 1)), stored).flatten()
        for role, part in zip(roles, flat.split([prod(target[role].shape) for role in roles]), strict=True):  # type: ignore[no-untyped-call]
            piece = target[role]
            if piece.part.numel():
                piece.part.copy_(part.view(piece.shape)[piece.slices])


def stacked(part: Tensor, stored: Stored) -> Tensor:
    """Return a tensor on disk, or some of its rows, as the stack of its roles."""
    if not stored.order:
        return part
    sizes = [stored.view[dim] for dim in stored.order]
    back = sorted(range(len(sizes)), key=stored.order.__getitem__)
    return part.reshape(-1, *sizes[1:]).permute(back)


def cut(whole: Tensor, stored: Stored, target: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Yield the roles' parts of a whole tensor on disk, flat."""
    start, flat = 0, stacked(whole, stored).flatten()
    for role, rows in stored.roles:
        if rows:
            yield torch.cat([whole[a:b] for a, b in rows])
        else:
            size = target[role].numel()
            yield flat[start : start + size]
            start += size


@torch.no_grad()
def initialise(model: Decoder, seed: int = 0) -> Decoder:
    """Fill in random weights, for benchmarks and training from scratch; they do not depend on the mesh."""
    from upcycle.planning import rng

    for tensor in model.parameters():
        tensor.zero_()  # the padding of uneven experts
    target = pieces(model)
    for role in with_room(model, target, [*target], lambda role: role):
        if not (piece := target[role]).part.numel():
            continue
        if "norm" in role:
            piece.part.fill_(0.0 if model.dense.norm.endswith("1p") or role.endswith("bias") else 1.0)
        elif role.endswith("bias"):
            piece.part.zero_()
        else:
            piece.part.copy_(model.dense.init_std * rng.normal(piece.shape, seed, role)[piece.slices])
    return model


@torch.no_grad()
def begin_adapters(model: Decoder, seed: int) -> None:
    """Fill the A of adapters with random values of peft's size; B is zero."""
    from upcycle.planning import rng

    for name, tensor in model.named_parameters():
        if is_adapter(name) and name.endswith(A) and local(tensor).numel():
            found = piece(tensor, ())
            deviation = (3 * tensor.shape[1]) ** -0.5
            found.part.copy_(deviation * rng.normal(found.shape, seed, plain_name(name))[found.slices])
    for layer in model.layers.values():
        if isinstance(layer.ffn, MoE) and layer.ffn.experts.low:
            for i, width in enumerate(layer.ffn.spec.widths):  # the padding of uneven experts stays zero and idle
                piece(layer.ffn.experts.down_lora_a, (i, slice(width, max(layer.ffn.spec.widths)))).part.zero_()


def joined(stored: Stored, source: Mapping[str, Tensor]) -> Tensor:
    if not any(rows for _, rows in stored.roles):
        parts = [source[role].detach().flatten() for role, _ in stored.roles]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return (whole.view(stored.view).permute(stored.order) if stored.order else whole).reshape(stored.shape)
    first = source[stored.roles[0][0]]
    whole = torch.empty(stored.shape, dtype=first.dtype, device=first.device)
    for role, rows in stored.roles:
        part, start = source[role].detach(), 0
        for a, b in rows:
            whole[a:b] = part[start : start + b - a]
            start += b - a
    return whole
