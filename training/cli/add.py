"""Make a part: new copies of a model's FFNs that learn your documents, while the model itself stays as it is.

usage: upcycle add MODEL documents=FOLDER general=FOLDER name=NAME output=FOLDER [key=value ...]

  upcycle add ./llama documents=book.txt general=other-book.txt name=book output=parts/book
  upcycle add ./llama documents=book.txt general=other-book.txt name=book output=parts/short steps=100 batch=8
  upcycle verify ./llama parts/book                      # its bytes, and whether it fits
  upcycle join ./llama parts/book output=joined          # a model that serves

A router in each layer sends tokens like those of the documents to the new copies. It learns from `general` which tokens
stay with the model's own FFN: at most 3 % of all general tokens may leave it, and a fifth of the training's text is
general, so that those do less harm. A text whose tokens all stay has exactly the model's function. Give each kind of
general text a file of its own: files count alike, and the losses of 2 to 12 files are printed one by one, before and
after, on 80,000 held-back characters together. All of it is read, and a sample of it is used. The part is a small
folder without the base. The training is the ready config `part`, and further keys change it (docs/config.md).
OUTPUT.work keeps the run; the same command continues it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from upcycle.cli import frame


@frame.command(resumes=True)
def main(words: Sequence[str]) -> int:
    from training.api import make_part
    from training.parts.add import AddConfig, configured
    from training.run.stop import Stopped
    from upcycle.config.reading import read_own
    from upcycle.converting import part

    names, keys = frame.names_and_words(words)
    if names and not any(word.startswith("model=") for word in keys):
        keys.append(f"model={names.pop(0)}")
    if names:
        raise ValueError(f"add got {names[0]!r} after the model; write key=value, as in documents=FOLDER")
    asked, rest = read_own(AddConfig, keys)
    configured(asked, rest, Path(f"{asked.output}.work"))  # refuse an unknown key first
    try:
        folder = make_part(asked, rest)
    except Stopped as stopped:
        print(f"{asked.output}.work/run {stopped}; the same command continues from there")
        return 75
    for name, value in part.described(part.open_part(folder)):
        print(frame.printable(f"{name:<14} {value}"))
    print(f"\n{folder} is complete. Join it: upcycle join {asked.model} {folder} output=FOLDER")
    return 0
