"""A model and questions: an exact upcycle flips no answer, a changed one does. Real ones where they are at hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from evaluation.ask.tasks import SUITES
from evaluation.judge import compare, logged
from evaluation.judge.results import Item
from tests.parity import asked
from tests.parity.test_stories import STORIES
from tests.unit.evaluation.test_compare import task, write
from training.checkpoint import layout
from training.model.decoder import Decoder
from upcycle.__main__ import main as upcycle
from upcycle.text import tokens as text

QUESTIONS = STORIES.parent / "eval" / "arc" / "arc_easy.jsonl"
ITEMS = 60
real = pytest.mark.skipif(not QUESTIONS.is_file(), reason="the shared data folder is not here")


def questions(source: Path) -> list[dict[str, Any]]:
    """The first of ARC-Easy for the trained model, those of the tiny suite for another."""
    if source == STORIES:
        return [json.loads(line) for line in QUESTIONS.read_text().splitlines()[:ITEMS]]
    rows = [json.loads(line) for line in (SUITES / "tiny" / "stories.jsonl").read_text().splitlines()]
    return [{"query": row["text"], "choices": [row["right"], *row["wrong"]], "gold": 0} for row in rows]


def load(source: Path) -> Decoder:
    with layout.opened(source) as origin:
        return layout.load(Decoder(origin.spec, experts="reference"), origin)


@torch.no_grad()
def answered(model: Decoder, source: Path, folder: Path) -> Path:
    """Questions, a choice at a time, as a run of a suite would leave them."""
    encode, items = text.encoder(source), []
    for doc, row in enumerate(questions(source)):
        context = encode(f"{row['query']}\nAnswer:")
        logprobs = []
        for choice in row["choices"]:
            whole = torch.tensor([encode(f"{row['query']}\nAnswer: {choice}")])
            scored = model(whole[:, :-1]).log_softmax(-1).gather(2, whole[:, 1:, None])[0, len(context) - 1 :]
            logprobs.append(float(scored.sum()))
        right = logprobs.index(max(logprobs)) == row["gold"]
        target, choices = str(row["gold"]), tuple(row["choices"])
        items.append(
            Item("arc", doc, f"d{doc}", f"p{doc}", target, {"acc": float(right)}, tuple(logprobs), (), "", choices)
        )
    return write(folder, [task("arc", len(items))], items)


@pytest.mark.parametrize("name", ["random", pytest.param("trained", marks=real)])
def test_an_exact_upcycle_flips_nothing_and_a_changed_one_does(name: str, tmp_path: Path) -> None:
    source = STORIES if name == "trained" else asked.make(tmp_path / "llama")
    moe, words = tmp_path / "moe", ("method.name=virtual_group", "experts=4", "granularity=2", "top_k=2")
    assert upcycle(["convert", f"source={source}", f"output={moe}", *words]) == 0
    dense, upcycled, changed = load(source), load(moe), load(moe)
    with torch.no_grad():
        changed.layers["1"].ffn.experts.down.mul_(-1)  # type: ignore[union-attr]
    runs = [
        answered(model, source, tmp_path / folder)
        for folder, model in (("dense", dense), ("exact", upcycled), ("changed", changed))
    ]
    exact, other = compare.compare(runs).comparisons
    assert not exact.flips
    assert (exact.differences[0].only_a, exact.differences[0].only_b) == (0, 0)
    was, now = ({i.doc: i.logprobs for i in logged.load(run).items} for run in runs[:2])
    assert all(now[doc] == pytest.approx(was[doc], abs=1e-3) for doc in was)  # float32, sums of up to 60 tokens
    assert other.flips and other.differences[0].only_a == sum(not f.gained for f in other.flips)
