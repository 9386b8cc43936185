"""Finished requests on disk: an evaluation that was killed goes on where it was.

The folder's name has the identity of the model as computed (load.identity), so that a model never gets another one's
answers (lm-eval's own cache is keyed by the request alone). A line is a request's key, its answer and a checksum of the
two: one that was cut by a kill or changed since is no answer, and its request is asked again. Each process appends to
its own file.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upcycle import strict

VERSION = 2  # of how answers are computed; a change that alters answers raises it, so that old ones are not used


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
        self.folder = Path(folder) / identity[:32]
        self.folder.mkdir(parents=True, exist_ok=True)
        self.answers: dict[str, Any] = {}
        for path in sorted(self.folder.glob("*.jsonl")):
            for where, line in strict.read_lines(path):
                try:
                    name, answer, _ = strict.parse(line, where, constants=True)
                except (ValueError, TypeError):  # no JSON, or no three things
                    continue
                if isinstance(name, str) and line == written(name, answer):
                    self.answers[name] = answer
        self.file = (self.folder / f"{rank}.jsonl").open("ab")
        self.file.write(b"\n")  # so that new lines do not join half a line that a kill left

    def put(self, answers: Mapping[str, Any]) -> None:
        """Writes the answers together and at once: a kill loses no more than the batch in work."""
        self.file.write(b"".join(written(*pair) + b"\n" for pair in answers.items()))
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def written(name: str, answer: Any) -> bytes:
    return json.dumps([name, answer, zlib.crc32(json.dumps([name, answer]).encode())]).encode()
