"""Turn token shards into batches. Sample number n of a run is a pure function of the config and n.

The cursor of a run is therefore one integer, the samples consumed, and does not depend on the mesh: with r ranks of
batch B, rank i takes samples cursor + i*B ... cursor + (i+1)*B, and the cursor moves by r*B.

(If weights changed on the way, the checkpoint's state counts too: from that sample on, a new schedule continues from
what each source had given, so that nothing is read twice or left out. If the sample length changed, a source continues
after as many of its tokens, in windows of the new length: in that epoch some tokens repeat and some are skipped.)

A periodic schedule decides the source of sample n: every source's count stays within one sample of its share at every n
(Tijdeman's solution of the chairman assignment problem).

The k-th sample of a source is a window of one of its epochs. An epoch has every document once: documents are shuffled
within chunks of CHUNK neighbours, laid end to end and cut into windows, and then the windows of the whole epoch are
shuffled. A chunk holds the same tokens in any order, so its position is known without summing lengths. A Feistel
network computes the windows' permutation entry by entry. So any sample is found with one binary search in a mapped
file.

A window has S inputs and S labels. Each token of the epoch is a label once. Its input is the token before it in its
document, or `start` (bos, else eos) for the first token; `documents` and `positions` belong to that pair. So with
masked documents the loss of a document does not depend on its neighbours, and no label is lost at borders. The last
window starts early enough to be full, and ignores labels that the window before has scored.

Conversations (chat.py) are not cut: a window is a row of whole conversations (packing.py), the same in each epoch, and
only windows are shuffled. Labels that are not learned are IGNORE.

Shapes: B samples, S sequence.
"""

from __future__ import annotations

import hashlib
import math
import queue
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from training.data.batch import IGNORE, Batch, Row, Samples, Span, Whole, lay, lay_whole, stack
from training.data.packing import packed
from training.data.shards import TokenShards
from upcycle.config.reading import build
from upcycle.config.values import LENGTH, TOKENS, above_zero, at_least, check_values, seed
from upcycle.io import strict
from upcycle.planning import rng

CHUNK = 1024  # neighbouring documents that are shuffled
CYCLE = 1 << 16  # longest schedule; weights are rounded to 1/CYCLE if needed
ROUNDS = 8
MASK64 = (1 << 64) - 1


# ---- config


@dataclass(frozen=True)
class TrainSource:
    name: str = ""  # "": the folder's name. It seeds the order, so a source keeps its order in any mixture
    path: str = ""  # a folder of token shards, or its address
    weight: float = 1.0  # share of the samples, relative to other sources


@dataclass(frozen=True)
class ValidSource:
    name: str = ""  # NAME of valid/NAME/loss in the log; "": the folder's name
    path: str = ""  # a folder of token shards
    tokens: int = 0  # use only the first documents that fit into this many tokens; 0: all


@dataclass(frozen=True)
class DataConfig:
    train: tuple[Any, ...] = ()  # training data, each a TrainSource: a folder, or keys and values
    valid: tuple[Any, ...] = ()  # held-out sets, each a ValidSource: a folder, or keys and values
    sequence: int = 4096  # tokens a sequence
    seed: int = 0  # seed of the order of samples
    mask_documents: bool = True  # tokens attend to their own document only
    stream: str = ""  # instead of train: hf:org/name[@revision][:config][:split][#column], tokenised while training
    tokenizer: str = ""  # for the stream: a folder with tokenizer.json, or a Hub id

    def __post_init__(self) -> None:
        object.__setattr__(self, "train", sources(TrainSource, self.train, "data.train"))
        object.__setattr__(self, "valid", sources(ValidSource, self.valid, "data.valid"))
        if self.stream and self.train:
            raise ValueError("data.stream and data.train are both set; prepare the stream to mix it, or leave one out")
        check_values(self, "data.", {"sequence": at_least(1, most=LENGTH), "seed": seed()})
        for number, source in enumerate(self.train):
            weight = above_zero("it must be above 0; leave the source out if you do not want it")
            check_values(source, f"data.train.{number}.", {"weight": weight})
        for number, source in enumerate(self.valid):
            check_values(source, f"data.valid.{number}.", {"tokens": at_least(0, most=TOKENS)})


