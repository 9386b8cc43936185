"""Show which experts a typed text chooses, with a run's newest checkpoint or a model's folder.

L MoE layers, T tokens, K experts chosen a token.
"""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from typing import Any

import torch

from evaluation.judge.experts.choices import choices, cut
from evaluation.judge.experts.routing import RoutingConfig, opened
from training.checkpoint.state import CHECKPOINTS, found
from training.model.decoder import Decoder
from upcycle.arch.spec import MoESpec
from upcycle.text import tokens

LONGEST = 256  # tokens of a text that are shown


class Typed:
    """Keep one model in memory, the last that was asked for, because a text should not wait for it twice."""

    def __init__(self) -> None:
        self.lock, self.kept = Lock(), ""
        self.model: tuple[Decoder, Any, Any] | None = None

    def routing(self, folder: Path, text: str) -> dict[str, Any]:
        """Return the tokens of a text, and each layer's experts of each token with their weights, the largest first."""
        with self.lock:
            wanted = str(next(iter(found(folder / CHECKPOINTS)), folder))
            if wanted != self.kept or self.model is None:
                self.model, self.kept = None, wanted  # free the old one first
                self.model = load(folder)
            model, origin, tokenizer = self.model
            ids, pieces = cut(tokenizer, text, min(LONGEST, origin.dense.context))
            if max(ids) >= origin.dense.vocab:
                raise ValueError(f"the tokenizer gives id {max(ids)}, the model has {origin.dense.vocab} embeddings")
            layers = choices(model, torch.tensor(ids))
        return {
            "pieces": pieces, "layers": layers, "experts": origin.spec.experts,
            "granularity": origin.spec.granularity, "checkpoint": Path(wanted).name,
        }  # fmt: skip


def load(folder: Path) -> tuple[Decoder, Any, Any]:
    """Load a model and its tokenizer into this machine's memory."""
    model, origin, _ = opened(RoutingConfig(str(folder)), "cpu")
    assert isinstance(origin.spec, MoESpec)
    place = next((file.parent for file in origin.files if file.name == "tokenizer.json"), None)
    if place is None:
        raise ValueError(f"{folder} has no tokenizer.json, and text needs one; add the model's")
    return model, origin, tokens.load_tokenizer(place)
