"""Where torch.distributed.checkpoint (DCP) puts its bytes: safetensors shards and one JSON manifest, never a pickle.

Each rank knows from its tensors' meshes which pieces it holds; DCP plans who reads them back on another mesh. Its own
storage keeps a plan as a pickle (.metadata) and each tensor as another, so reading a checkpoint would mean running it;
and one rank makes that plan for all. Here instead:

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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.futures import Future

from training.parallel.collectives import gather, local
from upcycle.io import disk, strict
from upcycle.io.checkpoint import DTYPES
from upcycle.io.disk import Stream, sync_folder, write_atomic
from upcycle.io.strict import Count

MANIFEST = "manifest.json"
FORMAT = 1
SHARD = re.compile(r"shard-\d{5,}\.safetensors", re.ASCII)
SUM = b',"sha256":"'  # before a manifest's own, which is its last key
SPARE = 64 << 20  # bytes left free beside a checkpoint: logs and metrics go on being written
SAFETENSORS = {torch_name: name for name, (torch_name, _) in DTYPES.items()}
Keys = np.ndarray[Any, np.dtype[np.uint64]]


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
    """What a rank holds of a tensor."""

    name: str
    dtype: torch.dtype
    size: tuple[int, ...]  # of the whole
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def key(self) -> str:
        """Its name in a shard. A whole tensor keeps its own, so that any safetensors tool finds it; a piece says where
        it begins."""
        return self.name if self.size == self.shape else f"{self.name}@{','.join(map(str, self.offset))}"

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def held_by_rank(live: Mapping[str, Tensor]) -> list[Piece]:
    """This rank's pieces, by the meshes of the tensors; none of what it holds nothing of."""
    found = []
    for name, tensor in live.items():
        shape, offset = tuple(tensor.shape), (0,) * tensor.ndim
        if isinstance(tensor, DTensor):
            own = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            shape, offset = tuple(own[0]), tuple(own[1])
        if math.prod(shape) or not tensor.numel():
            found.append(Piece(name, tensor.dtype, tuple(tensor.shape), offset, shape))
    return found


class Owners:
    """Which ranks write what several hold: copies of the model, ranks that share a norm. Every rank finds that out by
    itself, from what all hold, as 8 bytes a piece; and again only when that has changed."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.known, self.writes = b"", np.zeros(0, bool)

    def own(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Those that this rank writes. All ranks call this together."""
        keys = digests(pieces)
        if self.group is None:
            return list(pieces)
        if any(gather(keys.tobytes() != self.known, self.group)):
            everybody = exchanged(keys, self.group)
            self.known, self.writes = keys.tobytes(), written(everybody)[dist.get_rank(self.group)]
        return [piece for piece, writes in zip(pieces, self.writes, strict=True) if writes]


def digests(pieces: Sequence[Piece]) -> Keys:
    text = (f"{piece.key} {piece.dtype} {piece.shape}".encode() for piece in pieces)
    return np.frombuffer(b"".join(hashlib.blake2b(each, digest_size=8).digest() for each in text), np.uint64)


def exchanged(keys: Keys, group: dist.ProcessGroup) -> list[Keys]:
    """Every rank's keys."""
    counts: list[int] = gather(len(keys), group)
    own = torch.zeros(max(counts), dtype=torch.int64)
    own[: len(keys)] = torch.from_numpy(keys.view(np.int64).copy())
    every = [torch.zeros_like(own) for _ in counts]
    dist.all_gather(every, own, group=group)
    return [each.numpy()[:count].view(np.uint64) for each, count in zip(every, counts, strict=True)]


def written(keys: Sequence[Keys]) -> list[np.ndarray[Any, np.dtype[np.bool_]]]:
    """Of each rank's keys, whether it is the one to write it: one of those that have it, another one for each key."""
    every = np.concatenate(keys)
    order = np.argsort(every, kind="stable")
    found, first, count = np.unique(every[order], return_index=True, return_counts=True)
    writes = np.zeros(len(every), bool)
    writes[order[first + (found % count.astype(np.uint64)).astype(np.int64)]] = True
    return np.split(writes, np.cumsum([len(each) for each in keys])[:-1])


def save(
    partial: Path,
    facts: Mapping[str, Any],
    live: Mapping[str, Tensor],
    staged: Mapping[str, Tensor],
    owners: Owners,
    commit: Callable[[], None],
) -> None:
    """Every rank writes its shard of `staged`, the local parts of `live`; rank 0 makes the folder, writes the manifest
    when all shards are on the disk, and `commit`s. All ranks call this together, and what stops one of them stops all.

    Rank 0 plans nothing: it joins the ranks' lines of the manifest, as they have written them."""
    group = owners.group
    rank = 0 if group is None else dist.get_rank(group)
    own = owners.own(held_by_rank(live))
    total = sum(gathered(sum(piece.bytes for piece in own), group))
    lines = b""
    with together(group):
        if rank == 0:
            make_folder(partial, total)
    with together(group):
        if own:
            lines = write_shard(partial / f"shard-{rank:05d}.safetensors", own, staged)
    every = collected(lines, group)
    with together(group):
        if rank == 0:
            write_atomic(partial / MANIFEST, joined(facts, every))
            sync_folder(partial)
            commit()


