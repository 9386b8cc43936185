"""Helpers: plans of tiny models, and a tiny model with a tokenizer and a text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from upcycle.config.reading import read
from upcycle.config.schema import UpcycleConfig
from upcycle.io.checkpoint import Checkpoint
from upcycle.planning.plan import UpcyclePlan, build


def load(*words: str) -> tuple[UpcyclePlan, list[Checkpoint]]:
    config = read(UpcycleConfig, "", words)
    checkpoints = [Checkpoint.open(name) for name in [config.source or config.donors[0], *config.donors]]
    return build(config, checkpoints), checkpoints


def readable(llama: Path, folder: Path) -> tuple[Path, Path]:
    """(a copy of the model with a tokenizer of letters, a text of 16 letters)."""
    source, text = shutil.copytree(llama, folder / "readable"), folder / "letters.txt"
    model = {"type": "WordLevel", "vocab": {chr(97 + i): i for i in range(26)} | {"?": 26}, "unk_token": "?"}
    parts = dict.fromkeys(["truncation", "padding", "normalizer", "post_processor", "decoder"])
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model} | parts
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    text.write_text("a b c d e f g h i j k l m n o p")
    return source, text
