"""Join parts to their base in one model, and take a part out again; the base's files come back byte for byte.

A joined folder has target=upcycled: the base's own FFN in slices as copy 0, then the copies of each part. The manifest
keeps the base's small files and the headers of its weights, so that `remove` of the last part needs no base.
"""

from __future__ import annotations

import base64
import shutil
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any, NotRequired, TypedDict, cast

import torch
from torch import Tensor

from training.checkpoint import export, layout
from training.checkpoint.layout import Origin
from upcycle.arch import registry, tokenizer
from upcycle.arch.spec import MoESpec
from upcycle.converting import card, part
from upcycle.converting.part import Part
from upcycle.io import disk, publish, strict
from upcycle.io.checkpoint import MAX_COPIED, MAX_HEADER, Checkpoint
from upcycle.io.dtypes import DTYPES
from upcycle.io.strict import short
from upcycle.planning.plan import UpcyclePlan
from upcycle.verifying.inspect import read_manifest

TARGET, METADATA = "upcycled", "__metadata__"
SMALL = 1 << 20  # bytes of a file of the base that the manifest keeps, if the folder copies no file of this name
AGAIN = "join the parts to the base again"
# cosine of router rows, mean over layers: 8 alike pairs of texts had 0.73 to 0.88, 73 others at most 0.51 (SmolLM2, not
# mended); one alike pair was joined and scored
ALIKE = 0.6


class File(TypedDict):
    """A file of the base: in the joined folder with the same bytes, or packed here, as a whole or as a header."""

    sha256: str
    whole: NotRequired[str]  # base64 of zlib
    header: NotRequired[str]  # the same, of what stands before the tensors


# ---- join


def join(base: str, places: Sequence[str], output: str) -> Path:
    """Write the folder of a base with parts, and return it."""
    parts = [part.open_part(place) for place in places]
    check_together(parts)
    folder = Path(output)
    export.check_new(folder)
    with ExitStack() as stack:
        checkpoint = stack.enter_context(Checkpoint.open(base))
        sums = part.sums_of(checkpoint)
        for each in parts:
            part.check_base(each, base, sums)
        origin = stack.enter_context(based(base, parts))
        for each in parts:
            part.check_fits(each, spec_of(origin), base)
            if said := next(iter(part.damages(each)), ""):
                raise ValueError(f"{said}; {part.COPY_AGAIN}")
        warn_of_alike(parts)
        made = {
            **export.provenance(origin, {}),
            "trained": [facts for each in parts for facts in each.record["trained"]],
            "parts": {each.name: each.record["files"][part.TENSORS]["sha256"] for each in parts},
            "base": kept(checkpoint, sums, origin),
        }
        about = card.trained(made, origin.config, origin.terms, [path.name for path in origin.files])
        return export.write(origin, folder, lambda: Joined(origin, parts), made, about)


def check_together(parts: Sequence[Part]) -> None:
    """Raise a ValueError unless there are parts, whose names differ and whose sizes agree."""
    if not parts:
        raise ValueError("no part is named; write upcycle join BASE PART PART ... output=FOLDER")
    names = [each.name for each in parts]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise ValueError(f"two parts are called {twice}; join one of them")
    for key in ("granularity", "layers"):
        found = {each.name: each.record[key] for each in parts}
        if len(set(map(str, found.values()))) > 1:
            raise ValueError(f"the parts have different {key} ({short(found)}); join parts that were made alike")


def warn_of_alike(parts: Sequence[Part]) -> None:
    """Warn of two parts whose router rows look for the same tokens."""
    rows = {each.name: rows_of(each) for each in parts}
    for (one, its), (other, theirs) in combinations(rows.items(), 2):
        used = [(a, b) for a, b in zip(its, theirs, strict=True) if bool(a.any() or b.any())]
        cosines = [float((a @ b.T).max()) for a, b in used]  # of the copies most alike; a row of zeros takes no token
        cosine = fmean(cosines) if cosines else 0.0
        if cosine > ALIKE:
            warnings.warn(
                f"{one} and {other} look for alike tokens: their router rows have a cosine of {cosine:.2f} (unlike "
                "texts had at most 0.51 with SmolLM2); two such parts lost most of their answers when they were joined "
                "(docs/parts.md); make one part of the documents of both",
                stacklevel=3,
            )


def rows_of(each: Part) -> list[Tensor]:
    """Return a part's router rows of each layer, each of length 1 or zero."""
    rows = [each.read(f"layers.{layer}.router.weight").double() for layer in each.record["layers"]]
    scaled = [row / row.abs().amax(1, keepdim=True).clamp_min(torch.finfo(row.dtype).tiny) for row in rows]
    return [torch.nn.functional.normalize(row, dim=1) for row in scaled]


