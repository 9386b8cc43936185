"""Held-out text that training text holds too is left out, as sets of 13 tokens in a row say, and the rest stays as it is."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.unit.training.test_data import digests, jsonl, make_tokenizer, run, texts, tokenizer
from training.cli.prepare import main
from training.data import overlap
from training.data.overlap import GRAM, MOST
from training.data.prepare import PrepareConfig, prepare
from training.data.shards import Shard, TokenShards, read_meta
from training.data.sources import texts as sources
from upcycle.io.job import Worker

__all__ = ["tokenizer"]  # a fixture


def made(*parts: list[int]) -> TokenShards:
    """Shards of one document each."""
    held = [np.array(part, np.uint16) for part in parts]
    tables = [np.array([0, len(part)], np.uint64) for part in held]
    shards = tuple(Shard(ids, table, table) for ids, table in zip(held, tables, strict=True))
    return TokenShards(Path("none"), shards, 1 << 16, 0, 0, "")


def brute(document: list[int], training: list[list[int]]) -> int:
    """Count the seen tokens of a document by sets of tuples."""
    known = {tuple(part[at : at + GRAM]) for part in training for at in range(len(part) - GRAM + 1)}
    seen = set()
    for at in range(len(document) - GRAM + 1):
        if tuple(document[at : at + GRAM]) in known:
            seen |= set(range(at, at + GRAM))
    return len(seen)


@pytest.mark.parametrize("piece", [16, 100, 1 << 22])
def test_seen_tokens_are_those_that_sets_of_tuples_find(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "PIECE", piece)
    chance = random.Random(piece)
    training = [[chance.randrange(400) for _ in range(chance.randint(1, 300))] for _ in range(20)]
    documents = []
    for number in range(60):
        document = [chance.randrange(400) for _ in range(chance.randint(1, 80))]
        source = chance.choice(training)
        if number % 2:  # a part of the training text, often of 12 to 14 tokens, at the borders too
            at = chance.choice([0, chance.randrange(len(source)), max(0, len(source) - 13)])
            place = chance.randrange(len(document) + 1)
            document[place:place] = source[at : at + chance.choice([12, 13, 14, 40])]
        documents.append(document)
    found = overlap.overlap(
        (((0, number), np.array(document, np.uint16)) for number, document in enumerate(documents, 1)),
        [made(*training)],
    )
    seen = [brute(document, training) for document in documents]
    out = {(0, number) for number, each in enumerate(seen, 1) if each > MOST * len(documents[number - 1])}
    assert found.left_out == out and 5 < len(out) < 55 and found.documents == 60
    lengths = [len(document) for document in documents]
    assert found.seen == sum(seen) / sum(lengths)
    kept = [number for number in range(60) if (0, number + 1) not in out]
    assert found.seen_after == sum(seen[n] for n in kept) / sum(lengths[n] for n in kept) > 0


@pytest.mark.parametrize("long", [1 << 22, 100], ids=["whole", "in pieces"])
def test_a_held_out_folder_is_that_of_the_unseen_documents(
    long: int, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "LONG", long)
    monkeypatch.setattr(sources.text, "PIECE", 60)
    shown, new = texts(30, 1), texts(40, 2)
    run(tmp_path / "train", tokenizer, jsonl(tmp_path / "train.jsonl", shown))
    wordy = [text for text in shown if len(text) > 100]
    mixed = [text for pair in zip(new, wordy * 9, strict=False) for text in pair]
    assert len(mixed) == 80
    held = [jsonl(tmp_path / "a.jsonl", mixed[:50]), jsonl(tmp_path / "b.jsonl", mixed[50:])]
    clean = [jsonl(tmp_path / "c.jsonl", mixed[:50:2]), jsonl(tmp_path / "d.jsonl", mixed[50::2])]
    words = [f"tokenizer={tokenizer}", f"sources=[{held[0]},{held[1]}]", f"unseen=[{tmp_path / 'train'}]"]
    assert main([str(tmp_path / "out"), *words]) == 0
    want = run(tmp_path / "want", tokenizer, *clean)
    got = TokenShards.open(tmp_path / "out")
    assert [got.document(n).tolist() for n in range(got.documents)] == [
        want.document(n).tolist() for n in range(want.documents)
    ]
    assert "40 of 80 documents are left out" in capsys.readouterr().out
    found = read_meta(tmp_path / "out")["overlap"]
    assert found["left_out"] == 40 and found["seen"] > 0.3 and found["seen_after"] < 0.05
    got.verify()

    both = PrepareConfig(
        str(tmp_path / "two"), str(tokenizer), tuple(map(str, held)), unseen=(str(tmp_path / "train"),)
    )
    other = threading.Thread(target=lambda: prepare(both, Worker(1, 2), quiet=True))
    other.start()
    prepare(both, Worker(0, 2), quiet=True)
    other.join()
    assert digests(tmp_path / "two") == digests(tmp_path / "out")


def test_a_dataset_of_the_hub_is_compared_too(tokenizer: Path, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    shown, new = [text for text in texts(30, 1) if len(text) > 100], texts(12, 2)
    run(tmp_path / "train", tokenizer, jsonl(tmp_path / "train.jsonl", shown))
    (tmp_path / "set").mkdir()
    jsonl(tmp_path / "set" / "train.jsonl", [text for pair in zip(new, shown, strict=False) for text in pair])
    config = PrepareConfig(
        str(tmp_path / "out"), str(tokenizer), (f"hf:{tmp_path / 'set'}",), shard_tokens=50,
        unseen=(str(tmp_path / "train"),), take="1/2",
    )  # fmt: skip
    got = TokenShards.open(prepare(config, quiet=True))
    want = run(tmp_path / "want", tokenizer, jsonl(tmp_path / "new.jsonl", new))
    assert [got.document(n).tolist() for n in range(got.documents)] == [
        want.document(n).tolist() for n in range(want.documents)
    ]


def test_parts_of_a_text_are_apart_and_together_all(tokenizer: Path, tmp_path: Path) -> None:
    file, documents = jsonl(tmp_path / "a.jsonl", texts(31, 3)), 0
    whole = run(tmp_path / "whole", tokenizer, file)
    for number in (1, 2, 3):
        part = run(tmp_path / f"part{number}", tokenizer, file, take=f"{number}/3")
        mine = [whole.document(n).tolist() for n in range(number - 1, whole.documents, 3)]
        assert [part.document(n).tolist() for n in range(part.documents)] == mine
        documents += part.documents
    assert documents == whole.documents == 31
    with pytest.raises(ValueError, match="exists and was made from something else"):
        run(tmp_path / "part1", tokenizer, file)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["take=3/2"], "take is '3/2'; write K/N with K from 1 to N"),
        (["take=half"], "take is 'half'; write K/N"),
        (["take=1/2", "kind=chat"], "take is for kind=text"),
        (["unseen=[{here}]", "kind=chat"], "unseen is for kind=text"),
        (["unseen=[{here}/other]"], "was prepared with another tokenizer"),
        (["unseen=[{here}/nowhere]"], "there is no folder"),
    ],
)
def test_wrong_words_are_a_sentence(
    words: list[str], said: str, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bos").mkdir()
    file = jsonl(tmp_path / "a.jsonl", texts(5))
    run(tmp_path / "other", make_tokenizer(tmp_path / "bos", bos=True), file)
    own = [f"tokenizer={tokenizer}", f"sources=[{file}]", *(word.format(here=tmp_path) for word in words)]
    assert main([str(tmp_path / "out"), *own]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()
