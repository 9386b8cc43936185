"""Where torch.distributed.checkpoint (DCP) puts its bytes: safetensors shards and one JSON manifest, never a pickle.

DCP plans who writes which piece of which tensor, and who reads it back on another mesh. Its own storage keeps that plan
as a pickle (.metadata) and each tensor as another, so reading a checkpoint would mean running it. Here instead:

    step-00000123/
      shard-00000.safetensors   what rank 0 wrote: its tensors, or its pieces of them as NAME@OFFSET,OFFSET
      shard-00001.safetensors   ...
      manifest.json             step, every tensor's shape, dtype and pieces, every file's size and sha256, its own sum

The manifest is written after the shards are on the disk, and the folder gets its name after the manifest is: a folder
without `.partial` is whole, or was damaged later, which the sums show.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.futures import Future

from training.parallel.collectives import local
from upcycle import disk, strict
from upcycle.checkpoint import DTYPES
from upcycle.disk import Stream, sync_folder, write_atomic
from upcycle.strict import Count

MANIFEST = "manifest.json"
FORMAT = 1
SHARD = re.compile(r"shard-\d{5,}\.safetensors", re.ASCII)
SUM = b',"sha256":"'  # before a manifest's own, which is its last key
SPARE = 64 << 20  # bytes left free beside a checkpoint: logs and metrics go on being written
SAFETENSORS = {torch_name: name for name, (torch_name, _) in DTYPES.items()}


class Part(TypedDict):
    """A piece as the manifest has it."""

    file: str
    start: Count
    offset: list[Count]
    shape: list[Count]


class Entry(TypedDict):
    dtype: str
    shape: list[Count]
    pieces: list[Part]


class File(TypedDict):
    bytes: Count
    sha256: str


class Manifest(TypedDict):
    step: Count
    files: Mapping[str, File]
    tensors: Mapping[str, Entry]
    settings: NotRequired[Mapping[str, Any]]  # older checkpoints hold a digest of them only


class Tensors(TypedDict):
    tensors: Mapping[str, Entry]


@dataclass(frozen=True)
class Piece:
    """Where a piece of a tensor went. Goes from the rank that wrote it to the one that writes the manifest."""

    file: str
    start: int  # of its bytes in the file
    shape: tuple[int, ...]
    file_bytes: int
    file_sha256: str


class Planner(DefaultSavePlanner):
    """Plans by the live tensors (their meshes), writes from `staged`: each tensor's local part, copied when saved."""

    def __init__(self, staged: Mapping[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.staged = staged

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.staged[index.fqn]


class Writer(StorageWriter):
    """Every rank writes its shard; rank 0 makes the folder, and `commit`s it when every shard is on the disk."""

    def __init__(self, partial: Path, facts: Mapping[str, Any], commit: Callable[[], None]) -> None:
        self.partial, self.facts, self.commit = partial, facts, commit

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Makes the folder, on rank 0 before any rank writes."""
        make_folder(self.partial, sum(item_bytes(item) for plan in plans for item in plan.items))
        return [replace(plan, storage_data=f"shard-{rank:05d}.safetensors") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future: Future[list[WriteResult]] = Future()
        future.set_result(write_shard(self.partial / plan.storage_data, plan, planner) if plan.items else [])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the manifest and commits, on rank 0 when every rank has written."""
        body = {"format": FORMAT, **self.facts, **describe(metadata, results)}
        write_atomic(self.partial / MANIFEST, signed(body))
        sync_folder(self.partial)
        self.commit()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class Reader(StorageReader):
    """Reads only those rows of each shard that are asked for."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self.folder, self.manifest = folder, manifest
        self.metadata = Metadata(tensors_in(manifest), storage_data={})
        self.wanted: dict[str, int] = {}  # numbers of each tensor that this rank is to get

    def want(self, places: Mapping[str, Tensor]) -> None:
        """Finds the pieces that are to be read into these: a thousand ranks' checkpoint has a million, of which a rank
        needs a thousand."""
        for name, tensor in places.items():
            entry, saved = self.manifest["tensors"][name], self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            self.wanted[name] = local(tensor).numel()
            first, last = rows_of(tensor)
            for piece in entry["pieces"]:
                offset, shape = piece["offset"], piece["shape"]
                if not offset or (offset[0] < last and offset[0] + shape[0] > first):
                    chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))
                    saved.chunks.append(chunk)
                    place = piece["file"], piece["start"], tuple(shape)
                    self.metadata.storage_data[MetadataIndex(name, chunk.offsets)] = place

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan, if it fills all that is wanted; DCP itself reads what it finds, and leaves the rest as it was."""
        found = dict.fromkeys(self.wanted, 0)
        for item in plan.items:
            name = item.dest_index.fqn
            found[name] = found.get(name, 0) + math.prod(item.lengths)
        if found != self.wanted or not found:
            short = sorted(name for name in found if found[name] != self.wanted.get(name))
            raise ValueError(f"{self.folder} does not hold all of {strict.short((short or ['anything wanted'])[0])}")
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            planner.resolve_tensor(item).detach().copy_(self.read(item))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def read(self, item: ReadItem) -> Tensor:
        index = item.storage_index
        file, start, shape = self.metadata.storage_data[index]
        saved = self.metadata.state_dict_metadata[index.fqn]
        assert isinstance(saved, TensorStorageMetadata)
        dtype = saved.properties.dtype
        row = math.prod(shape[1:]) * dtype.itemsize  # dim 0 is contiguous in the file, so only its rows are read
        first, rows = (item.storage_offsets[0], item.lengths[0]) if shape else (0, 1)
        data = np.fromfile(self.folder / file, np.uint8, rows * row, offset=start + first * row)
        if data.size != rows * row:
            raise ValueError(f"{self.folder / file} ends before {index.fqn!r} does; it changed while it was read")
        part = torch.from_numpy(data).view(dtype).reshape((rows, *shape[1:]) if shape else ())
        for dim, (offset, length) in list(enumerate(zip(item.storage_offsets, item.lengths, strict=True)))[1:]:
            part = part.narrow(dim, offset, length)
        return part

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


# ---- writing


def make_folder(partial: Path, size: int) -> None:
    shutil.rmtree(partial, ignore_errors=True)  # of a run that died while it saved
    disk.make_folder(partial.parent)
    check_free(partial.parent, size)
    partial.mkdir()


def check_free(folder: Path, size: int, count: int = 1) -> None:
    """Raises a ValueError if `count` checkpoints of `size` bytes do not fit into a folder, which need not be there."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < count * size + SPARE:
        what = "a checkpoint of {} does" if count == 1 else f"{count} checkpoints of {{}} each do"
        raise ValueError(
            f"{what.format(gigabytes(size))} not fit into {folder}, where {gigabytes(free)} are free and "
            f"{gigabytes(SPARE)} are left alone; make room, keep fewer checkpoints, or choose another folder"
        )


def write_shard(path: Path, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
    """Writes a shard front to back, hashed on the way; it is on the disk when this returns."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    spans, at = [], 0
    items = sorted(plan.items, key=lambda item: -tensor_data(item).properties.dtype.itemsize)  # so that each is aligned
    for item in items:
        stop = at + item_bytes(item)
        table[piece_name(item)] = {
            "dtype": SAFETENSORS[str(tensor_data(item).properties.dtype).removeprefix("torch.")],
            "shape": chunk_shape(item),
            "data_offsets": [at, stop],
        }
        spans.append(at)
        at = stop
    head = json.dumps(table, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with Stream(path) as stream:
        stream.write(len(head).to_bytes(8, "little") + head)
        for item in items:
            data = planner.resolve_data(item)
            assert isinstance(data, Tensor)
            if data.shape != chunk_shape(item):
                raise ValueError(
                    f"{item.index.fqn!r} has a part of {list(data.shape)} to save where its mesh says "
                    f"{list(chunk_shape(item))}; shard it as its placements say"
                )
            stream.write(data.detach().cpu())
    first, size, sha256 = 8 + len(head), stream.bytes, stream.sha256
    return [
        WriteResult(item.index, item_bytes(item), Piece(path.name, first + at, chunk_shape(item), size, sha256))
        for item, at in zip(items, spans, strict=True)
    ]


def tensor_data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None  # all that is saved is a tensor
    return item.tensor_data


def chunk_shape(item: WriteItem) -> tuple[int, ...]:
    return tuple(tensor_data(item).chunk.sizes)


def item_bytes(item: WriteItem) -> int:
    return math.prod(chunk_shape(item)) * tensor_data(item).properties.dtype.itemsize


def piece_name(item: WriteItem) -> str:
    """A whole tensor keeps its name, so that any safetensors tool finds it; a piece says where it begins."""
    assert item.index.offset is not None
    whole = tuple(tensor_data(item).size) == chunk_shape(item)
    return item.index.fqn if whole else f"{item.index.fqn}@{','.join(map(str, item.index.offset))}"


# ---- the manifest


def describe(metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> dict[str, Any]:
    files: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for result in (result for of_rank in results for result in of_rank):
        piece, saved = result.storage_data, metadata.state_dict_metadata[result.index.fqn]
        assert isinstance(saved, TensorStorageMetadata) and result.index.offset is not None
        files[piece.file] = {"bytes": piece.file_bytes, "sha256": piece.file_sha256}
        dtype = str(saved.properties.dtype).removeprefix("torch.")
        entry = tensors.setdefault(result.index.fqn, {"dtype": dtype, "shape": list(saved.size), "pieces": []})
        entry["pieces"].append(
            {"file": piece.file, "start": piece.start, "offset": list(result.index.offset), "shape": list(piece.shape)}
        )
    return {"files": files, "tensors": tensors}


def signed(body: Mapping[str, Any]) -> bytes:
    text = encode(body)
    return text[:-1] + SUM + hashlib.sha256(text).hexdigest().encode() + b'"}'


def encode(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def read_manifest(folder: Path, share: slice = slice(None)) -> dict[str, Any]:
    """The manifest, if its bytes are exactly those that were written; else a ValueError. share: of its tensors, which
    are judged here."""
    path = folder / MANIFEST
    if not os.path.lexists(path):
        raise ValueError(f"{path} is missing")
    shards = 1 + sum(SHARD.fullmatch(name) is not None for name in os.listdir(folder))  # it grows with the ranks
    try:
        text = strict.read_small(path, shards * strict.MAX_FILE)
        body: dict[str, Any] = strict.parse(text, MANIFEST, values=shards * strict.MAX_VALUES)
        rest, _, own_sum = text.rpartition(SUM)
        right = hashlib.sha256(rest + b"}").hexdigest().encode() + b'"}'
        if not isinstance(body, dict) or body.pop("sha256", None) is None or own_sum != right:
            raise ValueError("its sha256 is not the one it states")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if body.get("format") != FORMAT:
        raise ValueError(f"{path} has format {strict.short(body.get('format'))}; this version reads format {FORMAT}")
    tensors = body.get("tensors")
    strict.held({**body, "tensors": {} if isinstance(tensors, dict) else tensors}, Manifest, str(path))
    own = dict(list(body["tensors"].items())[share])
    strict.held({"tensors": own}, Tensors, str(path))
    for name in body["files"]:
        if not SHARD.fullmatch(name):
            raise ValueError(f"{path} names a file {strict.short(name)}, which no save makes")
    for name, entry in own.items():  # the sha256 shows damage, not malice
        if said := impossible(entry, body["files"]):
            raise ValueError(
                f"{path} says of {strict.short(name)} what no save says, {said}; where is this checkpoint from?"
            )
    return body


def impossible(entry: Entry, files: Mapping[str, File]) -> str:
    """What is wrong with what a manifest says of a tensor: its pieces are inside it and fill it, and their bytes are
    inside files; "" if nothing is. So no tensor is larger than the files."""
    shape, dtype, filled = entry["shape"], getattr(torch, entry["dtype"], None), 0
    if entry["dtype"] not in SAFETENSORS or not isinstance(dtype, torch.dtype):
        return f"dtype {strict.short(entry['dtype'])}"
    if math.prod(size for size in shape if size) * dtype.itemsize > strict.LARGEST:
        return f"shape {strict.short(shape)}"
    for piece in entry["pieces"]:
        inside, size = piece["shape"], math.prod(piece["shape"])
        if len(inside) != len(shape) or len(piece["offset"]) != len(shape):
            return "a piece of other dimensions"
        if any(at + n > whole for at, n, whole in zip(piece["offset"], inside, shape, strict=True)):
            return "a piece beyond its shape"
        if piece["file"] not in files or piece["start"] + size * dtype.itemsize > files[piece["file"]]["bytes"]:
            return "a piece that is in no file"
        filled += size
    return "" if filled == math.prod(shape) else "pieces that do not fill it"


def damage(folder: Path, share: slice = slice(None)) -> str | None:
    """What is wrong with a checkpoint, in words that name the file; None if nothing is. share: of its files."""
    return read_whole(folder, share)[1]


def read_whole(folder: Path, share: slice = slice(None)) -> tuple[dict[str, Any], str | None]:
    """(its manifest, its damage): a thousand ranks' manifest takes seconds to parse, so nobody should do it twice, and
    each judges its share of it."""
    manifest: dict[str, Any] = {}
    try:
        manifest = read_manifest(folder, share)
        for name, stated in list(manifest["files"].items())[share]:
            path = folder / name
            if not path.is_file():
                return manifest, f"{path} is missing"
            if (size := path.stat().st_size) != stated["bytes"]:
                return manifest, f"{path} has {size} bytes where its manifest says {stated['bytes']}"
            with open(path, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != stated["sha256"]:
                    return manifest, f"{path} is damaged: its sha256 is not the one in its manifest"
    except (OSError, ValueError) as error:
        return manifest, str(error)
    return manifest, None


def tensors_in(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Shape and dtype of each tensor; `Reader.want` finds its pieces."""
    return {
        name: TensorStorageMetadata(
            TensorProperties(dtype=getattr(torch, entry["dtype"])), torch.Size(entry["shape"]), chunks=[]
        )
        for name, entry in manifest["tensors"].items()
    }


def rows_of(tensor: Tensor) -> tuple[int, int]:
    """(the first, the one after the last) of the rows that this rank has of a tensor, as DCP counts them."""
    if not isinstance(tensor, DTensor):
        return 0, len(tensor) if tensor.ndim else 1
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return (offset[0], offset[0] + shape[0]) if shape else (0, 1)


def gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
