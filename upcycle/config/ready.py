"""Find the folders of ready configs, in a clone or in an installed wheel."""

from __future__ import annotations

from pathlib import Path

_CLONE = Path(__file__).parents[2] / "configs"
CONFIGS = _CLONE if _CLONE.is_dir() else Path(__file__).parents[1] / "configs"  # the wheel holds them in the package
UPCYCLE, TRAIN, STUDY, EVAL, HARDWARE = (CONFIGS / kind for kind in ("upcycle", "train", "study", "eval", "hardware"))
