"""Read, check and write a part: what one corpus added to a base model, as a small folder of data.

    part.safetensors   the new copies and their router rows: layers.L.router.weight, layers.L.experts.I.up.weight, ...
    part.json          name, sizes, training, sha256 of the base's files and of the two others; its own sum is the last
    README.md          the card, which its owner may edit

A part of a stranger is data: headers and texts are bounded, nothing in it runs, and it joins only the base whose bytes
it names. `check_fits` compares every shape before a tensor is read.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

import torch
from safetensors import safe_open
from torch import Tensor

from upcycle.arch.spec import MoESpec
from upcycle.arch.targets.upcycled import check_name
from upcycle.cli.frame import printable
from upcycle.config.schema import UpcycleConfig
from upcycle.converting import card
from upcycle.io import disk, publish, strict
from upcycle.io.checkpoint import INDEX, Checkpoint, Entry, public_name, read_header
from upcycle.io.strict import Count, short
from upcycle.planning.outputs import Output

RECORD, TENSORS, CARD = "part.json", "part.safetensors", "README.md"
COPY_AGAIN = "copy or download the part again"
MOST = 1 << 12  # copies, or slices of a copy


class Line(TypedDict):
    bytes: Count
    sha256: str


class Base(TypedDict):
    """The model that a part belongs to."""

    name: str
    files: Mapping[str, str]  # sha256 of config.json, of each safetensors file and of their index


class Record(TypedDict):
    format: Count
    name: str
    copies: Count
    granularity: Count
    layers: list[Count]
    dtype: str
    base: Base
    trained: list[card.Training]
    # shares of held-back general tokens and of the part's that left the anchor of each layer, before the training
    left: NotRequired[list[tuple[float, float]]]
    files: Mapping[str, Line]
    versions: NotRequired[Mapping[str, str]]


@dataclass(frozen=True)
class Part:
    folder: Path
    record: Record

    @property
    def name(self) -> str:
        return self.record["name"]

    @property
    def copies(self) -> int:
        return self.record["copies"]

    @property
    def experts(self) -> int:
        return self.copies * self.record["granularity"]

    @cached_property
    def entries(self) -> Mapping[str, Entry]:
        return read_header(self.folder / TENSORS)

    def read(self, name: str) -> Tensor:
        """Return a tensor; raise a ValueError if it has numbers that are not finite."""
        assert name in self.entries
        with safe_open(self.folder / TENSORS, "pt") as file:
            tensor: Tensor = file.get_tensor(name)
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} of {self.folder} has numbers that are not finite; {COPY_AGAIN}")
        return tensor


def is_part(folder: str | Path) -> bool:
    return (Path(folder) / RECORD).is_file()


def open_part(folder: str | Path) -> Part:
    """Open a part, and check its record; raise a ValueError of one sentence for what is not one."""
    folder, path = Path(folder), Path(folder) / RECORD
    if not path.is_file():
        raise ValueError(f"{folder} has no {RECORD}, so it is not a part; name a folder that upcycle add wrote")
    record = publish.unsigned(strict.read_object(path), path, COPY_AGAIN)
    found = cast(Record, strict.held(record, Record, str(path)))
    if found["format"] != 1:
        raise ValueError(f"{path} has format {found['format']} and this version reads 1; install a newer upcycle")
    check_name(found["name"])
    sizes = found["copies"], found["granularity"]
    ascending = found["layers"] == sorted(set(found["layers"])) and found["layers"]
    if not (min(sizes) >= 1 and max(sizes) <= MOST and ascending and found["trained"]):
        raise ValueError(f"{path} names no copies, no layers or no training; {COPY_AGAIN}")
    if set(found["files"]) != {TENSORS}:
        raise ValueError(f"{path} lists {short(sorted(found['files']))}; a part has {TENSORS} alone")
    return Part(folder, found)


def damages(part: Part) -> list[str]:
    """Return a sentence for each file of a part that differs from its record."""
    return list(publish.damages(part.folder / RECORD, part.record["files"], every=True))


# ---- the base


def files_of(base: Checkpoint) -> list[Path]:
    """Return the files that hold a base's weights and their meaning."""
    names = {"config.json", INDEX, *(file.name for file in base.files)}
    return [base.folder / name for name in sorted(names) if (base.folder / name).is_file()]


