"""Read documents from files, in the columns that lm-eval's own tasks know from the hub.

A task stays lm-eval's, with its prompts and metrics; only its documents come from files. SOURCES maps the name of a
data set on the hub to the files that its authors publish and to the format of a line. A suite's own task names `jsonl`
(or `text`) as its data set, and a file. We do not use the reader of `datasets`, because it takes any columns and hangs
on deep lists; here a wrong file is an error that names the line.
"""

from __future__ import annotations

import bz2
import csv
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from datasets import Dataset
from pyarrow import ArrowException  # type: ignore[import-untyped]

from upcycle.io.strict import MAX_LINE, check_depth, parse_row, read_text, short
from upcycle.text import tokens as text

Row = dict[str, Any]
MAX_NESTED = 12  # depth of nested values; the time of `datasets` doubles with each level


class Splits(dict[str, Dataset]):
    """Hold documents by split; a split without a file is empty, because tasks name a train split even if they need
    none."""

    def __missing__(self, name: str) -> Dataset:
        return next(iter(self.values())).select([])


@dataclass(frozen=True)
class Source:
    files: Mapping[str, str]  # by split; {part} stands for the part of the data set
    keys: tuple[str, ...] = ()  # keys that a line must have
    document: Callable[[Row, str], Row] = lambda row, part: row  # of a line
    parts: Mapping[str, str] | None = None  # the parts of the data set: their names on the hub and in files; None: all
    lines: Callable[[Path, Sequence[str]], Iterator[Row]] | None = None  # None: CSV or JSON, by the file's suffix


def reads(dataset: str, name: str | None) -> bool:
    """Return whether the part `name` of a data set can be read from files."""
    parts: Mapping[str, str] | None = SOURCES[dataset].parts if dataset in SOURCES else {}
    return parts is None or (name or "") in parts


def splits(folder: Path, dataset: str, name: str | None) -> Splits:
    if not reads(dataset, name):
        part = f" ({name})" if name and dataset in SOURCES else ""
        raise ValueError(f"{dataset}{part} cannot be read from files; leave data away, or add it to offline.py")
    source, found = SOURCES[dataset], Splits()
    part = (name or "") if source.parts is None else source.parts[name or ""]
    for split, file in source.files.items():
        path = folder / file.format(part=part)
        if not path.is_file():
            raise ValueError(f"{path} is missing; give data=FOLDER that has it, or leave data away to use the hub")
        found[split] = table(list(documents(source, path, part)), f"{dataset} ({split})", path)
    return found


def documents(source: Source, path: Path, part: str) -> Iterator[Row]:
    lines = source.lines or (csv_rows if path.suffix == ".csv" else json_rows)
    for row in lines(path, source.keys):
        try:
            yield source.document(row, part)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def table(documents: list[Row], what: str, path: Path) -> Dataset:
    if not documents:
        raise ValueError(f"{path} has no documents for {what}; is the file empty?")
    try:
        check_depth(documents, MAX_NESTED)
        return Dataset.from_list(documents)
    except (
        ArrowException,
        OverflowError,
        TypeError,
        ValueError,
    ) as error:  # for instance a number in one row and a list in another
        said = " ".join(str(error).split())
        raise ValueError(f"{path} has documents for {what} that do not form a table: {said:.200}") from None


# ---- lines of files


def need(row: Any, keys: Sequence[str], where: str) -> Row:
    lacks = [key for key in keys if not isinstance(row, Mapping) or row.get(key) is None]
    if lacks or not isinstance(row, Mapping):
        has = short(", ".join(map(str, row))) if isinstance(row, Mapping) else type(row).__name__
        raise ValueError(f"{where} has no {', '.join(lacks)} (it has {has}); is this the right file?")
    return dict(row)


def json_rows(path: Path, keys: Sequence[str]) -> Iterator[Row]:
    with text.opened(path) as lines:
        for number, line in text.rows(path, lines):
            where = f"{path}:{number}"
            row = need(parse_row(line, where), keys, where)
            for key in keys:
                if not fits(row, key):
                    raise ValueError(
                        f"{where} has {key}={short(row[key])}, which differs from the published file; is this the "
                        "right file?"
                    )
            yield row


def fits(row: Row, key: str) -> bool:
    """Return whether a key's value has its kind: two or more texts, the number of one of them, or a text."""
    value, options = row[key], row.get("choices", row.get("context_options", ["no", "yes"]))
    if key in ("choices", "context_options"):
        return isinstance(value, list) and len(value) > 1 and all(isinstance(each, str) for each in value)
    if key == "gold":
        return isinstance(value, int) and isinstance(options, list) and 0 <= value < len(options)
    return isinstance(value, str)


def csv_rows(path: Path, keys: Sequence[str]) -> Iterator[Row]:
    with path.open(newline="", encoding="utf-8-sig") as lines:
        try:
            for number, row in enumerate(csv.DictReader(lines), 2):
                yield need(row, keys, f"{path}:{number}")
        except csv.Error as error:
            raise ValueError(f"{path} is not usable CSV: {error}; is this the right file?") from None


def hellaswag_rows(path: Path, keys: Sequence[str]) -> Iterator[Row]:
    """Yield items of six lines: text, number of the right ending, four endings.

    The hub splits the text into three parts; the last is the unfinished sentence, which the task writes with a capital.
    """
    try:
        with bz2.open(path, "rt", encoding="utf-8") as file:
            content = file.read(MAX_LINE + 1)
    except EOFError:
        raise ValueError(f"{path} is cut short; copy or download it again") from None
    if len(content) > MAX_LINE:
        raise ValueError(f"{path} unpacks to more than {MAX_LINE} characters; is this the right file?")
    lines = content.removesuffix("\n").split("\n") if content else []
    if len(lines) % 6:
        raise ValueError(f"{path} has {len(lines)} lines, and an item has six; is the file whole?")
    for at in range(0, len(lines), 6):
        label, _, context = lines[at].partition(": ")
        *before, last = re.split(r"(?<=[.!?]) (?=[a-z][^.!?]*$)", context)
        yield {
            "activity_label": label, "ctx_a": " ".join(before) if before else last, "ctx_b": last if before else "",
            "endings": lines[at + 2 : at + 6], "label": lines[at + 1].strip(),
        }  # fmt: skip


