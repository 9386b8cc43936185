"""Text to token shards, once: streamed, restartable, shared by any number of processes.

A source is a .txt file (one document), .jsonl or .jsonl.zst (a document a line), .parquet (a document a row), a folder
or a pattern of such, or a dataset of the hub, `hf:org/name[@revision][:config][:split]`. `#column` says where the text
is; without it, `text`.

kind=chat reads conversations in place of texts: rows with `messages` ({role, content}), `conversations` ({from,
value}), or `prompt` and `completion`, rendered by the tokenizer's chat template; what the assistant says is learned.

  upcycle prepare runs/data tokenizer=./llama sources=[book.txt]
  upcycle prepare runs/data tokenizer=./llama 'sources=[text/*.jsonl,hf:org/name:config:train#text]'
  upcycle prepare runs/chat tokenizer=./llama-chat sources=[talks.jsonl] kind=chat sequence=4096
  torchrun --nproc-per-node 8 -m upcycle prepare runs/data prepare.yaml
  upcycle prepare --check runs/stories-data

keys, with defaults and meaning: docs/config.md
"""

from __future__ import annotations

import sys
from pathlib import Path

from upcycle.cli import frame as cli


@cli.command(resumes=True)
def main(words: list[str]) -> int:
    parser = cli.parser(prog="upcycle prepare", description=__doc__)
    parser.add_argument("output", metavar="OUTPUT", help="the folder to make")
    parser.add_argument("words", nargs="*", metavar="CONFIG key=value", help="a YAML file, then key=value words")
    parser.add_argument("--check", action="store_true", help="read a finished folder and compare every sha256")
    options = parser.parse_args(words)

    from training.data.prepare import PrepareConfig, prepare
    from training.data.shards import TokenShards, read_meta
    from upcycle.config.reading import read
    from upcycle.io.job import Worker

    if options.check:
        TokenShards.open(options.output).verify()
    else:
        file, words = cli.file_and_words(options.words)
        worker = Worker.here()
        prepare(read(PrepareConfig, file, [*words, f"output={options.output}"], Path("configs")), worker)
        if worker.rank:
            return 0
    meta = read_meta(Path(options.output))
    if "chat" in meta:
        dropped, most = meta["silent"] + meta["refused"], meta["chat"]["sequence"]
        print(
            f"{options.output}: {meta['documents']:,} conversations, {meta['tokens']:,} tokens, of which "
            f"{meta['scored']:,} are learned ({meta['scored'] / meta['tokens']:.0%}); {meta['truncated']:,} truncated "
            f"after {most:,} tokens; {dropped:,} dropped ({meta['silent']:,} with nothing to learn, "
            f"{meta['refused']:,} that the template refuses)"
        )
    else:
        print(
            f"{options.output}: {meta['documents']:,} documents, {meta['tokens']:,} tokens, {meta['bytes']:,} bytes "
            f"of text ({meta['bytes'] / meta['tokens']:.2f} per token)"
        )
    return 0


if __name__ == "__main__":
    sys.exit(cli.start("training.cli.prepare", own_help=True))
