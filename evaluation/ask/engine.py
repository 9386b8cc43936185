"""Ask a decoder how likely one text is after another (`score`), and what comes next (`write`).

Work is a generator that yields the rows of a forward and receives their hidden states. So all ranks can run each
forward together, as expert and data parallelism need; a rank without work left computes one dummy token until the last
rank has finished.

Shapes: T packed tokens, D hidden, U scored places, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn import functional
from tqdm import tqdm

from evaluation.ask.attention import Memory, Remembering, Rows, laid_out, next_tokens
from evaluation.ask.packing import FOREVER, Batch, Ids, Input, Plan, Row, plan, share
from training.kernels.attention import capped
from training.model.decoder import Decoder, Layer
from training.model.layers import LatentAttention
from training.parallel.collectives import all_gather, gather
from training.parallel.shard import moe_blocks, reshard
from upcycle.arch.rope import original

LOGITS = 1 << 26  # elements of logits at a time

Score = tuple[float, bool]  # log-probability in nats; whether greedy decoding would write it
Work = Generator[tuple[Rows, str], Tensor, None]  # yields (rows, Memory.keep), is sent hidden states [T, D]
DUMMY = Row([0], [0], [FOREVER])


@dataclass(frozen=True)
class Ranks:
    """Name this process's share of the work: `index` of `count`; ranks of one tensor-parallel group have the same
    share."""

    index: int = 0
    count: int = 1

    def any(self, mine: bool) -> bool:
        """Return whether any process passes True; all processes call it together."""
        if not dist.is_initialized():
            return mine
        flag = torch.tensor(int(mine), dtype=torch.int32)  # on the host: over gloo, even if there is NCCL
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def gather(self, value: Any) -> list[Any]:
        """Return each process's value in the order of ranks, sent as JSON and never as a pickle."""
        return gather(value)


