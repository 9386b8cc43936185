"""Read every JSON, JSONL and YAML file of the product, and the bytes of all other files, with strict checks.

A file may come from a stranger, or may be damaged by a disk, an editor or a kill. So only regular files (or links to
them) of bounded size are opened. JSON is strict: no duplicate keys, finite numbers, bounded depth, digits and number of
values. YAML has the same limits, and aliases count as often as they are used. Every value is checked against the types
that its reader states (`held`) before it is used. Every error is a ValueError of one sentence that names the file and
the key.

`held` understands Python types: dataclasses and TypedDicts for objects, list[...], tuple[...], Mapping[str, ...],
Literal, unions, and Annotated[int, Range(low, high)] for numbers with bounds.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, partial
from io import FileIO
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

import yaml

MAX_FILE = 64_000_000  # bytes of a small file that is read at once
MAX_YAML = 64_000  # bytes; a config is about a page, and PyYAML reads about 40 KB per second
MAX_VALUES = 1_000_000  # commas and opening brackets in one JSON text, which bounds json's memory and time
MAX_DEPTH = 50  # levels of nested values
MAX_NODES = 100_000  # values of one YAML text; an alias counts each time it is used
MAX_DIGITS = 300  # digits of a whole number: about as many as float64 can hold
MAX_LINE = 32_000_000  # characters of one line
LARGEST = 2**63 - 1


@dataclass(frozen=True)
class Range:
    """The bounds of a number, both included."""

    low: float
    high: float = LARGEST

    def __str__(self) -> str:
        return f"of at least {self.low}" if self.high == LARGEST else f"from {self.low} to {self.high}"


Count = Annotated[int, Range(0)]


# ---- bytes


def open_regular(file: Path) -> FileIO:
    """Open a regular file or a link to one; refuse others, because a pipe may never answer and a device may react."""
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):
            raise ValueError(f"{file} is not a regular file; a pipe, device or folder cannot be read here")
        # NONBLOCK: if a pipe replaces the file right now, opening it still returns.
        return FileIO(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))
    except OSError as error:
        missing = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be opened ({error.strerror})"
        raise ValueError(f"{file} {missing}; it must be a file that you may read") from error


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file name to an OSError; the error of a read or a write (for instance on a full disk) lacks it."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:  # without a number, an error has its own sentence
            error.filename = str(path)
        raise


def fill(handle: FileIO, file: Path, view: memoryview, at: int) -> None:
    """Fill `view` with the bytes of the file from byte `at`, in as many reads as needed."""
    done = 0
    while done < len(view):
        with naming(file):
            got = os.preadv(handle.fileno(), [view[done:]], at + done)
        if not got:
            raise ValueError(f"{file} shrank while it was open here: it ends at byte {at + done}; copy it again")
        done += got


def read_exactly(handle: FileIO, file: Path, at: int, count: int) -> bytearray:
    out = bytearray(count)
    fill(handle, file, memoryview(out), at)
    return out


def read_small(file: Path, limit: int = MAX_FILE) -> bytearray:
    with open_regular(file) as handle:
        size = os.fstat(handle.fileno()).st_size
        if size > limit:
            raise ValueError(f"{file} has {size} bytes; a {file.name} may have at most {limit}")
        return read_exactly(handle, file, 0, size)


def read_text(file: Path, limit: int = MAX_FILE) -> str:
    try:
        return read_small(file, limit).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text ({error.reason} at byte {error.start})") from None


# ---- JSON


def read_json(file: Path, limit: int = MAX_FILE, *, constants: bool = False) -> Any:
    """Read a JSON file; with `constants`, accept NaN and Infinity, which Python writes."""
    return parse(read_small(file, limit), file, constants=constants)


def read_object(file: Path, limit: int = MAX_FILE, *, constants: bool = False) -> dict[str, Any]:
    return parse_object(read_small(file, limit), file, constants=constants)


def read_lines(file: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (where, line) of each line of a file, without line ends; lines have a bounded length, files do not."""
    with open_regular(file) as raw, os.fdopen(os.dup(raw.fileno()), "rb") as handle:
        number = 0
        while True:
            with naming(file):
                line = handle.readline(MAX_LINE + 1)
            if not line:
                return
            number += 1
            if len(line) > MAX_LINE:
                raise ValueError(f"line {number} of {file} has more than {MAX_LINE} bytes; is it the right file?")
            yield f"{file}:{number}", line.removesuffix(b"\n")


