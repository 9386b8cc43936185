"""From a config to samples: the training data, shards or a stream, and the validation sets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from training.data.batch import Samples
from training.data.mixture import DataConfig, Mixture, Validation, same_tokenizer
from training.data.shards import TokenShards, check_file, remember, unchecked
from training.data.stream import Stream
from training.parallel.collectives import gather
from training.parallel.processes import rank

TOKENS, LEAST = 16384, 1024  # of a run's own text that upcycling measures on, at most and at least
LENGTH = 512  # of a sample, so that many have a say


def check_tokens(config: DataConfig) -> None:
    """Reads the token files that nobody has read since they changed, each rank its share, and compares them with their
    sums: damaged ones would be learned without a word. All ranks call this together, and all raise the first fault."""
    folders = list(dict.fromkeys(Path(source.path) for source in (*config.train, *config.valid)))
    files = [(path, sha) for folder in folders for path, sha in unchecked(folder).items()]
    fault, ranks = "", len(gather(rank()))
    for path, sha in tqdm(files[rank() :: ranks], "checking tokens", delay=2, disable=rank() > 0):
        try:
            check_file(path, sha)
        except (ValueError, OSError) as error:
            fault = fault or str(error)
    if faults := [found for found in gather(fault) if found]:  # which waits until all have read theirs
        raise ValueError(faults[0])
    if files and rank() == 0:
        for folder in folders:
            remember(folder)


def open_training(config: DataConfig, vocab: int, state: Mapping[str, Any] | None = None) -> Samples:
    """The training samples. `vocab`: the model's number of embeddings; `state`: from the checkpoint that is resumed."""
    if config.stream:
        return Stream(config, vocab, state)
    parts = [(source.name, TokenShards.open(source.path, vocab), source.weight) for source in config.train]
    return Mixture(parts, config.sequence, config.seed, mask_documents=config.mask_documents, state=state)


def first_tokens(config: DataConfig, samples: int, vocab: int) -> Tensor:
    """Ids [sequence, token] to measure the dense model on, of the first samples of a run that reads so many."""
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
