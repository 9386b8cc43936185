"""Read and check a Hugging Face safetensors folder (`Checkpoint`): headers on opening, tensors when they are read.

A safetensors file is 8 bytes of header length (little-endian), a JSON header {name: {dtype, shape, data_offsets}}, then
the bytes of the tensors, end to end. Files may come from strangers, so the whole header is checked against the file
before memory is allocated for tensors: the bytes of each tensor match its shape, the tensors fill the data exactly (no
overlap, hole or trailing bytes), and index entries are plain names in the folder. Nothing is ever unpickled.
Every error is a ValueError of one sentence that names the file.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from upcycle.io import publish, remote
from upcycle.io.dtypes import DTYPES
from upcycle.io.strict import fill, first_line, open_regular, parse_object, read_exactly, read_small, short

INDEX = "model.safetensors.index.json"
HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?", re.ASCII)  # (name, revision)
MAX_HEADER = 50_000_000  # half of the safetensors package's limit, and ten times the longest published header
MAX_CONFIG = 16_000_000
MAX_TENSORS = 100_000  # in one file
MAX_NAME = 512
MAX_DIMS = 64
BLOCK = 1 << 20  # bytes read at a time, so that they are checked while still in the processor's cache
SAMPLE = 4096  # bytes of a sample for the fingerprint

FIELDS = {"dtype", "shape", "data_offsets"}

# (bytes of an element, the bits of +infinity). As integers, all positive non-finite numbers are at or above these bits.
INFINITY = {
    "bfloat16": ("2", 0x7F80), "float16": ("2", 0x7C00), "float32": ("4", 0x7F800000), "complex64": ("4", 0x7F800000),
    "float64": ("8", 0x7FF0000000000000),
}  # fmt: skip

PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf", ".h5", ".msgpack"}
COPIED = (  # names or patterns of files that are published with a model
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tokenizer.model.v[0-9]*", "sentencepiece.bpe.model",
    "spiece.model", "spm.model", "tiktoken.model", "tekken.json", "qwen.tiktoken", "tokenizer.tiktoken", "vocab.json",
    "vocab.txt", "merges.txt", "added_tokens.json", "special_tokens_map.json", "generation_config.json",
    "chat_template.jinja", "chat_template.json", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json",
)  # fmt: skip
TEXTS = (*COPIED, "config.json")
MAX_COPIED = 100_000_000  # bytes of one of these files; the largest tokenizer.json we know has 35 MB
# license files, which are copied together with the weights
TERMS = (
    "LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "LICENCE.txt", "LICENCE.md", "COPYING", "NOTICE", "NOTICE.txt",
    "NOTICE.md", "Notice", "Notice.txt", "USE_POLICY", "USE_POLICY.md", "USE_POLICY.txt", "USAGE_POLICY.md",
)  # fmt: skip
DOWNLOADED = ["*.safetensors", "*.json", "tokenizer*", "*.model", "*.txt", "*.jinja", "*.tiktoken", "README.md", *TERMS]


@dataclass(frozen=True)
class Entry:
    """One tensor in one file."""

    name: str
    dtype: str  # torch's name: "bfloat16", "float32", ...
    shape: tuple[int, ...]
    file: Path
    start: int  # absolute byte offsets in the file
    stop: int


class Checkpoint:
    """A folder with safetensors files and a config.json. Many threads may call `read` at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
            raise ValueError(
                f"{folder} has only adapters, without their base model; give the training run or its merged "
                "model (export=FOLDER of training), or merge them with peft"
            )
        if not os.path.lexists(folder / "config.json"):
            raise ValueError(f"{folder}/config.json is missing{instead(folder)}")
        self._config_bytes = read_small(folder / "config.json", MAX_CONFIG)
        self.config: Mapping[str, Any] = parse_object(self._config_bytes, folder / "config.json")
        weight_map = read_index(folder)
        names = sorted(set(weight_map.values())) if weight_map else [single_file(folder)]
        self.files = tuple(folder / name for name in names)
        self._handles: dict[Path, FileIO] = {}
        self._stamps: dict[Path, tuple[int, int]] = {}
        with ExitStack() as stack:
            headers = {}
            for file in self.files:
                handle = self._handles[file] = stack.enter_context(open_regular(file))
                self._stamps[file] = stamp(handle)
                headers[file.name] = parse_header(handle, file)
            if weight_map:
                check_index(folder, weight_map, headers)
            self.entries: Mapping[str, Entry] = {n: e for header in headers.values() for n, e in header.items()}
            if not self.entries:
                raise ValueError(f"{self.files[0]} has no tensors; is this the model's folder?")
            self._open_files = stack.pop_all()

    @staticmethod
    def open(source: str | Path) -> Checkpoint:
        """Open a folder, or download a hub id (org/name or org/name@revision) or an address, and open its folder."""
        if remote.is_url(source):
            return Checkpoint(remote.fetch(str(source), publish.MANIFEST, stated, tuple(DOWNLOADED)))
        if source != "" and Path(source).is_dir():  # Path("") is the current folder, which users do not mean
            return Checkpoint(Path(source))
        hub_id = hub_match(source)
        if not hub_id:
            if source != "" and Path(source).is_file():
                kind = Path(source).suffix
                whole = f"give {Path(source).parent}" if kind == ".safetensors" else "name its folder"
                if kind in PICKLES:
                    whole = "load it with transformers where you trust it, and write it with save_pretrained(FOLDER)"
                raise ValueError(
                    f"{source} is a file, but a model is a folder with config.json, *.safetensors and a tokenizer; "
                    f"{whole}"
                )
            start = "" if source == "" or Path(source).is_absolute() else f" (a relative name starts in {Path.cwd()})"
            raise ValueError(
                f"{str(source)!r} is not a folder or a hub id (org/name or org/name@revision); name one{start}, or "
                "download the model there (hf download org/name --local-dir FOLDER)"
            )
        return Checkpoint(downloaded(hub_id, DOWNLOADED))

    def read(self, name: str, rows: tuple[int, int] | None = None, *, check: bool = True) -> torch.Tensor:
        """Read a tensor, or its rows [first, last) of dim 0; `check` raises a ValueError for NaN or infinity."""
        entry = self.entries.get(name)
        if entry is None:
            raise ValueError(f"{self.folder} has no tensor {short(name)} among its {len(self.entries)} tensors")
        dtype = getattr(torch, entry.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"tensor {short(name)} in {entry.file} is {entry.dtype}, which torch has no type for")
        shape, start, stop = row_range(entry, rows)
        buffer = torch.empty(stop - start, dtype=torch.uint8)
        block_bytes = buffer.numpy()
        bad = 0
        for at in range(0, stop - start, BLOCK):
            block = block_bytes[at : at + BLOCK]
            fill(self._handle(entry.file), entry.file, block.data, start + at)
            bad += count_non_finite(block, dtype) if check else 0
        self._check_unchanged(entry.file)
        if bad:
            raise ValueError(
                f"tensor {short(name)} in {entry.file} has {bad} values that are NaN or infinite among "
                f"{math.prod(shape)}; get an intact copy, because this model cannot be converted"
            )
        return buffer.view(dtype).reshape(shape)

    def fingerprint(self) -> str:
        """Return the sha256 of config.json, of file names, sizes and headers, and of 4 KiB samples of each tensor.

        A replaced or retrained tensor changes the fingerprint. Changes between samples or in tokenizer files do not.
        """
        digest = hashlib.sha256()

        def add(part: bytes | bytearray) -> None:
            digest.update(len(part).to_bytes(8, "little"))  # so that the boundaries of parts count
            digest.update(part)

        add(self._config_bytes)
        for file in self.files:
            handle = self._handle(file)
            add(file.name.encode())
            add(str(self._stamps[file][0]).encode())
            length = int.from_bytes(read_exactly(handle, file, 0, 8), "little")
            add(read_exactly(handle, file, 8, length))
        for _, entry in sorted(self.entries.items()):
            for start, stop in samples(entry):
                add(read_exactly(self._handle(entry.file), entry.file, start, stop - start))
        for file in self.files:
            self._check_unchanged(file)
        return digest.hexdigest()

    def stamps(self) -> dict[str, list[int]]:
        """Return the size and the modification time (ns) of every weight file."""
        return {file.name: list(self._stamps[file]) for file in self.files}

    def copied_files(self) -> list[Path]:
        """Return the files to copy into a converted folder: tokenizer, chat template, generation settings, licenses."""
        patterns = (*COPIED, *TERMS)
        names = sorted(name for name in os.listdir(self.folder) if any(fnmatchcase(name, p) for p in patterns))
        files = [self.folder / name for name in names]
        return [own(file) for file in files if file.is_symlink() or file.is_file()]

    def close(self) -> None:
        self._open_files.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _handle(self, file: Path) -> FileIO:
        handle = self._handles[file]
        if handle.closed:
            raise ValueError(f"{self.folder} was closed; read its tensors before close(), or open it again")
        return handle

    def _check_unchanged(self, file: Path) -> None:
        if stamp(self._handle(file)) != self._stamps[file]:
            raise ValueError(f"{file} changed while it was open here; wait until nothing writes it, then start again")


