"""Pictures of one run or several: training and validation loss by tokens, learning rate, load balance by layer.

  python -m training.cli.plots runs/dense runs/moe --output loss.png
  python -m training.cli.plots runs/moe/metrics.jsonl --output loss.svg

It reads metrics.jsonl and nothing else, so it works while a run goes on. Panels that have no data are left out.
"""

from __future__ import annotations

import sys
from pathlib import Path

from upcycle.cli import frame as cli


@cli.command()
def main(words: list[str]) -> int:
    parser = cli.parser(prog="python -m training.cli.plots", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the folder of a run, or its metrics.jsonl")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="a .png, .pdf or .svg to write")
    options = parser.parse_args(words)

    from training.observe.plots import plot

    plot(options.runs, options.output)
    print(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(cli.start("training.cli.plots", own_help=True))
