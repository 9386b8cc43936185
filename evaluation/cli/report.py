"""Write one page of results: scores, differences, losses, use of experts, the plan, and the origin of each number.

usage: upcycle report PATH ... [-- PATH ...] [key=value ...]

  upcycle report runs/eval/dense runs/eval/moe runs/dense runs/moe ./moe output=report.html
  upcycle report runs/dense-{0,1,2} runs/eval/dense-{0,1,2} -- runs/moe-{0,1,2} runs/eval/moe-{0,1,2}

  upcycle report runs/dense runs/moe output=loss.png        # losses, learning rate, load: .png, .pdf or .svg

A path is a folder of `upcycle eval` (results_*.json), of `upcycle train` (metrics.jsonl), of `upcycle convert`
(upcycle.json), or a file of `upcycle routing`; a folder may be two of these. The others are compared with the first of
each kind; there may be any number of suites and models. Groups work as in `compare`: A1,A2,A3, or the names between two
`--`, are seeds of one model, in the order of the other groups' seeds, and the page shows their mean and interval. With
one run each it gives no verdict. report.md and report.json have the same numbers. A picture needs only metrics.jsonl,
so you can draw it during a run.

The page fetches no script, no font and no picture, and a policy in its head forbids it.

keys, with defaults and meaning: docs/config.md
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from upcycle.cli import frame


@dataclass(frozen=True)
class ReportConfig:
    # the page to write, .html, with .md and .json next to it; or a picture of trainings: .png, .pdf or .svg
    output: str = "report.html"
    title: str = "Upcycling report"  # title of the page


@frame.command()
def main(words: Sequence[str]) -> int:
    from evaluation.api import report
    from evaluation.judge.compare import group_words
    from upcycle.config.reading import read

    paths, keys = frame.names_and_words(words)
    config = read(ReportConfig, "", keys)
    if not paths:
        raise ValueError("report needs something to show: report RESULTS ... RUN ... routing.json [output=report.html]")
    said = report(*group_words(paths), output=config.output, title=config.title)
    print("\n".join(map(frame.printable, [*said, config.output])))
    return 0
