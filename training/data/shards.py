"""Token shards, which `upcycle prepare` writes and training maps into memory.

    FOLDER/meta.json                    counts, dtype, ids, the tokenizer's fingerprint, sha256 of every file, own sum
    FOLDER/tokens-00000-00000.bin       ids of whole documents, each ended by eos
    FOLDER/documents-00000-00000.npy    uint64 [2, n + 1]: where each document starts in tokens, and in UTF-8 bytes
    FOLDER/scored-00000-00000.bin       for conversations: a byte per token, 1 if it is learned, 0 if it is only read

The two numbers are the source and its part. Documents are found by position, not by eos, which a text may contain.
`start` is the input before a document's first token: the tokenizer's bos, else eos; it is not stored. UTF-8 bytes are
kept so that a loss per byte can compare models with different tokenizers; for conversations, only bytes that are
learned.

A conversation starts with its template's first token instead of `start` and has no extra eos; its first token is never
learned.
"""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from tokenize import TokenError
from typing import Annotated, Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from upcycle.io import publish, remote, strict
from upcycle.io.disk import write_atomic
from upcycle.io.job import read_json
from upcycle.io.strict import Count, Range

META = "meta.json"
CHECKED = ".checked.json"  # written by training: the stamp of each file that was checked completely
KIND = "token shards"
CHAT = "chat shards"  # a different kind, so that no reader learns tokens that it should only read
VERSION = 1
PIECE = 1 << 20  # table entries that are checked together
Ids = NDArray[Any]  # uint16 or uint32
Offsets = NDArray[np.uint64]
Flags = NDArray[np.uint8]


@dataclass(frozen=True)
class Shard:
    tokens: Ids
    starts: Offsets  # [documents + 1] in tokens
    bytes: Offsets  # [documents + 1] in bytes of UTF-8
    scored: Flags | None = None  # for conversations: whether a token is learned

    @property
    def documents(self) -> int:
        return len(self.starts) - 1

    def head(self, documents: int) -> Shard:
        starts = self.starts[: documents + 1]
        end = int(starts[-1])
        scored = None if self.scored is None else self.scored[:end]
        return Shard(self.tokens[:end], starts, self.bytes[: documents + 1], scored)


