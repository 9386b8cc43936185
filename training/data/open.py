"""From a config to samples: the training data, shards or a stream, and the validation sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from training.data.batch import Samples
from training.data.mixture import DataConfig, Mixture, Validation, same_tokenizer
from training.data.shards import TokenShards
from training.data.stream import Stream


def open_training(config: DataConfig, vocab: int, state: Mapping[str, Any] | None = None) -> Samples:
    """The training samples. `vocab`: the model's number of embeddings; `state`: from the checkpoint that is resumed."""
    if config.stream:
        return Stream(config, vocab, state)
    parts = [(source.name, TokenShards.open(source.path, vocab), source.weight) for source in config.train]
    return Mixture(parts, config.sequence, config.seed, mask_documents=config.mask_documents)


def open_validation(config: DataConfig, vocab: int) -> list[Validation]:
    found = []
    for source in config.valid:
        shards = TokenShards.open(source.path, vocab)
        shards = shards.head(source.tokens) if source.tokens else shards
        found.append(Validation(source.name, shards, config.sequence, mask_documents=config.mask_documents))
    same_tokenizer([valid.windows.shards for valid in found])
    return found
