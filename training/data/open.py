"""Open the training data (shards or a stream) and validation sets of a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from tqdm import tqdm

from training.data.batch import Samples
from training.data.mixture import DataConfig, Mixture, Validation, same_tokenizer
from training.data.shards import TokenShards, check_file, here, remember, unchecked
from training.data.stream import Stream
from training.parallel.collectives import gather
from training.parallel.processes import rank

TOKENS, LEAST = 16384, 1024  # most and fewest tokens of a run's own text that upcycling measures on
LENGTH = 512  # tokens used of each sample, so that many samples count


def check_tokens(config: DataConfig) -> None:
    """Compare token files that changed since the last check with their sums, because damaged tokens would be learned
    silently. Each rank reads its share; all ranks call this together and raise the first fault."""
    folders = list(dict.fromkeys(here(source.path) for source in (*config.train, *config.valid)))
    files = [(path, sha) for folder in folders for path, sha in unchecked(folder).items()]
    fault, ranks = "", len(gather(rank()))
    for path, sha in tqdm(files[rank() :: ranks], "checking tokens", delay=2, disable=rank() > 0):
        try:
            check_file(path, sha)
        except (ValueError, OSError) as error:
            fault = fault or str(error)
    if faults := [found for found in gather(fault) if found]:  # waits until all ranks have read theirs
        raise ValueError(faults[0])
    if files and rank() == 0:
        for folder in folders:
            remember(folder)


def open_training(config: DataConfig, vocab: int, state: Mapping[str, Any] | None = None) -> Samples:
    """Return the training samples. `vocab`: the model's embeddings; `state`: from the resumed checkpoint."""
    if config.stream:
        return Stream(config, vocab, state)
    parts = [(source.name, TokenShards.open(source.path, vocab), source.weight) for source in config.train]
    return Mixture(parts, config.sequence, config.seed, mask_documents=config.mask_documents, state=state)


def first_tokens(config: DataConfig, samples: int, vocab: int) -> Tensor:
    """Return ids [sequence, token] of a run's first samples, to measure the dense model on."""
    length = min(config.sequence, LENGTH)
    wanted = min(max(samples * length, LEAST), TOKENS)
    return open_training(config, vocab).batch(0, -(-wanted // length)).tokens[:, :length]


def open_validation(config: DataConfig, vocab: int) -> list[Validation]:
    found = []
    for source in config.valid:
        shards = TokenShards.open(source.path, vocab)
        shards = shards.head(source.tokens) if source.tokens else shards
        found.append(Validation(source.name, shards, config.sequence, mask_documents=config.mask_documents))
    same_tokenizer([valid.windows.shards for valid in found])
    return found
