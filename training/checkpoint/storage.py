"""Read and write a checkpoint on disk: safetensors shards and a JSON manifest, without pickles.

    step-00000123/
      shard-00000.safetensors   rank 0's tensors, or its pieces of them as NAME@OFFSET,OFFSET
      shard-00001.safetensors   ... a large shard is several files: shard-00001-1.safetensors ...
      manifest.json             step, every tensor's shape, dtype and pieces, every file's size and sha256, its own sum

The manifest is written after the shards are on disk, and the folder is renamed after the manifest: a folder without
`.partial` is complete, or was damaged later, which the sums show. torch.distributed.checkpoint stores and sends its
plans as pickles, which can run code, and its rank 0 plans for all, which takes 80 s for 1,024 ranks (2 s here, where
each rank finds its own pieces).
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from training.parallel.collectives import box, gather, gather_bytes, together
from upcycle.io import disk, strict
from upcycle.io.disk import SAFETENSORS, Stream, write_atomic
from upcycle.io.strict import Count, short

MANIFEST = "manifest.json"
FORMAT = 1
SHARD = re.compile(r"shard-\d{5,}(-\d)?\.safetensors", re.ASCII)
FILES, LARGE = 4, 10**9  # most files of a rank's shard, and bytes from which it has another one
STAGE = 32 << 20  # bytes of pinned memory through which a GPU's tensor reaches the disk
SUM = b',"sha256":"'  # before the manifest's own sum, its last key
SPARE = 64 << 20  # bytes left free for logs and metrics
Box = Sequence[tuple[int, int]]  # [first, last) of each dimension


class Part(TypedDict):
    """A piece, as in the manifest."""

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
    world: NotRequired[Count]
    settings: NotRequired[Mapping[str, Any]]  # older checkpoints hold a digest of them only


class Tensors(TypedDict):
    tensors: Mapping[str, Entry]


# ---- writing


@dataclass(frozen=True)
class Piece:
    """A rank's part of a tensor."""

    tensor: str
    dtype: str
    size: tuple[int, ...]  # of the whole
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """Return the name in a shard; a whole tensor keeps its own name, so that any safetensors tool finds it."""
        return self.tensor if self.size == self.shape else f"{self.tensor}@{','.join(map(str, self.offset))}"

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize  # type: ignore[no-any-return]


def pieces(live: Mapping[str, Tensor]) -> list[Piece]:
    """Return this rank's pieces of all tensors."""
    found = []
    for name, tensor in live.items():
        bounds = box(tensor)
        offset, shape = tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds)
        if math.prod(shape) or not tensor.numel():
            found.append(Piece(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset, shape))
    return found


def owned(held: Sequence[Piece], group: dist.ProcessGroup | None) -> list[Piece]:
    """Return the pieces that this rank writes. One of the ranks that hold a piece writes it, and the pieces are spread
    over them. All ranks compute the same result from 8 bytes per piece of every rank."""
    texts = (f"{piece.name} {piece.dtype} {piece.shape}".encode() for piece in held)
    every = gather_bytes(b"".join(hashlib.blake2b(text, digest_size=8).digest() for text in texts), group)
    keys = np.frombuffer(b"".join(every), np.uint64)
    order = np.argsort(keys, kind="stable")  # ranks with the same piece are neighbours, in order
    found, first, count = np.unique(keys[order], return_index=True, return_counts=True)
    writes = np.zeros(len(keys), bool)
    writes[order[first + (found % count.astype(np.uint64)).astype(np.int64)]] = True
    rank = 0 if len(every) == 1 else dist.get_rank(group)
    start = sum(len(each) for each in every[:rank]) // 8
    return [piece for piece, mine in zip(held, writes[start:], strict=False) if mine]


def save(
    partial: Path,
    facts: Mapping[str, Any],
    live: Mapping[str, Tensor],
    staged: Mapping[str, Tensor],
    group: dist.ProcessGroup | None,
    commit: Callable[[], None],
) -> None:
    """Write `staged`, the local parts of `live`: each rank writes its shard, then rank 0 writes the manifest and calls
    `commit`. All ranks call this together, and a failure of one raises on all."""
    rank = 0 if group is None else dist.get_rank(group)
    what, lines = "save or load a checkpoint", b""
    own = owned(pieces(live), group)
    total = sum(gather(sum(piece.bytes for piece in own), group))
    with together(what, group):
        if rank == 0:
            make_folder(partial, total)
    with together(what, group):
        if own:
            lines = write_shards(partial / f"shard-{rank:05d}.safetensors", own, staged)
    every = collected(lines, group)
    with together(what, group):
        if rank == 0:
            write_atomic(partial / MANIFEST, joined(facts, every))  # the folder is then on disk too
            commit()


