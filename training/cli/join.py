"""Join parts to their base: one model that serves, without any training or data.

usage: upcycle join BASE PART [PART ...] output=FOLDER

  upcycle join ./llama parts/book output=joined          # more parts: one more word for each
  upcycle verify joined                                  # are its bytes what was written?
  upcycle remove joined name=book output=without-book

Each token goes, in each layer and slice, to the part whose router row likes it most, or to the base's own FFN where
none does. A token computes as much as in the base, whatever the number of parts. A part joins only the base that it was
made for, byte for byte; nothing in a part runs.

keys, with defaults and meaning: docs/config.md
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from upcycle.cli import frame


@dataclass(frozen=True)
class JoinKeys:
    base: str = ""  # the base's folder or Hub id; the first word
    parts: tuple[str, ...] = ()  # folders of parts; the other words
    output: str = ""  # the folder to make


@frame.command()
def main(words: Sequence[str]) -> int:
    from training.api import join
    from upcycle.config.reading import read

    names, keys = frame.names_and_words(words)
    if names and not any(word.startswith("base=") for word in keys):
        keys.append(f"base={names.pop(0)}")
    asked = read(JoinKeys, "", keys)
    parts = [*names, *asked.parts]
    if not asked.base or not asked.output:
        raise ValueError("write upcycle join BASE PART [PART ...] output=FOLDER")
    print(f"{join(asked.base, *parts, output=asked.output)} is complete: {len(parts)} parts on {asked.base}")
    return 0
