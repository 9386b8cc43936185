"""A model's answers to benchmarks, comparisons of models, how experts are used, and one page of it all.

usage: python -m evaluation COMMAND ... [key=value ...]

  run SUITE CHECKPOINT       a model's answers to the items of a suite (mmlu, core, perplexity, gsm8k, tiny)
  lm-eval run ...            lm-eval's own command line, with our engine as its model `upcycle`
  compare A1,A2 -- B1,B2     is B better than A? over seeds: answers to suites, or losses of trainings
  routing CHECKPOINT TEXT    how experts are used on each text, and how far they came from their start
  study STUDY                arms x seeds, trained and judged over seeds; ready ones are tiny and smollm2
  report PATH ...            one page of all that lies in these folders

  python -m evaluation run tiny ./moe
  python -m evaluation compare runs/eval/dense runs/eval/moe
  python -m evaluation routing ./moe book.txt
  python -m evaluation study tiny
  python -m evaluation report runs/eval/dense runs/eval/moe runs/dense runs/moe output=report.html

`python -m evaluation COMMAND --help` says more. keys, with defaults and meaning: docs/config.md
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from upcycle.cli import frame as cli

COMMANDS = {  # each a module with a main(words), whose docstring is its help
    "run": "evaluation.ask.run",
    "lm-eval": "evaluation.ask.harness",
    "compare": "evaluation.judge.compare",
    "routing": "evaluation.show.routing",
    "study": "evaluation.studies.study",
    "report": "evaluation.show.report",
}
RESUME = ("run", "study")  # started again these go on where they were: answers and runs are kept


def main(words: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if words is None else words)
    return cli.exit_code(__name__, lambda: command(given), resumes=bool(given) and given[0] in RESUME)


def command(words: list[str]) -> int:
    name, *rest = words or cli.HELP
    if name in cli.HELP:
        print(cli.about("evaluation.__main__"))
        return 0
    if name not in COMMANDS:
        raise ValueError(f"there is no command {name!r}; the commands are {', '.join(COMMANDS)}")
    if set(cli.HELP) & set(rest):
        print(cli.about(COMMANDS[name]))
        return 0
    code: int = import_module(COMMANDS[name]).main(rest)
    return code


if __name__ == "__main__":
    sys.exit(cli.start("evaluation.__main__", own_help=True))
