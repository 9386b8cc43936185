"""Turn text or conversations into token shards (shards.py): streamed, restartable, shared by any number of processes.

Work happens in OUTPUT.partial, which is renamed at the end. A process that dies leaves complete parts; the next one
keeps them and skips their documents without tokenising. The bytes depend only on tokenizer, sources and shard_tokens.
One process does a source, and its tokenizer's threads use all cores.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
from tqdm import tqdm

from training.data import chat, overlap
from training.data.encoding import ChatEncoder, Encoder, Piece, load_encoder, nothing_yet, nowhere
from training.data.shards import (
    CHAT,
    KIND,
    META,
    SHARD_FILES,
    VERSION,
    ChatCounts,
    ChatRow,
    Ids,
    Row,
    TokenShards,
    files_of,
    partial_of,
    read_meta,
)
from training.data.sources.texts import HubRows, Place, Source, find, talks, texts
from upcycle.config.values import LENGTH, TOKENS, at_least, check_values
from upcycle.io import disk, publish, strict
from upcycle.io.checkpoint import tokenizer_folder
from upcycle.io.job import (
    JOB,
    POLL,
    Watch,
    Worker,
    check_apart,
    check_first,
    explained,
    job,
    read_json,
    sweep_unfinished,
)

KINDS = ("text", "chat")
SHARD = r"tokens-\d{5,}-\d{5,}\.bin"  # names of the files that ranks write in parts
FILES = SHARD_FILES[CHAT]  # files of a part; text has no scored file


@dataclass(frozen=True)
class PrepareConfig:
    output: str = ""  # the folder to make
    tokenizer: str = ""  # a folder with tokenizer.json, or a Hub id; kind=chat needs its chat template too
    sources: tuple[str, ...] = ()  # files, folders, patterns, hf:org/name[...]; see --help
    eos: str = ""  # the token that ends a document; "": as in tokenizer_config.json
    shard_tokens: int = 1 << 28  # tokens of a shard, which closes at the next end of a document
    kind: str = "text"  # text | chat: conversations whose assistant's words are learned (training.md)
    loss: str = "assistant"  # kind=chat: learn the words of assistant | all
    sequence: int = 4096  # kind=chat: longest conversation in tokens; at most training's data.sequence
    # kind=text, for held-out text: folders of training data; a document that they hold too, in 13 tokens in a row over
    # more than a fifth of its length, is left out
    unseen: tuple[str, ...] = ()
    take: str = ""  # kind=text: 1/2 takes the first of every two documents, 2/2 the second; "": all

    def __post_init__(self) -> None:
        overlap.part_of(self.take)
        if self.kind == "chat" and (self.unseen or self.take):
            name = "unseen" if self.unseen else "take"
            raise ValueError(f"{name} is for kind=text; leave it out, or write kind=text")
        for name, known in (("kind", KINDS), ("loss", chat.LOSSES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {strict.short(getattr(self, name))}; it must be one of {', '.join(known)}")
        more = ", a token and one to learn after it"
        check_values(self, "", {"shard_tokens": at_least(1, most=TOKENS), "sequence": at_least(2, more, most=LENGTH)})


def prepare(config: PrepareConfig, worker: Worker | None = None, *, quiet: bool = False) -> Path:
    """Write the folder `config.output` and return it. A failure is one ValueError, and finished work is kept."""
    worker = worker or Worker.here()
    output = Path(config.output)
    if not output.name:
        raise ValueError(f"output is {config.output!r}; write the name of a folder to make")
    if not config.tokenizer:
        raise ValueError("tokenizer is not set; write tokenizer=FOLDER, or tokenizer=org/name")
    folder = tokenizer_folder(config.tokenizer)
    encoder = load_encoder(folder, config.eos)
    sources, renderer = find(config.sources, "" if config.kind == "chat" else "text"), None
    if config.kind == "chat":
        renderer = chat.Renderer(folder, config.loss, config.sequence)
        renderer.check()
    # no paths, because the same content elsewhere is the same job
    identity: dict[str, Any] = {
        "kind": CHAT if renderer else KIND,
        "version": VERSION,
        "vocab": encoder.vocab,
        "dtype": encoder.dtype.name,
    }
    identity |= {"eos": encoder.eos, "start": encoder.start, "tokenizer": encoder.fingerprint}
    identity |= {"shard_tokens": config.shard_tokens}
    if renderer:
        identity["chat"] = renderer.mark
    identity |= {"sources": [{"name": s.name, "column": s.column, "bytes": s.size, "mark": s.mark} for s in sources]}
    training = [training_text(folder, encoder) for folder in config.unseen]
    identity |= {"unseen": [disk.sha256(each.folder / META) for each in training]} if training else {}
    identity |= {"take": config.take} if config.take else {}
    partial = partial_of(output)
    if output.exists() and not made(output, identity):
        check_apart("output", output, [config.tokenizer, *(s.place for s in sources if s.hub is None)], "-tokens")
    if complete(output, identity):
        return output
    try:
        with (
            explained(partial),
            job(
                partial, identity, worker, lambda: None, SHARD, lambda: adopt(partial, identity),
                lambda: made(output, identity),
            ) as watch,
        ):  # fmt: skip
            if worker.rank == 0:
                check_first(partial, output)
            broken = broken_parts(len(sources), partial, worker)
            encodes = ChatEncoder(encoder, renderer) if renderer else encoder
            wanted, seen = overlap.Wanted(*overlap.part_of(config.take)), {}
            if training:
                found = overlap.overlap(documents_of(encoder, sources, wanted), training)
                wanted, seen = replace(wanted, left_out=found.left_out), {"overlap": found.counts}
            write_own_sources(encodes, sources, partial, config.shard_tokens, worker, broken, wanted, quiet=quiet)
            if worker.rank == 0:
                wait_for_others(len(sources), partial, watch, broken)
                finish(len(sources), partial, identity, seen)
                publish.rename(partial, output)
                shutil.rmtree(output / JOB, ignore_errors=True)
    except (OSError, ValueError):
        if worker.rank == 0 or not made(output, identity):  # rank 0 may have finished before a late process started
            raise
    return output


def training_text(folder: str, encoder: Encoder) -> TokenShards:
    """Open a folder of training data that held-out text is compared with."""
    shards = TokenShards.open(folder)
    if shards.tokenizer != encoder.fingerprint:
        raise ValueError(
            f"unseen={folder} was prepared with another tokenizer; prepare both with one, because tokens are compared"
        )
    return shards


def documents_of(
    encoder: Encoder, sources: Sequence[Source], wanted: overlap.Wanted
) -> Iterator[tuple[tuple[int, int], Ids]]:
    """Yield the source, the number and the tokens of each document that is wanted."""
    with tqdm(unit="B", unit_scale=True, desc="read", delay=2) as bar:
        for index, source in enumerate(sources):
            pieces = wanted.pieces(index, encoder.pieces(texts(source, bar.update), 0))
            for number, parts in groupby(pieces, key=lambda piece: piece.number):
                yield (index, number), np.concatenate([piece.ids for piece in parts])


def made(output: Path, identity: dict[str, Any]) -> bool:
    found = read_json(output / META)
    return isinstance(found, dict) and all(found.get(key) == identity.get(key) for key in {*identity, "unseen", "take"})


def adopt(partial: Path, identity: Mapping[str, Any]) -> None:
    """Keep finished parts of sources that this job shares with an earlier one, and forget parts of a failed source.
    Raise a ValueError for finished parts of other sources, because they may have taken hours."""
    before = read_json(partial / JOB / "job.json")
    if not isinstance(before, dict):
        before = {}
    alike = {**before, "sources": None} == {**identity, "sources": None}
    own = identity["sources"] if alike else []
    theirs = [index for index, source in enumerate(before.get("sources", ())) if own[index : index + 1] != [source]]
    for index in theirs:
        if any(row["counts"]["documents"] for row in records(partial, index)) and not failure(partial, index).exists():
            raise ValueError(
                f"{partial} holds unfinished work with another tokenizer, source or setting; finish it with those, or "
                "remove it"
            )
    for index in theirs:
        for record in records(partial, index):
            for file in files_in(record):
                (partial / file["file"]).unlink(missing_ok=True)
        forget(partial, index, 0)
        failure(partial, index).unlink(missing_ok=True)


def complete(output: Path, identity: dict[str, Any]) -> bool:
    """Return whether the output exists and was made from these sources; raise a ValueError for something else."""
    if made(output, identity):
        shutil.rmtree(output / JOB, ignore_errors=True)  # left if the last process was killed before this
        files = {file["file"]: file for file in files_of(read_meta(output))}
        if said := next(publish.damages(output / META, files), ""):
            raise ValueError(f"{said}, so {output} has changed; remove it and prepare it again")
        return True
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ValueError(f"{output} exists and was made from something else; remove it or choose another output")
    return False


def write_own_sources(
    encoder: Encoder | ChatEncoder,
    sources: Sequence[Source],
    partial: Path,
    limit: int,
    worker: Worker,
    broken: Mapping[int, Broken],
    wanted: overlap.Wanted,
    *,
    quiet: bool,
) -> None:
    mine = [(i, source) for i, source in enumerate(sources) if i % worker.count == worker.rank]
    total = sum(source.size for _, source in mine) if all(source.size for _, source in mine) else None
    tokens, begun = 0, time.monotonic()
    with tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        desc="prepare",
        disable=quiet or worker.rank > 0,
        mininterval=0.2,
        delay=2,
    ) as bar:

        def counted(pieces: Iterator[Piece]) -> Iterator[Piece]:
            nonlocal tokens
            for piece in pieces:
                tokens += len(piece.ids)
                speed = tokens / (time.monotonic() - begun)
                bar.set_postfix_str(f"{tokens / 1e6:.1f} M tokens, {speed / 1e3:.0f} k/s", refresh=False)
                yield piece

        for index, source in mine:
            if index in broken:  # remove all records from there on first, so that the source does not count as finished
                forget(partial, index, broken[index].part)
            done = records(partial, index)
            if done and done[-1]["last"]:
                bar.update(source.size)
                continue
            found = source_pieces(encoder, source, done[-1] if done else {"read": 0}, bar.update)
            pieces = counted(wanted.pieces(index, found))
            part, last = len(done), False
            while not last:
                with failing(failure(partial, index)):
                    pieces, last = write_part(
                        partial, index, part, pieces, limit, worker, is_chat=isinstance(encoder, ChatEncoder)
                    )
                part += 1


def source_pieces(
    encoder: Encoder | ChatEncoder, source: Source, record: Mapping[str, Any], watch: Callable[[int], object]
) -> Iterator[Piece]:
    """Tokenise what a source holds after the part with this record."""
    rows = HubRows.after(source, record.get("place")) if source.hub is not None else None
    begin, place = (rows.read, rows.place) if rows else (0, nowhere)
    if isinstance(encoder, ChatEncoder):
        yield from encoder.pieces(talks(source, watch, rows), record["read"], begin, place)
    else:
        yield from encoder.pieces(texts(source, watch, rows), record["read"], begin, place)


@contextmanager
def failing(mark: Path) -> Iterator[None]:
    """Leave the file `mark` if a source cannot be read to its end, so that a corrected source may replace it."""
    try:
        yield
    except ValueError:
        disk.write_atomic(mark, b"")
        raise


def failure(partial: Path, index: int) -> Path:
    """Return the file that marks a source that could not be read to its end."""
    return partial / JOB / f"source-{index:05d}.failed"


def write_part(
    partial: Path, index: int, part: int, pieces: Iterator[Piece], limit: int, worker: Worker, *, is_chat: bool
) -> tuple[Iterator[Piece], bool]:
    """Write whole documents until there are `limit` tokens. Return the remaining pieces and whether none remain."""
    starts, sizes, tokens, size, read = array("Q", [0]), array("Q", [0]), 0, 0, 0
    counts, place = nothing_yet(), None
    with ExitStack() as stack:

        def opened(kind: str) -> disk.Stream:
            name = stem(kind, index, part) + ".bin"
            scratch = partial / f"{name}.rank-{worker.rank}.part"
            stack.enter_context(disk.renamed(scratch, partial / name))
            return stack.enter_context(disk.Stream(scratch))

        streams = {kind: opened(kind) for kind in (("tokens", "scored") if is_chat else ("tokens",))}
        for piece in pieces:
            streams["tokens"].write(piece.ids.tobytes())
            if piece.scored is not None:
                streams["scored"].write(piece.scored.tobytes())
            for name, number in (piece.counts or {}).items():
                counts[name] += number
            tokens += len(piece.ids)
            size += piece.bytes
            if piece.closes:
                starts.append(tokens)
                sizes.append(size)
                read, place = piece.read, piece.place
                if tokens >= limit:
                    break
    table = io.BytesIO()
    np.save(table, np.array([starts, sizes], "<u8"))
    disk.write_atomic(partial / (stem("documents", index, part) + ".npy"), table.getvalue())
    ahead = next(pieces, None)
    record = {
        kind: {"file": stem(kind, index, part) + ".bin", "bytes": stream.bytes, "sha256": stream.sha256}
        for kind, stream in streams.items()
    } | {
        "documents": {
            "file": stem("documents", index, part) + ".npy",
            "bytes": len(table.getvalue()),
            "sha256": hashlib.sha256(table.getvalue()).hexdigest(),
        },
        "counts": {"tokens": tokens, "documents": len(starts) - 1, "bytes": size, **(counts if is_chat else {})},
        "read": read,
        "last": ahead is None,
        **({"place": place} if place else {}),
    }
    disk.write_atomic(record_file(partial, index, part), json.dumps(record).encode())
    return chain([] if ahead is None else [ahead], pieces), ahead is None


def stem(kind: str, index: int, part: int) -> str:
    return f"{kind}-{index:05d}-{part:05d}"


def record_file(partial: Path, index: int, part: int) -> Path:
    return partial / JOB / (stem("part", index, part) + ".json")


def records(partial: Path, index: int) -> list[dict[str, Any]]:
    """Return the records of a source's complete parts, in order, up to the first incomplete one."""
    found: list[dict[str, Any]] = []
    while (record := read_record(partial, index, len(found))) is not None:
        for file in files_in(record):
            path = partial / file["file"]
            if not path.is_file() or path.stat().st_size != file["bytes"]:
                return found
        found.append(record)
        if record["last"]:
            break
    return found


