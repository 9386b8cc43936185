"""Run `python -m evaluation run|compare|routing|study|report|lm-eval ...`, for launchers: the same commands as
`upcycle`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from upcycle.cli import main as door


def main(words: Sequence[str] | None = None) -> int:
    """Run the same command of `upcycle`; `run` is called `eval` there."""
    name, *rest = (sys.argv[1:] if words is None else words) or ["--help"]
    return door.main(["eval" if name == "run" else name, *rest])


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        sys.argv[1] = "eval"
    door.script()