# ---- names on the Hub


def hub_match(source: str | Path) -> re.Match[str] | None:
    """Match a hub id as (name, revision); return None for a Path and for an existing local path."""
    return None if isinstance(source, Path) or Path(source).exists() else HUB_ID.fullmatch(source)


def downloaded(hub_id: re.Match[str], patterns: Sequence[str]) -> Path:
    """Download the files of a hub id whose names match the patterns, and return their folder."""
    from huggingface_hub import snapshot_download  # imported here, because a local folder does not need it

    try:
        return Path(snapshot_download(hub_id[1], revision=hub_id[2], allow_patterns=[*patterns]))
    except (OSError, ValueError) as error:
        raise not_had(hub_id[0], error) from error


def tokenizer_folder(source: str) -> Path:
    """Return the folder of a tokenizer; for a hub id, download only tokenizer files and config.json."""
    if remote.is_url(source):
        return remote.fetch(source, publish.MANIFEST, stated_texts, TEXTS)
    hub_id = hub_match(source)
    return downloaded(hub_id, TEXTS) if hub_id else Path(source)


def stated(folder: Path) -> Mapping[str, remote.File]:
    """Return the files of a folder's upcycle.json, with their sums."""
    path = folder / publish.MANIFEST
    advice = "send the folder again"
    files = publish.unsigned(parse_object(read_small(path), path), path, advice).get("files")
    if not isinstance(files, dict):
        raise ValueError(f"{path} lists no files; {advice}")
    return files


