"""Random numbers that depend only on a seed and a name.

`generator(seed, "noise", layer, expert, "up")` gives the same numbers on every rank, no matter what was drawn before.
Therefore a slice computed in training is bit-identical to the slice in a converted file.
"""

from __future__ import annotations

import hashlib

import torch


def generator(seed: int, *key: object) -> torch.Generator:
    digest = hashlib.sha256(repr((seed, *key)).encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def normal(shape: tuple[int, ...], seed: int, *key: object) -> torch.Tensor:
    """Draw float32 standard normals. Draw the whole named tensor, then slice it: a slice drawn alone differs."""
    return torch.randn(shape, generator=generator(seed, *key))


def permutation(n: int, seed: int, *key: object) -> torch.Tensor:
    return torch.randperm(n, generator=generator(seed, *key))
