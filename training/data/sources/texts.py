"""Find sources of text or conversations, and read them: files, folders, tables and datasets of the Hub."""

from __future__ import annotations

import glob
import hashlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypedDict

from training.data import chat
from training.data.sources import arrow, pages
from upcycle.cli.frame import install
from upcycle.io import strict
from upcycle.io.job import read_json
from upcycle.text import tokens as text

TABLES = (".parquet", ".arrow")
SUFFIXES = (*text.SUFFIXES, *TABLES)
HUB = "hf:"
SAMPLE = 1 << 20  # bytes at a file's begin and end that identify it
LONG = 1 << 22  # characters of a document that are tokenised at once


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
