"""Keep finished requests on disk, so that an evaluation that was killed continues where it stopped.

lm-eval's CachingLM does not serve here: its key is the request alone, so one model gets another's answers; it loads
pickles; it saves only when all answers are there; and all ranks would write one database. Here a line has a request's
key, its answer, and a checksum of both and of the model's identity (load.identity), which also names the folder.
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

VERSION = 3  # version of the computation; raise it with any change that alters answers, so that old ones are not used
Line = tuple[str, tuple[float, bool] | tuple[strict.Count, ...], int]  # key, (log-probability, greedy) or tokens, sum


def key(kind: str, *parts: NDArray[np.int64] | str) -> str:
    """Return a digest of a request: of its `kind` and of its tokens or texts."""
    sums = hashlib.blake2b(kind.encode(), digest_size=16)
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part.tobytes()
        sums.update(len(raw).to_bytes(8, "little") + raw)
    return sums.hexdigest()


class Remembered:
    """Hold answers by request key: read the files of all processes at the start, then append to this process's own."""

    def __init__(self, folder: str | Path, identity: str, rank: int = 0) -> None:
        self.folder, self.identity = Path(folder) / identity[:32], identity
        self.folder.mkdir(parents=True, exist_ok=True)
        paths = sorted(self.folder.glob("*.jsonl"))
        found = [read(line, identity) for path in paths for _, line in strict.read_lines(path) if line]
        self.answers: dict[str, Any] = dict(pair for pair in found if pair)
        broken = found.count(None)
        if broken and rank == 0:  # the process that prints
            lines = "1 line is" if broken == 1 else f"{broken:,} lines are"
            warnings.warn(
                f"{self.folder}: {lines} not an answer (cut by a kill, or changed since), so those requests are "
                "asked again; remove the folder to end this message",
                stacklevel=2,
            )
        self.file = (self.folder / f"{rank}.jsonl").open("ab")
        self.file.write(b"\n")  # so that a new line does not join half a line that a kill left

    def put(self, answers: Mapping[str, Any]) -> None:
        """Write the answers of a batch at once, so that a kill loses only the batch in work."""
        with strict.naming(Path(self.file.name)):
            self.file.write(b"".join(written(*pair, self.identity) + b"\n" for pair in answers.items()))
            self.file.flush()

    def close(self) -> None:
        with strict.naming(Path(self.file.name)):
            self.file.close()


def read(line: bytes, identity: str) -> tuple[str, Any] | None:
    """Return the key and the answer of a line that was written for this model; None for any other line."""
    try:
        name, answer, _ = strict.held(strict.parse(line, "an answer"), Line, "an answer")
    except ValueError:
        return None
    return (name, answer) if line == written(name, answer, identity) else None


def written(name: str, answer: Any, identity: str) -> bytes:
    return json.dumps([name, answer, zlib.crc32(json.dumps([identity, name, answer]).encode())]).encode()
