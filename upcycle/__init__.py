"""Turn a dense Hugging Face language model into a mixture of experts: planned, exact, streamed, verified."""

from typing import TYPE_CHECKING

from upcycle.plugin import lazy
from upcycle.version import __version__

if TYPE_CHECKING:
    from upcycle.api import Plan, convert, inspect, plan, push, verify

__all__ = ["Plan", "__version__", "convert", "inspect", "plan", "push", "verify"]
__getattr__ = lazy(__name__, __all__)  # on first use, so that importing the package does not wait for torch