def sums_of(base: Checkpoint) -> dict[str, str]:
    return {path.name: disk.sha256(path) for path in files_of(base)}


def config_on(base: str, parts: Sequence[Part]) -> UpcycleConfig:
    """Return the config that makes room for parts on a base; the anchor and all else are the base's own."""
    record, copies = parts[0].record, sum(each.copies for each in parts)
    return UpcycleConfig(
        source=base, target="upcycled", experts=1 + copies, granularity=record["granularity"],
        top_k=record["granularity"], layers=list(record["layers"]), method={"name": "part", "part": parts[0].name},
    )  # fmt: skip


def check_base(part: Part, base: str, sums: Mapping[str, str]) -> None:
    """Raise a ValueError unless a part was made for the base whose files have these sums."""
    known = part.record["base"]["files"]
    wrong = [name for name in sorted(known.keys() | sums.keys()) if known.get(name) != sums.get(name)]
    if wrong:
        raise ValueError(
            f"{part.folder} was made for {short(part.record['base']['name'])}, and {wrong[0]} of {base} has other "
            "bytes; give the base that it was made for"
        )


def check_fits(part: Part, moe: MoESpec, base: str) -> None:
    """Raise a ValueError unless each tensor of a part fits `moe`, a model of its base with this part."""
    if part.record["dtype"] != moe.dtype:
        raise ValueError(f"{part.folder} holds {short(part.record['dtype'])} and {base} {moe.dtype}; {COPY_AGAIN}")
    want = {name: moe.shape(role) for name, role in tensors(moe, part.name)}
    want |= {name: (part.experts, moe.dense.hidden) for name in want if name.endswith("router.weight")}
    have = {name: entry.shape for name, entry in part.entries.items()}
    for name in sorted(want.keys() | have.keys()):
        if want.get(name) != have.get(name):
            raise ValueError(
                f"{name} of {part.folder / TENSORS} has shape {list(have.get(name, ()))} and {base} wants "
                f"{list(want.get(name, ()))}; {COPY_AGAIN}"
            )
    for name, entry in part.entries.items():
        if entry.dtype != part.record["dtype"]:
            raise ValueError(
                f"{name} of {part.folder / TENSORS} is {entry.dtype}, not {part.record['dtype']}; {COPY_AGAIN}"
            )


def first_of(moe: MoESpec, name: str) -> int:
    """Return the number of the first expert of a part; raise a ValueError if the model has no such part."""
    before = moe.granularity
    for known, copies in moe.parts:
        if known == name:
            return before
        before += copies * moe.granularity
    has = ", ".join(known for known, _ in moe.parts) or "none"
    raise ValueError(f"the model has no part {short(name)}; it has {has}")


def tensors(moe: MoESpec, name: str) -> Iterator[tuple[str, str]]:
    """Yield (its name in the part's file, its role in the model) of each tensor of a part."""
    first, count = first_of(moe, name), dict(moe.parts)[name] * moe.granularity
    matrices = [f"{matrix}.weight" for matrix in ("gate", "up", "down")[not moe.dense.gated :]]
    matrices += [matrix.replace("weight", "bias") for matrix in matrices] if moe.dense.ffn_bias else []
    for layer in moe.layers:
        yield f"layers.{layer}.router.weight", f"layers.{layer}.router.weight"
        for number in range(count):
            for matrix in matrices:
                at = f"layers.{layer}.experts"
                yield f"{at}.{number}.{matrix}", f"{at}.{first + number}.{matrix}"


# ---- writing