def wikitext_rows(path: Path, keys: Sequence[str]) -> Iterator[Row]:
    """Yield the articles of the raw file, whose headings stand between blank lines."""
    pages: list[str] = []
    for line in filter(None, (line.strip() for line in read_text(path).splitlines())):
        heading = re.fullmatch(r"(= )+[^=].*?( =)+", line)
        if (heading and not line.startswith("= =")) or not pages:
            pages.append("")
        pages[-1] += f" \n {line} \n \n" if heading and pages[-1] else f" {line} \n" + (" \n" if heading else "")
    yield from ({"page": page} for page in pages)


def text_rows(path: Path, keys: Sequence[str]) -> Iterator[Row]:
    yield from ({"text": document} for document in text.documents([path]))


# ---- a document from a line


def after(row: Row, start: str) -> str:
    """Return the row's query without `start`, because the task's prompt adds it again."""
    value = str(row["query"])
    if not value.startswith(start):
        raise ValueError(f"query starts with {value[:20]!r} instead of {start!r}; is this the right file?")
    return value[len(start) :]


def lettered(row: Row) -> Row:
    letters = [chr(ord("A") + i) for i in range(len(row["choices"]))]
    return {"choices": {"text": row["choices"], "label": letters}, "answerKey": letters[row["gold"]]}


def mmlu(row: Row, subject: str) -> Row:
    choices = [row[f"choice{number}"] for number in range(4)]
    return {"question": row["question"], "subject": subject, "choices": choices, "answer": int(row["answer"])}


def piqa(row: Row, part: str) -> Row:
    first, second = row["choices"][:2]
    return {"goal": after(row, "Question: ").removesuffix("\n"), "sol1": first, "sol2": second, "label": row["gold"]}


def boolq(row: Row, part: str) -> Row:
    passage, _, question = after(row, "Passage: ").rpartition("\nQuestion: ")
    return {"passage": passage, "question": question.removesuffix("?"), "label": row["gold"]}


def winogrande(row: Row, part: str) -> Row:
    options = row["context_options"]
    words = zip(*(option.split(" ") for option in options), strict=False)
    start = sum(len(a) + 1 for a, _ in takewhile(lambda pair: pair[0] == pair[1], words))
    return {
        "sentence": f"{options[0][:start]}_ {row['continuation']}", "option1": options[0][start:],
        "option2": options[1][start:], "answer": str(row["gold"] + 1),
    }  # fmt: skip


def truthfulqa(row: Row, part: str) -> Row:
    wrong = [answer.strip() for answer in row["Incorrect Answers"].split(";") if answer.strip()]
    targets = {"choices": [row["Best Answer"], *wrong], "labels": [1] + [0] * len(wrong)}
    return {"question": row["Question"], "mc1_targets": targets}


ANSWERED = ("query", "choices", "gold")
SOURCES = {
    "cais/mmlu": Source(
        {split: f"mmlu/{split}/{{part}}_{split}.csv" for split in ("test", "dev")},
        ("question", "choice0", "choice1", "choice2", "choice3", "answer"), mmlu,
    ),
    "allenai/ai2_arc": Source(
        {"test": "arc/arc_{part}.jsonl"}, ANSWERED,
        lambda row, part: {"question": after(row, "Question: "), **lettered(row)},
        {"ARC-Easy": "easy", "ARC-Challenge": "challenge"},
    ),
    "baber/piqa": Source({"validation": "piqa/piqa.jsonl"}, ANSWERED, piqa, {"": ""}),
    "allenai/openbookqa": Source(
        {"test": "openbookqa/openbook_qa.jsonl"}, ANSWERED,
        lambda row, part: {"question_stem": row["query"], **lettered(row)}, {"main": ""},
    ),
    "aps/super_glue": Source({"validation": "boolq/boolq.jsonl"}, ("query", "gold"), boolq, {"boolq": ""}),
    "allenai/winogrande": Source(
        {"validation": "winogrande/winogrande.jsonl"}, ("context_options", "continuation", "gold"), winogrande,
        {"winogrande_xl": ""},
    ),
    "EleutherAI/lambada_openai": Source(
        {"test": "lambada/lambada_openai.jsonl"}, ("context", "continuation"),
        lambda row, part: {"text": f"{row['context']} {row['continuation']}"}, {"default": ""},
    ),
    "Rowan/hellaswag": Source(
        {"validation": "hellaswag/hellaswag_val_full.txt.bz2"}, parts={"": ""}, lines=hellaswag_rows
    ),
    "truthfulqa/truthful_qa": Source(
        {"validation": "truthfulqa/TruthfulQA.csv"}, ("Question", "Best Answer", "Incorrect Answers"), truthfulqa,
        {"multiple_choice": ""},
    ),
    "openai/gsm8k": Source({"test": "gsm8k/test.jsonl"}, ("question", "answer"), parts={"main": ""}),
    "EleutherAI/wikitext_document_level": Source(
        {"test": "wikitext2/wiki.test.raw.crlf.txt"}, parts={"wikitext-2-raw-v1": ""}, lines=wikitext_rows
    ),
    "jsonl": Source({"test": "{part}"}),
    "text": Source({"test": "{part}"}, lines=text_rows),
}  # fmt: skip
