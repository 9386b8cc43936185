"""Tokenise documents and conversations in batches, and say where in their source each one ends."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from training.data import chat
from training.data.shards import ChatCounts, Flags, Ids
from training.data.sources.texts import Place
from upcycle.io import strict
from upcycle.io.job import read_json
from upcycle.text import tokens as text

BATCH = 1 << 21  # characters tokenised at once, about 100 MB in the tokenizer
TALKS = 512  # conversations tokenised at once


def nowhere() -> None:
    """Return the place in a file: it is read from its begin."""


@dataclass(frozen=True)
class Piece:
    """The tokens of a document or of a part of one."""

    ids: Ids
    bytes: int
    read: int  # documents of the source up to here, with empty ones
    closes: bool
    scored: Flags | None = None  # for conversations
    counts: Mapping[str, int] | None = None  # counts of this conversation and of those left out before it
    place: Place | None = None  # at or before the document

    @property
    def number(self) -> int:
        """Return the number of the document in its source, from 1."""
        return self.read if self.closes else self.read + 1


@dataclass(frozen=True)
class Encoder:
    tokenizer: Any
    vocab: int
    eos: int
    start: int
    fingerprint: str

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("<u2" if self.vocab <= 1 << 16 else "<u4")

    def pieces(
        self,
        texts: Iterable[tuple[str, bool]],
        skip: int,
        begin: int = 0,
        place: Callable[[], Place | None] = nowhere,
    ) -> Iterator[Piece]:
        """Tokenise `texts` of (text, whether the document ends here), without the first `skip` documents.

        `begin`: the documents before those of `texts`. `place` says where their source stands.
        """
        number = begin
        batch: list[tuple[bytes, bool, int]] = []
        size, tokens, here = 0, 0, place()
        for piece, closes in texts:
            number += closes
            if number - closes < skip:
                continue
            # large crawls contain half surrogate pairs, which are not text
            batch.append((piece.encode("utf-8", "replace"), closes, number))
            size += len(piece)
            if size >= BATCH:
                for made in self.encode(batch, tokens, here):
                    tokens = 0 if made.closes else tokens + len(made.ids)
                    yield made
                batch, size, here = [], 0, place()
        yield from self.encode(batch, tokens, here)

    def encode(self, batch: list[tuple[bytes, bool, int]], tokens: int, place: Place | None) -> Iterator[Piece]:
        """Encode a batch. `tokens`: tokens of the open document so far. A document without tokens is left out."""
        with text.explained(Path("tokenizer.json")):
            found = self.tokenizer.encode_batch_fast([data.decode() for data, _, _ in batch], add_special_tokens=False)
        for (data, closes, number), encoding in zip(batch, found, strict=True):
            ids = encoding.ids
            tokens += len(ids)
            if closes and tokens:
                ids.append(self.eos)
            if ids:
                yield Piece(np.array(ids, self.dtype), len(data), number, closes, place=place)
            if closes:
                tokens = 0


@dataclass(frozen=True)
class ChatEncoder:
    """The encoder of conversations."""

    of: Encoder
    renderer: chat.Renderer

    def pieces(
        self, talks: Iterable[chat.Talk], skip: int, begin: int = 0, place: Callable[[], Place | None] = nowhere
    ) -> Iterator[Piece]:
        """Tokenise conversations without the first `skip`. The last piece only counts what was left out."""
        batch: list[tuple[str, list[chat.Span]] | None] = []
        size, number, counts, warned, here = 0, skip, nothing_yet(), False, place()
        for talk in islice(talks, skip - begin, None):
            try:
                batch.append(self.renderer.spans(talk))
            except chat.Refused as refused:
                if not warned:  # warn once, not for every conversation
                    warnings.warn(f"{talk.where} is left out: the chat template refuses it, {refused}", stacklevel=2)
                warned = True
                batch.append(None)
            size += len(batch[-1][0]) if batch[-1] else 0
            if size >= BATCH or len(batch) >= TALKS:
                counts = yield from self.encode(batch, number, counts, here)
                number, size, batch, here = number + len(batch), 0, [], place()
        counts = yield from self.encode(batch, number, counts, here)
        yield Piece(np.empty(0, self.of.dtype), 0, number + len(batch), False, counts=counts)

    def encode(
        self,
        batch: list[tuple[str, list[chat.Span]] | None],
        number: int,
        counts: dict[str, int],
        place: Place | None,
    ) -> Generator[Piece, None, dict[str, int]]:
        found = iter(self.renderer.tokens([each for each in batch if each]))
        for read, each in enumerate(batch, number + 1):
            made = next(found) if each else None
            if each is None or made is None:
                counts["silent" if each else "refused"] += 1
                continue
            if int(made.ids.max()) >= self.of.vocab:
                raise ValueError(
                    f"transformers' tokenizer of {self.renderer.folder} gives id {int(made.ids.max())}, and its "
                    f"tokenizer.json has {self.of.vocab} ids; add the missing ones to tokenizer.json"
                )
            counts["scored"] += int(made.scored.sum())
            counts["truncated"] += made.cut
            yield Piece(made.ids.astype(self.of.dtype), made.bytes, read, True, made.scored, counts, place)
            counts = nothing_yet()
        return counts


def nothing_yet() -> dict[str, int]:
    return dict.fromkeys(ChatCounts.__annotations__, 0)


def load_encoder(folder: Path, eos: str) -> Encoder:
    tokenizer = text.load_tokenizer(folder)
    known = tokenizer.get_vocab(with_added_tokens=True)
    if not known:
        raise ValueError(f"the tokenizer of {folder} has no tokens; give the model's own")
    if not eos:
        settings = read_json(folder / "tokenizer_config.json")
        token = settings.get("eos_token") if isinstance(settings, dict) else None
        named = token.get("content") if isinstance(token, dict) else token
        if not isinstance(named, str) or not named:
            raise ValueError(f"{folder}/tokenizer_config.json names no eos_token; write eos=TOKEN")
        eos = named
    if eos not in known:
        raise ValueError(
            f"the tokenizer of {folder} has no token {strict.short(eos)}; write eos=TOKEN with one that it has"
        )
    with text.explained(folder / "tokenizer.json"):
        before = [id for id in tokenizer.encode("").ids if id != known[eos]]
    if len(before) > 1:
        raise ValueError(f"the tokenizer of {folder} puts {len(before)} tokens before a text; at most one is supported")
    tokenizer.encode_special_tokens = True  # "<eos>" in a text is not the end of it
    first, size = (before or [known[eos]])[0], max(known.values()) + 1
    return Encoder(tokenizer, size, known[eos], first, text.fingerprint(tokenizer))
