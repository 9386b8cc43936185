"""Turn text files (.txt, .jsonl, .jsonl.zst with key `text`) into token ids, with the tokenizer.json of a model's
folder.

`token_batches` makes calibration batches; `documents` yields the texts alone. Nothing is drawn at random: the same
files give the same ids.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any

import torch
import zstandard
from torch import Tensor

from upcycle.io import strict
from upcycle.text.growth import check_growth

SUFFIXES = (".txt", ".jsonl", ".jsonl.zst")
MAX_TOKENIZER = 200_000_000  # bytes; the largest published ones have a sixth of that
MAX_ID = 1 << 24  # the tokenizers package allocates room for every id up to the largest
PIECE = 1 << 20  # characters of a .txt read at a time, so that memory does not grow with the file
UNPACKED, RATIO = 1 << 28, 200  # bytes that any file may unpack into; more is allowed up to RATIO times its size
SKIPPED, SKIPPED_MASK = 0x184D2A50, 0xFFFFFFF0  # first four bytes of a zst frame that readers skip


def documents(
    paths: Iterable[str | Path], key: str = "text", watch: Callable[[int], object] | None = None
) -> Iterator[str]:
    """Yield the texts of all files, in order; `watch` is called with the number of bytes of each read from a file."""
    for path in map(Path, paths):
        with reading(path, watch) as file:
            yield from iter(lambda: file.read(PIECE), "") if path.suffix == ".txt" else lines(path, file, key)


def objects(path: Path, watch: Callable[[int], object] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield (where, value) of each line of a .jsonl or .jsonl.zst."""
    with reading(path, watch) as file:
        for number, line in rows(path, file):
            yield f"line {number} of {path}", strict.parse_row(line, f"line {number} of {path}")


@contextmanager
def reading(path: Path, watch: Callable[[int], object] | None = None) -> Iterator[IO[str]]:
    """Open a file; errors become a ValueError that names it."""
    if not path.name.endswith(SUFFIXES):
        raise ValueError(f"{path} is not a text file that can be read; its name must end in {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise ValueError(f"text file {path} does not exist")
    try:
        with opened(path, watch) as file:
            yield file
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8 text"
        ) from None
    except (OSError, zstandard.ZstdError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


class Watched(io.FileIO):
    """A file that reports each read to `watch`, so that progress is known for compressed files too."""

    def __init__(self, path: Path, watch: Callable[[int], object] | None) -> None:
        with strict.open_regular(path) as file:
            super().__init__(os.dup(file.fileno()), "rb")
        self.watch = watch or (lambda size: None)

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size) or b""
        self.watch(len(data))
        return data

    def readinto(self, buffer: Any) -> int:
        size = super().readinto(buffer) or 0
        self.watch(size)
        return size


def opened(path: Path, watch: Callable[[int], object] | None = None) -> IO[str]:
    file = Watched(path, watch)
    packed = path.suffix == ".zst"
    if packed:
        check_frames(file, path)
    frames: Any = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True) if packed else None
    return io.TextIOWrapper(frames or io.BufferedReader(file), encoding="utf-8")


def check_frames(file: io.FileIO, path: Path) -> None:
    """Raise a ValueError for a .zst that ends before its last frame does; zstandard's reader takes it for the end."""
    size, at = os.fstat(file.fileno()).st_size, 0
    while at < size or not size:
        head = os.pread(file.fileno(), 18, at)
        if int.from_bytes(head[:4], "little") & SKIPPED_MASK == SKIPPED and len(head) >= 8:
            at += 8 + int.from_bytes(head[4:8], "little")
        else:
            try:
                frame = zstandard.get_frame_parameters(head)
            except zstandard.ZstdError as error:
                raise zstandard.ZstdError(f"byte {at} of {size} does not begin a zst frame ({error})") from None
            at = frame_end(file, at + zstandard.frame_header_size(head)) + 4 * frame.has_checksum
        if at > size:
            raise ValueError(f"{path} ends in the middle of its packed data, at byte {size}; copy or download it again")


def frame_end(file: io.FileIO, at: int) -> int:
    """Return where the last block of a frame ends; `at`: where the first block begins."""
    while head := os.pread(file.fileno(), 3, at):
        word = int.from_bytes(head, "little")
        last, kind, length = word & 1, word >> 1 & 3, word >> 3
        at += 3 + (1 if kind == 1 else length)  # a block of kind 1 is one byte that is repeated
        if last:
            return at
    return at + 1


