"""Does it pay? Train every arm with every seed, on one device or several, and judge them over seeds on one page.

usage: upcycle study STUDY [key=value ...]

  upcycle study tiny                                     # from nothing, about a minute on a laptop
  upcycle study smollm2 source=./llama data=./tokens workers=2 devices=[0,1]    # a real checkpoint
  upcycle study facts source=./llama documents=./texts   # what does a model learn from your texts, what does it lose?
  upcycle study tiny judge=true                          # the page of the runs so far

STUDY is a file or the name of a ready one (configs/study). Each arm is a training config: `base` has the keys of all
arms, `arms` each arm's own. Arms of one seed read the same samples in the same order; another seed has another order.
Each run is `upcycle train` on a config next to its folder. The same command continues a study that was stopped: it
skips finished runs and resumes begun ones. It writes study.html, study.json and runs/ARM/seed-N into its folder.

keys, with defaults and meaning: docs/config.md
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from upcycle.cli import frame


@frame.command(resumes=True)
def main(words: Sequence[str]) -> int:
    from evaluation.studies.plan import read_study
    from evaluation.studies.study import perform

    failures = perform(read_study(*frame.file_and_words(words)), shlex.join(["upcycle", "study", *words]))
    for sentence in failures.values():
        print(f"upcycle: {frame.printable(sentence)}", file=sys.stderr)
    return frame.USER_ERROR if failures else 0
