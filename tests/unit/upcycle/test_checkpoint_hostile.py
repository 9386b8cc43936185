"""Hostile checkpoints: each is refused in one sentence; nothing is executed, nothing large is allocated.

The second opinion is the safetensors package: it accepts every file that our reader accepts, with the same shapes.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from upcycle.io import checkpoint, strict
from upcycle.io.checkpoint import DTYPES, INDEX, MAX_CONFIG, MAX_HEADER, Checkpoint, read_header

GOOD = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
    "empty": {"dtype": "I8", "shape": [4, 0], "data_offsets": [26, 26]},
    "c": {"dtype": "F4", "shape": [4], "data_offsets": [26, 28]},
}
DATA = bytes(28)


def packed(header: Any, data: bytes = DATA) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def edited(path: str, value: Any) -> dict[str, Any]:
    """GOOD with one value changed; `path` is for instance "a.shape", or the name of a new tensor."""
    header: dict[str, Any] = copy.deepcopy(GOOD)
    *way, last = path.split(".")
    at = header
    for step in way:
        at = at[step]
    at[last] = value
    return header


def refused(call: Callable[[], Any], *words: str) -> str:
    """The one sentence with which `call` refuses; asserts that it has these words."""
    with pytest.raises(ValueError) as caught:
        call()
    sentence = str(caught.value)
    assert type(caught.value) is ValueError  # not a subclass, as json and codecs raise
    assert all(word in sentence for word in words), sentence
    assert "\n" not in sentence and ". " not in sentence and len(sentence) < 1200, sentence
    return sentence


# ---- one header


def one(dtype: Any, shape: Any, offsets: Any) -> dict[str, Any]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


A = b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
HEADERS: dict[str, tuple[bytes, tuple[str, ...]]] = {
    # the frame
    "no bytes": (b"", ("has 0 bytes", "8 bytes of header length")),
    "seven bytes": (b"\x02" + bytes(6), ("has 7 bytes", "8 bytes of header length")),
    "header of nothing": (bytes(8) + b"{}", ("header of 0 bytes",)),
    "header beyond the limit": ((MAX_HEADER + 1).to_bytes(8, "little") + b"{}", (f"header of {MAX_HEADER + 1} bytes",)),
    "header of 2**64 - 1": (b"\xff" * 8 + b"{}", ("header of 18446744073709551615 bytes",)),
    "header beyond the end": ((100).to_bytes(8, "little") + b"{}", ("cut short", "98 bytes are missing")),
    "git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", ("git-lfs pointer", "git lfs pull")),
    # JSON
    "not UTF-8": (packed(b'{"\xff":1}', b""), ("not UTF-8", "byte 2")),
    "UTF-16": (packed("{}".encode("utf-16"), b""), ("not UTF-8",)),
    "byte order mark": (packed(b"\xef\xbb\xbf{}", b""), ("not usable JSON", "BOM")),
    "not JSON": (packed(b"{a:1}", b""), ("not usable JSON",)),
    "half of it": (packed(b'{"a":' + A[:-1], bytes(4)), ("not usable JSON",)),
    "two values": (packed(b"{}{}", b""), ("not usable JSON", "Extra data")),
    "zero bytes for padding": (packed(b"{}\0\0", b""), ("not usable JSON", "Extra data")),
    "a pickle": (packed(pickle.dumps({}), b""), ("not u",)),
    "a list": (packed(b"[]", b""), ("type list", "must be an object")),
    "a number": (packed(b"17", b""), ("type int", "must be an object")),
    "null": (packed(b"null", b""), ("type NoneType", "must be an object")),
    "the same tensor twice": (packed(b'{"a":' + A + b',"a":' + A + b"}", bytes(4)), ("'a' occurs twice",)),
    "the same field twice": (packed(b'{"a":' + A[:-1] + b',"shape":[1]}}', bytes(4)), ("'shape' occurs twice",)),
    "metadata twice": (packed(b'{"__metadata__":{},"__metadata__":{}}', b""), ("'__metadata__' occurs twice",)),
    "NaN": (packed(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,0]}}', b""), ("NaN is not JSON",)),
    "Infinity": (packed(b'{"a":{"dtype":"F32","shape":[],"data_offsets":[0,Infinity]}}', b""), ("Infinity is not JSON",)),
    "-Infinity": (packed(b'{"__metadata__":{"a":-Infinity}}', b""), ("-Infinity is not JSON",)),
    "deep lists": (packed(b'{"a":' + b"[" * 200_000, b""), ("nested too deeply",)),
    "deep and closed": (packed(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b""), ("nested too deeply",)),
    "deep objects": (packed(b'{"a":' * 100_000, b""), ("nested too deeply",)),
    "deep, but not for json": (packed(b'{"a":' + b"[" * 300 + b"]" * 300 + b"}", b""), ("nested too deeply",)),
    "a list of lists": (packed(b'{"a":' + b"[" * 30 + b"]" * 30 + b"}", b""), ("'a'", "described by [[[", "must be an object")),
    "a number of many digits": (packed(b'{"a":' + b"9" * 10_000 + b"}", b""), ("a number of 10000 digits",)),
    "a shape of many digits": (packed(one("F32", [int("9" * 30)], [0, 4]), bytes(4)), ("a number of 30 digits",)),
    # metadata
    "metadata is a list": (packed({"__metadata__": []}, b""), ("__metadata__ []", "strings to strings")),
    "metadata is null": (packed({"__metadata__": None}, b""), ("__metadata__ None", "strings to strings")),
    "metadata holds a number": (packed({"__metadata__": {"a": 1}}, b""), ("__metadata__", "strings to strings")),
    "metadata holds a map": (packed({"__metadata__": {"a": {}}}, b""), ("__metadata__", "strings to strings")),
    "metadata of half a character": (packed(b'{"__metadata__":{"a":"\\ud800"}}', b""), ("surrogate", "__metadata__")),
    # names
    "empty name": (packed(edited("", GOOD["a"])), ("tensor ''", "printable characters")),
    "name with NUL": (packed(edited("x\0y", GOOD["a"])), ("'x\\x00y'", "printable characters")),
    "name with a newline": (packed(edited("x\ny", GOOD["a"])), ("'x\\ny'", "printable characters")),
    "name with an escape": (packed(edited("\x1b[2J", GOOD["a"])), ("'\\x1b[2J'", "printable characters")),
    "name that turns text round": (packed(edited("a\u202eb", GOOD["a"])), ("'a\\u202eb'", "printable characters")),
    "name of half a character": (packed(edited("\ud800", GOOD["a"])), ("'\\ud800'", "printable characters")),
    "name too long": (packed(edited("x" * 513, GOOD["a"])), ("(513 characters)", "1 to 512")),
    "name of a megabyte": (packed(edited("x" * 10**6, GOOD["a"])), ("(1000000 characters)", "1 to 512")),
    # fields
    "entry is a list": (packed(edited("a", ["F32", [2, 3], [0, 24]])), ("'a'", "described by ['F32'", "must be an object")),
    "entry is null": (packed(edited("a", None)), ("'a'", "described by None", "must be an object")),
    "no dtype": (packed(edited("a", {"shape": [2, 3], "data_offsets": [0, 24]})), ("'a'", "fields ['data_offsets', 'shape']")),
    "no shape": (packed(edited("a", {"dtype": "F32", "data_offsets": [0, 24]})), ("'a'", "fields ['data_offsets', 'dtype']")),
    "no offsets": (packed(edited("a", {"dtype": "F32", "shape": [2, 3]})), ("'a'", "fields ['dtype', 'shape']")),
    "another field": (packed(edited("a.offset", 1)), ("'a'", "fields [", "'offset'", "must be dtype, shape and data_offsets")),
    "no fields": (packed(edited("a", {})), ("'a'", "fields []")),
    # dtype
    "unknown dtype": (packed(edited("a.dtype", "F128")), ("'a'", "dtype 'F128'", "known are F64, F32")),
    "torch's name of a dtype": (packed(edited("a.dtype", "float32")), ("'a'", "dtype 'float32'")),
    "lower case": (packed(edited("a.dtype", "f32")), ("'a'", "dtype 'f32'")),
    "dtype is a number": (packed(edited("a.dtype", 32)), ("'a'", "dtype 32")),
    "dtype is a list": (packed(edited("a.dtype", ["F32"])), ("'a'", "dtype ['F32']")),
    "dtype is null": (packed(edited("a.dtype", None)), ("'a'", "dtype None")),
    # shape
    "shape is a number": (packed(edited("a.shape", 6)), ("'a'", "shape 6", "whole numbers")),
    "shape is a string": (packed(edited("a.shape", "23")), ("'a'", "shape '23'", "whole numbers")),
    "shape is a map": (packed(edited("a.shape", {"0": 2})), ("'a'", "shape {", "whole numbers")),
    "negative": (packed(edited("a.shape", [-2, -3])), ("'a'", "shape [-2, -3]", "whole numbers")),
    "bool": (packed(edited("a.shape", [True, 6])), ("'a'", "shape [True, 6]", "whole numbers")),
    "float": (packed(edited("a.shape", [2.0, 3])), ("'a'", "shape [2.0, 3]", "whole numbers")),
    "exponent": (packed(json.dumps(GOOD).replace("[2, 3]", "[6e0]").encode()), ("'a'", "shape [6.0]", "whole numbers")),
    "minus zero": (packed(json.dumps(GOOD).replace("[4, 0]", "[4, -0]").encode()), ("'empty'", "shape [4, -0.0]")),
    "shape holds a string": (packed(edited("a.shape", ["6"])), ("'a'", "shape ['6']", "whole numbers")),
    "shape holds a list": (packed(edited("a.shape", [[2, 3]])), ("'a'", "shape [[2, 3]]", "whole numbers")),
    "too many dims": (packed(edited("a.shape", [2, 3] + [1] * 63)), ("'a'", "shape [2, 3, 1", "up to 64")),
    "many dims": (packed(edited("a.shape", [1] * 10**5)), ("'a'", "shape [1, 1", "up to 64")),
    "a million dims": (packed(edited("a.shape", [1] * 10**6)), ("more than 1000000 values",)),
    # sizes
    "product overflows": (packed(one("F32", [2**40, 2**40], [0, 4]), bytes(4)), ("'a'", "overflows")),
    "product wraps to the right size": (packed(one("F32", [2**32, 2**32 + 1], [0, 2**34]), bytes(4)), ("'a'", "overflows")),
    "bits overflow": (packed(one("F64", [2**58], [0, 2**61]), b""), ("'a'", "overflows")),
    "dims of 20 digits": (packed(one("F32", [10**19] * 64, [0, 4]), bytes(4)), ("'a'", "overflows")),
    "empty, but its strides overflow": (packed(one("F32", [2**40, 2**40, 0], [0, 0]), b""), ("'a'", "overflows")),
    "a terabyte": (packed(one("U8", [2**40], [0, 2**40]), b""), ("cut short", f"{2**40} of its")),
    "a terabyte in four bytes": (packed(one("U8", [2**40], [0, 4]), bytes(4)), ("'a'", "has 4 bytes", f"takes {2**40}")),
    "a byte too few": (packed(one("F32", [1], [0, 3]), bytes(3)), ("'a'", "has 3 bytes", "[1] of F32 takes 4")),
    "a byte too many": (packed(one("F32", [1], [0, 5]), bytes(5)), ("'a'", "has 5 bytes", "[1] of F32 takes 4")),
    "scalar without bytes": (packed(one("F32", [], [0, 0]), b""), ("'a'", "has 0 bytes", "takes 4")),
    "half a byte": (packed(one("F4", [3], [0, 1]), b"x"), ("'a'", "has 1 bytes", "takes 1 and a part of one")),
    # offsets
    "offsets is null": (packed(one("U8", [4], None), bytes(4)), ("'a'", "data_offsets None", "two whole numbers")),
    "one offset": (packed(one("U8", [4], [4]), bytes(4)), ("'a'", "data_offsets [4]", "two whole numbers")),
    "three offsets": (packed(one("U8", [4], [0, 4, 4]), bytes(4)), ("'a'", "data_offsets [0, 4, 4]", "two whole numbers")),
    "offsets turned round": (packed(one("U8", [4], [4, 0]), bytes(4)), ("'a'", "data_offsets [4, 0]", "in order")),
    "negative offset": (packed(one("U8", [4], [-4, 0]), bytes(4)), ("'a'", "data_offsets [-4, 0]", "two whole numbers")),
    "float offset": (packed(one("U8", [4], [0, 4.0]), bytes(4)), ("'a'", "data_offsets [0, 4.0]", "two whole numbers")),
    "bool offset": (packed(one("U8", [1], [False, True]), bytes(1)), ("'a'", "data_offsets [False, True]", "two whole")),
    # layout
    "overlap": (packed(edited("b.data_offsets", [22, 24])), ("'b'", "overlaps 'a'", "end to end")),
    "the same bytes": (packed(edited("twin", GOOD["a"])), ("overlaps", "end to end")),
    "hole": (packed(edited("b.data_offsets", [25, 27])), ("'b'", "hole of 1 bytes after 'a'", "end to end")),
    "hole before the first": (packed(one("U8", [4], [1, 5]), bytes(5)), ("'a'", "hole of 1 bytes after the header")),
    "empty tensor in a hole": (packed(edited("empty.data_offsets", [99, 99])), ("'empty'", "hole of 71 bytes after 'c'")),
    "empty tensor in another": (packed(edited("empty.data_offsets", [5, 5])), ("overlaps", "end to end")),
    "truncated": (packed(GOOD, DATA[:-3]), ("cut short", "3 of its", "are missing")),
    "no data at all": (packed(GOOD, b""), ("cut short", "28 of its", "are missing")),
    "trailing bytes": (packed(GOOD, DATA + b"payload"), ("7 trailing bytes", "no tensor")),
    "trailing bytes after nothing": (packed({}, b"payload"), ("7 trailing bytes", "no tensor")),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADERS)
def test_every_fault_of_a_header_has_its_sentence(tmp_path: Path, case: str) -> None:
    content, words = HEADERS[case]
    file = tmp_path / "some.safetensors"
    file.write_bytes(content)
    refused(lambda: read_header(file), str(file), *words)


def test_the_unspoilt_header_is_accepted(tmp_path: Path) -> None:
    """Without this the table above would prove nothing."""
    file = tmp_path / "some.safetensors"
    for header in (GOOD, dict(reversed(GOOD.items())), json.dumps(GOOD, indent=3).encode() + b" \n\t\r"):
        file.write_bytes(packed(header))
        assert sorted(read_header(file)) == ["a", "b", "c", "empty"]
    assert {e.shape for e in read_header(file).values()} == {(2, 3), (), (4, 0), (4,)}
    for dtype, (_, bits) in DTYPES.items():
        file.write_bytes(packed(one(dtype, [8], [0, bits]), bytes(bits)))
        assert read_header(file)["a"].shape == (8,) and second_opinion(file) == {"a": (8,)}
    file.write_bytes(packed(edited("注意 重み/ö [0]", {"dtype": "U8", "shape": [0], "data_offsets": [28, 28]})))
    assert "注意 重み/ö [0]" in read_header(file)


def test_how_many_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "some.safetensors"
    file.write_bytes(packed(GOOD))
    monkeypatch.setattr(checkpoint, "MAX_TENSORS", 3)
    refused(lambda: read_header(file), "some.safetensors", "lists 4 tensors", "at most 3")
    monkeypatch.setattr(strict, "MAX_VALUES", 5)
    refused(lambda: read_header(file), "some.safetensors", "more than 5 values")


def peak(call: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_promise_of_much_allocates_little(tmp_path: Path) -> None:
    """Sparse files: large by their size, but with nothing on disk."""
    file = tmp_path / "some.safetensors"
    file.write_bytes((10**8 + 1).to_bytes(8, "little"))
    os.truncate(file, 10**12)
    assert peak(lambda: refused(lambda: read_header(file), "header of 100000001 bytes")) < 10**6
    file.write_bytes(packed({"a": {"dtype": "U8", "shape": [10**12], "data_offsets": [0, 10**12]}}, b""))
    assert peak(lambda: refused(lambda: read_header(file), "1000000000000 of its")) < 10**6
    # both would be hundreds of MB as Python objects; nesting costs no comma
    for lists in (b'{"a":[' + b"[]," * 500_001 + b"0]}", b'{"a":[' + (b"[" * 99 + b"]" * 99 + b",") * 10_000 + b"0]}"):
        file.write_bytes(packed(lists, b""))
        assert peak(lambda: refused(lambda: read_header(file), "values")) < 2 * len(lists)


# ---- folders


def good_folder(folder: Path) -> Path:
    (folder / "config.json").write_text("{}")
    (folder / "x-1.safetensors").write_bytes(packed(one("U8", [4], [0, 4]), bytes(4)))
    (folder / "x-2.safetensors").write_bytes(packed(one("U8", [4], [0, 4]), bytes(4)).replace(b'"a"', b'"b"'))
    write_index(folder, {"a": "x-1.safetensors", "b": "x-2.safetensors"})
    return folder


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": "a lie"}, "weight_map": weight_map}))


def refused_folder(folder: Path, *words: str) -> None:
    refused(lambda: Checkpoint.open(folder), str(folder), *words)


def test_the_unspoilt_folder_is_accepted(tmp_path: Path) -> None:
    with Checkpoint.open(good_folder(tmp_path)) as ours:
        assert set(ours.entries) == {"a", "b"}


@pytest.mark.parametrize(
    "name",
    ["../x-2.safetensors", "/etc/x.safetensors", "sub/x-2.safetensors", "..\\x-2.safetensors", "..", ".", "", "x-2.bin",
     ".x.safetensors", "x\0.safetensors", "x\n.safetensors", 7, None, ["x-2.safetensors"]],
)  # fmt: skip
def test_an_index_entry_is_a_plain_name(tmp_path: Path, name: Any) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    good_folder(folder)
    for place in (tmp_path, folder / "sub"):  # the file exists, so it is the spelling that is refused
        place.mkdir(exist_ok=True)
        (place / "x-2.safetensors").write_bytes((folder / "x-2.safetensors").read_bytes())
    write_index(folder, {"a": "x-1.safetensors", "b": name})
    if isinstance(name, list):
        refused_folder(folder, "'b' into ['x-2.safetensors']", "plain NAME.safetensors")
    else:
        refused_folder(folder, f"'b' into {name!r}", "plain NAME.safetensors")


def test_index_and_files_must_agree(tmp_path: Path) -> None:
    good_folder(tmp_path)
    one_map, two_map = {"a": "x-1.safetensors"}, {"a": "x-1.safetensors", "b": "x-2.safetensors"}
    write_index(tmp_path, two_map | {"c": "x-1.safetensors"})
    refused_folder(tmp_path, "'c' is not in", "x-1.safetensors")
    write_index(tmp_path, {"a": "x-2.safetensors", "b": "x-1.safetensors"})
    refused_folder(tmp_path, "'a' is not in", "x-2.safetensors but in x-1.safetensors")
    write_index(tmp_path, two_map | {"c": "x-3.safetensors"})
    refused_folder(tmp_path, "lacks the file 'x-3.safetensors'")
    write_index(tmp_path, two_map | {"c": "x" * 5000 + ".safetensors"})
    refused_folder(tmp_path, "lacks the file 'xxx")
    write_index(tmp_path, two_map)
    (tmp_path / "x-1.safetensors").write_bytes(packed(GOOD))
    refused_folder(tmp_path, "'b' of", "two files, x-1.safetensors and x-2.safetensors")
    write_index(tmp_path, one_map)
    refused_folder(tmp_path, "'b' is in", "x-1.safetensors but not in")


NO_JSON = {
    "": ("not usable JSON",), "{": ("not usable JSON",), "[1]": ("type list", "must be an object"),
    '{"a": NaN}': ("NaN is not JSON",), '{"a": 1, "a": 2}': ("'a' occurs twice",), "[" * 100_000: ("nested too deeply",),
}  # fmt: skip
NO_INDEX = {
    "{}": ("weight_map None", "must map tensor names to file names"), '{"weight_map": {}}': ("weight_map {}", "must map"),
    '{"weight_map": ["a"]}': ("weight_map ['a']", "must map"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "most", "cases"), [("config.json", MAX_CONFIG, NO_JSON), (INDEX, MAX_HEADER, NO_JSON | NO_INDEX)]
)
def test_a_config_or_an_index_that_is_none(tmp_path: Path, name: str, most: int, cases: dict[str, Any]) -> None:
    file = good_folder(tmp_path) / name
    for text, words in cases.items():
        file.write_text(text)
        refused_folder(tmp_path, name, *words)
    os.truncate(file, most + 1)
    refused_folder(tmp_path, name, f"{most + 1} bytes")
    file.unlink()
    os.mkfifo(file)
    refused_folder(tmp_path, f"{name} is not a regular file")
    (tmp_path / "config.json").unlink()
    refused_folder(tmp_path, "config.json is missing")


def test_which_file_is_meant(tmp_path: Path) -> None:
    good_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(packed(GOOD))
    refused_folder(tmp_path, "both model.safetensors and", INDEX)
    (tmp_path / INDEX).unlink()
    with Checkpoint.open(tmp_path) as ours:
        assert [file.name for file in ours.files] == ["model.safetensors"]
    (tmp_path / "model.safetensors").unlink()
    refused_folder(tmp_path, "has 2 safetensors files but no", INDEX)
    for name in ("x-1.safetensors", "x-2.safetensors"):
        (tmp_path / name).unlink()
    refused_folder(tmp_path, "has no *.safetensors file")
    (tmp_path / "model.safetensors").write_bytes(packed({}, b""))
    refused_folder(tmp_path, "model.safetensors has no tensors")


class Trap:
    def __init__(self, sprung: Path) -> None:
        self.sprung = sprung

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.sprung,))


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.gguf", "last.ckpt", "x.pkl"]
)
def test_nothing_is_ever_unpickled(tmp_path: Path, name: str) -> None:
    sprung = tmp_path / "sprung"
    (tmp_path / "config.json").write_text("{}")
    trap = tmp_path / name
    trap.write_bytes(pickle.dumps(Trap(sprung)))
    refused_folder(tmp_path, name, "no safetensors", "save_pretrained(folder, safe_serialization=True)")
    trap.rename(tmp_path / "model.safetensors")
    refused_folder(tmp_path, "model.safetensors")
    assert not sprung.exists()
    pickle.loads((tmp_path / "model.safetensors").read_bytes())
    assert sprung.exists()  # the trap works


LINKS = {"device": "/dev/zero", "link to fifo": "pipe", "dangling link": "nowhere", "link to itself": "x-2.safetensors"}


@pytest.mark.parametrize("kind", ["fifo", "folder", *LINKS])
def test_only_regular_files_and_links_to_them(tmp_path: Path, kind: str) -> None:
    file = good_folder(tmp_path) / "x-2.safetensors"
    file.unlink()
    os.mkfifo(tmp_path / "pipe")
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to(LINKS[kind])
    known = {"dangling link": "is missing", "link to itself": "cannot be opened (Too many levels of symbolic links)"}
    words = known.get(kind, "is not a regular file")
    refused_folder(tmp_path, "x-2.safetensors", words)
    refused(lambda: read_header(file), "x-2.safetensors", words)


# ---- fuzzing: the two readers against each other

# Words of the refusals, on purpose, of files that safetensors accepts.
STRICTER = (
    "occurs twice",
    "has the fields",
    "printable characters",
    "strings to strings",
    "described by",
    "overflows",
)


def second_opinion(file: Path) -> dict[str, tuple[int, ...]] | None:
    try:
        with safe_open(file, "np") as theirs:
            return {name: tuple(theirs.get_slice(name).get_shape()) for name in theirs.keys()}  # noqa: SIM118
    except SafetensorError:
        return None


def judge(file: Path, content: bytes) -> str:
    """Read `content` with both readers and return "accepted" or our sentence; fails if the two contradict each other."""
    file.write_bytes(content)
    theirs = second_opinion(file)
    try:
        ours = read_header(file)
    except ValueError as error:
        sentence = str(error)
        assert type(error) is ValueError and "\n" not in sentence and len(sentence) < 1200
        assert theirs is None or any(words in sentence for words in STRICTER), (content, sentence)
        return sentence
    assert theirs == {name: entry.shape for name, entry in ours.items()}, content
    size = len(content)
    assert all(8 <= entry.start <= entry.stop <= size and entry.file == file for entry in ours.values())
    return "accepted"


VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 4, 24, 26, 28, 2**31, 2**32, 2**63, 2**64 - 1, 2**64, 1.0, -0.0, 1e300, "", "F32", "BF16",
    "I8", "U8", "F64", "F4", "\0", "\ud800", [], {}, [0], [1], [0, 0], [2, 3], [0, 24], [24, 26], [26, 26], [26, 28], [3, 2], [6],
    [1, 6], [28, 28], [0, 28], [2**40, 2**40, 0], [True, 6], [[6]], {"a": "b"},
]  # fmt: skip


def mutate(rng: random.Random) -> bytes:
    header, text, kind = copy.deepcopy(GOOD), b"", rng.randrange(8)
    if kind == 0:  # a field
        name = rng.choice([n for n in header if n != "__metadata__"])
        header[name][rng.choice(["dtype", "shape", "data_offsets", "more"])] = rng.choice(VALUES)  # type: ignore[index]
    elif kind == 1:  # a number in a field
        name, key = rng.choice(["a", "empty", "c"]), rng.choice(["shape", "data_offsets"])
        numbers: Any = header[name][key]  # type: ignore[index]
        numbers[rng.randrange(len(numbers))] = rng.choice(VALUES)
    elif kind == 2:  # an entry or a name
        header[rng.choice([*header, "new", "", "\n"])] = rng.choice([*VALUES, *GOOD.values()])
    elif kind == 3:  # another order, another layout: still valid
        header = dict(rng.sample(list(header.items()), len(header)))
        text = json.dumps(header, indent=rng.choice([None, 1]), ensure_ascii=rng.random() < 0.5).encode()
    text = text or json.dumps(header).encode()
    if kind == 4:  # bytes of the JSON, with the right length before it
        text = spliced(rng, text)
    content = packed(text)
    if kind == 5:  # bits anywhere
        flipped = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        return bytes(flipped)
    if kind == 6:
        return content[: rng.randrange(len(content))] + bytes(rng.choice([0, 0, 1, 30]))
    if kind == 7:
        return spliced(rng, content)
    return content


def spliced(rng: random.Random, content: bytes) -> bytes:
    """`content` with a piece of it copied over, or inserted at, another place."""
    start, at = rng.randrange(len(content)), rng.randrange(len(content))
    piece = content[start : start + rng.randint(1, 60)]
    return content[:at] + piece + content[at + rng.choice([0, len(piece)]) :]


def test_ten_thousand_mutations(tmp_path: Path) -> None:
    rng, file, sentences = random.Random(0), tmp_path / "some.safetensors", []
    contents = [mutate(rng) for _ in range(10_000)]
    traced = lambda: sentences.extend(judge(file, content) for content in contents[:1500])  # noqa: E731 (tracing is slow)
    assert peak(traced) < 4_000_000
    sentences.extend(judge(file, content) for content in contents[1500:])
    assert 1000 < sentences.count("accepted") < 9000


SMALL = st.lists(st.integers(0, 4), max_size=4)


@st.composite
def valid(draw: st.DrawFn) -> tuple[dict[str, Any], bytes]:
    header: dict[str, Any] = {}
    at = 0
    for name in draw(
        st.lists(st.text(st.characters(min_codepoint=33, max_codepoint=0x17F), min_size=1), unique=True, max_size=6)
    ):
        dtype, shape = draw(st.sampled_from(list(DTYPES))), [*draw(SMALL), 8]  # 8: whole bytes for 4 and 6 bits
        size = DTYPES[dtype][1]
        for dim in shape[:-1]:
            size *= dim
        if name.isprintable() and name != "__metadata__":
            header[name] = {"data_offsets": [at, at := at + size], "dtype": dtype, "shape": shape}
    header = dict(draw(st.permutations(list(header.items()))))
    return header, bytes(at)


@settings(max_examples=100, deadline=None)
@given(valid(), st.integers(0, 2**30))
def test_all_that_is_valid_is_accepted(
    tmp_path_factory: pytest.TempPathFactory, made: tuple[dict[str, Any], bytes], at: int
) -> None:
    file = tmp_path_factory.getbasetemp() / "valid.safetensors"
    header, data = made
    assert judge(file, packed(header, data)) == "accepted"
    assert {n: list(e.shape) for n, e in read_header(file).items()} == {n: h["shape"] for n, h in header.items()}
    whole = packed(header, data)
    assert judge(file, whole[: at % len(whole)]) != "accepted"  # cut anywhere, it is refused
