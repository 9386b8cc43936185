"""Continued pre-training of dense and upcycled models, PyTorch-native."""

from typing import TYPE_CHECKING

from upcycle.plugin import lazy

if TYPE_CHECKING:
    from training.api import estimate, export, prepare, train

__all__ = ["estimate", "export", "prepare", "train"]
__getattr__ = lazy(__name__, __all__)