def check_unpacked(place: str | Path, size: int, unpacked: int) -> None:
    """Raise a ValueError for a file of `size` bytes that has unpacked into so many that it cannot be text."""
    if unpacked > max(UNPACKED, RATIO * size):
        raise ValueError(
            f"{place} has {size} bytes and unpacks into more than {unpacked}, which no text does; look at it, or leave "
            "it out"
        )


def lines(path: Path, file: IO[str], key: str = "text") -> Iterator[str]:
    for number, line in rows(path, file):
        try:
            row = strict.parse_row(line, f"line {number} of {path}")
        except ValueError as error:
            raise ValueError(f"{error}; each line must be like {{'{key}': '...'}}") from None
        if not isinstance(row, dict) or not isinstance(row.get(key), str):
            raise ValueError(f"line {number} of {path} has no string under the key '{key}'{other_keys(row, path)}")
        yield row[key]


def other_keys(row: Any, path: Path) -> str:
    """Return advice for a row without text under the expected key."""
    if not isinstance(row, dict):
        return ""
    if {"messages", "conversations"} & row.keys():
        return "; it is a conversation: write kind=chat to prepare it"
    texts = [name for name, value in row.items() if isinstance(value, str)]
    return f"; if it is under {texts[0]!r}, rename that key, or prepare {path}#{texts[0]}" if texts else ""


def rows(path: Path, file: IO[str]) -> Iterator[tuple[int, str]]:
    """Yield (number, line) of each line that is not empty; the length of a line is bounded."""
    number = length = 0
    size = path.stat().st_size
    while line := file.readline(strict.MAX_LINE + 1):
        number += 1
        length += len(line)
        check_unpacked(path, size, length)
        if len(line) > strict.MAX_LINE:
            raise ValueError(f"line {number} of {path} has more than {strict.MAX_LINE} characters; is it one document?")
        if not line.isspace():
            yield number, line


def token_batches(folder: Path, paths: Sequence[str | Path], tokens: int, length: int, vocab: int) -> Tensor:
    """Return ids [n, length]: as many rows as fit into `tokens`, with an equal share of each file."""
    if tokens < 1 or length < 1:
        raise ValueError(f"calibration of {tokens} tokens in sequences of {length}; both must be at least 1")
    if not paths:
        raise ValueError("there is no text to calibrate on; name files under calibration.texts")
    length = min(length, tokens)
    rows, encode = tokens // length, encoder(folder)
    batches = []
    for i, path in enumerate(paths):
        share = (rows // len(paths) + (i < rows % len(paths))) * length
        ids = list(islice((id for text in documents([path]) for id in encode(text)), share))
        if len(ids) < share:
            raise ValueError(
                f"{path} has {len(ids)} tokens and {share} are needed; lower calibration.tokens or add text"
            )
        batches.append(torch.tensor(ids, dtype=torch.long).view(-1, length))
    batch = torch.cat(batches)
    if int(batch.max()) >= vocab:
        raise ValueError(
            f"the tokenizer.json of {folder} gives id {int(batch.max())} but the model has {vocab} embeddings; "
            "it belongs to another model"
        )
    return batch


def encoder(folder: Path) -> Any:
    """Return a function text -> ids that adds special tokens as the donor's tokenizer does."""
    tokenizer, path = load_tokenizer(folder), Path(folder) / "tokenizer.json"

    def encode(text: str) -> Any:
        with explained(path):
            return tokenizer.encode(text).ids

    return encode


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn every exception of the tokenizer, including Rust panics, into a ValueError."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        said = " ".join(str(error).split())
        raise ValueError(f"{path} cannot be read as a tokenizer: {said:.500}") from None


def load_tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer

    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no tokenizer.json, which turns text into tokens; add the model's")
    if (size := path.stat().st_size) > MAX_TOKENIZER:
        raise ValueError(f"{path} has {size} bytes; a tokenizer may have at most {MAX_TOKENIZER}")
    with explained(path):
        tokenizer = Tokenizer.from_file(str(path))
        most = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if most > MAX_ID:
        raise ValueError(f"{path} gives a token the id {most}; ids may be at most {MAX_ID}")
    check_growth(tokenizer, path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def fingerprint(tokenizer: Any) -> str:
    """Return the sha256 of a tokenizer's whole definition."""
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()