@dataclass(frozen=True)
class TokenShards:
    folder: Path
    shards: tuple[Shard, ...]
    vocab: int
    eos: int
    start: int
    tokenizer: str  # fingerprint

    @staticmethod
    def open(folder: str | Path, vocab: int | None = None) -> TokenShards:
        """Map a folder's files and check their sizes; `verify` checks contents. `vocab`: the model's embeddings."""
        folder = here(folder)
        meta = read_meta(folder)
        shards = tuple(open_shard(folder, row, np.dtype(meta["dtype"]), meta["kind"]) for row in meta["shards"])
        found = TokenShards(folder, shards, *(meta[key] for key in ("vocab", "eos", "start", "tokenizer")))
        for name, number in (("tokens", found.tokens), ("documents", found.documents), ("bytes", found.bytes)):
            if number != meta[name]:
                for path, sha in sums(folder).items():
                    check_file(path, sha)  # raises for the damaged file, if it is one
                raise ValueError(f"{folder} has {number} {name} but its {META} says {meta[name]}; prepare it again")
        if not found.documents:
            raise ValueError(f"{folder} has no documents; prepare it again")
        if vocab is not None and found.vocab > vocab:
            raise ValueError(
                f"{folder} was made with a tokenizer of {found.vocab} ids but the model has {vocab} embeddings; "
                "prepare it with the model's own tokenizer"
            )
        return found

    @property
    def tokens(self) -> int:
        return sum(len(shard.tokens) for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def bytes(self) -> int:
        """Return the UTF-8 bytes of the text; eos and start have none."""
        return sum(int(shard.bytes[-1] - shard.bytes[0]) for shard in self.shards)

    def document(self, index: int) -> Ids:
        """Return the ids of a document, with its eos."""
        if not 0 <= index < self.documents:
            raise IndexError(f"document {index} of {self.documents}")
        firsts = [0, *accumulate(shard.documents for shard in self.shards)]
        shard = bisect_right(firsts, index) - 1
        a, b = self.shards[shard].starts[index - firsts[shard] :][:2]
        return self.shards[shard].tokens[int(a) : int(b)]

    def head(self, tokens: int) -> TokenShards:
        """Return the first documents that fit into `tokens`, at least one."""
        shards: list[Shard] = []
        for shard in self.shards:
            fit = int(np.searchsorted(shard.starts, np.uint64(tokens), side="right")) - 1
            fit = max(fit, 0 if shards else 1)
            if fit:
                shards.append(shard.head(fit))
            if fit < shard.documents:
                break
            tokens = max(0, tokens - len(shard.tokens))
        return replace(self, shards=tuple(shards))

    def verify(self) -> None:
        """Check everything: the sha256 of every file, the range of ids, and the scored flags."""
        for path, sha in sums(self.folder).items():
            check_file(path, sha)
        for row, shard in zip(read_meta(self.folder)["shards"], self.shards, strict=True):
            if not all(rises(table) for table in (shard.starts, shard.bytes)):
                path = self.folder / Path(row["documents"]["file"]).name
                raise ValueError(f"{path} has documents that end before they begin; prepare it again")
            if int(shard.tokens.max()) >= self.vocab:
                path = self.folder / Path(row["tokens"]["file"]).name
                raise ValueError(f"{path} holds ids beyond the {self.vocab} ids of its tokenizer; prepare it again")
            firsts = shard.starts[:-1][shard.starts[:-1] < shard.starts[1:]]
            if shard.scored is not None and (int(shard.scored.max()) > 1 or shard.scored[firsts].any()):
                path = self.folder / Path(row["scored"]["file"]).name
                raise ValueError(f"{path} scores a first token, or holds other values than 0 and 1; prepare it again")


def rises(table: Offsets) -> bool:
    """Return whether no entry is below the one before it, reading a piece at a time."""
    pieces = (table[at : at + PIECE] for at in range(0, len(table), PIECE - 1))
    return all(bool((piece[1:] >= piece[:-1]).all()) for piece in pieces)


def here(folder: str | Path) -> Path:
    """Return a folder of token shards, fetched to the cache if it is in an object store."""
    return remote.fetch(str(folder), META, stated, ()) if remote.is_url(folder) else Path(folder)


def stated(folder: Path) -> Mapping[str, remote.File]:
    """Return the size and sha256 of each file of a part by its name."""
    return {row["file"]: {"bytes": row["bytes"], "sha256": row["sha256"]} for row in files_of(read_meta(folder))}


def read_meta(folder: Path) -> Mapping[str, Any]:
    path = folder / META
    how = "make it with upcycle prepare"
    if folder.is_file():
        raise ValueError(
            f"{folder} is a file, not a folder of token shards; if it is a text, make one of it: upcycle prepare "
            f"{folder}-tokens tokenizer=MODEL sources=[{folder}]"
        )
    if not folder.is_dir():
        hint = f"; {folder}.partial is unfinished, run the same command again" if partial_of(folder).is_dir() else ""
        raise ValueError(f"there is no folder {folder} with token shards{hint or '; ' + how}")
    if not os.path.lexists(path):
        raise ValueError(f"{folder} has no {META}, so it is not a folder of token shards; {how}")
    try:
        meta = strict.read_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); {how}") from None
    if not isinstance(meta, dict) or meta.get("kind") not in (KIND, CHAT):
        raise ValueError(f"{path} does not describe token shards; {how}")
    if meta.get("version") != VERSION:
        raise ValueError(
            f"{path} is of version {strict.short(meta.get('version'))} and this program reads {VERSION}; {how}"
        )
    meta = publish.unsigned(meta, path, "copy it again, or prepare the folder again")
    if meta.get("dtype") not in ("uint16", "uint32"):
        raise ValueError(
            f"{path} says dtype {strict.short(meta.get('dtype'))}; it must be uint16 or uint32: prepare it again"
        )
    try:
        found: Mapping[str, Any] = strict.held(meta, ChatMeta if meta["kind"] == CHAT else Meta, str(path))
    except ValueError as error:
        raise ValueError(
            f"{path} lacks a description of its token shards ({error}); prepare the folder again"
        ) from None
    if max(meta["eos"], meta["start"]) >= meta["vocab"]:
        raise ValueError(f"{path} has special tokens beyond its {meta['vocab']} ids; prepare the folder again")
    return found


class Stored(TypedDict):
    """The record of a file of a part."""

    file: str
    bytes: Count
    sha256: str


class Row(TypedDict):
    tokens: Stored
    documents: Stored


class ChatRow(Row):
    scored: Stored