@contextmanager
def based(base: str, parts: Sequence[Part]) -> Iterator[Origin]:
    """Open the model of a base with room for parts; it reads what is the base's."""

    def nothing(plan: UpcyclePlan, _: Sequence[Checkpoint]) -> Mapping[str, Tensor]:
        return {f"layers.{layer}.rows": torch.zeros(plan.moe.copies, plan.dense.hidden) for layer in plan.moe.layers}

    with layout.online(part.config_on(base, parts), nothing, reads=False) as origin:
        moe = replace(spec_of(origin), parts=tuple((each.name, each.copies) for each in parts))
        yield replace(origin, spec=moe, config=registry.target(TARGET).config(moe), plan=None)


def spec_of(origin: Origin) -> MoESpec:
    assert isinstance(origin.spec, MoESpec)
    return origin.spec


class Joined:
    """Give the tensors of a base and of parts by their roles."""

    def __init__(self, origin: Origin, parts: Sequence[Part]) -> None:
        self.origin, self.moe, self.names = origin, spec_of(origin), names_of(origin)
        self.parts = {role: (each, name) for each in parts for name, role in part.tensors(self.moe, each.name)}
        self.rows = parts

    def role(self, role: str) -> Tensor:
        if role.endswith("router.weight"):
            rows = [each.read(role) for each in self.rows]
            return torch.cat([rows[0].new_zeros(self.moe.granularity, self.moe.dense.hidden), *rows])
        if role in self.parts:
            found, name = self.parts[role]
            return found.read(name)
        return self.origin.read(self.names[role])


def names_of(origin: Origin) -> dict[str, str]:
    """Return the name on disk of each role; this target stores each role in a tensor of its own."""
    return {stored.roles[0][0]: stored.name for stored in origin.tensors}


# ---- what brings the base back


def packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


def unpacked(text: str, most: int) -> bytes:
    """Return what `packed` packed; raise a ValueError for anything else, and for more than `most` bytes."""
    try:
        inflate = zlib.decompressobj()
        data = inflate.decompress(base64.b64decode(text, validate=True), most)
    except (ValueError, zlib.error) as error:
        raise ValueError(f"a packed file of the base cannot be read ({error}); {AGAIN}") from None
    if not inflate.eof:
        raise ValueError(f"a packed file of the base has more than {most} bytes; {AGAIN}")
    return data


def kept(base: Checkpoint, sums: Mapping[str, str], origin: Origin) -> dict[str, File]:
    """Return a line for each file of the base that `remove` can make again."""
    weights, copied = {file.name for file in base.files}, {path.name for path in origin.files}
    found: dict[str, File] = {}
    for path in sorted(path for path in base.folder.iterdir() if path.is_file()):
        if path.name in weights:
            with strict.open_regular(path) as file:
                size = int.from_bytes(strict.read_exactly(file, path, 0, 8), "little")
                head = bytes(strict.read_exactly(file, path, 0, 8 + size))
            found[path.name] = {"sha256": sums[path.name], "header": packed(head)}
        elif path.name in copied and tokenizer.read(path, origin.tokenizer_class) == path.read_bytes():
            found[path.name] = {"sha256": disk.sha256(path)}
        elif path.name in copied or path.stat().st_size <= SMALL:
            found[path.name] = {"sha256": disk.sha256(path), "whole": packed(path.read_bytes())}
    return found


# ---- remove


def remove(place: str, name: str, output: str) -> Path:
    """Write a joined folder without a part, or the base's own files if it was the last, and return the folder."""
    folder = Path(output)
    export.check_new(folder)
    with layout.opened(place) as origin:
        moe = spec_of(origin) if isinstance(origin.spec, MoESpec) else None
        if moe is None or not moe.parts:
            raise ValueError(f"{place} has no parts; name a folder that upcycle join wrote")
        part.first_of(moe, name)
        manifest = read_manifest(Path(place))
        if manifest is None or "trained" not in manifest:
            raise ValueError(f"{place} has no {publish.MANIFEST} of a model with parts; {AGAIN}")
        for said in publish.damages(Path(place) / publish.MANIFEST, manifest["files"], every=True):
            raise ValueError(f"{said}; {AGAIN}")
        if len(moe.parts) == 1:
            return rebuild(Path(place), origin, manifest, folder)
        left = tuple(each for each in moe.parts if each[0] != name)
        return without(origin, moe, manifest, name, left, folder)


