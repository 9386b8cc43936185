"""Show runs in a browser while they train: losses, load by layer, throughput, the plan, and the experts of your text.

usage: upcycle watch FOLDER [key=value ...]

  upcycle watch runs                     # every run and model in a folder
  upcycle watch runs/moe port=8100
  upcycle watch ./moe                    # a model without a run: its plan, and the experts of your text

The page is http://127.0.0.1:8099 and renews itself. It reads only the files of the runs and changes none, so you can
watch a run that is training. Only this machine can open it; from another one, use `ssh -L 8099:127.0.0.1:8099 HOST`.

Type a text, and the page colours each token by the expert that it chooses, layer by layer. The model is the run's
newest checkpoint or the model's folder. It is loaded at the first text, into this machine's memory, and computed on its
CPU.

keys, with defaults and meaning: docs/config.md
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from upcycle.cli import frame
from upcycle.config.values import Rule, check_values


@dataclass(frozen=True)
class WatchConfig:
    folder: str = ""  # a run, a model, or a folder of them
    port: int = 8099  # of http://127.0.0.1; 0: any that is free

    def __post_init__(self) -> None:
        check_values(self, "", {"port": Rule(lambda value: 0 <= value <= 65535, "it must be 0 to 65535")})


@frame.command()
def main(words: Sequence[str]) -> int:
    from pathlib import Path

    from evaluation.show.server import serve

    config = frame.named(WatchConfig, words, "folder")
    serve(Path(config.folder), config.port)
    return 0
