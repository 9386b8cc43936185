"""Move a part to a base that was trained further, if it still helps there.

A copy has learned its difference from the old base's FFN. The new copy is the new base's FFN plus that difference,
and router rows stay. Whether this works depends on how far the base moved, so the loss on the part's documents decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from training.checkpoint import export, layout
from training.checkpoint.layout import Origin
from training.experts import SPECIFICATION
from training.model.stock.model import model_of
from training.parts.add import CHARACTERS, files, starts
from training.parts.join import Joined, based, names_of, spec_of
from upcycle.converting import card, part
from upcycle.converting.part import Part
from upcycle.io.checkpoint import Checkpoint, pinned
from upcycle.text import tokens

KEPT = 0.5  # the least share of the gain on its own base that a part must keep on the new one


@dataclass(frozen=True)
class UpgradeConfig:
    part: str = ""  # the part; the first word
    old: str = ""  # its base; the second word
    new: str = ""  # the newer base; the third word
    documents: str = ""  # a folder or a file of the part's documents, best held out
    output: str = ""  # the folder to make


@dataclass(frozen=True)
class Losses:
    """Nats a token on the part's documents."""

    old: float
    old_part: float
    new: float
    new_part: float

    def __str__(self) -> str:
        return (
            f"old base {self.old:.4f}, with the part {self.old_part:.4f}; new base {self.new:.4f}, with the part "
            f"{self.new_part:.4f} nats a token"
        )

    @property
    def keeps(self) -> bool:
        return self.new - self.new_part >= KEPT * max(self.old - self.old_part, 0.0) and self.new_part <= self.new


@dataclass(frozen=True)
class Moved(Part):
    """A part whose copies moved with the base."""

    change: Callable[[str, Tensor], Tensor]

    def read(self, name: str) -> Tensor:
        return self.change(name, super().read(name))


def upgrade(asked: UpgradeConfig, *, count: int = 8192, length: int = 512) -> tuple[Path, Losses]:
    """Write the part for the new base; raise a ValueError with the losses if it breaks there."""
    found, folder = part.open_part(asked.part), Path(asked.output)
    export.check_new(folder)
    if said := next(iter(part.damages(found)), ""):
        raise ValueError(f"{said}; {part.COPY_AGAIN}")
    with ExitStack() as stack:
        bases = [stack.enter_context(Checkpoint.open(name)) for name in (asked.old, asked.new)]
        part.check_base(found, asked.old, part.sums_of(bases[0]))
        old, new = (stack.enter_context(based(name, [found])) for name in (asked.old, asked.new))
        for origin, name in ((old, asked.old), (new, asked.new)):
            part.check_fits(found, spec_of(origin), name)
        moved = Moved(found.folder, found.record, lambda name, own: change(found, old, new, name, own))
        ids = ids_of(bases[1].folder, asked.documents, count, min(length, spec_of(new).dense.longest))
        bare = [stack.enter_context(layout.opened(name)) for name in (asked.old, asked.new)]
        tried = [bare[0], with_parts(old, [found]), bare[1], with_parts(new, [moved])]
        losses = Losses(*(loss(origin, ids) for origin in tried))
        if not losses.keeps:
            raise ValueError(f"{asked.part} breaks on {asked.new} ({losses}); make it again with upcycle add")
        about: part.Base = {"name": pinned(asked.new, bases[1].folder), "files": part.sums_of(bases[1])}
        trained, left = found.record["trained"], found.record.get("left", [])
        role = Joined(new, [moved]).role
        written = part.write(folder, spec_of(new), found.name, role, about, trained, left, card.terms(bases[1].folder))
        return written, losses


def change(found: Part, old: Origin, new: Origin, name: str, own: Tensor) -> Tensor:
    """Return a part's tensor moved by what the base's own slice has changed; router rows stay."""
    words = name.split(".")
    if words[2] == "router":
        return own
    words[3] = str(int(words[3]) % found.record["granularity"])
    role = ".".join(words)
    before, after = (origin.read(names_of(origin)[role]).float() for origin in (old, new))
    return (own.float() + (after - before)).to(own.dtype)


def with_parts(origin: Origin, parts: Sequence[Part]) -> Origin:
    """Return the Origin of a base with parts, which reads theirs too."""
    joined, roles = Joined(origin, parts), {stored.name: stored.roles[0][0] for stored in origin.tensors}

    def read(name: str, rows: tuple[int, int] | None = None) -> Tensor:
        return joined.role(roles[name])[slice(*rows) if rows else slice(None)]

    return replace(origin, read=read, alike=lambda _: None)


def ids_of(folder: Path, documents: str, count: int, length: int) -> Tensor:
    """Return ids [sequence, token] of the documents, at most `count`."""
    encode, ids = tokens.encoder(folder), list[int]()
    for _, text in starts(files(documents), count * CHARACTERS):
        if len(ids) >= count:
            break
        ids += encode(text)
    length = min(length, len(ids))
    if length < 2:
        raise ValueError(f"{documents} has {len(ids)} tokens, and a loss needs 2; name the part's documents")
    rows = min(count, len(ids)) // length
    return torch.tensor(ids[: rows * length]).view(rows, length)


@torch.no_grad()
def loss(origin: Origin, ids: Tensor) -> float:
    """Return the loss of a model in nats a token, in float32."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device("meta"):
        model = model_of(origin.spec, experts=SPECIFICATION, compute=torch.float32)
    model = layout.load(model.to_empty(device=device), origin)
    total = 0.0
    for row in ids.to(device):
        logits = model(row[None])[0, :-1].float()
        total += float(torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum"))
    found = total / (ids.numel() - len(ids))
    if not math.isfinite(found):
        raise ValueError("the loss on the documents is not finite; look at the bases")
    return found
