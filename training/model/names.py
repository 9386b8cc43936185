"""Plain names of parameters, without the prefixes that wrappers of a module add."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

WRAPPERS = re.compile(r"(_orig_mod|_checkpoint_wrapped_module)\.")  # prefixes that torch.compile and checkpointing add


def plain_name(name: str) -> str:
    return WRAPPERS.sub("", name)


def holds(pattern: str, name: str) -> bool:
    """Return whether the pattern's words match consecutive words of the name.

    Words are separated by dots; a word of the pattern may hold * ? [0-9]."""
    words, wanted = name.split("."), pattern.split(".")
    starts = range(len(words) - len(wanted) + 1)
    return any(all(map(fnmatchcase, words[start:], wanted)) for start in starts)
