"""A parameter's plain name, whatever wraps the module that it is in."""

from __future__ import annotations

import re

WRAPPERS = re.compile(r"(_orig_mod|_checkpoint_wrapped_module)\.")  # of torch.compile and of checkpointing


def plain_name(name: str) -> str:
    return WRAPPERS.sub("", name)
