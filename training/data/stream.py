"""Tokenise a dataset of the Hub while training, for a first try or where shards do not fit on disk.

Every rank reads the whole stream and keeps its own samples, so that samples do not depend on the mesh. Each rank
tokenises everything, at about 10^5 tokens a second per core: prepare shards for more than a node, for a mixture, or to
shuffle documents. A stream keeps the dataset's order.

A stream only moves forward. `state(cursor)` is a place at or before sample `cursor`: the position that `datasets`
reports, and the rest of the current document.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from training.data.batch import Batch, Longs, Row, Span, lay, stack
from training.data.encoding import load_encoder
from training.data.mixture import DataConfig
from training.data.sources.texts import HUB, HubRows, hub, strings
from upcycle.io.checkpoint import tokenizer_folder

PLACES = 64  # remembered positions, more than a loader prefetches


class Stream:
    def __init__(self, config: DataConfig, vocab: int, state: Mapping[str, Any] | None = None) -> None:
        if not config.stream.startswith(HUB):
            raise ValueError(f"data.stream is {config.stream!r}; write {HUB}org/name, or prepare files for data.train")
        if not config.tokenizer:
            raise ValueError("data.tokenizer is not set; a stream needs one: a folder or a Hub id")
        self.config, self.encoder = config, load_encoder(tokenizer_folder(config.tokenizer), "")
        if self.encoder.vocab > vocab:
            raise ValueError(
                f"{config.tokenizer} has {self.encoder.vocab} ids but the model has {vocab} embeddings; "
                "use the model's own tokenizer"
            )
        self.source = hub(config.stream)
        self.at, self.epoch = 0, 0  # the next sample
        self.ids, self.used = np.empty(0, np.int64), 0  # the current document
        if state:
            if state["mark"] != self.mark():
                raise ValueError(f"{config.stream} or its tokenizer differs from the checkpoint's; use the same")
            self.at, self.epoch, self.used = state["at"], state["epoch"], state["used"]
            self.ids = np.array(state["ids"], np.int64)
        self.rows = HubRows(self.source, state["rows"] if state else None)
        self.rows.set_epoch(self.epoch)
        self.documents = self.read()
        self.places: deque[dict[str, Any]] = deque(maxlen=PLACES)

    def mark(self) -> list[Any]:
        return [self.source.name, self.source.mark, self.source.column, self.encoder.fingerprint, self.config.sequence]

    def batch(self, sample: int, size: int) -> Batch:
        if sample < self.at:
            raise ValueError(f"the stream is at sample {self.at} and cannot go back to {sample}; open it again")
        while self.at < sample:
            self.row()
        rest = self.ids[max(0, self.used - 1) :]  # the last used label is the next input
        place = {"at": self.at, "epoch": self.epoch, "ids": rest.tolist(), "used": min(1, self.used)}
        self.places.append({**place, "rows": self.rows.state(), "mark": self.mark()})
        return stack([self.row() for _ in range(size)])

    def state(self, cursor: int) -> dict[str, Any]:
        before = [place for place in tuple(self.places) if place["at"] <= cursor]
        if not before:
            raise ValueError(f"the stream has forgotten the position of sample {cursor}; save sooner after it is used")
        return before[-1]

    def epochs(self, cursor: int) -> dict[str, float]:
        return {}  # its length is unknown

    def row(self) -> Row:
        self.at += 1
        return lay(self.spans(), self.config.sequence, self.encoder.start, self.config.mask_documents)

    def spans(self) -> Iterator[Span]:
        missing = self.config.sequence
        while missing:
            if self.used == len(self.ids):
                self.ids, self.used = next(self.documents), 0
            begin, self.used = self.used, min(len(self.ids), self.used + missing)
            missing -= self.used - begin
            yield self.ids, begin, self.used, begin > 0

    def read(self) -> Iterator[Longs]:
        """Yield documents, epoch after epoch."""
        empty = 0  # epochs without a document; one is possible if a run resumes at an epoch's end
        while empty < 2:
            empty += 1
            for text in strings(self.source, (row.get(self.source.column) for row in self.rows)):
                for piece in self.encoder.pieces([(text, True)], 0):
                    empty = 0
                    yield piece.ids.astype(np.int64)
            self.epoch += 1
            self.rows.set_epoch(self.epoch)
        raise ValueError(f"there is no text in {self.config.stream}")