def without(
    origin: Origin,
    moe: MoESpec,
    manifest: Mapping[str, Any],
    name: str,
    left: tuple[tuple[str, int], ...],
    folder: Path,
) -> Path:
    """Write a joined folder with the parts that are left; their tensors stay as they are."""
    first, gone = part.first_of(moe, name), dict(moe.parts)[name] * moe.granularity
    fewer = replace(moe, parts=left, copies=moe.copies - gone // moe.granularity, widths=moe.widths[gone:])
    target, names = registry.target(TARGET), names_of(origin)

    class Left:
        def role(self, role: str) -> Tensor:
            words = role.split(".")
            if role.endswith("router.weight"):
                rows = origin.read(names[role])
                return torch.cat([rows[:first], rows[first + gone :]])
            if "experts" in words and int(words[3]) >= first:
                words[3] = str(int(words[3]) + gone)
            return origin.read(names[".".join(words)])

    settings = {**(origin.settings or {}), "experts": fewer.copies}
    settings["method"] = {**settings.get("method", {}), "part": left[0][0]}
    smaller = replace(
        origin, spec=fewer, tensors=layout.stored_slots(fewer, target.slots(fewer)), settings=settings,
        config=target.config(fewer),
    )  # fmt: skip
    parts = {key: value for key, value in manifest.get("parts", {}).items() if key != name}
    made = {key: value for key, value in manifest.items() if key not in ("files", "sum")}
    made |= {"config": settings, "parts": parts}
    about = card.trained(made, smaller.config, origin.terms, [path.name for path in origin.files])
    return export.write(smaller, folder, lambda: cast(export.Roles, Left()), made, about)


def rebuild(place: Path, origin: Origin, manifest: Mapping[str, Any], folder: Path) -> Path:
    """Write the base's files, each with the sha256 that the manifest has of it."""
    if "base" not in manifest:
        raise ValueError(f"{place} does not say what files its base had; {AGAIN}")
    found: Mapping[str, File] = strict.held(manifest["base"], Mapping[str, File], f"{place / publish.MANIFEST}: base")
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    disk.make_folder(partial)
    most = {tokenizer.FILE: MAX_COPIED}
    texts = {name: unpacked(line["whole"], most.get(name, SMALL)) for name, line in found.items() if "whole" in line}
    for name, line in found.items():
        target = partial / Path(name).name
        if name in texts:
            disk.write_atomic(target, texts[name])
        elif "header" in line:
            head = unpacked(line["header"], MAX_HEADER + 8)
            write_weights(target, head, origin, strict.parse_object(texts.get("config.json", b"{}"), "config.json"))
        else:
            disk.copy(place / Path(name).name, target)
        if disk.sha256(target) != line["sha256"]:
            shutil.rmtree(partial)
            raise ValueError(f"{name} would not be the base's own, because {place} has changed; {AGAIN}")
    publish.rename(partial, folder)
    return folder


def write_weights(target: Path, head: bytes, origin: Origin, config: Mapping[str, Any]) -> None:
    """Write a safetensors file of the base by its own header, with the anchor's and the other tensors of the base."""
    family = registry.family(config.get("model_type"))
    dense = family.read(config)
    stored = {each.name: each for each in layout.dense_tensors(dense, family.sources(dense))}
    entries = {
        name: line for name, line in strict.parse_object(head[8:], target, digits=20).items() if name != METADATA
    }
    if unknown := sorted(entries.keys() - stored.keys()):
        raise ValueError(
            f"{target.name} of the base has {short(unknown[0])}, which no model of this kind uses, so the joined "
            "folder does not have it; take the base from where you have it"
        )
    with disk.Stream(target) as stream:
        stream.write(head)
        for name, line in sorted(entries.items(), key=lambda entry: entry[1]["data_offsets"]):
            parts = {role: dense_role(origin, role) for role, _ in stored[name].roles}
            whole = layout.joined(stored[name], parts).to(getattr(torch, DTYPES[line["dtype"]][0]))
            stream.write(whole.contiguous())


def dense_role(origin: Origin, role: str) -> Tensor:
    """Return a tensor of the base: one of the joined model, or of its FFN in a layer with an anchor, whose slices are
    stacked again."""
    moe, names = spec_of(origin), names_of(origin)
    if role in names:
        return origin.read(names[role])
    _, layer, matrix, kind = role.split(".")
    slices = [origin.read(names[f"layers.{layer}.experts.{i}.{matrix}.{kind}"]) for i in range(moe.granularity)]
    width = moe.dense.ffn // moe.granularity  # without padding
    if matrix == "down" and kind == "bias":
        return torch.stack([part.float() for part in slices]).sum(0)
    if matrix == "down":
        return torch.cat([part[:, :width] for part in slices], 1)
    return torch.cat([part[:width] for part in slices])
