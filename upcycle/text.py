"""Text files -> token ids for calibration: .txt, .jsonl and .jsonl.zst (key `text`), with the donor's tokenizer.json.

Nothing is drawn at random: the same files give the same ids.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any

import torch
import zstandard
from torch import Tensor

SUFFIXES = (".txt", ".jsonl", ".jsonl.zst")
PIECE = 1 << 20  # characters of a .txt at a time: a book or a dump needs no more memory than a page


def documents(paths: Iterable[str | Path]) -> Iterator[str]:
    """The texts of all files, in order. Every refusal is a ValueError that names the file."""
    for path in map(Path, paths):
        if not path.name.endswith(SUFFIXES):
            raise ValueError(f"{path} is not a text file that can be read; its name must end in {', '.join(SUFFIXES)}")
        if not path.is_file():
            raise ValueError(f"text file {path} does not exist")
        try:
            with opened(path) as file:
                yield from iter(lambda: file.read(PIECE), "") if path.suffix == ".txt" else lines(path, file)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from None
        except (OSError, zstandard.ZstdError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from None


def opened(path: Path) -> IO[str]:
    if path.suffix != ".zst":
        return open(path, encoding="utf-8")
    frames = zstandard.ZstdDecompressor().stream_reader(open(path, "rb"), read_across_frames=True)  # noqa: SIM115
    return io.TextIOWrapper(frames, encoding="utf-8")


def lines(path: Path, file: IO[str]) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            raise ValueError(f"line {number} of {path} is not JSON; each line must be like {{'text': '...'}}") from None
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise ValueError(f"line {number} of {path} has no string under the key 'text'")
        yield row["text"]


def token_batches(folder: Path, paths: Sequence[str | Path], tokens: int, length: int, vocab: int) -> Tensor:
    """[n, length] ids, n * length as near to `tokens` as it gets from below; each file gives an equal share."""
    if tokens < 1 or length < 1:
        raise ValueError(f"calibration of {tokens} tokens in sequences of {length}; both must be at least 1")
    if not paths:
        raise ValueError("there is no text to calibrate on; name files under calibration.texts")
    length = min(length, tokens)
    rows, encode = tokens // length, encoder(folder)
    batches = []
    for i, path in enumerate(paths):
        share = (rows // len(paths) + (i < rows % len(paths))) * length
        ids = list(islice((id for text in documents([path]) for id in encode(text)), share))
        if len(ids) < share:
            raise ValueError(f"{path} has {len(ids)} of {share} tokens wanted; lower calibration.tokens or add text")
        batches.append(torch.tensor(ids, dtype=torch.long).view(-1, length))
    found = torch.cat(batches)
    if int(found.max()) >= vocab:
        raise ValueError(
            f"the tokenizer.json of {folder} gives id {int(found.max())} but the model has {vocab} embeddings; "
            "it belongs to another model"
        )
    return found


def encoder(folder: Path) -> Any:
    """text -> ids, with the special tokens the donor was trained with."""
    from tokenizers import Tokenizer

    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no tokenizer.json, which turns calibration text into tokens; add the donor's")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise ValueError(f"{path} cannot be read as a tokenizer: {' '.join(str(error).split())}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda text: tokenizer.encode(text).ids