def stated_texts(folder: Path) -> Mapping[str, remote.File]:
    """Return those of `stated` that a tokenizer consists of."""
    return {name: file for name, file in stated(folder).items() if any(fnmatchcase(name, each) for each in TEXTS)}


def not_had(source: str | Path, error: Exception) -> ValueError:
    return ValueError(f"{source} is not a local folder and cannot be downloaded from the Hub: {first_line(error)}")


def pinned(source: str | Path, folder: Path) -> str:
    """Return a hub id pinned to the commit of `folder` in the Hub's cache; return any other source unchanged."""
    found = hub_match(source)
    return f"{found[1]}@{folder.name}" if found and folder.parent.name == "snapshots" else str(source)


def public_name(source: str) -> str:
    """Return a hub id unchanged; for a folder, return only its name, without its path on this machine."""
    return source if hub_match(source) else os.path.basename(os.path.normpath(source))


# ---- one file's header


def read_header(file: Path) -> dict[str, Entry]:
    """Read and check the header of one safetensors file; return the entry of each tensor."""
    with open_regular(file) as handle:
        return parse_header(handle, file)


def load_checked(file: Path) -> dict[str, torch.Tensor]:
    """Check the header of a small safetensors file, then load all of its tensors."""
    from safetensors.torch import load_file

    read_header(file)
    return load_file(file)


def parse_header(handle: FileIO, file: Path) -> dict[str, Entry]:
    size = os.fstat(handle.fileno()).st_size
    if size < 8:
        raise ValueError(f"{file} has {size} bytes; a safetensors file starts with 8 bytes of header length")
    first = read_exactly(handle, file, 0, 8)
    if first == b"version ":
        raise ValueError(f"{file} is a git-lfs pointer, not the weights; run `git lfs pull` in its folder")
    length = int.from_bytes(first, "little")
    if not 1 <= length <= MAX_HEADER:
        raise ValueError(
            f"{file} states a header of {length} bytes; a safetensors header has 1 to {MAX_HEADER}, so this file is "
            f"damaged or of another kind"
        )
    if length > size - 8:
        raise ValueError(
            f"{file} states a header of {length} bytes but is cut short: {length + 8 - size} bytes are missing; "
            f"copy or download it again"
        )
    header = parse_object(read_exactly(handle, file, 8, length), file, digits=20)
    check_metadata(file, header.pop("__metadata__", {}))
    if len(header) > MAX_TENSORS:
        raise ValueError(f"{file} lists {len(header)} tensors; a file may have at most {MAX_TENSORS}")
    entries = {name: check_entry(file, name, fields, 8 + length) for name, fields in header.items()}
    check_layout(file, entries, 8 + length, size)
    return entries