def parse_object(
    raw: bytes | bytearray | str, where: Path | str, *, constants: bool = False, digits: int = MAX_DIGITS
) -> dict[str, Any]:
    value = parse(raw, where, constants=constants, digits=digits)
    if not isinstance(value, dict):
        raise ValueError(f"{where} has JSON of type {type(value).__name__}; it must be an object")
    return value


def parse(
    raw: bytes | bytearray | str,
    where: Path | str,
    *,
    constants: bool = False,
    values: int | None = None,
    digits: int = MAX_DIGITS,
) -> Any:
    """Parse JSON strictly: no duplicate keys, finite numbers, bounded nesting, digits and number of values."""
    try:
        check_values(raw, values or MAX_VALUES)
        value = json.loads(
            raw if isinstance(raw, str) else raw.decode(),
            object_pairs_hook=unique,
            parse_int=partial(integer, most=digits),
            parse_float=finite,
            parse_constant=float if constants else no_constant,
        )
        check_depth(value)
        return value
    except RecursionError:
        raise ValueError(f"{where} is not usable JSON: it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not usable JSON: it is not UTF-8 at byte {error.start} of the JSON") from error
    except ValueError as error:
        raise ValueError(f"{where} is not usable JSON: {error}") from error


def check_values(raw: bytes | bytearray | str, most: int) -> None:
    """Raise a ValueError if a JSON text may hold more values than `most`."""
    marks: Any = ",[{" if isinstance(raw, str) else (b",", b"[", b"{")
    if sum(raw.count(mark) for mark in marks) > most:
        raise ValueError(f"more than {most} values")


def parse_row(line: str, where: str) -> Any:
    """Parse one line of a user's data: bounded, but not strict, because only a few keys of it are used."""
    try:
        check_values(line, MAX_VALUES)
        return json.loads(line)
    except RecursionError:
        raise ValueError(f"{where} is not JSON: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None


def check_depth(value: Any, most: int = MAX_DEPTH) -> None:
    """Raise a ValueError if values are nested deeper than `most`, because code that uses them is recursive."""
    level = [value]
    for _ in range(most):
        nested = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [inner for values in nested for inner in values]
        if not level:
            return
    raise ValueError("it is nested too deeply")


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {short(twice)} occurs twice")
    return out


def integer(digits: str, most: int) -> int | float:
    if len(digits) > most:
        raise ValueError(f"a number of {len(digits)} digits")
    return -0.0 if digits == "-0" else int(digits)  # the safetensors package does not accept -0 as an integer either


def finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):  # for instance 1e400, which Python reads as infinity
        raise ValueError(f"{digits:.40} is beyond float64")
    return number


def no_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


# ---- YAML


class Loader(yaml.SafeLoader):
    """SafeLoader without dates: a word that looks like a date stays a string."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as in the class above
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


PLAIN = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map", "merge")}


def read_yaml(file: Path) -> Any:
    return parse_yaml(read_text(file, MAX_YAML), str(file))


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML of plain values, with bounded depth and number of values (aliases expanded)."""
    try:
        loader = Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            size_of(node, {})
            value = loader.construct_document(node)
            check_depth(value)
            return value
        finally:
            loader.dispose()
    except RecursionError:
        raise ValueError(f"{where} is not usable YAML: it is nested too deeply") from None
    except (yaml.YAMLError, ValueError, TypeError, LookupError, OverflowError) as error:  # for instance from int('')
        raise ValueError(f"{where} is not usable YAML: {' '.join(str(error).split())}") from None


def size_of(node: yaml.Node, known: dict[int, int]) -> int:
    """Count the values in a node, with aliases expanded; raise a ValueError for too many values or a cycle."""
    if id(node) in known:
        if not known[id(node)]:
            raise ValueError("a value is inside itself")
        return known[id(node)]
    known[id(node)] = 0
    if node.tag not in PLAIN:
        raise ValueError(f"a value is of type {short(node.tag)}; use only plain numbers, words, lists and keys")
    inner: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        inner = [each for pair in node.value for each in pair]
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(keys) < len(node.value):
            raise ValueError("a key is a list or has keys of its own; it must be a word")
        if len(set(keys)) < len(keys):
            raise ValueError(f"the key {short(next(key for key in keys if keys.count(key) > 1))} occurs twice")
    elif isinstance(node, yaml.SequenceNode):
        inner = node.value
    known[id(node)] = found = 1 + sum(size_of(each, known) for each in inner)
    if found > MAX_NODES:
        raise ValueError(f"more than {MAX_NODES} values")
    return found


