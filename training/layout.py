"""Hugging Face folders in, Hugging Face folders out: which part of which parameter lies in which tensor on disk.

A model starts from a checkpoint folder, dense or MoE, or *online* from a dense checkpoint and an upcycle config: then
every tensor is made by the converter's own Maker, so the weights are those that `upcycle convert` would have written,
bit for bit, and no MoE copy is on disk. `export` writes the layout of the same architecture again, at any time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from training.model.decoder import Decoder
from training.model.moe import MoE
from upcycle import disk, plugin
from upcycle.checkpoint import Checkpoint
from upcycle.config import UpcycleConfig, byte_size
from upcycle.families.common import Source
from upcycle.make import Maker
from upcycle.plan import build
from upcycle.spec import BYTES, DenseSpec, MoESpec


@dataclass(frozen=True)
class Stored:
    """A tensor on disk: the roles it holds, each with the rows they take in it (none: they are stacked in order)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    roles: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * BYTES[self.dtype]


@dataclass(frozen=True)
class Origin:
    """Where a model comes from: its numbers, its tensors, and what its folder holds besides them."""

    spec: DenseSpec | MoESpec
    tensors: tuple[Stored, ...]
    read: Callable[[str], Tensor]
    config: Mapping[str, Any]  # config.json
    files: tuple[Path, ...]  # tokenizer and the like

    @property
    def dense(self) -> DenseSpec:
        return self.spec.dense if isinstance(self.spec, MoESpec) else self.spec


# ---- where it comes from


@contextmanager
def opened(source: str | Path) -> Iterator[Origin]:
    """A checkpoint folder or hub id, dense or MoE."""
    with Checkpoint.open(source) as checkpoint:
        model_type, config = str(checkpoint.config.get("model_type")), checkpoint.config
        files = tuple(checkpoint.copied_files())
        families, targets = plugin.names("upcycle.families"), plugin.names("upcycle.targets")
        if model_type in families:
            module = plugin.load("upcycle.families", model_type)
            dense: DenseSpec = module.read(config)
            tensors = dense_tensors(dense, module.sources(dense))
            yield Origin(dense, tensors, checkpoint.read, config, files)
        elif model_type in targets:
            moe: MoESpec = plugin.load("upcycle.targets", model_type).read(config)
            if model_type == "upcycled":
                files += (plugin.load("upcycle.targets", model_type).MODELING,)
            yield Origin(moe, moe_tensors(moe, model_type), checkpoint.read, config, files)
        else:
            raise ValueError(
                f"{source} has model_type {model_type!r}; training knows the dense families {', '.join(families)} "
                f"and the MoE architectures {', '.join(targets)}"
            )


@contextmanager
def online(config: UpcycleConfig) -> Iterator[Origin]:
    """What `upcycle convert` would write, made as it is read."""
    with ExitStack() as stack:
        names = [config.source or config.donors[0], *config.donors]
        checkpoints = [stack.enter_context(Checkpoint.open(name)) for name in names]
        plan = build(config, checkpoints)
        if plan.needs_text:
            from upcycle import measure

            plan = replace(plan, observed=measure.measure(plan, checkpoints))
        target = plugin.load("upcycle.targets", plan.target)
        moe: MoESpec = target.read(plan.hf_config)
        files = tuple(checkpoints[0].copied_files()) + ((target.MODELING,) if hasattr(target, "MODELING") else ())
        yield Origin(moe, moe_tensors(moe, plan.target), Maker(plan, checkpoints).tensor, plan.hf_config, files)


def moe_tensors(moe: MoESpec, target: str) -> tuple[Stored, ...]:
    slots = plugin.load("upcycle.targets", target).slots(moe)
    return tuple(Stored(s.name, s.shape, s.dtype or moe.dtype, tuple((role, ()) for role in s.roles)) for s in slots)


def dense_tensors(dense: DenseSpec, sources: Mapping[str, Source]) -> tuple[Stored, ...]:
    """Roles that lie in one tensor (phi3's gate_up, gpt_neox's query_key_value) come together in it."""
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


def views(model: Decoder) -> dict[str, Tensor]:
    """role -> that part of a parameter (or buffer), as a view: writing to it writes to the model."""
    out: dict[str, Tensor] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        role = name.replace(".attention.", ".").replace(".ffn.", ".")
        if ".experts." not in role:
            out[role] = tensor.data
    for index, layer in model.layers.items():
        if isinstance(layer.ffn, MoE):
            out |= expert_views(layer.ffn, f"layers.{index}.experts")
    return out


def expert_views(block: MoE, prefix: str) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    experts = block.experts
    halves = ("gate", "up") if experts.gated else ("up",)
    for i, width in enumerate(block.spec.widths):
        for half, matrix in enumerate(halves):
            out[f"{prefix}.{i}.{matrix}.weight"] = experts.up.data[i, half, :width]
            if experts.up_bias is not None:
                out[f"{prefix}.{i}.{matrix}.bias"] = experts.up_bias.data[i, half, :width]
        out[f"{prefix}.{i}.down.weight"] = experts.down.data[i, :, :width]
        if experts.down_bias is not None:
            out[f"{prefix}.{i}.down.bias"] = experts.down_bias.data[i]
    return out