def sources(
    kind: type[TrainSource] | type[ValidSource], values: Sequence[Any], where: str
) -> tuple[TrainSource | ValidSource, ...]:
    found: list[TrainSource | ValidSource] = []
    for i, value in enumerate(values):
        if not isinstance(value, kind):
            value = build(kind, {"path": value} if isinstance(value, str) else value, f"{where}.{i}.")
        if not value.path:
            raise ValueError(f"{where}.{i} has no path; write the folder that upcycle prepare made")
        found.append(value if value.name else replace(value, name=Path(value.path).name))
    names = [source.name for source in found]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{where} has two sources named {name!r}; give each a different name")
    return tuple(found)


# ---- permutations that are computed entry by entry


def mixed(x: int) -> int:
    """Return the finaliser of splitmix64."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK64
    return x ^ x >> 31


def permuted(index: int, count: int, *key: object) -> int:
    """Return entry `index` of the permutation of range(count) named by `key`, without computing the others.

    A Feistel network permutes the next power of four. An entry outside of range(count) goes through again until it is
    inside, at most four times on average.
    """
    digest = hashlib.sha256(repr(key).encode()).digest()
    keys = [int.from_bytes(digest[4 * i : 4 * i + 4], "big") << 32 | i for i in range(ROUNDS)]
    half = max(1, (count - 1).bit_length() + 1 >> 1)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for round_key in keys:
            left, right = right, left ^ mixed(right ^ round_key) & mask
        index = left << half | right
        if index < count:
            return index


# ---- one source


class Windows:
    """The windows of a set of documents, epoch after epoch; in order if there is no seed."""

    def __init__(
        self, shards: TokenShards, sequence: int, mask_documents: bool = True, name: str = "", seed: int | None = None
    ) -> None:
        self.shards, self.sequence, self.mask_documents = shards, sequence, mask_documents
        self.name, self.seed = name, seed
        self.firsts = [0, *accumulate(len(shard.tokens) for shard in shards.shards)]  # tokens before each shard
        self.tokens = self.firsts[-1]
        self.count = -(-self.tokens // sequence)  # windows of an epoch

    def row(self, index: int) -> Row:
        epoch, window = self.place(index)
        begin = window * self.sequence
        return self.cut(max(0, min(begin, self.tokens - self.sequence)), begin, epoch)

    def place(self, index: int) -> tuple[int, int]:
        """Return (epoch, window in it) of a sample."""
        epoch, window = divmod(index, self.count)
        if self.seed is not None:
            window = permuted(window, self.count, self.seed, "windows", self.name, epoch)
        return epoch, window

    def cut(self, first: int, scored: int, epoch: int) -> Row:
        """Return the row of labels first ... first + S of an epoch; labels before `scored` are context."""
        row = lay(self.spans(first, self.sequence, epoch), self.sequence, self.shards.start, self.mask_documents)
        self.check(row)
        row[1][: scored - first] = IGNORE
        return row

    def check(self, row: Row) -> None:
        highest = max(int(row[0].max()), int(row[1].max()))
        if highest >= self.shards.vocab:
            raise ValueError(
                f"{self.shards.folder} holds id {highest} but its tokenizer has {self.shards.vocab}; its files are "
                "damaged: run upcycle prepare FOLDER check=true"
            )

    def spans(self, at: int, length: int, epoch: int) -> Iterator[Span]:
        """Yield the parts of documents that cover `length` tokens from `at` on."""
        while length > 0 and at < self.tokens:
            index = bisect_right(self.firsts, at) - 1
            shard, inside = self.shards.shards[index], at - self.firsts[index]
            # as uint64: with any other type numpy would copy the whole mapped array
            found = int(np.searchsorted(shard.starts, np.uint64(inside), side="right")) - 1
            chunk = found // CHUNK
            starts = shard.starts[chunk * CHUNK : (chunk + 1) * CHUNK + 1].astype(np.int64)
            sizes = np.diff(starts)
            if self.seed is None:
                order = np.arange(len(sizes))
            else:
                order = rng.permutation(len(sizes), self.seed, "documents", self.name, epoch, index, chunk).numpy()
            ends = starts[0] + np.cumsum(sizes[order])
            for place in range(int(np.searchsorted(ends, inside, side="right")), len(order)):
                document = order[place]
                skipped = inside - int(ends[place] - sizes[document])
                begin = int(starts[document]) + skipped
                size = min(int(sizes[document]) - skipped, length)
                yield shard.tokens, begin, begin + size, skipped > 0
                inside, at, length = inside + size, at + size, length - size
                if length == 0:
                    return


class Talks(Windows):
    """The windows of a set of conversations: rows of whole ones."""

    def __init__(
        self, shards: TokenShards, sequence: int, mask_documents: bool = True, name: str = "", seed: int | None = None
    ) -> None:
        super().__init__(shards, sequence, mask_documents, name, seed)
        sizes = np.concatenate([np.diff(shard.starts.astype(np.int64)) for shard in shards.shards])
        if (longest := int(sizes.max())) > sequence:
            raise ValueError(
                f"{shards.folder} has a conversation of {longest} tokens and data.sequence is {sequence}; prepare it "
                f"with sequence={sequence}, or train with data.sequence={longest}"
            )
        self.order, self.rows = packed(sizes, sequence)
        self.count = len(self.rows) - 1
        self.documents = [0, *accumulate(shard.documents for shard in shards.shards)]  # before each shard

    def row(self, index: int) -> Row:
        _, window = self.place(index)
        chosen = self.order[self.rows[window] : self.rows[window + 1]].tolist()
        row = lay_whole(map(self.talk, chosen), self.sequence, self.shards.start, self.mask_documents)
        self.check(row)
        return row

    def talk(self, document: int) -> Whole:
        index = bisect_right(self.documents, document) - 1
        shard, place = self.shards.shards[index], document - self.documents[index]
        assert shard.scored is not None
        part = slice(*map(int, shard.starts[place : place + 2]))
        return shard.tokens[part], shard.scored[part]


def windows(
    shards: TokenShards, sequence: int, mask_documents: bool = True, name: str = "", seed: int | None = None
) -> Windows:
    kind = Windows if shards.shards[0].scored is None else Talks
    return kind(shards, sequence, mask_documents, name, seed)


# ---- several sources


class Schedule:
    """The source of each sample: after any number of samples each source has its share, within one sample."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self.shares = whole_shares(weights)
        self.period = sum(self.shares)
        self.key = mixed(seed & MASK64)
        self.table = chairmen(self.shares)
        self.rank = np.empty(self.period, np.int64)  # earlier samples of the same source
        for source in range(len(weights)):
            places = self.table == source
            self.rank[places] = np.arange(int(places.sum()))

    def backward(self, cycle: int) -> bool:
        """Return whether a cycle is read backwards. Half of them are, so that a source does not always fall to one
        rank.
        """
        return bool(mixed(self.key ^ cycle) & 1)

    def __getitem__(self, sample: int) -> tuple[int, int]:
        """Return (source, number of its earlier samples)."""
        cycle, place = divmod(sample, self.period)
        backward = self.backward(cycle)
        place = self.period - 1 - place if backward else place
        source = int(self.table[place])
        rank = int(self.rank[place])
        share = self.shares[source]
        return source, cycle * share + (share - 1 - rank if backward else rank)

    def counts(self, samples: int) -> list[int]:
        """Return how many of the first samples belong to each source."""
        cycle, place = divmod(samples, self.period)
        part = self.table[self.period - place :] if self.backward(cycle) else self.table[:place]
        here = np.bincount(part, minlength=len(self.shares)).tolist()
        return [cycle * share + count for share, count in zip(self.shares, here, strict=True)]


