"""Documents from files, in the form that lm-eval's own tasks know from the hub.

A task stays lm-eval's, prompts and metrics included; only its documents come from elsewhere. READERS has a function for
each data set, by its name on the hub, that reads the files as their authors publish them. A suite's own task names
`jsonl` (or `text`) as its data set, and a file.
"""

from __future__ import annotations

import bz2
import csv
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from datasets import Dataset
from pyarrow import ArrowException  # type: ignore[import-untyped]

from upcycle.io.strict import MAX_LINE, check_depth, parse_row, read_text, short
from upcycle.text import tokens as text

Row = dict[str, Any]
MAX_NESTED = 12  # values in values of all rows; the time that datasets takes to look at them doubles with each


class Splits(dict[str, Dataset]):
    """Documents by split. A split without a file is empty: tasks name their train split even if they need none."""

    def __missing__(self, name: str) -> Dataset:
        return next(iter(self.values())).select([])


def reads(dataset: str, name: str | None) -> bool:
    """Whether a data set, of its parts the one called `name`, can be read from files."""
    return dataset in READERS and (dataset not in PARTS or (name or "") in PARTS[dataset])


def splits(folder: Path, dataset: str, name: str | None) -> Splits:
    if not reads(dataset, name):
        part = f" ({name})" if name and dataset in READERS else ""
        raise ValueError(f"{dataset}{part} cannot be read from files; leave data away, or add its reader to offline.py")
    found = Splits()
    for split, rows in READERS[dataset](folder, name or ""):
        if not rows:
            raise ValueError(f"{folder} has no documents for {dataset} ({split}); is the file empty?")
        documents = list(rows)
        try:
            check_depth(documents, MAX_NESTED)
            found[split] = Dataset.from_list(documents)
        except (ArrowException, OverflowError, TypeError, ValueError) as error:  # a number here, a list there
            said = " ".join(str(error).split())
            raise ValueError(
                f"{folder} has documents for {dataset} ({split}) that make no table: {said:.200}"
            ) from None
    return found


# ---- files


def opened(folder: Path, file: str) -> Path:
    path = folder / file
    if not path.is_file():
        raise ValueError(f"{path} is missing; give data=FOLDER that has {file}, or leave data away to use the hub")
    return path


def need(row: Any, keys: Sequence[str], where: str) -> Row:
    lacks = [key for key in keys if not isinstance(row, Mapping) or row.get(key) is None]
    if lacks or not isinstance(row, Mapping):
        has = short(", ".join(map(str, row))) if isinstance(row, Mapping) else type(row).__name__
        raise ValueError(f"{where} has no {', '.join(lacks)} (it has {has}); is this the right file?")
    return dict(row)


def json_rows(folder: Path, file: str, *keys: str) -> Iterator[Row]:
    path = opened(folder, file)
    with text.opened(path) as lines:
        for number, line in text.rows(path, lines):
            where = f"{path}:{number}"
            row = need(parse_row(line, where), keys, where)
            for key in keys:
                if not fits(row, key):
                    raise ValueError(f"{where} has {key}={short(row[key])}, not as published; is this the right file?")
            yield row


def fits(row: Row, key: str) -> bool:
    """Whether the value of a key that is read is of its kind: two or more texts, one of them, or a text."""
    value, options = row[key], row.get("choices", row.get("context_options", ["no", "yes"]))
    if key in ("choices", "context_options"):
        return isinstance(value, list) and len(value) > 1 and all(isinstance(each, str) for each in value)
    if key == "gold":
        return isinstance(value, int) and isinstance(options, list) and 0 <= value < len(options)
    return isinstance(value, str)


def csv_rows(folder: Path, file: str, *keys: str) -> Iterator[Row]:
    path = opened(folder, file)
    with path.open(newline="", encoding="utf-8-sig") as lines:
        try:
            for number, row in enumerate(csv.DictReader(lines), 2):
                yield need(row, keys, f"{path}:{number}")
        except csv.Error as error:
            raise ValueError(f"{path} is not usable CSV: {error}; is this the right file?") from None