def check_metadata(file: Path, metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{file} has __metadata__ {short(metadata)}; it must map strings to strings")
    try:
        for pair in metadata.items():
            "".join(pair).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{file} has half a UTF-16 surrogate pair in its __metadata__; it must be text") from error


def check_entry(file: Path, name: str, fields: Any, base: int) -> Entry:
    if not 1 <= len(name) <= MAX_NAME or not name.isprintable():
        raise ValueError(
            f"{file} names a tensor {short(name)} ({len(name)} characters); "
            f"a name must be 1 to {MAX_NAME} printable characters"
        )
    where = f"tensor {short(name)} in {file}"
    if not isinstance(fields, dict):
        raise ValueError(
            f"{where} is described by {short(fields)}; it must be an object of dtype, shape and data_offsets"
        )
    if fields.keys() != FIELDS:
        raise ValueError(f"{where} has the fields {short(sorted(fields))}; they must be dtype, shape and data_offsets")
    kind, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(kind, str) or kind not in DTYPES:
        raise ValueError(f"{where} has dtype {short(kind)}; known are {', '.join(DTYPES)}")
    if not whole_numbers(shape) or len(shape) > MAX_DIMS:
        raise ValueError(f"{where} has shape {short(shape)}; it must be a list of up to {MAX_DIMS} whole numbers >= 0")
    if not whole_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{where} has data_offsets {short(offsets)}; they must be two whole numbers >= 0, in order")
    dtype, bits = DTYPES[kind]
    # Ignore zeros: [2**40, 2**40, 0] is empty, but its strides overflow.
    if math.prod(size for size in shape if size) * bits >= 2**63:
        raise ValueError(f"{where} has shape {short(shape)}, which is too large: its size in bits overflows 63 bits")
    want, odd = divmod(math.prod(shape) * bits, 8)
    start, stop = offsets
    if odd or stop - start != want:
        raise ValueError(
            f"{where} has {stop - start} bytes, but shape {short(shape)} of {kind} takes {want}"
            f"{' and a part of one' if odd else ''}"
        )
    return Entry(name, dtype, tuple(shape), file, base + start, base + stop)


def whole_numbers(value: Any) -> bool:
    # type() and not isinstance(), because True is an int too
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def check_layout(file: Path, entries: Mapping[str, Entry], base: int, size: int) -> None:
    """Check that the tensors fill the file exactly, from the end of the header to the end of the file."""
    at, before = base, "the header"
    for entry in sorted(entries.values(), key=lambda e: (e.start, e.stop)):
        if entry.start != at:
            fault = "overlaps" if entry.start < at else f"leaves a hole of {entry.start - at} bytes after"
            raise ValueError(f"tensor {short(entry.name)} in {file} {fault} {before}; the tensors must lie end to end")
        at, before = entry.stop, short(entry.name)
    if at > size:
        raise ValueError(f"{file} is cut short: {at - size} of its {at} bytes are missing; copy or download it again")
    if at < size:
        raise ValueError(f"{file} has {size - at} trailing bytes that belong to no tensor; copy or download it again")


# ---- which files


def read_index(folder: Path) -> dict[str, str]:
    """Return the index's weight_map, {tensor: file name}; empty if there is no index."""
    file = folder / INDEX
    if not os.path.lexists(file):
        return {}
    weight_map = parse_object(read_small(file, MAX_HEADER), file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{file} has weight_map {short(weight_map)}; it must map tensor names to file names")
    for tensor, name in weight_map.items():
        # The file may be a link to elsewhere (as in the Hub's cache), but the name must not contain a path.
        if not isinstance(name, str) or not re.fullmatch(r"[^/\\\x00-\x1f.][^/\\\x00-\x1f]*\.safetensors", name):
            raise ValueError(
                f"{file} puts tensor {short(tensor)} into {short(name)}; it must be a plain NAME.safetensors, "
                "without a path"
            )
    names = set(weight_map.values())
    for name in sorted(names):
        if not os.path.lexists(folder / name):
            raise ValueError(f"{folder} lacks the file {short(name)} that its {INDEX} names; copy or download it again")
    if "model.safetensors" not in names and os.path.lexists(folder / "model.safetensors"):
        raise ValueError(f"{folder} has both model.safetensors and an {INDEX} of other files; delete the stale one")
    return weight_map


def single_file(folder: Path) -> str:
    """Return the name of the only safetensors file in a folder without an index."""
    names = sorted(file.name for file in folder.glob("*.safetensors") if not file.name.startswith("."))
    if "model.safetensors" in names:
        return "model.safetensors"
    if len(names) == 1:
        return names[0]
    if names:
        raise ValueError(f"{folder} has {len(names)} safetensors files but no {INDEX}; copy or download the index too")
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
    if pickles:
        raise ValueError(
            f"{folder} has {pickles[0]} but no safetensors, the only supported format; load the model where you "
            f"trust it and write it with save_pretrained(folder, safe_serialization=True)"
        )
    raise ValueError(f"{folder} has no *.safetensors file; copy or download the model's weights into it")


def instead(folder: Path) -> str:
    """Return the end of the error sentence for a folder without config.json: what to give instead."""
    if (folder / "checkpoints").is_dir():
        return f", because this is a training run; make its model with upcycle export {folder} OUTPUT, and give OUTPUT"
    return "; give the folder of a whole model: config.json, *.safetensors and a tokenizer"


def check_index(folder: Path, weight_map: Mapping[str, str], headers: Mapping[str, Mapping[str, Entry]]) -> None:
    """Check that the index and the headers agree on the file of each tensor."""
    seen: dict[str, str] = {}
    for file, header in headers.items():
        for name in header:
            if name in seen:
                raise ValueError(
                    f"tensor {short(name)} of {folder} is in two files, {seen[name]} and {file}; delete the stale one"
                )
            seen[name] = file
    for name, file in weight_map.items():
        if seen.pop(name, None) != file:
            place = next((f" but in {other}" for other, header in headers.items() if name in header), "")
            raise ValueError(
                f"tensor {short(name)} is not in {folder / file}{place}, but {INDEX} says so; is one of them stale?"
            )
    for name, file in seen.items():
        raise ValueError(f"tensor {short(name)} is in {folder / file} but not in {INDEX}; are they from one model?")


# ---- bytes


def own(file: Path) -> Path:
    """Return the file if it may be published: regular, not too large, no link out of its folder or Hub cache."""
    home, target = Path(os.path.realpath(file.parent)), Path(os.path.realpath(file))
    places = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(target.is_relative_to(place) for place in places):
        raise ValueError(
            f"{file} is a link to {target}, outside of its folder, and would be published with the model; put a copy "
            "of the file in its place, or remove it"
        )
    if not target.is_file():
        raise ValueError(f"{file} is missing, or not a regular file; put the model's own in its place, or remove it")
    if (size := target.stat().st_size) > MAX_COPIED:
        raise ValueError(f"{file} has {size} bytes; a {file.name} of more than {MAX_COPIED} bytes is not published")
    return file


def stamp(handle: FileIO) -> tuple[int, int]:
    status = os.fstat(handle.fileno())
    return status.st_size, status.st_mtime_ns


# ---- tensors


def row_range(entry: Entry, rows: tuple[int, int] | None) -> tuple[tuple[int, ...], int, int]:
    """Return the shape of these rows, and the start and end of their bytes in the file."""
    if rows is None:
        return entry.shape, entry.start, entry.stop
    first, last = rows
    if not entry.shape or not 0 <= first <= last <= entry.shape[0]:
        raise ValueError(
            f"tensor {short(entry.name)} in {entry.file} has no rows {first} to {last}; its shape is {entry.shape}"
        )
    row_bytes = (entry.stop - entry.start) // max(entry.shape[0], 1)
    return (last - first, *entry.shape[1:]), entry.start + first * row_bytes, entry.start + last * row_bytes


def samples(entry: Entry) -> Iterator[tuple[int, int]]:
    """Yield ranges of bytes to sample: start, middle and end of a tensor, or all of a small tensor."""
    size = entry.stop - entry.start
    if size <= 3 * SAMPLE:
        yield entry.start, entry.stop
        return
    for start in (entry.start, entry.start + (size - SAMPLE) // 2, entry.stop - SAMPLE):
        yield start, start + SAMPLE


def count_non_finite(block: np.ndarray[Any, np.dtype[np.uint8]], dtype: torch.dtype) -> int:
    """Count the values in these bytes that are NaN or infinite.

    Fast path: read as signed integers, positive non-finite values are the largest; read as unsigned integers, negative
    ones are. So two maxima show whether there are any.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0
    size, infinity = INFINITY.get(str(dtype).removeprefix("torch."), ("", 0))
    if size:
        sign = 1 << (8 * int(size) - 1)
        if block.view(f"i{size}").max() < infinity and block.view(f"u{size}").max() < sign + infinity:
            return 0
    values = torch.from_numpy(block).view(dtype)
    return int((~torch.isfinite(values.float() if dtype.itemsize == 1 else values)).sum())