class Common(TypedDict):
    vocab: Annotated[int, Range(1, 2**32)]
    eos: Count
    start: Count
    tokens: Count
    documents: Count
    bytes: Count
    tokenizer: str


class Meta(Common):
    shards: list[Row]


class Chat(TypedDict):
    """How conversations were turned into tokens."""

    loss: str
    sequence: Annotated[int, Range(2)]
    template: str  # its sha256


class ChatCounts(TypedDict):
    """Counts of conversations; `tokens`, `documents` and `bytes` count those that were kept."""

    scored: Count  # tokens that are learned
    truncated: Count  # conversations that were cut
    silent: Count  # left out, because they have nothing to learn
    refused: Count  # left out, because the template refused them


class ChatMeta(Common, ChatCounts):
    chat: Chat
    shards: list[ChatRow]


# ---- checking bytes


def sums(folder: Path) -> dict[Path, str]:
    """Return the recorded sha256 of each file of a part."""
    return {folder / Path(file["file"]).name: file["sha256"] for file in files_of(read_meta(folder))}


def check_file(path: Path, sha: str) -> None:
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha:
        raise ValueError(f"{path} has changed: its sha256 is {found}; prepare it again")


def unchecked(folder: Path) -> dict[Path, str]:
    """Return the files, with sums, that were not checked since their size or time changed."""
    known = read_json(folder / CHECKED)
    known = known if isinstance(known, dict) else {}
    return {path: sha for path, sha in sums(folder).items() if known.get(path.name) != stamp(path, sha)}


def remember(folder: Path) -> None:
    """Record that all files were checked. If the folder cannot be written, they are read again next time."""
    with suppress(OSError):
        found = {path.name: stamp(path, sha) for path, sha in sums(folder).items()}
        write_atomic(folder / CHECKED, json.dumps(found).encode() + b"\n")


def stamp(path: Path, sha: str) -> list[Any]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ino, sha]  # the inode tells a copy apart


def partial_of(folder: Path) -> Path:
    return folder.with_name(folder.name + ".partial")


def files_of(meta: Mapping[str, Any]) -> list[Any]:
    """Return meta.json's records of files."""
    return [row[kind] for row in meta["shards"] for kind in SHARD_FILES[meta["kind"]]]


def open_shard(folder: Path, row: Any, dtype: np.dtype[Any], kind: str) -> Shard:
    files = {each: (folder / Path(row[each]["file"]).name, row[each]["bytes"]) for each in SHARD_FILES[kind]}
    for path, size in files.values():
        if not path.is_file():
            raise ValueError(f"{path} is missing; prepare the folder again, or copy all of it")
        if path.stat().st_size != size:
            raise ValueError(f"{path} has {path.stat().st_size} bytes and should have {size}; prepare or copy it again")
    try:
        path = files["tokens"][0]
        tokens: Ids = np.memmap(path, dtype, "r")
        path = files["documents"][0]
        table = np.load(path, mmap_mode="r", allow_pickle=False)
        path = files["scored"][0] if kind == CHAT else path
        scored: Flags | None = np.memmap(path, np.uint8, "r") if kind == CHAT else None
    # numpy parses the header as Python and may raise anything
    except (ValueError, OSError, EOFError, SyntaxError, TokenError, TypeError, MemoryError, OverflowError) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"{path} cannot be read ({said:.300}); prepare the folder again") from None
    if table.ndim != 2 or table.shape[0] != 2 or table.shape[1] < 2 or table.dtype != np.uint64:
        raise ValueError(
            f"{path} is {table.dtype} {list(table.shape)}, not uint64 [2, n + 1]; prepare the folder again"
        )
    if int(table[0, 0]) or int(table[0, -1]) != len(tokens):
        raise ValueError(
            f"{path} counts {int(table[0, -1])} tokens and {files['tokens'][0].name} has {len(tokens)}; they do not "
            "belong together, prepare the folder again"
        )
    if scored is not None and len(scored) != len(tokens):
        raise ValueError(
            f"{path} covers {len(scored)} tokens and {files['tokens'][0].name} has {len(tokens)}; they do not belong "
            "together, prepare the folder again"
        )
    return Shard(tokens, table[0], table[1], scored)


SHARD_FILES: Mapping[str, Sequence[str]] = {KIND: ("tokens", "documents"), CHAT: ("tokens", "documents", "scored")}