def after(row: Row, key: str, start: str, where: str) -> str:
    """row[key] without `start`, which the file has before each question and the task's prompt would add once more."""
    value = str(row[key])
    if not value.startswith(start):
        raise ValueError(f"{where}: {key} starts with {value[:20]!r} instead of {start!r}; is this the right file?")
    return value[len(start) :]


def lettered(row: Row) -> Row:
    letters = [chr(ord("A") + i) for i in range(len(row["choices"]))]
    return {"choices": {"text": row["choices"], "label": letters}, "answerKey": letters[row["gold"]]}


# ---- data sets: (split, documents) each

Split = tuple[str, list[Row]]


def mmlu(folder: Path, subject: str) -> Iterator[Split]:
    keys = ["question", "choice0", "choice1", "choice2", "choice3", "answer"]
    for split in ("test", "dev"):
        file = f"mmlu/{split}/{subject}_{split}.csv"
        yield (
            split,
            [
                {
                    "question": row["question"],
                    "subject": subject,
                    "choices": [row[key] for key in keys[1:5]],
                    "answer": int(row["answer"]),
                }
                for row in csv_rows(folder, file, *keys)
            ],
        )


def arc(folder: Path, name: str) -> Iterator[Split]:
    file = arc_file(name)
    rows = json_rows(folder, file, "query", "choices", "gold")
    yield "test", [{"question": after(row, "query", "Question: ", file), **lettered(row)} for row in rows]


def arc_file(name: str) -> str:
    return f"arc/arc_{name.removeprefix('ARC-').lower()}.jsonl"


def piqa(folder: Path, name: str) -> Iterator[Split]:
    rows = json_rows(folder, "piqa/piqa.jsonl", "query", "choices", "gold")
    yield (
        "validation",
        [
            {
                "goal": after(row, "query", "Question: ", "piqa.jsonl").removesuffix("\n"),
                "sol1": row["choices"][0],
                "sol2": row["choices"][1],
                "label": row["gold"],
            }
            for row in rows
        ],
    )


def openbookqa(folder: Path, name: str) -> Iterator[Split]:
    rows = json_rows(folder, "openbookqa/openbook_qa.jsonl", "query", "choices", "gold")
    yield "test", [{"question_stem": row["query"], **lettered(row)} for row in rows]


def boolq(folder: Path, name: str) -> Iterator[Split]:
    out = []
    for row in json_rows(folder, "boolq/boolq.jsonl", "query", "gold"):
        passage, _, question = after(row, "query", "Passage: ", "boolq.jsonl").rpartition("\nQuestion: ")
        out.append({"passage": passage, "question": question.removesuffix("?"), "label": row["gold"]})
    yield "validation", out


def winogrande(folder: Path, name: str) -> Iterator[Split]:
    out = []
    for row in json_rows(folder, "winogrande/winogrande.jsonl", "context_options", "continuation", "gold"):
        options = row["context_options"]
        words = zip(*(option.split(" ") for option in options), strict=False)
        start = sum(len(a) + 1 for a, _ in takewhile(lambda pair: pair[0] == pair[1], words))
        out.append(
            {
                "sentence": f"{options[0][:start]}_ {row['continuation']}",
                "option1": options[0][start:],
                "option2": options[1][start:],
                "answer": str(row["gold"] + 1),
            }
        )
    yield "validation", out


def lambada(folder: Path, name: str) -> Iterator[Split]:
    rows = json_rows(folder, "lambada/lambada_openai.jsonl", "context", "continuation")
    yield "test", [{"text": f"{row['context']} {row['continuation']}"} for row in rows]


