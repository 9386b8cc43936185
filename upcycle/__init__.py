"""Turn a dense Hugging Face language model into a mixture of experts: planned, exact, streamed, verified."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from upcycle.version import __version__

if TYPE_CHECKING:
    from upcycle.library import Upcycling

__all__ = ["Upcycling", "__version__"]


def __getattr__(name: str) -> Any:
    """Import `Upcycling` on first use: importing the package alone should not wait for torch."""
    if name == "Upcycling":
        from upcycle.library import Upcycling

        return Upcycling
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