@dataclass
class Engine:
    model: Decoder
    budget: int  # tokens of a forward
    ranks: Ranks = field(default_factory=Ranks)
    tensor_parallel: dist.ProcessGroup | None = None
    progress: bool = True
    poll: Callable[[], object] = bool  # called before each forward on all ranks; it may raise an error to end the work
    work: dict[str, float] = field(default_factory=lambda: {"tokens": 0.0, "forwards": 0.0})

    def __post_init__(self) -> None:
        self.is_open = False
        self.memory = Memory()
        self.head_VD = torch.empty(0)
        self.device = next(self.model.parameters()).device

    @contextmanager
    def open(self) -> Iterator[Engine]:
        """Make attention read packed rows and stop routers from counting; restore the model afterwards.

        A nested call changes nothing.
        """
        if self.is_open:
            yield self
            return
        dense, was_training = self.model.dense, self.model.training
        layers = {name: layer for name, layer in self.model.layers.items() if isinstance(layer, Layer)}
        attends = [(layer.attention, layer.attention.attend) for layer in layers.values()]
        balances = [(block, block.balance) for block in moe_blocks(self.model)]
        for name, layer in layers.items():
            window = dense.window if int(name) in dense.window_layers else None
            latent = 0 if dense.latent is None else dense.latent.kv_rank
            layer.attention.attend = Remembering(
                int(name), window, dense.attention_scale, dense.attention_cap, self.memory, latent
            )
            if isinstance(layer.attention, LatentAttention):
                layer.attention.absorbed = True
        for block, _ in balances:  # no capacity, no auxiliary loss, nothing counted
            block.balance = None
        if isinstance(self.model, FSDPModule):
            register_fsdp_forward_method(self.model, "hidden")
        try:
            self.is_open = True
            self.model.eval()
            # packed lengths differ between forwards, and a compiled layer would be compiled again for each length
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                head = self.model.head_weight.detach().to(self.model.compute)
                self.head_VD = head.full_tensor() if isinstance(head, DTensor) else head
                yield self
        finally:
            self.is_open = False
            self.model.train(was_training)
            for attention, attend in attends:
                attention.attend = attend
                if isinstance(attention, LatentAttention):
                    attention.absorbed = False
            for block, balance in balances:
                block.balance = balance
            reshard(self.model)
            self.memory.forget()
            self.head_VD = torch.empty(0)

    # ---- forwards

    def together(self, work: Work) -> None:
        """Do the work, each forward together with all other ranks."""
        forward = next(work, None)
        while self.ranks.any(forward is not None):
            self.poll()
            if forward is None:
                self.hidden(laid_out([DUMMY], 0, 1, 0, self.device), "")
                continue
            try:
                forward = work.send(self.hidden(*forward))
            except StopIteration:
                forward = None

    def hidden(self, rows: Rows, keep: str) -> Tensor:
        self.memory.rows, self.memory.keep = rows, keep
        self.work["tokens"] += len(rows.tokens_T)
        self.work["forwards"] += 1
        tokens, positions, group = rows.tokens_T, rows.positions_T, self.tensor_parallel
        if group is None:
            hidden: Tensor = self.model.hidden(tokens[None], positions[None], None, rows.length)
            return hidden[0]
        # between attention and FFN each tensor-parallel rank has an equal part of the tokens
        missing = -len(tokens) % group.size()
        tokens, positions = (functional.pad(x, (0, missing)) for x in (tokens, positions))
        own = tokens.chunk(group.size())[group.rank()]
        hidden = self.model.hidden(own[None], positions[None], None, rows.length)
        return all_gather(hidden[0], group)[: len(rows.tokens_T)]

    def each(
        self, planned: Plan, length: int, what: str, answer: Callable[[Batch, int], Work],
        answered: Callable[[int], bool],
    ) -> Work:  # fmt: skip
        """Call `answer` with each batch of this rank and the length of its prefix, whose keys are in the memory.

        Leave out a batch if all its inputs are `answered`. The other batches keep all their inputs, because a forward
        of fewer tokens may round differently.
        """
        left = [
            batch for batch in planned.batches if not all(map(answered, (n for row in batch.rows for n in row.places)))
        ]
        batches, group = share(left, planned.prefixes, self.ranks.index, self.ranks.count), -1
        with tqdm(
            total=sum(batch.tokens for batch in batches), desc=what, unit="tok", disable=not self.progress
        ) as bar:
            for batch in batches:
                prefix = planned.prefixes[batch.group]
                if batch.group != group:
                    yield from self.fill(prefix, length)
                    group = batch.group
                yield from answer(batch, len(prefix))
                bar.update(batch.tokens)

    def fill(self, prefix: Ids, length: int) -> Work:
        """Compute the keys and values of the prefix that all rows of a group attend to."""
        self.memory.forget()
        if len(prefix):
            row = Row(prefix.tolist(), list(range(len(prefix))), [FOREVER] * len(prefix))
            yield laid_out([row], 0, length, 0, self.device), "prefix"

    # ---- likelihoods

    def score(
        self, pairs: Sequence[tuple[Ids, Ids]], done: Callable[[Mapping[int, Score]], None], known: Container[int] = ()
    ) -> None:
        """Score (context, continuation) pairs; give `done` this rank's scores by the pair's number, batch by batch.

        `known`: the numbers of pairs whose scores are not needed.
        """
        for numbers, length in self.regimes([len(a) + len(b) - 1 for a, b in pairs]):
            asked: dict[bytes, list[int]] = {}  # the tokens that a forward reads -> the pairs that it answers
            for number in numbers:
                context, continuation = pairs[number]
                asked.setdefault(np.concatenate([context, continuation[:-1]]).tobytes(), []).append(number)
            inputs = []
            for raw, asking in asked.items():
                tokens = np.frombuffer(raw, np.int64)
                inputs.append(Input(tokens, len(tokens) - max(len(pairs[n][1]) for n in asking)))
            askers = list(asked.values())
            answer = partial(self.score_batch, askers=askers, pairs=pairs, length=length, done=done)
            answered = [all(number in known for number in asking) for asking in askers]
            self.together(self.each(plan(inputs, self.budget), length, "scoring", answer, answered.__getitem__))

    def score_batch(
        self, batch: Batch, prefix: int, askers: Sequence[Sequence[int]], pairs: Sequence[tuple[Ids, Ids]], length: int,
        done: Callable[[Mapping[int, Score]], None],
    ) -> Work:  # fmt: skip
        hidden = yield laid_out(batch.rows, prefix, length, 0, self.device), ""
        starts = np.cumsum([0, *map(len, batch.rows)])
        found = [
            (number, start + np.array(at[-len(pairs[number][1]) :]))
            for start, row in zip(starts, batch.rows, strict=False)
            for index, at in row.places.items()
            for number in askers[index]
        ]
        targets = [pairs[number][1] for number, _ in found]
        logp, greedy = self.scored(hidden, np.concatenate([places for _, places in found]), np.concatenate(targets))
        ends = np.cumsum([len(target) for target in targets])[:-1]
        answers = zip(found, np.split(logp, ends), np.split(greedy, ends), strict=True)
        done({number: (float(nats.sum()), bool(best.all())) for (number, _), nats, best in answers})

    def scored(
        self, hidden_TD: Tensor, places: NDArray[np.int64], targets: Ids
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Return log p(target | place) of each pair and whether no token is likelier; compute logits only there."""
        unique, which = np.unique(places, return_inverse=True)
        order = np.argsort(which, kind="stable")
        target = torch.from_numpy(targets[order]).to(self.device)
        row = torch.from_numpy(which[order]).to(self.device)
        x_UD = hidden_TD[torch.from_numpy(unique).to(self.device)]
        logp, best = [], []
        step = max(1, LOGITS // len(self.head_VD))
        for start in range(0, len(unique), step):
            logits = self.logits(x_UD[start : start + step])
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            a, b = np.searchsorted(which[order], [start, start + step])
            rows, expected = row[a:b] - start, target[a:b]
            logp.append(logits[rows, expected] - logits.logsumexp(-1)[rows])
            best.append(logits.argmax(-1)[rows] == expected)
        inverse = np.argsort(order)
        return torch.cat(logp).double().cpu().numpy()[inverse], torch.cat(best).cpu().numpy()[inverse]

    # ---- greedy texts

    def write(
        self, prompts: Sequence[Ids], limit: int, stopped: Callable[[Sequence[int]], bool],
        done: Callable[[Mapping[int, Sequence[int]]], None], known: Container[int] = (),
    ) -> None:  # fmt: skip
        """Write at most `limit` greedy tokens after each prompt, or until `stopped` is true; give `done` this rank's
        tokens by the prompt's number, batch by batch. `known`: the numbers of prompts whose texts are not needed."""
        for numbers, length in self.regimes([len(prompt) + limit for prompt in prompts]):
            inputs = [Input(prompts[n], len(prompts[n]) - 1) for n in numbers]
            answer = partial(self.write_batch, numbers=numbers, length=length, limit=limit, stopped=stopped, done=done)
            answered = [number in known for number in numbers]
            planned = plan(inputs, self.budget, trees=False)
            self.together(self.each(planned, length, "writing", answer, answered.__getitem__))

    def write_batch(
        self, batch: Batch, prefix: int, numbers: Sequence[int], length: int, limit: int,
        stopped: Callable[[Sequence[int]], bool], done: Callable[[Mapping[int, Sequence[int]]], None],
    ) -> Work:  # fmt: skip
        rows = laid_out(batch.rows, prefix, length, limit, self.device)
        ends = np.cumsum([len(row) for row in batch.rows]) - 1
        hidden = yield rows, "own"
        hidden = hidden[torch.from_numpy(ends).to(self.device)]
        slot, alive = rows.queries[1], list(range(len(batch.rows)))
        texts: list[list[int]] = [[] for _ in alive]
        while True:
            for row, token in zip(alive, self.logits(hidden).argmax(-1).tolist(), strict=True):
                texts[row].append(token)
            alive = [row for row in alive if len(texts[row]) < limit and not stopped(texts[row])]
            if not alive:
                break
            at = [batch.rows[row].positions[-1] + len(texts[row]) for row in alive]
            rows = next_tokens(rows, alive, [texts[row][-1] for row in alive], at, slot)
            hidden = yield rows, ""
            slot += 1
        self.memory.own.clear()
        done({numbers[n]: text for row, text in zip(batch.rows, texts, strict=True) for n in row.places})

    # ---- small parts

    def logits(self, x_TD: Tensor) -> Tensor:
        dense = self.model.dense
        return capped(functional.linear(x_TD, self.head_VD) * dense.logit_scale, dense.logit_cap)

    def regimes(self, lengths: Sequence[int]) -> Iterator[tuple[list[int], int]]:
        """Yield (numbers, longest length) of sequences that can be computed together: all, except that longrope rotates
        sequences beyond its first training length in another way."""
        rope = self.model.dense.rope
        border = original(rope) if rope["rope_type"] == "longrope" else max(lengths, default=0)
        for long in (False, True):
            numbers = [n for n, length in enumerate(lengths) if (length > border) == long]
            if numbers:
                yield numbers, max(lengths[n] for n in numbers)