def make_folder(partial: Path, size: int) -> None:
    shutil.rmtree(partial, ignore_errors=True)  # left by a run that died while saving
    disk.make_folder(partial.parent)
    check_free(partial.parent, size)
    partial.mkdir()


def check_free(folder: Path, size: int, count: int = 1) -> None:
    """Raise a ValueError if `count` checkpoints of `size` bytes do not fit into a folder, which need not exist."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < count * size + SPARE:
        what = f"a checkpoint of {size / 1e9:.2f} GB does"
        if count > 1:
            what = f"{count} checkpoints of {size / 1e9:.2f} GB each do"
        raise ValueError(
            f"{what} not fit into {folder}, where {free / 1e9:.2f} GB are free and {SPARE / 1e9:.2f} GB are left "
            "alone; make room, keep fewer checkpoints, or choose another folder"
        )


def write_shards(path: Path, own: Sequence[Piece], staged: Mapping[str, Tensor]) -> bytes:
    """Write the pieces to `path`, or to several files next to it at the same time if they are large: a single thread
    hashes about 1 GB in a second. Return the files' lines, with an empty line between two files."""
    size = sum(piece.bytes for piece in own)
    count = max(1, min(FILES, os.cpu_count() or 1, size // LARGE))
    parts: list[list[Piece]] = [[] for _ in range(count)]
    taken = [0] * count
    for piece in sorted(own, key=lambda piece: -piece.bytes):
        least = taken.index(min(taken))
        parts[least].append(piece)
        taken[least] += piece.bytes
    paths = [path, *(path.with_name(f"{path.stem}-{number}{path.suffix}") for number in range(1, count))]
    with ThreadPoolExecutor(count, "shard") as threads:
        return b"\n\n".join(threads.map(write_shard, paths, parts, [staged] * count))


def write_shard(path: Path, own: Sequence[Piece], staged: Mapping[str, Tensor]) -> bytes:
    """Write a shard to disk and return its lines of the manifest: first the file, then for each piece the tensor's name
    and entry, the sizes of piece and whole, and the piece."""
    own = sorted(own, key=lambda piece: -getattr(torch, piece.dtype).itemsize)  # so that each piece is aligned
    head, lines = disk.header(own), []
    start, host = len(head), Host()
    with Stream(path) as stream:
        stream.write(head)
        for piece in own:
            data = staged[piece.tensor]
            if data.shape != piece.shape:
                raise ValueError(
                    f"{piece.tensor!r} has a part of {list(data.shape)} to save where its mesh says "
                    f"{list(piece.shape)}; shard it as its placements say"
                )
            for part in host.parts(data.detach()):
                stream.write(part)
            place = encode({"file": path.name, "start": start, "offset": piece.offset, "shape": piece.shape})
            counts = b"%d\t%d" % (math.prod(piece.shape), math.prod(piece.size))
            entry = encode({"dtype": piece.dtype, "shape": piece.size})
            lines.append(b"\t".join([encode(piece.tensor), entry, counts, place]))
            start += piece.bytes
    return b"\n".join([encode({path.name: {"bytes": stream.bytes, "sha256": stream.sha256}})[1:-1], *lines])


class Host:
    """Bring tensors of a GPU to host memory a part at a time, while the GPU computes.

    `Tensor.cpu()` would use fresh memory for each tensor, at a tenth of the speed, and kernels would queue behind it.
    The tensors must be complete before, and must not change."""

    stream: torch.cuda.Stream | None = None
    pinned = torch.empty(0, dtype=torch.uint8)

    def parts(self, *tensors: Tensor) -> Iterator[Tensor]:
        """Yield the tensors' bytes in order; each part is valid until the next one."""
        if not tensors[0].is_cuda:
            yield from (tensor.cpu() for tensor in tensors)
            return
        if self.stream is None:
            self.stream = torch.cuda.Stream(tensors[0].device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self.stream):  # a new thread would use the first GPU
            if not len(self.pinned):
                self.pinned = torch.empty(STAGE, dtype=torch.uint8, pin_memory=True)
            flat = [tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors]
            whole = flat[0] if len(flat) == 1 else torch.cat(flat)
        for part in whole.split(STAGE):  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self.stream):
                self.pinned[: len(part)].copy_(part, non_blocking=True)
            self.stream.synchronize()
            yield self.pinned[: len(part)]


def collected(lines: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Return every rank's lines on rank 0."""
    if group is None:
        return [lines]
    sizes: list[int] = gather(len(lines), group)
    own = torch.zeros(max(sizes), dtype=torch.uint8)
    own[: len(lines)] = torch.from_numpy(np.frombuffer(bytearray(lines), np.uint8))
    every = None if dist.get_rank(group) else [torch.empty_like(own) for _ in sizes]
    dist.gather(own, every, group=group, group_dst=0)
    return [text.numpy().tobytes()[:size] for text, size in zip(every or (), sizes, strict=False)]


# ---- the manifest


def joined(facts: Mapping[str, Any], every: Sequence[bytes]) -> bytes:
    """Return the manifest from the results of write_shard on each rank, without parsing them: a thousand ranks have a
    million pieces."""
    files, held = [], dict[tuple[bytes, bytes], list[bytes]]()
    missing: Counter[tuple[bytes, bytes]] = Counter()  # numbers of a tensor that no piece covers
    for file, *rest in (part.split(b"\n") for lines in every if lines for part in lines.split(b"\n\n")):
        files.append(file)
        for line in rest:
            name, entry, count, whole, place = line.split(b"\t")
            places = held.setdefault((name, entry), [])
            missing[name, entry] += (0 if places else int(whole)) - int(count)
            places.append(place)
    if wrong := next((name for (name, _), numbers in missing.items() if numbers), None):
        raise ValueError(f"the ranks' pieces of {wrong.decode()} do not fill it; shard it as its placements say")
    if len({name for name, _ in held}) < len(held):
        raise ValueError(
            "ranks hold tensors with the same name and different shapes or types; give them different names"
        )
    texts = (
        name + b":" + entry[:-1] + b',"pieces":[' + b",".join(places) + b"]}" for (name, entry), places in held.items()
    )
    start = encode({"format": FORMAT, **facts})[:-1]
    return sealed(start + b',"files":{' + b",".join(files) + b'},"tensors":{' + b",".join(texts) + b"}}")


def sealed(text: bytes) -> bytes:
    """Return a manifest's JSON text with its sha256 as the last key."""
    return text[:-1] + SUM + hashlib.sha256(text).hexdigest().encode() + b'"}'


def encode(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def read_manifest(folder: Path, share: slice = slice(None)) -> Manifest:
    """Return the manifest if its bytes are unchanged; else raise a ValueError. `share`: the tensors that this rank
    checks.
    """
    path = folder / MANIFEST
    if not os.path.lexists(path):
        raise ValueError(f"{path} is missing")
    shards = 1 + sum(SHARD.fullmatch(name) is not None for name in os.listdir(folder))  # its size grows with the ranks
    try:
        text = strict.read_small(path, shards * strict.MAX_FILE)
        body: Any = strict.parse(text, MANIFEST, values=shards * strict.MAX_VALUES)
        rest, _, own_sum = text.rpartition(SUM)
        right = hashlib.sha256(rest + b"}").hexdigest().encode() + b'"}'
        if not isinstance(body, dict) or body.pop("sha256", None) is None or own_sum != right:
            raise ValueError("its sha256 is not the one it states")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if body.get("format") != FORMAT:
        raise ValueError(f"{path} has format {short(body.get('format'))}; this version reads format {FORMAT}")
    tensors = body.get("tensors")
    strict.held({**body, "tensors": {} if isinstance(tensors, dict) else tensors}, Manifest, str(path))
    own = dict(list(body["tensors"].items())[share])
    strict.held({"tensors": own}, Tensors, str(path))
    if strange := next((name for name in body["files"] if not SHARD.fullmatch(name)), None):
        raise ValueError(f"{path} names a file {short(strange)}, which a save does not write")
    for name, entry in own.items():  # the sha256 finds damage, not malice
        if said := impossible(entry, body["files"]):
            raise ValueError(f"{path} has an impossible entry for {short(name)}, {said}; use another checkpoint")
    return cast(Manifest, body)


def impossible(entry: Entry, files: Mapping[str, File]) -> str:
    """Return the fault of a manifest's entry, or "". Pieces must lie inside their tensor and fill it, and their bytes
    must lie inside files, so that no tensor is larger than its files."""
    shape, dtype, filled = entry["shape"], getattr(torch, entry["dtype"], None), 0
    if entry["dtype"] not in SAFETENSORS or not isinstance(dtype, torch.dtype):
        return f"dtype {short(entry['dtype'])}"
    if math.prod(size for size in shape if size) * dtype.itemsize > strict.LARGEST:
        return f"shape {short(shape)}"
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


# ---- finite values


def not_finite(tensors: Mapping[str, Tensor]) -> str:
    """Return the name of the first tensor that holds a value that is not finite, or ""."""
    floating = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel()}
    if not floating:
        return ""
    # aminmax needs no memory, and NaN and infinity reach it; one copy to the host for all tensors
    bounds = torch.stack([torch.stack(torch.aminmax(tensor)).double() for tensor in floating.values()]).cpu()
    finite = bounds.isfinite().all(1).tolist()
    return next((name for name, good in zip(floating, finite, strict=True) if not good), "")


# ---- reading


class Shards:
    """Read any part of any tensor of a checkpoint."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.step, self.tensors = folder, manifest["step"], manifest["tensors"]
        self.settings = manifest.get("settings")

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        return getattr(torch, self.tensors[name]["dtype"])  # type: ignore[no-any-return]

    def read(self, name: str, bounds: Box | None = None) -> Tensor:
        """Return a tensor, or its part within these bounds."""
        bounds = [(0, size) for size in self.shape(name)] if bounds is None else bounds
        out = torch.empty([high - low for low, high in bounds], dtype=self.dtype(name))
        self.fill(out, name, bounds)
        return out

    def fill(self, target: Tensor, name: str, bounds: Box) -> None:
        """Copy the part of a tensor within these bounds to `target`, reading only the bytes in between."""
        missing = target.numel()
        for piece in self.tensors[name]["pieces"]:
            inside = [(at, at + n) for at, n in zip(piece["offset"], piece["shape"], strict=True)]
            both = [(max(a, low), min(b, high)) for (a, b), (low, high) in zip(inside, bounds, strict=True)]
            if all(first < last for first, last in both):
                part = self.part(name, piece, [(a - at, b - at) for (a, b), (at, _) in zip(both, inside, strict=True)])
                target[tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(both, bounds, strict=True))] = part
                missing -= part.numel()
        if missing:
            raise ValueError(f"{self.folder} does not contain all of {short(name)}")

    def part(self, name: str, piece: Part, within: Box) -> Tensor:
        """Return a part of a piece, reading the file from its first to its last number."""
        dtype, strides = self.dtype(name), torch.empty(piece["shape"], device="meta").stride()
        start = sum(first * stride for (first, _), stride in zip(within, strides, strict=True))
        count = 1 + sum((last - first - 1) * stride for (first, last), stride in zip(within, strides, strict=True))
        path = self.folder / piece["file"]
        data = np.fromfile(path, np.uint8, count * dtype.itemsize, offset=piece["start"] + start * dtype.itemsize)
        if data.size != count * dtype.itemsize:
            raise ValueError(f"{path} ends before {name!r} does; it changed while it was read")
        return torch.from_numpy(data).view(dtype).as_strided([last - first for first, last in within], strides)


def read_whole(folder: Path, share: slice = slice(None)) -> Manifest:
    """Return a checkpoint's manifest after comparing its files with their sums; raise a ValueError that names the
    damage. `share`: the files and tensors that this rank checks."""
    manifest = read_manifest(folder, share)
    for name, stated in list(manifest["files"].items())[share]:
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path} is missing")
        if (size := path.stat().st_size) != stated["bytes"]:
            raise ValueError(f"{path} has {size} bytes where its manifest says {stated['bytes']}")
        if disk.sha256(path) != stated["sha256"]:
            raise ValueError(f"{path} is damaged: its sha256 is not the one in its manifest")
    return manifest
