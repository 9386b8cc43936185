"""What does a model know? Write made-up facts to train on, and ask a model about them in wordings that it never read.

usage: upcycle facts write [key=value ...], or upcycle facts score MODEL suite=FOLDER [key=value ...]

  upcycle facts write output=facts people=100 places=0 events=0
  upcycle prepare tokens/facts tokenizer=./llama sources=[facts/train.jsonl]    # to train on
  upcycle facts score ./moe suite=facts                                         # a folder, or a training run
  upcycle facts write output=facts-of-book documents=book.txt                   # your own documents

A suite has made-up people, places and events. Training documents tell some of them in wordings that questions and
held-out documents never have. Three groups are asked: `told`; `untold`, which no training document names, so it shows
what form and wording alone give; and `known`, real facts that training may make a model forget. Exact match says how
often greedy decoding writes the answer, and choice how often the answer is likelier than seven others of its kind.

With `documents`, one document in ten is held out (untold), and questions end inside the sentences of your documents,
before a number, a date, a name or a rare word.

Several suites (people=1000, people=4000, ...) show how many facts a model can hold. `upcycle compare BEFORE AFTER`
shows what was learned and lost, and judges folders of scores over seeds. `upcycle study facts` trains too.

keys, with defaults and meaning: docs/config.md
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from upcycle.cli import frame

TYPE_CHECKING = False  # as in frame.py
if TYPE_CHECKING:
    from evaluation.facts.results import ScoreConfig
    from evaluation.facts.suite import WriteConfig


@frame.command()
def main(words: Sequence[str]) -> int:
    from dataclasses import fields

    from evaluation.facts import results, suite
    from upcycle.plugin import nearest

    names, keys = frame.names_and_words(words)
    verb, names = (names[0] if names else ""), names[1:]
    if verb == "write":
        write(frame.named(suite.WriteConfig, [*names, *keys]))
    elif verb == "score":
        config = frame.named(results.ScoreConfig, [*names, *keys], "model")
        score(config, shlex.join(["upcycle", "facts", *words]))
    else:
        known = [field.name for kind in (suite.WriteConfig, results.ScoreConfig) for field in fields(kind)]
        for key in (word.partition("=")[0] for word in keys):
            if key not in known:
                raise ValueError(f"unknown key '{key}'{nearest(key, known)}; known keys: {', '.join(known)}")
        raise ValueError(
            f"facts got {verb!r}; write upcycle facts write output=FOLDER, or upcycle facts score MODEL suite=FOLDER"
        )
    return 0


def write(config: WriteConfig) -> None:
    """Write a suite, and print the lines of each file."""
    from evaluation.facts import suite

    for name, count in suite.write(config)["counts"].items():
        print(frame.printable(f"{Path(config.output) / name}: {count:,}"))


def score(config: ScoreConfig, command: str) -> None:
    """Score a model, and print the table."""
    from evaluation.facts import results

    folder = Path(results.score(config, command).place).parent
    print(frame.printable((folder / results.TABLE).read_text(encoding="utf-8") + f"\n{folder}", keep="\n"))
