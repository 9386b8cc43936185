"""Finished requests on disk: an evaluation that was killed goes on where it was.

The folder's name has the identity of the model as computed (load.identity), so that a model never gets another one's
answers (lm-eval's own cache is keyed by the request alone). A line is a request's key, its answer and a checksum of the
two and of the model: one that was cut by a kill, changed since, copied from another model's file or is not finite is no
answer, which is said once, and its request is asked again. Each process appends to its own file.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upcycle.io import strict

VERSION = 3  # of how answers are computed; a change that alters answers raises it, so that old ones are not used


def key(kind: str, *parts: NDArray[np.int64] | str) -> str:
    """A digest of a request: of `kind`, and of the tokens or texts that it is made of."""
    sums = hashlib.blake2b(kind.encode(), digest_size=16)
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part.tobytes()
        sums.update(len(raw).to_bytes(8, "little") + raw)
    return sums.hexdigest()


class Remembered:
    """Answers by request key: read from all processes' files at first, then appended to this process's own."""

    def __init__(self, folder: str | Path, identity: str, rank: int = 0) -> None:
        self.folder, self.identity = Path(folder) / identity[:32], identity
        self.folder.mkdir(parents=True, exist_ok=True)
        self.answers: dict[str, Any] = {}
        broken = 0
        for path in sorted(self.folder.glob("*.jsonl")):
            for where, line in strict.read_lines(path):
                if not line:
                    continue
                try:
                    name, answer, _ = strict.parse(line, where, constants=True)
                    whole = isinstance(name, str) and is_answer(answer) and line == written(name, answer, identity)
                except (ValueError, TypeError):  # no JSON, or no three things
                    whole = False
                if whole:
                    self.answers[name] = answer
                broken += not whole
        if broken and rank == 0:  # who speaks for all
            lines = "1 line is" if broken == 1 else f"{broken:,} lines are"
            warnings.warn(
                f"{self.folder}: {lines} no answer (cut by a kill, or changed since), and what was asked there is "
                "asked again; remove the folder to be rid of this",
                stacklevel=2,
            )
        self.file = (self.folder / f"{rank}.jsonl").open("ab")
        self.file.write(b"\n")  # so that new lines do not join half a line that a kill left

    def put(self, answers: Mapping[str, Any]) -> None:
        """Writes the answers together and at once: a kill loses no more than the batch in work."""
        self.file.write(b"".join(written(*pair, self.identity) + b"\n" for pair in answers.items()))
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def is_answer(value: Any) -> bool:
    """Whether it is what an engine answers: (log-probability, greedy) or the tokens of a text."""
    if not isinstance(value, list):
        return False
    if len(value) == 2 and isinstance(value[0], float):
        return math.isfinite(value[0]) and isinstance(value[1], bool)
    return all(type(token) is int and token >= 0 for token in value)


def written(name: str, answer: Any, identity: str) -> bytes:
    return json.dumps([name, answer, zlib.crc32(json.dumps([identity, name, answer]).encode())]).encode()
