"""Recommend dense training, slices or copies for a dense model, given GPUs and tokens; reads headers only.

usage: upcycle recommend MODEL gpus=NxCARD tokens=AMOUNT [sequence=N]

  upcycle recommend ./llama gpus=8xh100 tokens=10B
  upcycle recommend org/name gpus=1xh200 tokens=100M sequence=1024
  upcycle recommend ./llama gpus=4xmine.yaml tokens=1B      # a card of `upcycle estimate measure=mine.yaml`

Each of the three has memory, hours, and the measured gain with its conditions. The last lines are the commands that run
the best one that fits. `upcycle estimate` says more about a single config.

keys, with defaults and meaning: docs/config.md
"""

from __future__ import annotations

from collections.abc import Sequence

from upcycle.cli import frame


@frame.command()
def main(words: Sequence[str]) -> int:
    from training.estimating.recommend import RecommendConfig, recommend
    from upcycle.config.reading import read

    name, rest = frame.file_and_words(words)
    print(recommend(read(RecommendConfig, "", [*([f"source={name}"] if name else []), *rest])))
    return 0