def hellaswag(folder: Path, name: str) -> Iterator[Split]:
    """Six lines an item: text, number of the right ending, four endings. The hub has the text in three parts; the last
    one is the unfinished sentence, which the task writes with a capital."""
    path = opened(folder, "hellaswag/hellaswag_val_full.txt.bz2")
    try:
        with bz2.open(path, "rt", encoding="utf-8") as file:
            content = file.read(MAX_LINE + 1)
    except EOFError:
        raise ValueError(f"{path} is cut short; copy or download it again") from None
    if len(content) > MAX_LINE:
        raise ValueError(f"{path} unpacks to more than {MAX_LINE} characters; is this the right file?")
    lines = content.split("\n")
    lines = lines[:-1] if lines[-1] == "" else lines
    if len(lines) % 6:
        raise ValueError(f"{path} has {len(lines)} lines, which is not six an item; is it whole?")
    out = []
    for at in range(0, len(lines), 6):
        label, _, context = lines[at].partition(": ")
        *before, last = re.split(r"(?<=[.!?]) (?=[a-z][^.!?]*$)", context)
        out.append(
            {
                "activity_label": label,
                "ctx_a": " ".join(before) if before else last,
                "ctx_b": last if before else "",
                "endings": lines[at + 2 : at + 6],
                "label": lines[at + 1].strip(),
            }
        )
    yield "validation", out


def truthfulqa(folder: Path, name: str) -> Iterator[Split]:
    out = []
    for row in csv_rows(folder, "truthfulqa/TruthfulQA.csv", "Question", "Best Answer", "Incorrect Answers"):
        wrong = [answer.strip() for answer in row["Incorrect Answers"].split(";") if answer.strip()]
        labels = [1] + [0] * len(wrong)
        out.append(
            {"question": row["Question"], "mc1_targets": {"choices": [row["Best Answer"], *wrong], "labels": labels}}
        )
    yield "validation", out


def gsm8k(folder: Path, name: str) -> Iterator[Split]:
    yield "test", list(json_rows(folder, "gsm8k/test.jsonl", "question", "answer"))


def wikitext(folder: Path, name: str) -> Iterator[Split]:
    """Articles of the raw test file; headings stand between blank lines there."""
    path = opened(folder, "wikitext2/wiki.test.raw.crlf.txt")
    pages: list[str] = []
    for line in filter(None, (line.strip() for line in read_text(path).splitlines())):
        heading = re.fullmatch(r"(= )+[^=].*?( =)+", line)
        if (heading and not line.startswith("= =")) or not pages:
            pages.append("")
        pages[-1] += f" \n {line} \n \n" if heading and pages[-1] else f" {line} \n" + (" \n" if heading else "")
    yield "test", [{"page": page} for page in pages]


def jsonl(folder: Path, name: str) -> Iterator[Split]:
    yield "test", list(json_rows(folder, name))


def plain(folder: Path, name: str) -> Iterator[Split]:
    yield "test", [{"text": document} for document in text.documents([opened(folder, name)])]


# data sets of which the files are one part only: any other would be given these documents
PARTS = {
    "aps/super_glue": ("boolq",),
    "baber/piqa": ("",),
    "allenai/openbookqa": ("main",),
    "allenai/winogrande": ("winogrande_xl",),
    "allenai/ai2_arc": ("ARC-Easy", "ARC-Challenge"),
    "EleutherAI/lambada_openai": ("default",),
    "Rowan/hellaswag": ("",),
    "truthfulqa/truthful_qa": ("multiple_choice",),
    "openai/gsm8k": ("main",),
    "EleutherAI/wikitext_document_level": ("wikitext-2-raw-v1",),
}
READERS: dict[str, Callable[[Path, str], Iterator[Split]]] = {
    "cais/mmlu": mmlu,
    "allenai/ai2_arc": arc,
    "baber/piqa": piqa,
    "allenai/openbookqa": openbookqa,
    "aps/super_glue": boolq,
    "allenai/winogrande": winogrande,
    "EleutherAI/lambada_openai": lambada,
    "Rowan/hellaswag": hellaswag,
    "truthfulqa/truthful_qa": truthfulqa,
    "openai/gsm8k": gsm8k,
    "EleutherAI/wikitext_document_level": wikitext,
    "jsonl": jsonl,
    "text": plain,
}
