"""Continue training dense and upcycled models in PyTorch."""

from typing import TYPE_CHECKING

from upcycle.plugin import lazy

if TYPE_CHECKING:
    from training.api import add, estimate, export, join, prepare, recommend, remove, train, upgrade

__all__ = ["add", "estimate", "export", "join", "prepare", "recommend", "remove", "train", "upgrade"]
__getattr__ = lazy(__name__, __all__)