class Counts(TypedDict):
    tokens: strict.Count
    documents: strict.Count
    bytes: strict.Count


class Record(Row):
    """The record of a finished part of a source."""

    counts: Counts
    read: strict.Count
    last: bool
    place: NotRequired[Place]  # of a dataset of the Hub


class AllCounts(Counts, ChatCounts):
    pass


class ChatRecord(ChatRow):
    counts: AllCounts
    read: strict.Count
    last: bool
    place: NotRequired[Place]


def read_record(partial: Path, index: int, part: int) -> dict[str, Any] | None:
    """Return the record of a part; None if it is missing or was not written for this part."""
    value = read_json(record_file(partial, index, part))
    try:
        kind = ChatRecord if isinstance(value, dict) and "scored" in value else Record
        found: dict[str, Any] = strict.held(value, kind, "part")
    except ValueError:
        return None
    names = [file["file"] for file in files_in(found)]
    own = [stem(kind, index, part) + (".npy" if kind == "documents" else ".bin") for kind in FILES if kind in found]
    return found if names == own else None


def files_in(record: Mapping[str, Any]) -> list[Any]:
    return [record[kind] for kind in FILES if kind in record]


@dataclass(frozen=True)
class Broken:
    """The first part of a source with a changed file."""

    part: int
    file: Path
    stamp: publish.Stamp  # if it differs, the file was made again


