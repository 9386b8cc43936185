"""Put a model's folder on the Hub, in one commit: weights, configs, tokenizer, terms, card; nothing else.

usage: upcycle push FOLDER ORG/NAME [key=value ...]

  upcycle push ./moe org/name dry_run=true    # what would be sent; without that it is
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from upcycle.cli import frame


@dataclass(frozen=True)
class PushKeys:
    folder: str = ""  # the folder to send; the first word
    name: str = ""  # org/name, made if it is not there; the second word
    private: bool = False  # a new repository that only its owners see
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
