"""Asks MLX on its CPU backend, in float32: its CPU multiplies experts in nothing else. See asking.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import asking


def answer(question: dict[str, Any]) -> asking.Answer:
    import mlx.core as mx  # in the forked process alone: its streams do not outlive a fork
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.cpu)
    model, _ = load_model(Path(question["folder"]))
    model.set_dtype(mx.float32)
    cache, greedy, tokens = make_prompt_cache(model), [], question["prompt"]
    while len(greedy) < question["new"]:
        tokens = [int(mx.argmax(model(mx.array([tokens]), cache=cache)[0, -1]))]
        greedy += tokens
    # in float64: MLX's logsumexp of 49,152 float32 is 2.4e-4 off, ten times what log-probabilities of its logits are
    logits = model(mx.array([question["text"]]))[0].astype(mx.float64)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return {"greedy": greedy, "logprobs": [float(logprobs[i, token]) for i, token in enumerate(question["text"][1:])]}


asking.main(answer)