def broken_parts(sources: int, partial: Path, worker: Worker) -> dict[int, Broken]:
    """Return the broken parts by source. Each process checks its own sources; rank 0 checks all."""
    mine = [index for index in range(sources) if worker.rank in (0, index % worker.count)]
    return {index: broken for index in mine if (broken := first_broken(partial, index))}


def first_broken(partial: Path, index: int) -> Broken | None:
    part = 0
    while (record := read_record(partial, index, part)) is not None:
        for file in files_in(record):
            path = partial / file["file"]
            seen = publish.stamp(path)
            if not path.is_file() or disk.sha256(path) != file["sha256"]:
                return Broken(part, path, seen)
        part += 1
    return None


def forget(partial: Path, index: int, part: int) -> None:
    """Remove the records of a source's parts from this one on, last first, so that there is never a gap."""
    last = part
    while record_file(partial, index, last).exists():
        last += 1
    for each in range(last - 1, part - 1, -1):
        record_file(partial, index, each).unlink()


def wait_for_others(sources: int, partial: Path, watch: Watch, broken: Mapping[int, Broken]) -> None:
    def unfinished(index: int) -> bool:
        done, bad = records(partial, index), broken.get(index)
        return not done or not done[-1]["last"] or (bad is not None and publish.stamp(bad.file) == bad.stamp)

    missing = set(range(sources))
    while missing := {index for index in missing if unfinished(index)}:
        watch.check({index % watch.worker.count for index in missing})
        time.sleep(POLL)


