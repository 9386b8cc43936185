"""Move a part to a base that was trained further; refused with its losses where it breaks.

usage: upcycle upgrade PART OLD NEW documents=FOLDER output=FOLDER

  upcycle upgrade parts/book ./llama ./llama documents=book.txt output=parts/book-new

OLD is the base that the part was made for, and NEW the same model after more training. The changes that the part's
copies learned are added to NEW's own FFNs, and the router rows stay. The losses of both bases on the documents,
without and with the part, are measured and shown; documents that the part never read tell more. A part that keeps less
than half of its gain is not written.

keys, with defaults and meaning: docs/config.md
"""

from __future__ import annotations

from collections.abc import Sequence

from upcycle.cli import frame


@frame.command()
def main(words: Sequence[str]) -> int:
    from training.parts.upgrade import UpgradeConfig, upgrade

    asked = frame.named(UpgradeConfig, words, "part", "old", "new")
    if not asked.documents or not asked.output:
        raise ValueError("write upcycle upgrade PART OLD NEW documents=FOLDER output=FOLDER")
    folder, losses = upgrade(asked)
    print(f"{losses}\n{folder} is {asked.part} for {asked.new}")
    return 0
