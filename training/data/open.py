"""Open the training data (shards or a stream) and validation sets of a config."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from tqdm import tqdm

from training.data.batch import Samples
from training.data.mixture import DataConfig, Mixture, Validation, same_tokenizer
from training.data.shards import TokenShards, check_file, here, remember, unchecked
from training.data.stream import Stream
from training.parallel.collectives import gather
from training.parallel.processes import rank
from upcycle.text import tokens as text

TOKENS, LEAST = 16384, 1024  # most and fewest tokens of a run's own text that upcycling measures on
LENGTH = 512  # tokens used of each sample, so that many samples count
UNLIKE = 0.05  # share of bytes by which texts differ only if their ids are another tokenizer's: 0.14 was the least seen


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


def check_tokenizer(config: DataConfig, folder: Path) -> None:
    """Raise a ValueError for token shards whose ids are another tokenizer's than that of the model in `folder`.

    Another tokenizer.json may still have the same ids; then it spells texts of the lengths that the shards state."""
    shards = [TokenShards.open(source.path) for source in (*config.train, *config.valid)]
    if not shards:
        return
    tokenizer = text.load_tokenizer(folder)
    own = text.fingerprint(tokenizer)
    for found in shards:
        first = found.shards[0]
        if found.tokenizer == own or first.scored is not None:  # of conversations, only the answers' bytes are known
            continue
        last = max(1, int(np.searchsorted(first.starts, np.uint64(TOKENS), side="right")) - 1)
        ids = [first.tokens[a : b - 1].tolist() for a, b in pairwise(map(int, first.starts[: last + 1]))]
        spelled = [len(each.encode()) for each in tokenizer.decode_batch(ids, skip_special_tokens=False)]
        stated = np.diff(first.bytes[: last + 1].astype(np.int64))
        if np.abs(np.array(spelled) - stated).sum() > UNLIKE * stated.sum():
            raise ValueError(
                f"{found.folder} was made with another tokenizer than the model's: its first {last:,} documents have "
                f"{stated.sum():,} bytes, and {folder} reads {sum(spelled):,} from their tokens; prepare it with the "
                "model's own tokenizer"
            )


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
