"""What does a model know? Write made-up facts to train on, and ask a model about them in wordings that it never read.

usage: upcycle facts write [key=value ...]
       upcycle facts score MODEL suite=FOLDER [key=value ...]

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


@frame.command()
def main(words: Sequence[str]) -> int:
    verb, *rest = words or [""]
    if verb == "write":
        write(rest)
    elif verb == "score":
        score(rest, shlex.join(["upcycle", "facts", *words]))
    else:
        raise ValueError(
            f"facts got {verb!r}; write upcycle facts write output=FOLDER, or upcycle facts score MODEL suite=FOLDER"
        )
    return 0


def write(words: Sequence[str]) -> None:
    from evaluation.facts.suite import WriteConfig
    from evaluation.facts.suite import write as make

    config = frame.named(WriteConfig, words)
    about = make(config)
    for name, count in about["counts"].items():
        print(frame.printable(f"{Path(config.output) / name}: {count:,}"))


def score(words: Sequence[str], command: str) -> None:
    from evaluation.facts.results import TABLE, ScoreConfig
    from evaluation.facts.results import score as ask

    done = ask(frame.named(ScoreConfig, words, "model"), command)
    folder = Path(done.place).parent
    print(frame.printable((folder / TABLE).read_text(encoding="utf-8") + f"\n{folder}", keep="\n"))
