"""Turn text into token shards: streamed, restartable, shared by any number of processes.

usage: upcycle prepare OUTPUT [CONFIG] [key=value ...] [nproc=N]

A source is a .txt file (one document), .jsonl or .jsonl.zst (a document per line), .parquet or .arrow (a document per
row), a folder or pattern of these, also one of datasets' save_to_disk, or a dataset of the Hub,
`hf:org/name[@revision][:config][:split]`. `#column` names the column of the text; the default is `text`.

kind=chat reads conversations instead of texts: rows with `messages` ({role, content}), `conversations` ({from, value}),
or `prompt` and `completion`. The tokenizer's chat template renders them, and the assistant's words are learned.

  upcycle prepare runs/data tokenizer=./llama sources=[book.txt]
  upcycle prepare runs/data tokenizer=./llama 'sources=[text/*.jsonl,hf:org/name:config:train#text]'
  upcycle prepare runs/chat tokenizer=./llama-chat sources=[talks.jsonl] kind=chat sequence=4096
  upcycle prepare runs/data prepare.yaml nproc=8
  upcycle prepare runs/test tokenizer=./llama sources=[other-book.txt] unseen=[runs/data]
  upcycle prepare runs/stories-data check=true

keys, with defaults and meaning: docs/config.md
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upcycle.cli import frame


@dataclass(frozen=True)
class PrepareKeys:
    check: bool = False  # only check a finished folder against every sha256


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
            read(PrepareConfig, "", keys)  # report an unknown key first
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
    """Describe a folder of token shards in one sentence."""
    if "chat" not in meta:
        sizes = (
            f"{output}: {meta['documents']:,} documents, {meta['tokens']:,} tokens, {meta['bytes']:,} bytes "
            f"of text ({meta['bytes'] / meta['tokens']:.2f} per token)"
        )
        if (found := meta.get("overlap")) is None:
            return sizes
        return (
            f"{sizes}; {found['left_out']:,} of {found['documents']:,} documents are left out, because training data "
            f"holds them too (runs of 13 tokens cover {found['seen']:.2%} of all tokens, {found['seen_after']:.2%} of "
            "those that stay)"
        )
    dropped, most = meta["silent"] + meta["refused"], meta["chat"]["sequence"]
    return (
        f"{output}: {meta['documents']:,} conversations, {meta['tokens']:,} tokens, of which "
        f"{meta['scored']:,} are learned ({meta['scored'] / meta['tokens']:.0%}); {meta['truncated']:,} truncated "
        f"after {most:,} tokens; {dropped:,} dropped ({meta['silent']:,} with nothing to learn, "
        f"{meta['refused']:,} that the template refuses)"
    )
