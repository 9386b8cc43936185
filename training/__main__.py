"""`python -m training [CONFIG] [key=value ...]`, for launchers: the command `upcycle train`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from upcycle.cli import main as door


def main(words: Sequence[str] | None = None) -> int:
    """Run `upcycle train`."""
    return door.main(["train", *(sys.argv[1:] if words is None else words)])


if __name__ == "__main__":
    door.script("train")
