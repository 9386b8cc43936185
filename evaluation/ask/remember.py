"""Finished requests on disk: an evaluation that was killed goes on where it was.

lm-eval's CachingLM would lose this: it keys by the request alone, so a model gets another one's answers; it unpickles
what lies in the folder; it keeps answers when all are there; ranks would write one database. Here a line is a request's
key, its answer, and a checksum of both and of the model as computed (load.identity), which the folder is named after.
"""

from __future__ import annotations

import hashlib
import json
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upcycle.io import strict

VERSION = 3  # of how answers are computed; a change that alters answers raises it, so that old ones are not used
Line = tuple[str, tuple[float, bool] | tuple[strict.Count, ...], int]  # key, (log-probability, greedy) or tokens, sum


def key(kind: str, *parts: NDArray[np.int64] | str) -> str:
    """Return a digest of a request: of `kind`, and of the tokens or texts that it is made of."""
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
        paths = sorted(self.folder.glob("*.jsonl"))
        found = [read(line, identity) for path in paths for _, line in strict.read_lines(path) if line]
        self.answers: dict[str, Any] = dict(pair for pair in found if pair)
        broken = found.count(None)
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
        """Write the answers together and at once: a kill loses no more than the batch in work."""
        self.file.write(b"".join(written(*pair, self.identity) + b"\n" for pair in answers.items()))
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def read(line: bytes, identity: str) -> tuple[str, Any] | None:
    """Return the key and the answer of a line that was written for this model; None of any other line."""
    try:
        name, answer, _ = strict.held(strict.parse(line, "an answer"), Line, "an answer")
    except ValueError:
        return None
    return (name, answer) if line == written(name, answer, identity) else None


def written(name: str, answer: Any, identity: str) -> bytes:
    return json.dumps([name, answer, zlib.crc32(json.dumps([identity, name, answer]).encode())]).encode()
