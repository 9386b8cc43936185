"""Find plug-ins: each is one file in a package's folder, named by its file name.

`load("upcycle.arch.targets", "mixtral")` imports upcycle/arch/targets/mixtral.py. Nothing is registered
anywhere: a new family, target or method is a new file, and tests that walk `names(package)` test it.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def names(package: str) -> list[str]:
    """List the plug-ins of a package, sorted. `common` and modules that start with "_" do not count."""
    return list(_names(package))


@functools.cache  # a table of plans asks tens of thousands of times, and reading a folder takes longer than a plan
def _names(package: str) -> tuple[str, ...]:
    found = pkgutil.iter_modules(importlib.import_module(package).__path__)
    return tuple(sorted(m.name for m in found if not m.ispkg and not m.name.startswith("_") and m.name != "common"))


def load(package: str, name: str) -> ModuleType:
    known = names(package)
    if name not in known:
        kind = package.rsplit(".", 1)[-1]
        raise ValueError(f"{name!r} is not one of the {kind} ({', '.join(known)}){nearest(name, known)}")
    return importlib.import_module(f"{package}.{name}")


def lazy(package: str, names: Sequence[str]) -> Callable[[str], Any]:
    """Return a package's `__getattr__`, which imports PACKAGE.api on the first use of one of the names."""

    def get(name: str) -> Any:
        if name in names:
            return getattr(importlib.import_module(f"{package}.api"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get


def nearest(word: str, known: list[str]) -> str:
    """Return '; did you mean X?' if a known word is close, else ''."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
