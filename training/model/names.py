"""A parameter's plain name, whatever wraps the module that it is in."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

WRAPPERS = re.compile(r"(_orig_mod|_checkpoint_wrapped_module)\.")  # of torch.compile and of checkpointing


def plain_name(name: str) -> str:
    return WRAPPERS.sub("", name)


def holds(pattern: str, name: str) -> bool:
    """Whether the pattern's words (between dots, each may hold * ? [0-9]) are neighbours somewhere in a name."""
    words, wanted = name.split("."), pattern.split(".")
    starts = range(len(words) - len(wanted) + 1)
    return any(all(map(fnmatchcase, words[start:], wanted)) for start in starts)
