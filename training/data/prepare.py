"""Turn text or conversations into token shards (shards.py): streamed, restartable, shared by any number of processes.

Work happens in OUTPUT.partial, which is renamed at the end. A process that dies leaves complete parts; the next one
keeps them and skips their documents without tokenising. The bytes depend only on tokenizer, sources and shard_tokens.
One process does a source, and its tokenizer's threads use all cores.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import shutil
import time
import warnings
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
from tqdm import tqdm

from training.data import arrow, chat, overlap, pages
from training.data.shards import (
    CHAT,
    KIND,
    META,
    SHARD_FILES,
    VERSION,
    ChatCounts,
    ChatRow,
    Flags,
    Ids,
    Row,
    TokenShards,
    files_of,
    partial_of,
    read_meta,
)
from upcycle.cli.frame import install
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
from upcycle.text import tokens as text

TABLES = (".parquet", ".arrow")
SUFFIXES = (*text.SUFFIXES, *TABLES)
HUB = "hf:"
SAMPLE = 1 << 20  # bytes at a file's begin and end that identify it
BATCH = 1 << 21  # characters tokenised at once, about 100 MB in the tokenizer
LONG = 1 << 22  # characters of a document that are tokenised at once
TALKS = 512  # conversations tokenised at once
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


@dataclass(frozen=True)
class Source:
    place: str  # a path, or org/name
    column: str
    size: int  # bytes, 0 if unknown
    mark: str  # identifies its content
    hub: tuple[str, str, str] | None = None  # revision, config, split

    @property
    def name(self) -> str:
        return Path(self.place).name


class Place(TypedDict):
    """A place in a dataset of the Hub."""

    read: strict.Count  # documents before it
    state: dict[str, Any]  # as `datasets` tells it
    datasets: str  # the version of `datasets`, whose states may differ


def nowhere() -> None:
    """Return the place in a file: it is read from its begin."""


@dataclass(frozen=True)
class Piece:
    """The tokens of a document or of a part of one."""

    ids: Ids
    bytes: int
    read: int  # documents of the source up to here, with empty ones
    closes: bool
    scored: Flags | None = None  # for conversations
    counts: Mapping[str, int] | None = None  # counts of this conversation and of those left out before it
    place: Place | None = None  # at or before the document

    @property
    def number(self) -> int:
        """Return the number of the document in its source, from 1."""
        return self.read if self.closes else self.read + 1


@dataclass(frozen=True)
class Encoder:
    tokenizer: Any
    vocab: int
    eos: int
    start: int
    fingerprint: str

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("<u2" if self.vocab <= 1 << 16 else "<u4")

    def pieces(
        self,
        texts: Iterable[tuple[str, bool]],
        skip: int,
        begin: int = 0,
        place: Callable[[], Place | None] = nowhere,
    ) -> Iterator[Piece]:
        """Tokenise `texts` of (text, whether the document ends here), without the first `skip` documents.

        `begin`: the documents before those of `texts`. `place` says where their source stands.
        """
        number = begin
        batch: list[tuple[bytes, bool, int]] = []
        size, tokens, here = 0, 0, place()
        for piece, closes in texts:
            number += closes
            if number - closes < skip:
                continue
            # large crawls contain half surrogate pairs, which are not text
            batch.append((piece.encode("utf-8", "replace"), closes, number))
            size += len(piece)
            if size >= BATCH:
                for made in self.encode(batch, tokens, here):
                    tokens = 0 if made.closes else tokens + len(made.ids)
                    yield made
                batch, size, here = [], 0, place()
        yield from self.encode(batch, tokens, here)

    def encode(self, batch: list[tuple[bytes, bool, int]], tokens: int, place: Place | None) -> Iterator[Piece]:
        """Encode a batch. `tokens`: tokens of the open document so far. A document without tokens is left out."""
        with text.explained(Path("tokenizer.json")):
            found = self.tokenizer.encode_batch_fast([data.decode() for data, _, _ in batch], add_special_tokens=False)
        for (data, closes, number), encoding in zip(batch, found, strict=True):
            ids = encoding.ids
            tokens += len(ids)
            if closes and tokens:
                ids.append(self.eos)
            if ids:
                yield Piece(np.array(ids, self.dtype), len(data), number, closes, place=place)
            if closes:
                tokens = 0


@dataclass(frozen=True)
class ChatEncoder:
    """The encoder of conversations."""

    of: Encoder
    renderer: chat.Renderer

    def pieces(
        self, talks: Iterable[chat.Talk], skip: int, begin: int = 0, place: Callable[[], Place | None] = nowhere
    ) -> Iterator[Piece]:
        """Tokenise conversations without the first `skip`. The last piece only counts what was left out."""
        batch: list[tuple[str, list[chat.Span]] | None] = []
        size, number, counts, warned, here = 0, skip, nothing_yet(), False, place()
        for talk in islice(talks, skip - begin, None):
            try:
                batch.append(self.renderer.spans(talk))
            except chat.Refused as refused:
                if not warned:  # warn once, not for every conversation
                    warnings.warn(f"{talk.where} is left out: the chat template refuses it, {refused}", stacklevel=2)
                warned = True
                batch.append(None)
            size += len(batch[-1][0]) if batch[-1] else 0
            if size >= BATCH or len(batch) >= TALKS:
                counts = yield from self.encode(batch, number, counts, here)
                number, size, batch, here = number + len(batch), 0, [], place()
        counts = yield from self.encode(batch, number, counts, here)
        yield Piece(np.empty(0, self.of.dtype), 0, number + len(batch), False, counts=counts)

    def encode(
        self,
        batch: list[tuple[str, list[chat.Span]] | None],
        number: int,
        counts: dict[str, int],
        place: Place | None,
    ) -> Generator[Piece, None, dict[str, int]]:
        found = iter(self.renderer.tokens([each for each in batch if each]))
        for read, each in enumerate(batch, number + 1):
            made = next(found) if each else None
            if each is None or made is None:
                counts["silent" if each else "refused"] += 1
                continue
            if int(made.ids.max()) >= self.of.vocab:
                raise ValueError(
                    f"transformers' tokenizer of {self.renderer.folder} gives id {int(made.ids.max())}, and its "
                    f"tokenizer.json has {self.of.vocab} ids; add the missing ones to tokenizer.json"
                )
            counts["scored"] += int(made.scored.sum())
            counts["truncated"] += made.cut
            yield Piece(made.ids.astype(self.of.dtype), made.bytes, read, True, made.scored, counts, place)
            counts = nothing_yet()
        return counts


def nothing_yet() -> dict[str, int]:
    return dict.fromkeys(ChatCounts.__annotations__, 0)


def load_encoder(folder: Path, eos: str) -> Encoder:
    tokenizer = text.load_tokenizer(folder)
    known = tokenizer.get_vocab(with_added_tokens=True)
    if not known:
        raise ValueError(f"the tokenizer of {folder} has no tokens; give the model's own")
    if not eos:
        settings = read_json(folder / "tokenizer_config.json")
        token = settings.get("eos_token") if isinstance(settings, dict) else None
        named = token.get("content") if isinstance(token, dict) else token
        if not isinstance(named, str) or not named:
            raise ValueError(f"{folder}/tokenizer_config.json names no eos_token; write eos=TOKEN")
        eos = named
    if eos not in known:
        raise ValueError(
            f"the tokenizer of {folder} has no token {strict.short(eos)}; write eos=TOKEN with one that it has"
        )
    with text.explained(folder / "tokenizer.json"):
        before = [id for id in tokenizer.encode("").ids if id != known[eos]]
    if len(before) > 1:
        raise ValueError(f"the tokenizer of {folder} puts {len(before)} tokens before a text; at most one is supported")
    tokenizer.encode_special_tokens = True  # "<eos>" in a text is not the end of it
    first, size = (before or [known[eos]])[0], max(known.values()) + 1
    return Encoder(tokenizer, size, known[eos], first, text.fingerprint(tokenizer))


# ---- sources


def find(sources: Sequence[str], column: str = "text") -> list[Source]:
    """List the sources in the given order, those of a folder by name. `column`: the default column."""
    found = [
        source for word in sources for source in ([hub(word, column)] if word.startswith(HUB) else files(word, column))
    ]
    if not found:
        raise ValueError("there are no sources; write sources=[FILE,...]")
    return found


def files(word: str, default: str = "text") -> Iterator[Source]:
    path, _, column = word.rpartition("#") if "#" in word and not Path(word).exists() else (word, "", "")
    if Path(path).is_dir():
        names = in_folder(Path(path))
    else:
        names = [path] if Path(path).is_file() else sorted(glob.glob(path, recursive=True))
    if not names:
        plain = word.strip("[]() ")  # a list that was quoted twice, or that another language writes so
        hint = f"; write several in brackets: sources=[{plain}]" if "," in word else ""
        hint = hint or (f"; write sources=[{plain}], without more quotes or other brackets" if plain != word else "")
        raise ValueError(
            f"source {word!r} is not a file, a folder or a pattern that matches a name ending in {', '.join(SUFFIXES)}"
            f"{hint}"
        )
    for name in names:
        if not name.endswith(SUFFIXES):
            raise ValueError(f"source {name} cannot be read; convert it to one of {', '.join(SUFFIXES)}")
        with strict.open_regular(Path(name)) as file:
            size = file.seek(0, io.SEEK_END)
            digest = hashlib.sha256(str(size).encode())
            for at in (0, max(0, size - SAMPLE)):
                file.seek(at)
                digest.update(file.read(SAMPLE))
        yield Source(name, column or default, size, digest.hexdigest())


def in_folder(folder: Path) -> list[str]:
    """List the files of a folder that can be read, without those that `datasets` caches in it."""
    splits = read_json(folder / "dataset_dict.json")  # as DatasetDict.save_to_disk writes it
    if isinstance(splits, dict) and isinstance(splits.get("splits"), list):
        names = ", ".join(f"{folder}/{name}" for name in splits["splits"])
        raise ValueError(f"{folder} holds the splits of a dataset; name those to read: sources=[{names}]")
    return sorted(
        str(path)
        for path in folder.rglob("*")
        if path.name.endswith(SUFFIXES) and not (path.name.startswith("cache-") and path.suffix == ".arrow")
    )


def hub(word: str, default: str = "text") -> Source:
    place, _, column = word.removeprefix(HUB).partition("#")
    place, config, split, *more = [*place.split(":"), "", ""]
    place, _, revision = place.partition("@")
    if not place or more != ["", ""][: len(more)]:
        raise ValueError(f"source {word!r} is not like hf:org/name[@revision][:config][:split][#column]")
    if not Path(place).is_dir():  # a branch may move between two starts
        try:
            from huggingface_hub import HfApi

            revision = str(HfApi().dataset_info(place, revision=revision or None).sha)
        except Exception as error:  # network, Hub and name errors have no common class
            raise ValueError(f"dataset {place} cannot be found on the Hub: {' '.join(str(error).split())}") from None
    return Source(place, column or default, 0, revision, (revision, config, split or "train"))


def texts(source: Source, watch: Callable[[int], object], rows: HubRows | None = None) -> Iterator[tuple[str, bool]]:
    """Yield (text, whether the document ends with it). `rows`: the rest of a dataset of the Hub."""
    if source.hub is not None:
        each = rows or HubRows(source)
        yield from ((found, True) for found in strings(source, (row.get(source.column) for row in each)))
    elif source.place.endswith(TABLES):
        for found in table_texts(source, watch):
            yield from pieces_of(found)
    elif source.place.endswith(".txt"):
        yield from whole(text.documents([source.place], watch=watch))
    else:
        for found in text.documents([source.place], source.column, watch):
            yield from pieces_of(found)


def talks(source: Source, watch: Callable[[int], object], rows: HubRows | None = None) -> Iterator[chat.Talk]:
    """Yield the conversations of a source. `rows`: the rest of a dataset of the Hub."""
    found: Iterator[tuple[str, Any]]
    if source.hub is not None:
        rest = rows or HubRows(source)
        found = ((f"row {number} of {HUB}{source.place}", row) for number, row in enumerate(rest, rest.read + 1))
    elif source.place.endswith(TABLES):
        columns = [source.column, "tools"] if source.column else chat.COLUMNS
        each = table_rows(source, watch, columns)
        found = ((f"row {number} of {source.place}", row) for number, row in enumerate(each, 1))
    elif source.place.endswith(".txt"):
        raise ValueError(
            f"{source.place} is plain text; conversations are read from .jsonl, {', '.join(TABLES)} or {HUB}..."
        )
    else:
        found = text.objects(Path(source.place), watch)
    for where, row in found:
        yield chat.talk(row, source.column, where)


def pieces_of(document: str) -> Iterator[tuple[str, bool]]:
    """Yield a document whole, or in pieces if it is longer than LONG; a tokenizer takes 50 bytes a character."""
    if len(document) <= LONG:
        yield document, True
    else:
        yield from whole(document[at : at + text.PIECE] for at in range(0, len(document), text.PIECE))


def whole(pieces: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yield a long text in pieces, cut where tokenizers also cut: after a line, or before a word."""
    rest = ""
    for piece in pieces:
        if rest:
            cut = rest.rfind("\n") + 1 or max(0, rest.rfind(" ")) or len(rest)
            yield rest[:cut], False
            rest = rest[cut:]
        rest += piece
    if rest:
        yield rest, True