def finish(sources: int, partial: Path, identity: dict[str, Any], seen: Mapping[str, Any]) -> None:
    """Write meta.json, and remove the files of parts without text."""
    shards, totals = [], dict.fromkeys(("tokens", "documents", "bytes"), 0)
    if identity["kind"] == CHAT:
        totals |= nothing_yet()
    for index in range(sources):
        own = records(partial, index)
        if not own or not own[-1]["last"]:
            name = identity["sources"][index]["name"]
            raise ValueError(f"{partial} lacks parts of {name}, which were there before; run the same command again")
        for record in own:
            if ("scored" in record) != (identity["kind"] == CHAT):
                raise ValueError(f"{partial} holds a part of other data; remove it and prepare again")
            totals = {key: totals[key] + record["counts"][key] for key in totals}
            if record["counts"]["documents"]:
                files = {kind: record[kind] for kind in SHARD_FILES[identity["kind"]]}
                shards.append({"source": index, **files, "counts": record["counts"]})
            else:
                for file in files_in(record):
                    (partial / file["file"]).unlink(missing_ok=True)
    if not shards:
        what = "text" if identity["kind"] == KIND else "conversation to learn from"
        raise ValueError(f"there is no {what} in {', '.join(s['name'] for s in identity['sources'])}")
    sweep_unfinished(partial, SHARD)  # left by killed processes
    disk.sweep(partial)
    disk.write_atomic(partial / META, publish.signed({**identity, **totals, **seen, "shards": shards}))
