"""A real model, real questions: an exact upcycle flips no answer, a changed one does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from evaluation import compare, results
from evaluation.results import Item
from tests.parity.test_stories import STORIES, convert
from tests.unit.evaluation.test_compare import task, write
from training.checkpoint import layout
from training.model.decoder import Decoder
from upcycle import text

QUESTIONS = STORIES.parent / "eval" / "arc" / "arc_easy.jsonl"
ITEMS = 60
pytestmark = pytest.mark.skipif(not QUESTIONS.is_file(), reason="the shared data folder is not here")


def load(source: Path) -> Decoder:
    with layout.opened(source) as origin:
        return layout.load(Decoder(origin.spec, experts="reference"), origin)


@torch.no_grad()
def answered(model: Decoder, folder: Path) -> Path:
    """The first questions of ARC-Easy, a choice at a time, as a run of a suite would leave them."""
    encode, items = text.encoder(STORIES), []
    for doc, line in enumerate(QUESTIONS.read_text().splitlines()[:ITEMS]):
        row = json.loads(line)
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
    return write(folder, [task("arc", ITEMS)], items)


def test_an_exact_upcycle_flips_nothing_and_a_changed_one_does(tmp_path: Path) -> None:
    moe = convert(tmp_path / "moe", "method.name=virtual_group", "experts=4", "granularity=2", "top_k=2")
    dense, upcycled, changed = load(STORIES), load(moe), load(moe)
    with torch.no_grad():
        changed.layers["2"].ffn.experts.down.mul_(-1)  # type: ignore[union-attr]
    runs = [
        answered(model, tmp_path / name)
        for name, model in (("dense", dense), ("exact", upcycled), ("changed", changed))
    ]
    exact, other = compare.compare(runs)
    assert not exact.flips
    assert (exact.differences[0].only_a, exact.differences[0].only_b, exact.differences[0].p) == (0, 0, 1.0)
    was, now = ({i.doc: i.logprobs for i in results.items(run)} for run in runs[:2])
    assert all(now[doc] == pytest.approx(was[doc], abs=1e-3) for doc in was)  # float32, sums of up to 60 tokens
    assert other.flips and other.differences[0].only_a == sum(not f.gained for f in other.flips)
