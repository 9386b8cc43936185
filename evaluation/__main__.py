"""The command line of evaluation. Every failure a user can cause is one sentence and exit code 2."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

USER_ERROR = 2
COMMANDS = {  # a module of this package each, with a main(words)
    "run": "SUITE CHECKPOINT: a model's answers to the items of a suite (mmlu, core, perplexity, gsm8k, tiny)",
    "compare": "A B ...: is B better than A? paired statistics of two runs, or losses of two trainings",
    "routing": "CHECKPOINT TEXT ...: how experts are used on each text, and how far they came from their start",
    "study": "STUDY.yaml: arms x seeds, trained and judged over seeds; ready ones are tiny and smollm2",
    "report": "PATH ...: one page of all that lies in these folders",
}

MODULES = {"report": "evaluation.report.report", "study": "evaluation.study.study"}


def main(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print("python -m evaluation COMMAND ... [key=value ...]\n")
        for name, about in COMMANDS.items():
            print(f"  {name} {about}")
        print("\nWhat each key means stands at the top of evaluation/COMMAND.py.")
        return 0
    try:
        if words[0] not in COMMANDS:
            raise ValueError(f"there is no command {words[0]!r}; the commands are {', '.join(COMMANDS)}")
        code: int = import_module(MODULES.get(words[0], f"evaluation.{words[0]}")).main(words[1:])
        return code
    except BrokenPipeError:  # `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"evaluation: {' '.join(str(error).split())}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("evaluation: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
