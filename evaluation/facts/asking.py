"""Ask a model the questions of a suite, and measure its held-out documents.

One forward answers a question. It gives the log-probability of the right answer and of each wrong one, and it says
whether greedy decoding would write the right one: every token of it must be the likeliest after the tokens before. So
no text is generated; a test generates texts and finds the same answers.

A prompt begins with the token that comes before a document in training (`upcycle prepare`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evaluation.ask import load
from evaluation.ask.engine import Engine, Score
from evaluation.ask.packing import Ids, common
from evaluation.facts.suite import Suite, Text
from evaluation.facts.world import Question


@dataclass(frozen=True)
class Answered:
    question: Question
    scores: tuple[Score, ...]  # of the right answer, then of each wrong one

    @property
    def exact(self) -> bool:
        """Return whether greedy decoding writes the right answer."""
        return self.scores[0][1]

    @property
    def chosen(self) -> bool:
        """Return whether the right answer is likelier than every wrong one."""
        right, *wrong = (nats for nats, _ in self.scores)
        return all(right > nats for nats in wrong)


@dataclass(frozen=True)
class Read:
    text: Text
    nats: float  # of the whole text
    tokens: int


def ask(engine: Engine, tokenizer: Any, suite: Suite) -> tuple[list[Answered], dict[str, list[Read]]]:
    """Return the answers to all questions of a suite, and how well the model predicts its held-out documents."""
    pairs, owner = list[tuple[Ids, Ids]](), list[int]()
    for number, each in enumerate(question_pairs(tokenizer, suite.questions)):
        pairs += each
        owner += [number] * len(each)
    texts = [(group, text) for group, inside in suite.texts.items() for text in inside]
    length = engine.model.dense.context
    read = text_pairs(tokenizer, [text["text"] for _, text in texts], length)
    scores = scored(engine, [*pairs, *read], length)
    of_each: list[list[Score]] = [[] for _ in suite.questions]
    for number, score in zip(owner, scores, strict=False):
        of_each[number].append(score)
    out: dict[str, list[Read]] = {group: [] for group in suite.texts}
    for (group, text), (_, ids), (nats, _) in zip(texts, read, scores[len(pairs) :], strict=True):
        out[group].append(Read(text, -nats, len(ids)))
    return [Answered(q, tuple(s)) for q, s in zip(suite.questions, of_each, strict=True)], out


def question_pairs(tokenizer: Any, questions: Sequence[Question]) -> list[list[tuple[Ids, Ids]]]:
    """Return, for each question, the tokens (prompt, answer) of the right answer and of each wrong one."""
    asked = [[(q.prompt, f"{q.prompt} {answer}") for answer in (q.answer, *q.others)] for q in questions]
    unique = dict.fromkeys(text for pairs in asked for pair in pairs for text in pair)
    ids, start = load.encoded(tokenizer, list(unique), special=False), start_token(tokenizer)
    return [[divided(start, ids[prompt], ids[whole]) for prompt, whole in pairs] for pairs in asked]


def divided(start: int, prompt: Sequence[int], whole: Sequence[int]) -> tuple[Ids, Ids]:
    """Divide a prompt with its answer where the prompt ends; a token that holds the end of the prompt and the start of
    the answer belongs to the answer."""
    before, all_ids = np.asarray(prompt, np.int64), np.asarray(whole, np.int64)
    cut = common(before, all_ids)
    return np.concatenate([[start], all_ids[:cut]]), all_ids[cut:]


def text_pairs(tokenizer: Any, texts: Sequence[str], length: int) -> list[tuple[Ids, Ids]]:
    """Return the tokens of whole texts, each after the token that begins a document; a longer text loses its end."""
    ids, start = load.encoded(tokenizer, list(dict.fromkeys(texts)), special=False), np.array([start_token(tokenizer)])
    return [(start, np.asarray(ids[text][:length], np.int64)) for text in texts]


def start_token(tokenizer: Any) -> int:
    """Return the token before a document: the one that the tokenizer itself puts before a text, or else the end of the
    document before."""
    end = tokenizer.eos_token_id
    before = [token for token in tokenizer("")["input_ids"] if token != end]
    if not before and end is None:
        raise ValueError("the tokenizer has no end-of-text token, and a prompt begins with it; set its eos_token")
    return int((before or [end])[0])


def scored(engine: Engine, pairs: Sequence[tuple[Ids, Ids]], length: int) -> list[Score]:
    """Return the log-probability of each continuation, and whether greedy decoding would write it.

    The model reads `length` tokens; a longer context loses its beginning.
    """
    inputs = []
    for context, continuation in pairs:
        if not 1 <= len(continuation) <= length:
            raise ValueError(
                f"an answer has {len(continuation)} tokens, and the model reads 1 to {length}; leave the question out"
            )
        inputs.append((context[-(length + 1 - len(continuation)) :], continuation))
    found: dict[int, Score] = {}
    with engine.open():
        engine.score(inputs, found.update)
    return [found[number] for number in range(len(inputs))]
