"""Check the source and the donors against their config.json before the first write."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields, replace
from math import prod

from upcycle.arch import siblings
from upcycle.arch.registry import AnyDense
from upcycle.arch.spec import BYTES, DenseSpec
from upcycle.io.checkpoint import Checkpoint

FREE = ("dtype", "tokens", "init_std", "context")  # the fields of DenseSpec in which donors may differ


def same(name: str, spec: DenseSpec, other: DenseSpec) -> bool:
    if spec.carried is None or name != "carried":
        return bool(getattr(spec, name) == getattr(other, name))
    assert other.carried is not None
    one, two = (c.config.keys() for c in (spec.carried, other.carried))
    differing = {key for key in one | two if spec.carried.config.get(key) != other.carried.config.get(key)}
    return spec.carried.tensors == other.carried.tensors and not differing - siblings.FREE


def stored_dtype(checkpoint: Checkpoint) -> str:
    """Return the dtype of most weights, read from the headers, because config.json may be wrong."""
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
        "(dequantize it first)"
    )


def check_sources(dense: DenseSpec, source_family: AnyDense, checkpoints: Sequence[Checkpoint]) -> set[str]:
    """Return the dtypes of the sources' tensors.

    Raise a ValueError if a tensor of the family is missing or has the wrong shape, or if the donors' architectures
    differ.
    """
    stored: set[str] = set()
    for checkpoint in checkpoints:
        if checkpoint.config.get("model_type") != checkpoints[0].config.get("model_type"):
            raise ValueError(
                f"{checkpoint.folder} is not a {dense.family} model; all donors must have the same architecture"
            )
        spec = read_dense(source_family, checkpoint)
        differing = [f.name for f in fields(spec) if f.name not in FREE and not same(f.name, spec, dense)]
        if differing:
            raise ValueError(
                f"{checkpoint.folder} and {checkpoints[0].folder} differ in {', '.join(differing)}; all donors "
                "must have the same architecture"
            )
        if spec.layers > len(checkpoint.entries):
            raise ValueError(
                f"config.json of {checkpoint.folder} promises {spec.layers} layers, but there are only "
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
                    f"{source.name} in {checkpoint.folder} has shape {list(entry.shape)}, but config.json promises "
                    f"{list(shape)} for {role}; do the two belong to the same model?"
                )
            if entry.dtype not in BYTES:
                raise refused_dtype(checkpoint, entry.dtype)
            if not role.startswith("carried.") or entry.dtype == main:  # a carried tensor may keep another dtype
                stored.add(entry.dtype)
    return stored


def read_dense(source_family: AnyDense, checkpoint: Checkpoint) -> DenseSpec:
    spec = source_family.read(checkpoint.config)
    return source_family.carry(spec, checkpoint.entries) if isinstance(source_family, siblings.Dense) else spec


def dropped(source_family: AnyDense, dense: DenseSpec, base: Checkpoint) -> tuple[tuple[str, str], ...]:
    """Return (name, reason) of each unused tensor of the base; raise a ValueError for one that would be lost."""
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
