"""Is B better than A? Seeds are the unit: several runs of each, paired, at equal tokens and at equal FLOPs.

usage: upcycle compare A1,A2,A3 -- B1,B2,B3 [-- C1,C2,C3 ...] [output=FILE.json] [cluster=KEY]

  upcycle compare runs/eval/dense runs/eval/moe output=compared.json    # folders of `upcycle eval`
  upcycle compare runs/dense runs/moe                                   # folders of `upcycle train`

What lm-eval itself wrote (--output_path FOLDER --log_samples), of any model, is taken as a folder of `upcycle eval`.
The first group is what the others are compared with; without `--` each name is a group of its own. The first of A goes
with the first of B and so on: trainings of one seed, which read the same samples. A metric has

    difference  B - A, the mean over seeds
    interval    95 %, over seeds (Student's t), of three runs each or more
    Holm        p over seeds, corrected for how many comparisons there are; headlines (whole suites and groups) are one
                family, their parts (subjects, domains) another, losses (means of all sets, at equal tokens and, where
                that is something else, at equal FLOPs) a third. B is better or worse where it is at most 0.05
    over items  a diagnostic: the 95 % interval for other items and these very models, over clusters of items that come
                from one file, passage or document (`cluster` names the key). It says nothing about another training,
                whose data in another order may change hundreds of answers, so of one run each there is no verdict, but
                how large the difference is beside the noise between seeds that docs/science.md measured

All must have been asked the same items. What flipped is shown of one run each. Loss at equal FLOPs is read off the
curves; where that is before the end of a schedule, it is called interpolated: a schedule that ends there is lower.
An arm that has one is made by `upcycle study` (match: flops).

keys, with defaults and meaning: docs/config.md
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from upcycle.cli import frame


@dataclass(frozen=True)
class CompareConfig:
    output: str = ""  # a JSON file to write
    cluster: str = ""  # a key of documents (file, passage, ...) whose items count as one; "": the first that is kept


@frame.command()
def main(words: Sequence[str]) -> int:
    from evaluation.api import compare
    from evaluation.judge.compare import group_words
    from upcycle.config.reading import read
    from upcycle.io.disk import check_own, write_atomic

    names, keys = frame.names_and_words(words)
    config = read(CompareConfig, "", keys)
    if config.output:
        check_own(Path(config.output), rb'\A\{\n "comparisons"', "upcycle compare")
    found = compare(*group_words(names), cluster=config.cluster)
    print(found)
    if config.output:
        write_atomic(Path(config.output), (json.dumps(found.json(), indent=1, allow_nan=False) + "\n").encode())
    return 0
