"""Make a suite of a user's own documents: some are trained, some are held out, and questions end inside sentences.

The answer of a question is a number, a date, a name or a rare word, and the prompt is the text before it. The answer is
not in the prompt, and a question about a held-out document is left out if a trained one has the same words.

Files are read several times and never kept whole. A long document is cut at line ends into parts of PART characters,
if there are too few documents to hold some out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from random import Random
from typing import Any

from evaluation.facts.world import MONTHS, Question, alternatives
from training.data.sources.texts import find, texts

FEW = 20  # documents; fewer are cut into parts
PART = 4000  # characters of a part, and of a document whose loss is measured
SHARE = 0.1  # of the documents that are held out
EACH = 5  # questions about a document, at most
BEFORE, LEAST = 60, 8  # words of a prompt, at most and at least
SAME = 8  # words in a row that no trained document has, the first word of the answer included
RARE = 2  # a rare word occurs at most so often
ANSWER = 40  # characters of an answer, at most
MONTH = "|".join(MONTHS)
KINDS = {  # in this order: a date is not a number, and a name is not a rare word
    "date": rf"\d{{1,2}}\.? (?:{MONTH}) \d{{4}}|(?:{MONTH}) \d{{1,2}}, \d{{4}}|(?:{MONTH}) \d{{4}}",
    "number": r"\d+(?:[.,]\d+)*",
    "name": r"(?<=[a-z,;] )[A-Z][\w'’-]+(?: [A-Z][\w'’-]+)*",
    "rare word": r"[a-z]{6,}",
}
SPAN = re.compile("|".join(rf"(?P<k{n}>(?<= )(?:{form})(?!\w))" for n, form in enumerate(KINDS.values())))
WORD = re.compile(r"\w+")


def sources(documents: str) -> dict[str, str]:
    """Return what identifies the content of each file, by path."""
    return {source.place: source.mark for source in find([documents])}


def read(documents: str, cut: bool) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each document, or of each part of one."""
    for source in find([documents]):
        pieces, number = list[str](), 0
        for piece, closes in texts(source, lambda size: None):
            pieces.append(piece)
            if closes:
                text, pieces, number = "".join(pieces), [], number + 1
                for part, each in enumerate(parts(text) if cut else [text]):
                    if each.strip():
                        yield f"{source.name} {number}{f'.{part}' * cut}", each


def parts(text: str) -> Iterator[str]:
    """Yield a text in parts of about PART characters, cut after a line or before a word."""
    while text:
        end = len(text) if len(text) <= PART else max(text.rfind("\n", 0, PART), text.rfind(" ", 0, PART), 0) or PART
        yield text[:end]
        text = text[end:]


def content(
    documents: str, asked: int, seed: int
) -> tuple[Iterable[dict[str, Any]], list[Any], list[Any], list[Question]]:
    """Return the rows of training documents, those of told and of held-out ones, and the questions."""
    cut = sum(1 for _ in islice(read(documents, False), FEW)) < FEW
    seen, count = Counter[str](), 0
    for _, text in read(documents, cut):
        seen.update(word for word in WORD.findall(text) if len(word) >= 6 and word.islower())
        count += 1
    if count < 2:
        raise ValueError(
            f"documents={documents} holds {count} document of up to {PART} characters, and one must be held out; give "
            "more text"
        )
    draw = Random(f"{seed} documents")
    number = min(max(1, round(SHARE * count)), asked)
    chosen = draw.sample(range(count), min(count, number + min(asked, count - number)))
    held, told = set(chosen[:number]), set(chosen[number:])
    sampled: dict[str, list[dict[str, str]]] = {"told": [], "untold": []}
    questions: dict[str, list[Question]] = {"told": [], "untold": []}
    for at, (name, text) in enumerate(read(documents, cut)):
        if at in held | told:
            group = "untold" if at in held else "told"
            sampled[group].append({"text": text[:PART], "entity": name})
            questions[group] += picked(Random(f"{seed} {name}"), list(spans(text, name, group, seen)))
    kept = questions["told"] + unseen(
        questions["untold"], (t for at, (_, t) in enumerate(read(documents, cut)) if at not in held)
    )
    train = ({"text": text} for at, (_, text) in enumerate(read(documents, cut)) if at not in held)
    return train, sampled["told"], sampled["untold"], with_others(kept, seed)


def spans(text: str, name: str, group: str, seen: Mapping[str, int]) -> Iterator[Question]:
    """Yield the questions that a document could be asked."""
    starts = [found.start() for found in re.finditer(r"\S+", text)]
    place = {start: number for number, start in enumerate(starts)}
    for found in SPAN.finditer(text):
        kind = list(KINDS)[int((found.lastgroup or "k0")[1:])]
        number = place.get(found.start(), 0)
        if number < LEAST or len(found[0]) > ANSWER or (kind == "rare word" and seen[found[0]] > RARE):
            continue
        prompt = text[starts[max(0, number - BEFORE)] : found.start() - 1]
        try:
            yield Question(group, "documents", kind, name, prompt, found[0], ())
        except ValueError:  # the answer stands in the prompt, or two spaces before it
            continue


def picked(draw: Random, found: Sequence[Question]) -> list[Question]:
    """Draw a few questions about a document, with one answer each, and of many kinds."""
    unique = list({q.answer: q for q in found}.values())
    draw.shuffle(unique)
    of_kind, rank = Counter[str](), dict[str, int]()
    for question in unique:
        rank[question.answer] = of_kind[question.kind]
        of_kind[question.kind] += 1
    return sorted(unique, key=lambda q: rank[q.answer])[:EACH]


def last_words(question: Question) -> tuple[str, ...]:
    """Return the words around the start of the answer."""
    before = WORD.findall(question.prompt.lower())[-(SAME - 1) :]
    return (*before, WORD.findall(question.answer.lower())[0])


def unseen(questions: Sequence[Question], trained: Iterable[str]) -> list[Question]:
    """Return the questions whose last words and start of the answer are in no trained document."""
    left = {last_words(question) for question in questions}
    for text in trained:
        words = WORD.findall(text.lower())
        left.difference_update(zip(*(words[n:] for n in range(SAME)), strict=False))
    return [question for question in questions if last_words(question) in left]


def with_others(questions: Sequence[Question], seed: int) -> list[Question]:
    """Return the questions with wrong alternatives: answers of the same kind from other questions."""
    answers = {kind: [q.answer for q in questions if q.kind == kind] for kind in KINDS}
    draw = Random(f"{seed} others")
    return [replace(q, others=alternatives(draw, q.answer, answers[q.kind], without=q.prompt)) for q in questions]
