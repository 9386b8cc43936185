"""Turn text into token shards, once: streamed, restartable, shared by any number of processes.

usage: upcycle prepare OUTPUT [CONFIG] [key=value ...] [nproc=N]

A source is a .txt file (one document), .jsonl or .jsonl.zst (a document a line), .parquet (a document a row), a folder
or a pattern of such, or a dataset of the hub, `hf:org/name[@revision][:config][:split]`. `#column` says where the text
is; without it, `text`.

kind=chat reads conversations in place of texts: rows with `messages` ({role, content}), `conversations` ({from,
value}), or `prompt` and `completion`, rendered by the tokenizer's chat template; what the assistant says is learned.

  upcycle prepare runs/data tokenizer=./llama sources=[book.txt]
  upcycle prepare runs/data tokenizer=./llama 'sources=[text/*.jsonl,hf:org/name:config:train#text]'
  upcycle prepare runs/chat tokenizer=./llama-chat sources=[talks.jsonl] kind=chat sequence=4096
  upcycle prepare runs/data prepare.yaml nproc=8
  upcycle prepare runs/stories-data check=true

keys of what is prepared, with defaults and meaning: docs/config.md
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upcycle.cli import frame


@dataclass(frozen=True)
class PrepareKeys:
    check: bool = False  # only read a finished folder and compare every sha256


@frame.command(resumes=True)
def main(words: Sequence[str]) -> int:
    from training.data.prepare import PrepareConfig, prepare
    from training.data.shards import TokenShards, read_meta
    from upcycle.config.reading import read, read_own
    from upcycle.io.job import Worker

    options, rest = read_own(PrepareKeys, words)
    names, keys = frame.names_and_words(rest)
    if not any(word.startswith("output=") for word in keys):
        if not names:
            read(PrepareConfig, "", keys)  # a key that is unknown is refused first
            raise ValueError("write upcycle prepare OUTPUT [CONFIG] [key=value ...]; OUTPUT is the folder to make")
        keys.append(f"output={names.pop(0)}")
    config = read(PrepareConfig, *frame.file_and_words([*names, *keys]))
    if options.check:
        TokenShards.open(config.output).verify()
    else:
        worker = Worker.here()
        prepare(config, worker)
        if worker.rank:
            return 0
    print(said(config.output, read_meta(Path(config.output))))
    return 0


def said(output: str, meta: Any) -> str:
    """Return one sentence on what a folder of token shards holds."""
    if "chat" not in meta:
        return (
            f"{output}: {meta['documents']:,} documents, {meta['tokens']:,} tokens, {meta['bytes']:,} bytes "
            f"of text ({meta['bytes'] / meta['tokens']:.2f} per token)"
        )
    dropped, most = meta["silent"] + meta["refused"], meta["chat"]["sequence"]
    return (
        f"{output}: {meta['documents']:,} conversations, {meta['tokens']:,} tokens, of which "
        f"{meta['scored']:,} are learned ({meta['scored'] / meta['tokens']:.0%}); {meta['truncated']:,} truncated "
        f"after {most:,} tokens; {dropped:,} dropped ({meta['silent']:,} with nothing to learn, "
        f"{meta['refused']:,} that the template refuses)"
    )
