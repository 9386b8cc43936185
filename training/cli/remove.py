"""Take a part out of a joined model; the other parts keep every bit, and without the last the base comes back.

usage: upcycle remove FOLDER name=NAME output=FOLDER

  upcycle remove joined name=book output=without-book

After the last part OUTPUT holds the base's own files, and each has the sha256 that it had. The base is not needed: the
joined folder has its tensors, and its manifest keeps its small files and the headers of its weights.

keys, with defaults and meaning: docs/config.md
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from upcycle.cli import frame


@dataclass(frozen=True)
class RemoveKeys:
    folder: str = ""  # the joined folder; the first word
    name: str = ""  # the part to take out
    output: str = ""  # the folder to make


@frame.command()
def main(words: Sequence[str]) -> int:
    from training.api import remove

    asked = frame.named(RemoveKeys, words, "folder")
    if not asked.name or not asked.output:
        raise ValueError("write upcycle remove FOLDER name=NAME output=FOLDER")
    print(f"{remove(asked.folder, asked.name, asked.output)}: {asked.folder} without {asked.name}")
    return 0
