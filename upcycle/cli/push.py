"""Upload a model's folder to the Hub in one commit: weights, configs, tokenizer, licence files and card, nothing else.

usage: upcycle push FOLDER ORG/NAME [key=value ...]

  upcycle push ./moe org/name dry_run=true    # list the files; without dry_run they are sent
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from upcycle.cli import frame


@dataclass(frozen=True)
class PushKeys:
    folder: str = ""  # the folder to upload; the first word
    name: str = ""  # org/name, created if it does not exist; the second word
    private: bool = False  # make a new repository private
    dry_run: bool = False  # only list the files


@frame.command()
def main(words: Sequence[str]) -> int:
    from upcycle.converting import card
    from upcycle.io import hub

    asked = frame.named(PushKeys, words, "folder", "name")
    hub.check_id(asked.name)
    what = hub.upload(asked.folder)
    for name, content in what.files:
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        print(f"{card.human(size, 'B'):>10}  {name}")
    for name in what.left:
        print(f"      stays  {name}")
    print(f"{card.human(what.bytes, 'B'):>10}  in {len(what.files)} files to {asked.name}", flush=True)
    if not asked.dry_run:
        print(hub.send(what, asked.name, private=asked.private))
    return 0
