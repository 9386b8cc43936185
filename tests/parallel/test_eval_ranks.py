"""Several processes answer as one does, though they have different numbers of forwards, and none waits for ever."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from evaluation.ask.engine import Engine
from evaluation.ask.harness import ranks_of
from evaluation.ask.lm import DecoderLM
from tests.parallel import models
from tests.parallel.ranks import run
from training.parallel.mesh import MeshConfig, ParallelMesh
from training.parallel.shard import parallelize

# 32 tokens that all share, then questions of other lengths with endings; one more long one than there are ranks
SHARED = np.arange(32) % models.VOCAB


def pairs() -> list[tuple[Any, Any]]:
    draw = np.random.default_rng(0)

    def some(size: int) -> Any:
        return draw.integers(0, models.VOCAB, size)

    found = []
    for size in (2, 3, 5, 7, 9, 11, 13):
        question = np.concatenate([SHARED, some(size)])
        found += [(question, some(ending)) for ending in (1, 1, 2, 4)]
    return [*found, (some(9), some(30)), (some(1), some(1))]


@dataclass(frozen=True)
class Answers:
    scores: dict[int, tuple[float, bool]]
    texts: dict[int, list[int]]
    forwards: int
    tokens: int


def answers(model: str, mesh: ParallelMesh, budget: int) -> Answers:
    decoder = models.make(model)
    if mesh.world > 1:
        parallelize(decoder, mesh)
    engine = Engine(decoder, budget, ranks_of(mesh), mesh.group("tp"), progress=False)
    scores: dict[int, tuple[float, bool]] = {}
    texts: dict[int, list[int]] = {}
    with engine.open():
        engine.score(pairs(), scores.update)
        # each text has its own end, so that ranks write for different times
        engine.write(
            [context for context, _ in pairs()][::3], 9, lambda text: text[-1] % 5 == 0, lambda got: texts.update(got)
        )
    attends = {type(layer.attention.attend).__name__ for layer in decoder.layers.values()}
    assert "Remembering" not in attends
    return Answers(scores, texts, int(engine.work["forwards"]), int(engine.work["tokens"]))


class Words:
    """So much of a tokenizer as token ids need."""

    eos_token_id, bos_token_id = 0, None


def in_order(model: str, mesh: ParallelMesh, budget: int) -> list[tuple[float, bool]]:
    """What lm-eval gets: every answer, in the order of what it asked."""
    decoder = models.make(model)
    if mesh.world > 1:
        parallelize(decoder, mesh)
    lm = DecoderLM(Engine(decoder, budget, ranks_of(mesh), mesh.group("tp"), progress=False), Words())
    return lm.scores([(context.tolist(), continuation.tolist()) for context, continuation in [*pairs(), pairs()[3]]])


def ordered_on_ranks(rank: int, world: int, mesh: MeshConfig, budget: int) -> list[tuple[float, bool]]:
    return in_order("moe", ParallelMesh(mesh), budget)


def test_every_rank_gets_every_answer_in_the_order_of_the_requests() -> None:
    first, second = run(2, ordered_on_ranks, MeshConfig(ep=2), 48)
    torch.set_num_threads(1)
    alone = in_order("moe", ParallelMesh(MeshConfig()), 48)
    assert first == second and [greedy for _, greedy in first] == [greedy for _, greedy in alone]
    assert [nats for nats, _ in first] == pytest.approx([nats for nats, _ in alone], abs=1e-10)


def on_ranks(rank: int, world: int, cases: list[tuple[str, MeshConfig]], budget: int) -> list[Answers]:
    return [answers(model, ParallelMesh(mesh), budget) for model, mesh in cases]


CASES = [
    ("moe", MeshConfig(ep=2)),
    ("odd", MeshConfig(ep=2)),
    ("moe", MeshConfig()),  # FSDP alone
    ("dense", MeshConfig(tp=2)),
    ("odd", MeshConfig(tp=2, ep=2)),
    ("moe", MeshConfig(cp=2, etp=2)),
]


def test_ranks_answer_as_one_process_and_make_equally_many_forwards() -> None:
    budget = 48
    found = run(2, on_ranks, CASES, budget)
    torch.set_num_threads(1)
    for number, (model, mesh) in enumerate(CASES):
        ranks = [each[number] for each in found]
        alone = answers(model, ParallelMesh(MeshConfig()), budget)
        assert len({rank.forwards for rank in ranks}) == 1, (model, mesh)
        scores = {n: score for rank in ranks for n, score in rank.scores.items()}
        texts = {n: text for rank in ranks for n, text in rank.texts.items()}
        assert scores.keys() == alone.scores.keys() and texts == alone.texts, (model, mesh)
        for n, (logprob, greedy) in alone.scores.items():
            assert scores[n][0] == pytest.approx(logprob, abs=1e-10), (model, mesh, n)
            assert scores[n][1] == greedy
        if mesh.tp == 1:  # each has a share, and they are not alike
            assert all(rank.scores for rank in ranks)
            assert ranks[0].scores.keys().isdisjoint(ranks[1].scores)
            assert len(ranks[0].scores) != len(ranks[1].scores)