def whole_shares(weights: Sequence[float]) -> list[int]:
    """Return whole numbers proportional to the weights: exact if their sum fits into CYCLE, else rounded to 1/CYCLE."""
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= CYCLE:
        return [int(share * period) for share in shares]
    found = [max(1, int(share * CYCLE)) for share in shares]
    missing = sorted(range(len(found)), key=lambda i: found[i] - shares[i] * CYCLE)
    for i in missing[: max(0, CYCLE - sum(found))]:
        found[i] += 1
    return found


def chairmen(shares: Sequence[int]) -> NDArray[np.int64]:
    """Return the source of each sample of a cycle, by Tijdeman (1980): among sources far enough behind their share, the
    one with the nearest deadline."""
    count, period = len(shares), sum(shares)
    table = np.zeros(period, np.int64)
    if count == 1:
        return table
    share, slack = np.array(shares, np.int64), 2 * count - 2
    arrears = np.zeros(count, np.int64)  # (n * share - count) of each, times the period
    for n in range(period):
        arrears += share
        deadline = ((slack - 1) * period / slack - arrears) / share
        chosen = int(np.argmin(np.where(slack * arrears >= period, deadline, np.inf)))
        table[n] = chosen
        arrears[chosen] -= period
    return table


class MixtureState(TypedDict):
    """The mixture's part of a checkpoint: what each source has given."""

    weights: list[tuple[str, float]]
    since: strict.Count  # the first sample of these weights
    before: Mapping[str, strict.Count]  # samples of each source before it
    cursor: strict.Count
    given: Mapping[str, strict.Count]  # samples up to this checkpoint, including sources that are no longer read
    windows: NotRequired[Mapping[str, strict.Count]]  # windows of an epoch of each source


