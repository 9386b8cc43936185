"""Cut a text into tokens with their pieces, and return the experts that a model gives each token.

T tokens, K experts chosen a token.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training.model.decoder import Decoder
from training.model.moe import MoE, Routing
from upcycle.text import tokens


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
