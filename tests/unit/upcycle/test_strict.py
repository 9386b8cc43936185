"""The one reader: what it takes, what it refuses and in which words, and that nothing small becomes large."""

from __future__ import annotations

import errno
import json
import os
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pytest
import zstandard

from evaluation.ask.remember import Remembered
from upcycle.io import disk, publish, strict
from upcycle.io.strict import Count, Range, held, parse, parse_yaml
from upcycle.text import tokens as text


def refused(call: Any, *words: str) -> str:
    with pytest.raises(ValueError) as caught:
        call()
    said = str(caught.value)
    assert all(word in said for word in words), said
    assert "\n" not in said and len(said) < 1000, said
    return said


def test_json_is_as_json_loads_reads_it() -> None:
    value = {"a": [1, -2.5, None, True, {"b": "ü\u2028"}], "": {}, "x": 10**19}
    assert parse(json.dumps(value), "f") == parse(json.dumps(value).encode(), "f") == value
    assert parse("[NaN, -Infinity]", "f", constants=True)[1] == -float("inf")


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        ('{"a": 1, "a": 2}', "'a' occurs twice"), ("NaN", "NaN is not JSON"), ("1e999", "beyond float64"), ("9" * 301, "301 digits"),
        ("[" * 51 + "]" * 51, "nested too deeply"), ("[" * 100_000, "nested too deeply"), ("[1", "delimiter"), ("", "Expecting value"),
    ],
)  # fmt: skip
def test_what_is_no_strict_json(raw: str, word: str) -> None:
    refused(lambda: parse(raw, "some.json"), "some.json", word)


def test_nesting_up_to_the_limit_is_read() -> None:
    assert parse("[" * 49 + "]" * 49, "f") is not None and parse_yaml("[" * 40 + "]" * 40, "f") is not None


def test_the_number_of_values_is_bounded_whatever_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict, "MAX_VALUES", 100)
    for raw in ("[" + "0," * 101 + "0]", "[" + "[[]],[" * 60 + "]]", '[{"a":' * 20 + "0" + "}]" * 20 + ", [[[" * 30):
        refused(lambda: parse(raw, "f"), "f", "values")  # noqa: B023
        refused(lambda: strict.parse_row(raw, "f"), "f", "values")  # noqa: B023


def test_yaml_is_plain_values_and_aliases_do_not_multiply() -> None:
    said = "a: &x [1, 2]\nb: *x\nc: 2024-01-01\nd: {<<: &m {e: 1}, f: .inf}\n"
    assert parse_yaml(said, "f") == {"a": [1, 2], "b": [1, 2], "c": "2024-01-01", "d": {"e": 1, "f": float("inf")}}
    assert parse_yaml("", "f") is None
    bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)
    )
    for raw, word in {
        bomb: "values", "a: &a [*a]": "inside itself", "a: 1\na: 2": "'a' occurs twice", "? [1]\n: 2": "a key is",
        "a: !!python/object/apply:os.getcwd []": "of type", "a: !!binary x": "of type", "a: [": "usable YAML", "a: !!int x": "usable YAML", "a: !!int _": "usable YAML",
        "[" * 5000: "too deeply", "a: &x " + "[" * 60 + "]" * 60: "too deeply", "--- 1\n--- 2": "usable YAML",
    }.items():  # fmt: skip
        refused(lambda: parse_yaml(raw, "some.yaml"), "some.yaml", word)  # noqa: B023


