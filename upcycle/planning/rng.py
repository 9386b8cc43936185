"""Randomness has a name, not a turn.

`generator(seed, "noise", layer, expert, "up")` gives the same numbers whatever was drawn before it, in whatever order,
on whichever rank. Therefore a slice made online is bit-identical to the one in the file.
"""

from __future__ import annotations

import hashlib

import torch


def generator(seed: int, *key: object) -> torch.Generator:
    digest = hashlib.sha256(repr((seed, *key)).encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def normal(shape: tuple[int, ...], seed: int, *key: object) -> torch.Tensor:
    """float32 standard normals. Draw the whole named tensor and cut slices from it: a slice drawn alone differs."""
    return torch.randn(shape, generator=generator(seed, *key))


def permutation(n: int, seed: int, *key: object) -> torch.Tensor:
    return torch.randperm(n, generator=generator(seed, *key))
