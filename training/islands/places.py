"""Give each number of the model a place in one vector, in which the parameters follow each other by name.

A rank holds a box of each parameter, and names what it sends by places in the whole model. So two islands may have
different meshes, and only the sent numbers are gathered.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from training.islands.sparse import largest

NUMBERS = 1 << 22  # most numbers of an exchange that are tensors at once (or one parameter); the rest is bytes
Box = Sequence[tuple[int, int]]  # [first, last) in each dimension


@dataclass(frozen=True)
class Place:
    """Name a parameter's place in the model's vector."""

    name: str
    shape: tuple[int, ...]
    first: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def last(self) -> int:
        return self.first + self.size

    @property
    def experts(self) -> bool:
        return "experts" in self.name.split(".") and len(self.shape) > 1

    @property
    def segments(self) -> int:
        """Return the number of parts whose largest numbers are chosen separately: experts' matrices, or the tensor."""
        return self.shape[0] if self.experts else 1

    @property
    def dense(self) -> bool:
        """Say whether the parameter is sent whole: routers and norms are small, and all tokens need them."""
        words = self.name.split(".")
        return not self.experts and (len(self.shape) < 2 or "router" in words or words[-1].endswith("bias"))


class Layout:
    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        self.places: dict[str, Place] = {}
        at = 0
        for name in sorted(shapes):
            place = self.places[name] = Place(name, tuple(shapes[name]), at)
            at += place.size
        self.size = at

    @property
    def digest(self) -> str:
        names = [[place.name, list(place.shape)] for place in self.places.values()]
        return hashlib.sha256(json.dumps(names).encode()).hexdigest()

    def top(self, share: float) -> Callable[[Tensor], Tensor]:
        """Return a function that finds the places of each segment's largest numbers in the model's vector."""

        def places(x: Tensor) -> Tensor:
            found = []
            for place in self.places.values():
                part = x[place.first : place.last].view(place.segments, -1)
                count = part.shape[1] if place.dense else share_of(part.shape[1], share)
                found.append(largest(part, [count] * place.segments) + place.first)
            return torch.cat(found)

        return places


def share_of(width: int, share: float) -> int:
    return min(width, max(1, round(width * share)))


def whole(index: Tensor, box: Box, shape: Sequence[int]) -> Tensor:
    """Turn flat places in a box into flat places in the whole tensor; the order stays the same."""
    if all((a, b) == (0, n) for (a, b), n in zip(box, shape, strict=True)):
        return index
    steps, out = 1, torch.zeros_like(index)
    for (first, last), size in zip(reversed(box), reversed(shape), strict=True):
        out += (index % (last - first) + first) * steps
        index = index // (last - first)
        steps *= size
    return out


def inside(index: Tensor, box: Box, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return which flat places of the whole tensor lie in a box, and their flat places in the box."""
    steps, out, there = 1, torch.zeros_like(index), torch.ones_like(index, dtype=torch.bool)
    for (first, last), size in zip(reversed(box), reversed(shape), strict=True):
        at = index % size
        there &= (at >= first) & (at < last)
        out += (at - first) * steps
        index = index // size
        steps *= last - first
    return there, out[there]