# ---- weights in, weights out


@torch.no_grad()
def load(model: Decoder, origin: Origin) -> Decoder:
    """Every parameter from the origin; nothing may be missing on either side."""
    target = views(model)
    left = set(target)
    for tensor in model.parameters():
        tensor.zero_()  # the padding of uneven experts
    for stored in tqdm(origin.tensors, "weights", delay=2):
        whole = origin.read(stored.name)
        if tuple(whole.shape) != stored.shape:
            raise ValueError(
                f"{stored.name} has shape {list(whole.shape)}, config.json promises {list(stored.shape)}; "
                "do the two belong together?"
            )
        for role, part in zip((r for r, _ in stored.roles), cut(whole, stored, target), strict=True):
            target[role].copy_(part.view(target[role].shape))
            left.discard(role)
    assert not left, f"no tensor for {sorted(left)[:3]}"
    return model


def cut(whole: Tensor, stored: Stored, target: Mapping[str, Tensor]) -> Iterator[Tensor]:
    start, flat = 0, whole.flatten()
    for role, rows in stored.roles:
        if rows:
            yield torch.cat([whole[a:b] for a, b in rows])
        else:
            size = target[role].numel()
            yield flat[start : start + size]
            start += size


@torch.no_grad()
def initialise(model: Decoder, seed: int = 0) -> Decoder:
    """Random weights, for benchmarks and training from scratch."""
    from upcycle import rng

    for role, tensor in views(model).items():
        if "norm" in role:
            tensor.fill_(0.0 if model.dense.norm.endswith("1p") or role.endswith("bias") else 1.0)
        elif role.endswith("bias"):
            tensor.zero_()
        else:
            tensor.copy_(model.dense.init_std * rng.normal(tuple(tensor.shape), seed, role))
    return model


@torch.no_grad()
def export(model: Decoder, origin: Origin, folder: str | Path, *, dtype: str = "", max_shard: str = "5GB") -> Path:
    """The model as a folder in its origin's layout. It appears under its name when it is complete."""
    folder = Path(folder)
    if folder.exists():
        raise ValueError(f"{folder} exists already; remove it or choose another folder to export to")
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    dtype = dtype or origin.dense.dtype
    # a float32 tensor of a bf16 model (the router's correction bias) stays float32
    tensors = [replace(t, dtype=dtype if t.dtype == origin.spec.dtype else t.dtype) for t in origin.tensors]
    source, shards = views(model), packed(tensors, byte_size(max_shard))
    total = sum(t.bytes for t in tensors)
    with tqdm(total=total, desc="export", unit="B", unit_scale=True, delay=2) as bar:
        for name, group in shards:
            with disk.Stream(partial / name) as stream:
                stream.write(disk.header(group))
                for stored in group:
                    stream.write(joined(stored, source).to(getattr(torch, stored.dtype)).contiguous())
                    bar.update(stored.bytes)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": {t.name: n for n, group in shards for t in group}}
        disk.write_atomic(partial / "model.safetensors.index.json", json.dumps(index, indent=2).encode())
    for path in origin.files:
        shutil.copyfile(path, partial / path.name)
    config = {k: v for k, v in origin.config.items() if k != "torch_dtype"} | {"dtype": dtype}
    disk.write_atomic(partial / "config.json", json.dumps(config, indent=2).encode() + b"\n")
    disk.sync_folder(partial)
    partial.rename(folder)
    return folder


def joined(stored: Stored, source: Mapping[str, Tensor]) -> Tensor:
    if not any(rows for _, rows in stored.roles):
        parts = [source[role].detach().cpu().flatten() for role, _ in stored.roles]
        return torch.cat(parts).view(stored.shape)
    first = source[stored.roles[0][0]]
    whole = torch.empty(stored.shape, dtype=first.dtype)
    for role, rows in stored.roles:
        part, start = source[role].detach().cpu(), 0
        for a, b in rows:
            whole[a:b] = part[start : start + b - a]
            start += b - a
    return whole


def packed(tensors: Iterable[Stored], limit: int) -> list[tuple[str, Sequence[Stored]]]:
    """As upcycle.plan shards its outputs: as many per file as fit, in order."""
    groups: list[list[Stored]] = []
    room = 0
    for stored in tensors:
        if not groups or stored.bytes > room:
            groups.append([])
            room = limit
        groups[-1].append(stored)
        room -= stored.bytes
    if len(groups) == 1:
        return [("model.safetensors", groups[0])]
    return [(f"model-{i:05d}-of-{len(groups):05d}.safetensors", group) for i, group in enumerate(groups, 1)]
