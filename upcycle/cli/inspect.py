"""Describe a checkpoint folder, dense or MoE, and check whether its bytes are intact.

usage: upcycle inspect FOLDER [key=value ...]

  upcycle inspect ./llama
  upcycle inspect ./moe check=true
  upcycle inspect ./moe tensors=true
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from upcycle.cli import frame

DAMAGED = 1


@dataclass(frozen=True)
class InspectKeys:
    folder: str = ""  # a folder or a Hub id; the first word
    tensors: bool = False  # also list name, shape, dtype and file of every tensor
    # compare sizes and sha256 with the manifest, compare the source if it is here, and look for NaN
    check: bool = False


@frame.command()
def main(words: Sequence[str]) -> int:
    from upcycle.api import inspect
    from upcycle.converting.part import is_part
    from upcycle.io.checkpoint import Checkpoint
    from upcycle.verifying.inspect import check
    from upcycle.verifying.parts import verify_part

    asked = frame.named(InspectKeys, words, "folder")
    if asked.check and is_part(asked.folder):
        return verify_part(asked.folder)
    print(inspect(asked.folder, tensors=asked.tensors))
    if not asked.check:
        return 0
    with Checkpoint.open(asked.folder) as checkpoint:
        folder = checkpoint.folder
    return 0 if check(folder) else DAMAGED
