"""Finished requests on disk: an evaluation that was killed goes on where it was.

The folder's name has the fingerprint of the weights and the dtype, so that a model never gets another one's answers
(lm-eval's own cache is keyed by the request alone). A line is one answer, and each process appends to its own file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

VERSION = 1  # of how answers are computed; a change that alters answers raises it, so that old ones are not used


def key(kind: str, *parts: NDArray[np.int64] | str) -> str:
    """A digest of a request: of `kind`, and of the tokens or texts that it is made of."""
    sums = hashlib.blake2b(kind.encode(), digest_size=16)
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part.tobytes()
        sums.update(len(raw).to_bytes(8, "little") + raw)
    return sums.hexdigest()


class Remembered:
    """Answers by request key: read from all processes' files at first, then appended to this process's own."""

    def __init__(self, folder: str | Path, fingerprint: str, dtype: str, rank: int = 0) -> None:
        self.folder = Path(folder) / f"{fingerprint[:16]}-{dtype}-{VERSION}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.answers: dict[str, Any] = {}
        for path in sorted(self.folder.glob("*.jsonl")):
            for line in path.read_bytes().split(b"\n"):
                try:
                    name, answer = json.loads(line)
                except ValueError:
                    continue  # the last line of a process that was killed while it wrote
                self.answers[name] = answer
        self.file = (self.folder / f"{rank}.jsonl").open("ab")
        self.file.write(b"\n")  # so that new lines do not join half a line that a kill left

    def put(self, answers: Mapping[str, Any]) -> None:
        """Writes the answers together and at once: a kill loses no more than the batch in work."""
        self.file.write(b"".join(json.dumps(pair).encode() + b"\n" for pair in answers.items()))
        self.file.flush()

    def close(self) -> None:
        self.file.close()