def write(
    folder: Path,
    moe: MoESpec,
    name: str,
    role: Callable[[str], Tensor],
    base: Base,
    trained: Sequence[card.Training],
    left: Sequence[tuple[float, float]],
    terms: Mapping[str, Any],
) -> Path:
    """Write a part of a model whose tensors `role` returns; the folder gets its name when it is complete."""
    first, count = first_of(moe, name), dict(moe.parts)[name] * moe.granularity
    roles, partial = dict(tensors(moe, name)), folder.with_name(f"{folder.name}.partial")
    rows = (count, moe.dense.hidden)
    outputs = [
        Output(key, rows if key.endswith("router.weight") else moe.shape(of), moe.dtype, ())
        for key, of in roles.items()
    ]
    shutil.rmtree(partial, ignore_errors=True)
    disk.make_folder(partial)
    with disk.Stream(partial / TENSORS) as stream:
        stream.write(disk.header(outputs))
        for output in outputs:
            whole = role(roles[output.name])
            own_rows = whole[first : first + count] if output.name.endswith("router.weight") else whole
            found = own_rows.to(getattr(torch, moe.dtype)).contiguous()
            if not bool(found.isfinite().all()):
                raise ValueError(f"{output.name} is not finite, so the part is not written; train with a lower rate")
            stream.write(found)
    record: dict[str, Any] = {
        "format": 1,
        "name": name,
        "copies": dict(moe.parts)[name],
        "granularity": moe.granularity,
        "layers": list(moe.layers),
        "dtype": moe.dtype,
        "base": dict(base),
        "trained": list(trained),
        "left": [list(pair) for pair in left],
        "files": {TENSORS: {"bytes": stream.bytes, "sha256": stream.sha256}},
        "versions": card.versions(),
    }
    disk.write_atomic(partial / CARD, page(cast(Record, record), stream.bytes, terms).encode())
    disk.write_atomic(partial / RECORD, publish.signed(record))
    publish.rename(partial, folder)
    return folder


def described(part: Part) -> list[tuple[str, str]]:
    """Return the lines that describe a part."""
    numbers = sum(prod(entry.shape) for entry in part.entries.values())
    size = os.path.getsize(part.folder / TENSORS)
    return [("part", part.name), *rows_of(part.record, size), ("parameters", card.human(numbers))]


def text(part: Part, *, tensors: bool = False) -> str:
    """Describe a part, and list its tensors if asked."""
    lines = [f"{name:<20} {printable(value)}" for name, value in described(part)]
    listed = [f"{e.name}  {list(e.shape)}  {e.dtype}" for e in part.entries.values()] if tensors else []
    return "\n".join([*lines, *(["", *listed] if listed else [])])


def rows_of(record: Record, size: int) -> list[tuple[str, str]]:
    left = record.get("left", [])
    shares = [sum(values) / len(left) for values in zip(*left, strict=True)] or [0.0, 0.0]
    said = f"{shares[1]:.0%} of its tokens and {shares[0]:.1%} of general ones leave the anchor, the mean over layers"
    starts = [("at the start", said)] if left else []
    return [
        ("base", public_name(record["base"]["name"])),
        ("copies", f"{record['copies']} of {record['granularity']} slices, in {len(record['layers'])} layers"),
        ("on disk", f"{card.human(size, 'B')}, {record['dtype']}"),
        *starts,
        *card.learned(record["trained"]),
    ]  # fmt: skip


def page(record: Record, size: int, terms: Mapping[str, Any]) -> str:
    """Return the card of a part."""
    base = public_name(record["base"]["name"])
    lines = [
        f"# Part {record['name']} of {card.inert(base)}", "",
        "New copies of the FFNs and router rows, without the base. part.json names its files. Join them:", "",
        f"    upcycle join {card.inert(base)} THIS-FOLDER output=joined", "",
        "| | |", "|---|---|", *(f"| {key} | {card.inert(value)} |" for key, value in rows_of(record, size)), "",
    ]  # fmt: skip
    return (
        f"---\n{card.metadata([record['base']['name']], {'model_type': 'upcycled'}, terms, ['moe', 'part'])}\n---\n"
        + "\n".join(lines)
    )