# ---- types


def held(value: Any, kind: Any, where: str) -> Any:
    """Check that a value has the type `kind` and return it; raise a ValueError that names the place `where` otherwise.

    An object becomes a dataclass and a list becomes a tuple if `kind` says so. Keys that a TypedDict does not have stay
    unchanged. A whole number is accepted as a float.
    """
    check = CHECKS.get(kind)
    if check is not None:
        if not check[0](value):
            raise wrong(where, value, check[1])
        return float(value) if kind is float and abs(value) > LARGEST else value  # numpy has no integers above LARGEST
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        held(value, inner[0], where)
        if not inner[1].low <= value <= inner[1].high:
            raise wrong(where, value, f"a number {inner[1]}")
        return value
    if origin is NotRequired:
        return held(value, inner[0], where)
    if origin in (Union, UnionType):
        return held_to_one(value, inner, where)
    if origin is Literal:
        if not any(type(value) is type(each) and value == each for each in inner):
            raise wrong(where, value, f"one of {', '.join(map(str, inner))}")
        return value
    if origin in (list, tuple):
        return held_list(value, origin, inner, where)
    if is_dataclass(kind) or is_typeddict(kind):
        return held_object(value, kind, where)
    assert origin in (dict, Mapping) or getattr(origin, "__name__", "") == "Mapping", kind
    if not isinstance(value, dict):
        raise wrong(where, value, "keys and values")
    return {key: held(each, inner[1], f"{where}.{key:.60}") for key, each in value.items()}


def held_to_one(value: Any, kinds: tuple[Any, ...], where: str) -> Any:
    problems = []
    for kind in kinds:
        try:
            return held(value, kind, where)
        except ValueError as error:
            problems.append(error)
    # raise the error of the nearest type: for an object or a list the last type (if not null), else the first
    raise problems[-1 if isinstance(value, dict | list) and kinds[-1] is not NoneType else 0]


def held_list(value: Any, origin: Any, inner: tuple[Any, ...], where: str) -> Any:
    if not isinstance(value, list):
        raise wrong(where, value, "a list")
    if origin is tuple and inner[-1] is not Ellipsis:
        if len(value) != len(inner):
            raise wrong(where, value, f"a list of {len(inner)}")
        return tuple(held(each, kind, f"{where}[{i}]") for i, (each, kind) in enumerate(zip(value, inner, strict=True)))
    return origin(held(each, inner[0], f"{where}[{i}]") for i, each in enumerate(value))


def held_object(value: Any, kind: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise wrong(where, value, "keys and values")
    hints, needed = keys_of(kind)
    if lacks := needed - value.keys():
        raise ValueError(f"{where} has no {min(lacks)}, which is required")
    inside = {key: held(value[key], hints[key], f"{where}.{key}") for key in hints if key in value}
    if is_typeddict(kind):
        return {**value, **inside}
    if strange := value.keys() - hints.keys():
        raise ValueError(f"{where} has a key {short(min(strange))}, which this version does not know")
    return kind(**inside)


@cache
def keys_of(kind: Any) -> tuple[Mapping[str, Any], frozenset[str]]:
    """Return ({key: type}, required keys) of a dataclass or a TypedDict."""
    hints = get_type_hints(kind, include_extras=True)
    if is_typeddict(kind):
        return hints, frozenset(key for key, hint in hints.items() if get_origin(hint) is not NotRequired)
    must = (f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING)
    return hints, frozenset(must)


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


CHECKS: Mapping[Any, tuple[Callable[[Any], bool], str]] = {
    Any: (lambda value: True, ""),
    bool: (lambda value: isinstance(value, bool), "true or false"),
    int: (is_whole, "a whole number"),
    float: (is_number, "a number"),
    str: (lambda value: isinstance(value, str), "text"),
    NoneType: (lambda value: value is None, "null"),
    dict: (lambda value: isinstance(value, dict), "keys and values"),
}


def wrong(where: str, value: Any, want: str) -> ValueError:
    return ValueError(f"{where} is {short(value)}; it must be {want}")


def short(value: Any) -> str:
    """Return the repr() of an untrusted value, shortened to a bounded length and depth."""
    brief = reprlib.Repr()
    brief.maxstring = 160
    return brief.repr(value)


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or its type if it has none."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
