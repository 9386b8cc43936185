"""benchmarks.evaluation on a small model: both sides answer alike, ours with fewer tokens, and a difference is seen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.evaluation import Asked, accuracy, compared, main
from evaluation.ask.tasks import SUITES
from tests.parity import asked

STORIES = Path(__file__).parents[2].parent / "shared" / "data" / "stories260k"


trained = pytest.mark.skipif(not STORIES.is_dir(), reason="the shared data folder is not here")


@pytest.mark.parametrize("name", ["random", pytest.param("trained", marks=trained)])
def test_both_answer_alike_and_the_last_line_is_a_row(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = STORIES if name == "trained" else asked.make(tmp_path / "model")
    assert main([str(model), "suite=tiny", "tasks=[tiny_stories,tiny_text,tiny_copy]", "batch_sizes=[1,4]"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    lines = sum(
        len((SUITES / "tiny" / f"{name}.jsonl").read_text().splitlines()) for name in ("stories", "text", "copy")
    )
    assert row["device"] and row["items"] == lines and [each["batch_size"] for each in row["hflm"]] == [1, 4]
    for theirs in row["hflm"]:
        assert theirs["largest_logprob_difference"] < 1e-3  # of whole texts, in float32
        assert theirs["other_texts"] == 0 and theirs["scores_equal"]
        assert 0 < row["ours"]["tokens"] < theirs["tokens"]
        assert 0 < theirs["answering_seconds"] <= theirs["seconds"]


def test_other_answers_are_seen() -> None:
    scores = {"a": {"acc": 1.0}, "b": {"acc": 0.5}, "c": {"exact_match": 0.0}}
    answers = {("a", 0): [-1.0, -2.0], ("b", 0): [-1.5], ("b", 1): [-3.0], ("c", 0): ["yes"]}
    one = Asked(1.0, 0.5, 10, 2, answers, scores)
    assert compared(one, one) == {"largest_logprob_difference": 0.0, "other_texts": 0, "scores_equal": True}
    other = replace(one, answers={**answers, ("b", 1): [-3.25], ("c", 0): ["no"]}, scores={**scores, "b": {"acc": 0.0}})
    assert compared(one, other) == {"largest_logprob_difference": 0.25, "other_texts": 1, "scores_equal": False}
    assert accuracy(one) == {"acc": pytest.approx(2 / 3), "exact_match": 0.0}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "checkpoint is not set"),
        (["m", "batch_sizes=[0]"], "one or more numbers from 1"),
        (["./no-such-folder", "suite=tiny"], "no-such-folder"),
    ],
)
def test_what_is_wrong_is_one_sentence(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert says in said
