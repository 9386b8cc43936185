"""Show which experts a typed text chooses, with a run's newest checkpoint or a model's folder.

L MoE layers, T tokens, K experts chosen a token.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from evaluation.judge.experts.routing import RoutingConfig, opened
from training.checkpoint.state import CHECKPOINTS, found
from training.model.decoder import Decoder
from training.model.moe import MoE, Routing
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


def cut(tokenizer: Any, text: str, most: int) -> tuple[list[int], list[str]]:
    """Return the ids of a text and the piece of the text that each stands for; a token without one has its name."""
    with tokens.explained(Path("tokenizer.json")):
        encoded = tokenizer.encode(text)
    ids, pieces, done = encoded.ids[:most], [], 0
    for (_, end), name in zip(encoded.offsets[:most], encoded.tokens, strict=False):
        pieces.append(text[done:end] or name)
        done = max(done, end)
    if not ids:
        raise ValueError("the text has no tokens; type some words")
    return ids, pieces


@torch.no_grad()
def choices(model: Decoder, id_S: Tensor) -> list[dict[str, Any]]:
    """Return the experts and weights that each MoE layer gives each token, the largest weight first."""
    blocks = [(int(number), layer.ffn) for number, layer in model.layers.items() if isinstance(layer.ffn, MoE)]
    seen: dict[int, dict[str, Any]] = {}

    def see(number: int, routing: Routing) -> Routing:
        order_TK = routing.weight_TK.argsort(dim=1, descending=True, stable=True)
        expert_TK, weight_TK = routing.expert_TK.gather(1, order_TK), routing.weight_TK.gather(1, order_TK)
        weights = [[round(w, 3) for w in row] for row in weight_TK.double().tolist()]
        seen[number] = {"layer": number, "experts": expert_TK.tolist(), "weights": weights}
        return routing

    for number, block in blocks:
        block.balance = partial(see, number)
    try:
        model.hidden(id_S[None])
    finally:
        for _, block in blocks:
            block.balance = None
    return [seen[number] for number, _ in blocks]