@pytest.mark.parametrize("kind", ["pipe", "folder", "loop", "device", "nothing", "large"])
def test_only_regular_files_of_a_bounded_size(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "loop":
            path.symlink_to(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "large":
            path.touch()
            os.truncate(path, 10**12)
    for reader in (strict.read_json, strict.read_object, strict.read_text, strict.read_yaml):
        refused(lambda: reader(path), "x.json")  # noqa: B023
    if kind != "large":  # lines are read one by one
        refused(lambda: list(strict.read_lines(path)), "x.json")


def test_lines_are_bounded_and_nothing_else_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"1\n\n" + b"2" * 10)
    assert [line for _, line in strict.read_lines(path)] == [b"1", b"", b"2" * 10]
    monkeypatch.setattr(strict, "MAX_LINE", 9)
    refused(lambda: list(strict.read_lines(path)), "line 3 of", "more than 9")


@pytest.mark.parametrize("inside", ["spaces", "one text"])
def test_a_small_zst_that_becomes_large_is_refused_as_it_is_streamed(inside: str, tmp_path: Path) -> None:
    path = tmp_path / "bomb.jsonl.zst"
    maker = zstandard.ZstdCompressor().compressobj()
    piece = (b" " if inside == "spaces" else b"x") * (1 << 20)
    path.write_bytes(
        maker.compress(b"" if inside == "spaces" else b'{"text": "')
        + b"".join(maker.compress(piece) for _ in range(300))
        + maker.flush()
    )
    assert path.stat().st_size < 100_000
    tracemalloc.start()
    refused(lambda: list(text.documents([path])), "line 1 of", "more than 32000000")
    assert tracemalloc.get_traced_memory()[1] < 200_000_000
    tracemalloc.stop()


class Inner(TypedDict):
    size: Annotated[int, Range(1, 9)]
    more: NotRequired[list[float]]


@dataclass(frozen=True)
class Outer:
    name: str
    pair: tuple[int, str]
    inner: Inner
    kinds: Mapping[str, Literal["a", "b"]]
    rest: tuple[float, ...] = ()
    maybe: Count | None = None


GOOD: dict[str, Any] = {"name": "x", "pair": [1, "y"], "inner": {"size": 3, "other": []}, "kinds": {"k": "a"}}


def test_values_are_held_to_types() -> None:
    made = held({**GOOD, "rest": [1, 2.5]}, Outer, "f")
    assert made == Outer("x", (1, "y"), {"size": 3, "other": []}, {"k": "a"}, (1, 2.5))  # type: ignore[typeddict-unknown-key]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": 1}, ("f.name is 1", "text")), ({"pair": [1]}, ("f.pair", "a list of 2")), ({"pair": [True, "y"]}, ("f.pair[0] is True",)),
        ({"pair": {}}, ("f.pair", "a list")), ({"inner": []}, ("f.inner", "keys and values")), ({"inner": {}}, ("f.inner has no size",)),
        ({"inner": {"size": 10}}, ("f.inner.size is 10", "from 1 to 9")), ({"inner": {"size": 1.0}}, ("a whole number",)),
        ({"inner": {"size": 1, "more": [None]}}, ("f.inner.more[0] is None",)), ({"kinds": {"k": "c"}}, ("f.kinds.k", "one of a, b")),
        ({"kinds": []}, ("f.kinds",)), ({"rest": "x"}, ("f.rest",)), ({"maybe": -1}, ("f.maybe is -1", "at least 0")),
        ({"maybe": 2**63}, ("f.maybe", "a whole number")), ({"maybe": "1"}, ("f.maybe",)), ({"strange": 1}, ("'strange'", "does not know")),
        ({"name": "x" * 10**6 + "\n", "pair": 0}, ("f.pair",)), ({"rest": [True]}, ("f.rest[0]",)),
    ],
)  # fmt: skip
def test_what_is_of_another_type_is_named(change: dict[str, Any], words: tuple[str, ...]) -> None:
    refused(lambda: held({**GOOD, **change}, Outer, "f"), *words)
    refused(lambda: held({key: value for key, value in GOOD.items() if key != "name"}, Outer, "f"), "f has no name")


def test_a_disk_that_fails_is_said_with_the_files_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's errors of a read, a write and a sync have no name: they are of a file's number."""
    path = tmp_path / "a.json"
    path.write_text("{}")

    def fails(*_: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    remembered = Remembered(tmp_path / "cache", "a" * 64)
    broken: Any = SimpleNamespace(name=str(tmp_path / "lock"), seek=fails, write=fails)
    remembered.file.close()
    calls: list[tuple[str, Callable[[], Any], str]] = [
        ("preadv", lambda: strict.read_json(path), "a.json"),
        ("write", lambda: disk.write_atomic(tmp_path / "b", b"x"), "b"),
        ("fsync", lambda: disk.write_atomic(tmp_path / "b", b"x"), "b"),
        ("fsync", lambda: disk.sync_folder(tmp_path), tmp_path.name),
        ("", lambda: remembered.put({"x": (1.0, True)}), "lock"),
        ("", lambda: publish.sign(broken, 1), "lock"),
    ]
    remembered.file = broken
    for name, call, said in calls:
        with monkeypatch.context() as patch, pytest.raises(OSError, match=rf"Input/output error: '.*{said}'"):
            if name:
                patch.setattr(os, name, fails)
            call()


def test_an_error_without_a_number_keeps_its_sentence() -> None:
    with pytest.raises(OSError, match=r"^a\.jsonl could not be written whole$"), strict.naming(Path("a.jsonl")):
        raise OSError("a.jsonl could not be written whole")
    with pytest.raises(OSError, match=r"No space left on device: 'a\.jsonl'"), strict.naming(Path("a.jsonl")):
        raise OSError(28, "No space left on device")
