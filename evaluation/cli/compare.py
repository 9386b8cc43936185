"""Is B better than A? Compare several runs of each, paired by seed, at equal tokens and at equal FLOPs.

usage: upcycle compare A1,A2,A3 -- B1,B2,B3 [-- C1,C2,C3 ...] [output=FILE.json] [cluster=KEY]

  upcycle compare runs/eval/dense runs/eval/moe output=compared.json    # folders of `upcycle eval`
  upcycle compare runs/dense runs/moe                                   # folders of `upcycle train`

A folder that lm-eval wrote (--output_path FOLDER --log_samples) works like a folder of `upcycle eval`. Each group is
compared with the first one; without `--` each name is a group. The first run of A is paired with the first run of B and
so on: two trainings of one seed, which read the same samples. A metric has

    difference  B - A, mean over seeds
    interval    95 %, over seeds (Student's t), with three runs each or more
    Holm        p over seeds, corrected for the number of comparisons. Headlines (whole suites and groups) are one
                family, their parts (subjects, domains) another, and losses (means of all sets, at equal tokens and, if
                that differs, at equal FLOPs) a third. B is better or worse if this p is at most 0.05
    over items  a diagnostic: the 95 % interval for other items and these same models, over clusters of items from one
                file, passage or document (`cluster` names the key). Another training, with its data in another order,
                may change hundreds of answers, so one run each gets no verdict: the table then says how large the
                difference is next to the noise between seeds (docs/science.md)

All runs must have the same items. With one run each, the items that flipped are shown. Loss at equal FLOPs is read from
the curves. If that point is before the end of a schedule, the loss is called interpolated, because a schedule that ends
there would be lower; `upcycle study` (match: flops) trains such an arm.

No verdict above means "not worse". `equivalent={law: 0.005}` tests that: is the difference smaller than a margin that
you name before you look?

keys, with defaults and meaning: docs/config.md
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from upcycle.cli import frame


@dataclass(frozen=True)
class CompareConfig:
    output: str = ""  # a JSON file to write
    # a row's name: a margin; two one-sided t-tests over seeds say whether B is equivalent to A. {law: 0.005} is in nats
    # for a validation set, {mmlu: 0.01} a share of right answers
    equivalent: Any = field(default_factory=dict)
    # a key of documents (file, passage, ...) whose items count as one; "": the first key in the samples
    cluster: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.equivalent, Mapping):
            raise ValueError(f"equivalent is {self.equivalent!r}; write names and margins: equivalent={{law: 0.005}}")


@frame.command()
def main(words: Sequence[str]) -> int:
    from evaluation.api import compare
    from evaluation.judge.compare import group_words
    from upcycle.config.reading import read
    from upcycle.io.disk import check_own
    from upcycle.io.publish import write_own

    names, keys = frame.names_and_words(words)
    config = read(CompareConfig, "", keys)
    if config.output:
        check_own(Path(config.output), rb'\A\{\n "comparisons"', "upcycle compare")
    found = compare(*group_words(names), cluster=config.cluster, equivalent=config.equivalent)
    print(frame.printable(str(found), keep="\n"))
    if config.output:
        write_own(Path(config.output), (json.dumps(found.json(), indent=1, allow_nan=False) + "\n").encode())
    return 0