def table_texts(source: Source, watch: Callable[[int], object]) -> Iterator[str]:
    yield from strings(source, (row[source.column] for row in table_rows(source, watch, [source.column])))


def table_rows(source: Source, watch: Callable[[int], object], columns: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Yield each row with the columns that exist. A column that the user named must exist."""
    kind = Path(source.place).suffix[1:]
    try:
        pyarrow = import_module("pyarrow")
    except ImportError:
        raise ValueError(f"{source.place} is {kind}, which needs pyarrow; {install('pyarrow')}") from None

    def choose(names: Sequence[str]) -> list[str]:
        if source.column and source.column not in names:
            raise ValueError(
                f"{source.place} has no column {source.column!r}, only {', '.join(names)}; write FILE#COLUMN"
            )
        return [name for name in columns if name in names]

    batches = arrow.batches(source.place, choose, watch) if kind == "arrow" else parquet_batches(source, choose, watch)
    try:
        for batch in batches:
            yield from (row.as_py() for row in batch.to_struct_array())
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{source.place} cannot be read: {' '.join(str(error).split())}") from None


def parquet_batches(
    source: Source, choose: Callable[[Sequence[str]], list[str]], watch: Callable[[int], object]
) -> Iterator[Any]:
    """Yield the record batches of a file with the columns that `choose` returns for the names of all columns."""
    with import_module("pyarrow.parquet").ParquetFile(source.place) as file:
        rows, columns, unpacked = max(1, file.metadata.num_rows), choose(file.schema_arrow.names), 0
        for batch in file.iter_batches(rows_at_once(source, file, columns), columns=columns):
            unpacked += batch.nbytes
            text.check_unpacked(source.place, source.size, unpacked)
            yield batch
            watch(source.size * len(batch) // rows)


def rows_at_once(source: Source, file: Any, columns: Sequence[str]) -> int:
    """Return how many rows of a parquet file take at most text.UNPACKED bytes, by the sizes of its pages: a text that
    is stored once may be in every row. Raise a ValueError for a decompression bomb."""
    most = 1
    with strict.open_regular(Path(source.place)) as raw:
        for group in map(file.metadata.row_group, range(file.metadata.num_row_groups)):
            for chunk in map(group.column, range(group.num_columns)):  # each key of a list of objects is a column
                if chunk.path_in_schema.partition(".")[0] not in columns:
                    continue
                try:
                    found = pages.sizes(raw, chunk)
                except ValueError as error:
                    raise ValueError(f"{source.place} cannot be read: {error}") from None
                if found.unpacked > text.UNPACKED and found.unpacked > text.RATIO * max(1, found.packed):
                    raise ValueError(
                        f"{source.place} packs {found.unpacked} bytes into {found.packed}, which no text does; look at "
                        "it, or leave it out"
                    )
                most = max(most, found.unpacked)
    return max(1, min(1024, text.UNPACKED // most))


class HubRows:
    """Iterate over the rows of a dataset of the Hub, from a state of an earlier iteration."""

    def __init__(self, source: Source, state: Mapping[str, Any] | None = None, read: int = 0) -> None:
        self.source, self.read, self.loaded = source, read, state
        with hub_errors(source):
            self.rows = hub_rows(source)
            if state:
                self.rows.load_state_dict(state)

    def __iter__(self) -> Iterator[Any]:
        with hub_errors(self.source):
            for row in self.rows:
                self.loaded = None
                self.read += 1
                yield row

    def state(self) -> Any:
        """Return the state after the last row; before the first one, `datasets` forgets which state it has loaded."""
        return self.loaded or self.rows.state_dict()

    def set_epoch(self, epoch: int) -> None:
        self.rows.set_epoch(epoch)

    @staticmethod
    def after(source: Source, place: Place | None) -> HubRows:
        """Return the rows after a place, or all rows if another version of `datasets` has told it."""
        known = place if place and place["datasets"] == import_module("datasets").__version__ else None
        return HubRows(source, known["state"], known["read"]) if known else HubRows(source)

    def place(self) -> Place:
        return {"read": self.read, "state": self.state(), "datasets": import_module("datasets").__version__}


def hub_rows(source: Source) -> Any:
    """Return the rows as `datasets` streams them."""
    try:
        datasets = import_module("datasets")
    except ImportError:
        raise ValueError(f"{HUB}{source.place} needs the package datasets; {install('datasets')}") from None
    assert source.hub is not None
    revision, config, split = source.hub
    return datasets.load_dataset(source.place, config or None, split=split, revision=revision or None, streaming=True)


@contextmanager
def hub_errors(source: Source) -> Iterator[None]:
    try:
        yield
    except (ValueError, GeneratorExit):
        raise
    except Exception as error:  # network, Hub and format errors have no common class
        raise ValueError(f"{HUB}{source.place} cannot be read: {' '.join(str(error).split())}") from None


def strings(source: Source, values: Iterable[Any]) -> Iterator[str]:
    for value in values:
        if not isinstance(value, str):
            raise ValueError(f"{source.place} has {type(value).__name__}, not text, in column {source.column!r}")
        if len(value) > strict.MAX_LINE:
            raise ValueError(
                f"{source.place} has a text of {len(value)} characters; at most {strict.MAX_LINE} are allowed"
            )
        yield value


# ---- shards


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
