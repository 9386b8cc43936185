"""Continue training dense and upcycled models in PyTorch."""

from typing import TYPE_CHECKING

from upcycle.plugin import lazy

if TYPE_CHECKING:
    from training.api import estimate, export, prepare, recommend, train

__all__ = ["estimate", "export", "prepare", "recommend", "train"]
__getattr__ = lazy(__name__, __all__)