class Mixture:
    """The training samples of a run."""

    def __init__(
        self,
        parts: Sequence[tuple[str, TokenShards, float]],
        sequence: int,
        seed: int,
        *,
        mask_documents: bool = True,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """`state`: the checkpoint's, for a resume."""
        if not parts:
            raise ValueError("there is nothing to train on; name folders under data.train")
        same_tokenizer([shards for _, shards, _ in parts])
        self.sources = [windows(shards, sequence, mask_documents, name, seed) for name, shards, _ in parts]
        self.weights = [(name, float(weight)) for name, _, weight in parts]
        self.schedule = Schedule([weight for _, weight in self.weights], seed)
        self.since = 0
        before: Mapping[str, int] = {}
        counts = {source.name: source.count for source in self.sources}
        then: Mapping[str, int] = {}
        if state:
            saved = strict.held(dict(state), MixtureState, "the checkpoint's place in the data")
            then = saved.get("windows", {})
            same = saved["weights"] == self.weights and all(then.get(name, n) == n for name, n in counts.items())
            self.since, before = (saved["since"], saved["before"]) if same else (saved["cursor"], saved["given"])
        # windows of another length: continue at the same token of the epoch
        self.before = [-(-before.get(name, 0) * n // (then.get(name) or n)) for name, n in counts.items()]
        self.others = {name: n for name, n in before.items() if name not in counts}  # sources of earlier stages
        self.counts = {**{name: then[name] for name in self.others if name in then}, **counts}

    def batch(self, sample: int, size: int) -> Batch:
        assert sample >= self.since, "what was before other weights is known to nobody"
        places = map(self.schedule.__getitem__, range(sample - self.since, sample - self.since + size))
        return stack([self.sources[source].row(self.before[source] + n) for source, n in places])

    def state(self, cursor: int) -> dict[str, Any]:
        names = [name for name, _ in self.weights]
        now = [a + b for a, b in zip(self.before, self.schedule.counts(cursor - self.since), strict=True)]
        before, given = ({**self.others, **dict(zip(names, each, strict=True))} for each in (self.before, now))
        weights, places = [list(each) for each in self.weights], {"since": self.since, "cursor": cursor}
        return {"weights": weights, **places, "before": before, "given": given, "windows": self.counts}

    def epochs(self, cursor: int) -> dict[str, float]:
        given: Mapping[str, int] = self.state(cursor)["given"]
        return {name: given[name] / self.counts[name] for name, _ in self.weights}


def same_tokenizer(found: Sequence[TokenShards]) -> None:
    for shards in found[1:]:
        if (shards.tokenizer, shards.eos, shards.start) != (found[0].tokenizer, found[0].eos, found[0].start):
            raise ValueError(
                f"{shards.folder} and {found[0].folder} were made with different tokenizers; prepare all data with one"
            )


class Mock:
    """Random tokens instead of data, for benchmarks."""

    def state(self, cursor: int) -> dict[str, Any]:
        return {}

    def epochs(self, cursor: int) -> dict[str, float]:
        return {}

    def __init__(self, vocab: int, sequence: int, seed: int = 0) -> None:
        self.vocab, self.sequence, self.seed = vocab, sequence, seed

    def batch(self, sample: int, size: int) -> Batch:
        shape = (self.sequence + 1,)
        ids = [
            torch.randint(self.vocab, shape, generator=rng.generator(self.seed, "mock", n))
            for n in range(sample, sample + size)
        ]
        both = torch.stack(ids)
        positions = torch.arange(self.sequence).repeat(size, 1)
        return Batch(both[:, :-1].contiguous(), both[:, 1:].contiguous(), torch.zeros_like(positions).int(), positions)


# ---- validation


class Validation:
    """A validation set in order; each token is scored once."""

    def __init__(self, name: str, shards: TokenShards, sequence: int, *, mask_documents: bool = True) -> None:
        self.name, self.windows = name, windows(shards, sequence, mask_documents)
        self.tokens, self.bytes = shards.tokens, shards.bytes

    def batches(self, size: int, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        """Yield this rank's batches. All ranks have equally many, and surplus windows are not scored."""
        windows = self.windows
        for first in range(rank * size, self.rounds(size, ranks) * size * ranks, size * ranks):
            rows = [windows.row(min(n, windows.count - 1)) for n in range(first, first + size)]
            for n in range(max(windows.count, first), first + size):
                rows[n - first][1].fill(IGNORE)
            yield stack(rows)

    def rounds(self, size: int, ranks: int = 1) -> int:
        """Return how many batches each rank has."""
        return -(-self.windows.count // (size * ranks))

    def bits_per_byte(self, nats: float) -> float:
        """Convert `nats`, the sum of -log p over all labels of the set, to bits per byte."""
        return bits_per_byte(nats, self.bytes)


def bits_per_byte(nats: float, size: int) -> float:
    return nats / math.log(2) / size


# ---- ahead of time


class Loader:
    """Prefetch a rank's batches in a thread; yields (batch, the cursor after it).

    Save the cursor of the last batch that was used; the thread is already further.
    """

    def __init__(
        self,
        samples: Samples,
        cursor: int,
        size: int,
        rank: int = 0,
        ranks: int = 1,
        *,
        ahead: int = 2,
        pin: bool = False,
    ) -> None:
        self.samples, self.cursor, self.size, self.rank, self.ranks, self.pin = samples, cursor, size, rank, ranks, pin
        self.queue: queue.Queue[tuple[Batch, int] | BaseException] = queue.Queue(ahead)
        self.closed = threading.Event()
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self.work, name="loader", daemon=True)
        self.thread.start()

    def work(self) -> None:
        cursor = self.cursor
        while not self.closed.is_set():
            item: tuple[Batch, int] | BaseException
            try:
                batch = self.samples.batch(cursor + self.rank * self.size, self.size)
                cursor += self.size * self.ranks
                item = (batch.pinned() if self.pin else batch, cursor)
            except BaseException as error:  # the caller handles it
                item = error
            while not self.closed.is_set():
                try:
                    self.queue.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if isinstance(item, BaseException):
                return

    def __iter__(self) -> Iterator[tuple[Batch, int]]:
        return self

    def __next__(self) -> tuple[Batch, int]:
        if self.closed.is_set():
            raise ValueError("the loader is closed")
        if self.failure is None:
            item = self.queue.get()
            if not isinstance(item, BaseException):
                return item
            self.failure = item
        raise self.failure

    def close(self) -> None:
        self.closed.set()
        self.thread.join()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
