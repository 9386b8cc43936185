"""Serve islands: runs of one model that a slow link joins.

usage: python -m training.islands serve [CONFIG] [key=value ...]

The server keeps the model and what each island has of it; islands train, tell it what they have learned, and are told
what the others have. All have one config, and one secret in a file. The same command goes on where it stopped.

  openssl rand -hex 32 > secret                                                        # once; a copy to every island
  python -m training.islands serve my.yaml output=runs/server islands.secret=secret islands.count=2 export=moe-islands
  python -m training my.yaml output=runs/island-0 islands.join=localhost:29600 islands.secret=secret   # one a machine
  python -m training my.yaml output=runs/try islands.local=2                           # all of it on this machine

Tell what it would cost with training.cli.estimate. When it pays, and when not: docs/islands.md

keys, with defaults and meaning: docs/config.md, those of training
"""

from __future__ import annotations

import sys

from upcycle.cli import frame as cli


@cli.command(resumes=True)
def main(words: list[str]) -> int:
    from training.config.reading import read_config
    from training.islands.run import serve

    if words[:1] != ["serve"]:
        raise ValueError(f"{words[0] if words else 'nothing'!r} is not a command of islands; write serve")
    print(serve(read_config(*cli.file_and_words(words[1:])))[0])
    return 0


if __name__ == "__main__":
    sys.exit(cli.start("training.islands.__main__"))