def gathered(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    return [value] if group is None else gather(value, group)


@contextmanager
def together(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Context whose errors are raised on all ranks, each naming the first that had one."""
    reason: BaseException | None = None
    try:
        yield
    except BaseException as error:
        reason = error
    said = "" if reason is None else str(reason) or type(reason).__name__
    problems = gathered(said, group)
    if reason is not None and not isinstance(reason, OSError | ValueError):
        raise reason
    first = next((rank for rank, problem in enumerate(problems) if problem), None)
    if first is not None:
        raise ValueError(f"rank {first} could not save or load a checkpoint: {problems[first]}") from reason


def collected(lines: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Every rank's lines, on rank 0."""
    if group is None:
        return [lines]
    sizes: list[int] = gather(len(lines), group)
    if dist.get_rank(group):
        if lines:
            dist.send(torch.frombuffer(bytearray(lines), dtype=torch.uint8), group=group, group_dst=0)
        return []
    found = [lines]
    for source, size in enumerate(sizes[1:], 1):
        coming = torch.empty(size, dtype=torch.uint8)
        if size:
            dist.recv(coming, group=group, group_src=source)
        found.append(coming.numpy().tobytes())
    return found


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


def write_shard(path: Path, own: Sequence[Piece], staged: Mapping[str, Tensor]) -> bytes:
    """Writes a shard front to back, hashed on the way; it is on the disk when this returns. Returns its lines of the
    manifest: of the file, and of each piece the tensor's name, its entry, how many numbers it and the whole
    tensor have, and the piece."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at, own = 0, sorted(own, key=lambda piece: -piece.dtype.itemsize)  # so that each is aligned
    for piece in own:
        table[piece.key] = {
            "dtype": SAFETENSORS[plain(piece.dtype)],
            "shape": piece.shape,
            "data_offsets": [at, at + piece.bytes],
        }
        at += piece.bytes
    head = json.dumps(table, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with Stream(path) as stream:
        stream.write(len(head).to_bytes(8, "little") + head)
        for piece in own:
            data = staged[piece.name]
            if data.shape != piece.shape:
                raise ValueError(
                    f"{piece.name!r} has a part of {list(data.shape)} to save where its mesh says "
                    f"{list(piece.shape)}; shard it as its placements say"
                )
            stream.write(data.detach().cpu())
    lines = [encode({path.name: {"bytes": stream.bytes, "sha256": stream.sha256}})[1:-1]]
    for piece in own:
        start = 8 + len(head) + table[piece.key]["data_offsets"][0]
        place = {"file": path.name, "start": start, "offset": piece.offset, "shape": piece.shape}
        entry = encode({"dtype": plain(piece.dtype), "shape": piece.size})
        counts = b"%d\t%d" % (math.prod(piece.shape), math.prod(piece.size))
        lines.append(b"\t".join([encode(piece.name), entry, counts, encode(place)]))
    return b"\n".join(lines)


def plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- the manifest


def joined(facts: Mapping[str, Any], every: Sequence[bytes]) -> bytes:
    """The manifest, of what each rank's write_shard has returned. Nothing of it is parsed: of a thousand ranks there
    are a million pieces."""
    files, pieces = [], dict[tuple[bytes, bytes], list[bytes]]()
    missing: Counter[tuple[bytes, bytes]] = Counter()  # numbers of a tensor that no piece has
    for lines in filter(None, every):
        file, *rest = lines.split(b"\n")
        files.append(file)
        for line in rest:
            name, entry, count, whole, place = line.split(b"\t")
            held = pieces.setdefault((name, entry), [])
            missing[name, entry] += (0 if held else int(whole)) - int(count)
            held.append(place)
    for (name, _), numbers in missing.items():
        if numbers:
            raise ValueError(f"what the ranks hold of {name.decode()} does not fill it; shard it as its placements say")
    if len({name for name, _ in pieces}) < len(pieces):
        raise ValueError("ranks hold tensors of one name and different shapes or types; give them names of their own")
    texts = (
        name + b":" + entry[:-1] + b',"pieces":[' + b",".join(places) + b"]}"
        for (name, entry), places in pieces.items()
    )
    start = encode({"format": FORMAT, **facts})[:-1]
    return sealed(start + b',"files":{' + b",".join(files) + b'},"tensors":{' + b",".join(texts) + b"}}")


def signed(body: Mapping[str, Any]) -> bytes:
    return sealed(encode(body))


def sealed(text: bytes) -> bytes:
    return text[:-1] + SUM + hashlib.sha256(text).hexdigest().encode() + b'"}'


def encode(value: Any) -> bytes:
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
