"""Text to token shards and back, and samples that are a function of one integer: on every mesh, after every restart."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
import zstandard
from huggingface_hub import constants
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tests.parallel.ranks import forked
from training.cli.prepare import main
from training.data import mixture as data
from training.data import prepare as prepare_module
from training.data.batch import IGNORE, Batch, stack
from training.data.mixture import (
    DataConfig,
    Loader,
    Mixture,
    Mock,
    Schedule,
    TrainSource,
    Validation,
    ValidSource,
    Windows,
    bits_per_byte,
    permuted,
)
from training.data.open import open_training, open_validation
from training.data.prepare import PrepareConfig, prepare
from training.data.shards import Shard, TokenShards
from training.data.sources import texts as sources
from upcycle.config.reading import read
from upcycle.io import job, publish
from upcycle.io.job import Worker
from upcycle.text import tokens as text

SHARED = Path(__file__).parents[3].parent / "shared" / "data"
EOS, BOS = "<eos>", "<bos>"
SENTENCE = "a soft grey evening; the boats came home, ärger über Öl und ☂ 雨 in the old harbour of 1904\n"
WORDS = SENTENCE.split(" ")


def texts(count: int, seed: int = 0) -> list[str]:
    chance = random.Random(seed)
    return [" ".join(chance.choices(WORDS, k=chance.randint(1, 60))) for _ in range(count)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"), bos=False)


def make_tokenizer(folder: Path, *, bos: bool) -> Path:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[BOS, EOS], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts(50), trainer)
    if bos:
        made.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": EOS}}))
    return folder


def cached(folder: Path, hub_id: str, patch: pytest.MonkeyPatch, cache: Path) -> None:
    """Put a folder's files where huggingface_hub keeps those of a hub id, with no network."""
    home = cache / f"models--{hub_id.replace('/', '--')}"
    for part in ("refs", "blobs", "snapshots/0123abc"):
        (home / part).mkdir(parents=True)
    (home / "refs" / "main").write_text("0123abc")
    for number, file in enumerate(sorted(path for path in folder.iterdir() if path.is_file())):
        (home / "blobs" / str(number)).write_bytes(file.read_bytes())
        (home / "snapshots" / "0123abc" / file.name).symlink_to(f"../../blobs/{number}")
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setattr(constants, "HF_HUB_OFFLINE", True)


def jsonl(path: Path, documents: Sequence[str], key: str = "text") -> Path:
    lines = "".join(json.dumps({key: document}) + "\n" for document in documents).encode()
    path.write_bytes(zstandard.compress(lines) if path.suffix == ".zst" else lines)
    return path


def run(output: Path, tokenizer: Path, *sources: object, shard_tokens: int = 1 << 28, **more: str) -> TokenShards:
    config = PrepareConfig(str(output), str(tokenizer), tuple(map(str, sources)), shard_tokens=shard_tokens, **more)
    return TokenShards.open(prepare(config, quiet=True))


def decoded(shards: TokenShards, tokenizer: Path) -> list[str]:
    known = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    found = []
    for index in range(shards.documents):
        ids = shards.document(index).tolist()
        assert ids[-1] == shards.eos
        found.append(known.decode(ids[:-1], skip_special_tokens=False))
    return found


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


# ---- text to shards


def test_the_tokenizer_of_a_hub_id_is_a_folders(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And nothing of the model but its tokenizer is fetched."""
    cached(tokenizer, "org/tokenizer", monkeypatch, tmp_path / "cache")
    source, asked = jsonl(tmp_path / "a.jsonl", texts(20)), list[list[str]]()
    here = run(tmp_path / "here", tokenizer, source)
    real = huggingface_hub.snapshot_download

    def download(*names: str, **options: Any) -> str:
        asked.append(options["allow_patterns"])
        return str(real(*names, **options))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for number, name in enumerate(("org/tokenizer", "org/tokenizer@main")):
        output = tmp_path / str(number)
        assert main([str(output), f"tokenizer={name}", f"sources=[{source}]"]) == 0
        assert digests(output) == digests(here.folder)
    files = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt", "config.json"}
    weights = {"model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "modeling_x.py", "README.md"}
    for patterns in asked:
        assert {*huggingface_hub.utils.filter_repo_objects(files | weights, allow_patterns=patterns)} == files
    capsys.readouterr()
    assert main([str(tmp_path / "none"), "tokenizer=org/another", f"sources=[{source}]"]) == 2
    said = capsys.readouterr().err
    assert "org/another is not a local folder and cannot be downloaded from the Hub: " in said and said.count("\n") == 1


def test_every_kind_of_file_comes_back_as_it_was(tokenizer: Path, tmp_path: Path) -> None:
    a, b, c = texts(40, 1), texts(30, 2), "\n".join(texts(20, 3))
    (tmp_path / "in").mkdir()
    jsonl(tmp_path / "in" / "a.jsonl", a)
    jsonl(tmp_path / "in" / "b.jsonl.zst", b)
    (tmp_path / "in" / "c.txt").write_text(c)
    (tmp_path / "in" / "notes.md").write_text("not a source")
    shards = run(tmp_path / "out", tokenizer, tmp_path / "in", shard_tokens=500)
    assert decoded(shards, tokenizer) == [*a, *b, c]
    assert len(shards.shards) > 3  # sources were cut into parts
    assert shards.bytes == sum(len(document.encode()) for document in [*a, *b, c])
    assert shards.start == shards.eos and shards.shards[0].tokens.dtype == np.uint16
    shards.verify()
    assert not list(tmp_path.glob("*.partial")) and not (tmp_path / "out" / ".upcycle").exists()
    again = run(
        tmp_path / "pattern", tokenizer, tmp_path / "in" / "[ab].*", tmp_path / "in" / "c.txt", shard_tokens=500
    )
    assert digests(again.folder) == digests(shards.folder)


def test_what_texts_may_hold(tokenizer: Path, tmp_path: Path) -> None:
    """The name of eos, half a surrogate pair, nothing at all; and a column of another name."""
    rows = [f"it says {EOS} here", "", "half \ud800 a pair", "", "last"]
    path = jsonl(tmp_path / "a.jsonl", rows, key="content")
    shards = run(tmp_path / "out", tokenizer, f"{path}#content")
    assert decoded(shards, tokenizer) == [rows[0], "half ? a pair", "last"]
    assert shards.document(0).tolist().count(shards.eos) == 1
    assert shards.bytes == len(rows[0]) + len("half ? a pair") + len("last")


def test_a_long_txt_is_one_document(tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = "\n".join(texts(60, 4)) + "x" * 300 + " the end"
    (tmp_path / "a.txt").write_text(content)
    whole = run(tmp_path / "whole", tokenizer, tmp_path / "a.txt")
    monkeypatch.setattr(text, "PIECE", 64)
    monkeypatch.setattr("training.data.encoding.BATCH", 100)
    shards = run(tmp_path / "out", tokenizer, tmp_path / "a.txt", shard_tokens=10)
    assert shards.documents == 1 and decoded(shards, tokenizer) == [content]
    assert shards.bytes == whole.bytes == len(content.encode())
    assert abs(shards.tokens - whole.tokens) < 20  # pieces end where tokens do, but for the run of x


def test_a_long_document_of_a_line_is_one_document(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = texts(6, 4)
    monkeypatch.setattr("training.data.sources.texts.LONG", 100)
    monkeypatch.setattr(text, "PIECE", 64)
    monkeypatch.setattr("training.data.encoding.BATCH", 100)
    assert max(map(len, documents)) > 150
    shards = run(tmp_path / "out", tokenizer, jsonl(tmp_path / "a.jsonl", documents))
    assert decoded(shards, tokenizer) == documents


def test_a_pipe_among_the_sources_is_a_sentence(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    os.mkfifo(tmp_path / "text" / "a.jsonl")
    with pytest.raises(ValueError, match=r"a\.jsonl is not a regular file"):
        run(tmp_path / "out", tokenizer, tmp_path / "text")


def test_parquet_that_unpacks_without_end(tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("upcycle.text.tokens.UNPACKED", 1 << 16)
    parquet.write_table(pyarrow.table({"text": ["x" * (1 << 22)]}), tmp_path / "a.parquet", compression="zstd")
    with pytest.raises(ValueError, match=r"a\.parquet packs \d+ bytes into \d+, which no text does"):
        run(tmp_path / "out", tokenizer, tmp_path / "a.parquet")
    long = SENTENCE * 600  # once in the file, and as large as what is unpacked at once: so the rows come one by one
    parquet.write_table(pyarrow.table({"text": [long] * 3}), tmp_path / "b.parquet", compression="none")
    source = sources.find([str(tmp_path / "b.parquet")])[0]
    with parquet.ParquetFile(tmp_path / "b.parquet") as file:
        assert sources.rows_at_once(source, file, ["text"]) == 1
    monkeypatch.setattr("upcycle.text.tokens.UNPACKED", 1 << 28)
    assert decoded(run(tmp_path / "three", tokenizer, tmp_path / "b.parquet"), tokenizer) == [long] * 3


@pytest.mark.parametrize("rows", [1, 40])
def test_a_parquet_whose_footer_lies_about_its_size(
    rows: int, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("upcycle.text.tokens.UNPACKED", 1 << 20)
    path = tmp_path / "a.parquet"
    one = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * rows, pyarrow.int32()), pyarrow.array(["x" * (1 << 19)])
    )
    parquet.write_table(pyarrow.table({"text": one}), path, compression="zstd", write_statistics=False)
    with parquet.ParquetFile(path) as file:
        said = file.metadata.row_group(0).column(0).total_uncompressed_size
    raw = path.read_bytes()
    assert raw.count(varint(said)) == 2  # of the column and of its row group
    path.write_bytes(raw.replace(varint(said), b"\x82\x80\0"))  # 1 byte
    source = sources.find([str(path)])[0]
    with parquet.ParquetFile(path) as file:
        assert file.metadata.row_group(0).column(0).total_uncompressed_size == 1
        assert sources.rows_at_once(source, file, ["text"]) == 1
    if rows > 2:
        with pytest.raises(ValueError, match=r"a\.parquet has \d+ bytes and unpacks into more than \d+, which no text"):
            run(tmp_path / "out", tokenizer, path)
    else:
        assert run(tmp_path / "out", tokenizer, path).documents == rows


def varint(number: int) -> bytes:
    """A number as Thrift's compact protocol writes it."""
    number, out = 2 * number, b""
    while number > 127:
        out, number = out + bytes([number & 127 | 128]), number >> 7
    return out + bytes([number])


def test_damaged_parquet_is_read_or_a_sentence(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path, chance = tmp_path / "a.parquet", random.Random(3)
    parquet.write_table(pyarrow.table({"text": texts(50), "n": list(range(50))}), path, row_group_size=20)
    whole = path.read_bytes()
    for _ in range(300):
        raw = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            raw[chance.randrange(len(raw))] = chance.randrange(256)
        path.write_bytes(raw)
        try:
            list(sources.table_texts(sources.find([str(path)])[0], lambda size: None))
        except ValueError as error:
            assert "a.parquet" in str(error) and "\n" not in str(error)


def test_documents_that_repeat_without_end_are_no_text(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("upcycle.text.tokens.UNPACKED", 1 << 16)
    path = jsonl(tmp_path / "a.jsonl.zst", ["x" * 100] * 40000)
    assert path.stat().st_size < 4000
    with pytest.raises(ValueError, match=r"a\.jsonl\.zst has \d+ bytes and unpacks into more than \d+, which no text"):
        run(tmp_path / "out", tokenizer, path)


@pytest.mark.parametrize("table", [0, 1])
def test_a_table_of_documents_that_goes_down_is_noticed(table: int, folder: Path) -> None:
    path = folder / "documents-00000-00000.npy"
    rows = np.load(path)
    rows[table, 2] = rows[table, 3] + 1
    np.save(path, rows)
    meta = json.loads((folder / "meta.json").read_text())
    meta["shards"][0]["documents"]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (folder / "meta.json").write_bytes(publish.signed(meta))
    with pytest.raises(ValueError, match="documents that end before they begin"):
        TokenShards.open(folder).verify()


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared corpus is not here")
@pytest.mark.parametrize("domain", ["encyclopedia", "fiction"])
def test_the_real_corpus_comes_back_as_it_was(domain: str, tmp_path: Path) -> None:
    source, folder = SHARED / "corpus" / f"{domain}.val.jsonl.zst", SHARED / "tokenizers" / "corpus_bpe_32k"
    shards = run(tmp_path / "out", folder, source, shard_tokens=100_000)
    wanted = list(text.documents([source]))
    assert decoded(shards, folder) == wanted
    assert shards.bytes == sum(len(document.encode()) for document in wanted)
    shards.verify()


def test_parquet(tokenizer: Path, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = texts(20)
    parquet.write_table(pyarrow.table({"content": rows, "n": list(range(20))}), tmp_path / "a.parquet")
    assert decoded(run(tmp_path / "out", tokenizer, f"{tmp_path / 'a.parquet'}#content"), tokenizer) == rows
    with pytest.raises(ValueError, match="no column 'text', only content, n"):
        run(tmp_path / "none", tokenizer, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="has int, not text, in column 'n'"):
        run(tmp_path / "number", tokenizer, f"{tmp_path / 'a.parquet'}#n")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match=r"b\.parquet cannot be read"):
        run(tmp_path / "broken", tokenizer, tmp_path / "b.parquet")


def test_hub_dataset(tokenizer: Path, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    rows = texts(20)
    (tmp_path / "set").mkdir()
    jsonl(tmp_path / "set" / "train.jsonl", rows, key="content")
    assert decoded(run(tmp_path / "out", tokenizer, f"hf:{tmp_path / 'set'}::train#content"), tokenizer) == rows
    with pytest.raises(ValueError, match="has NoneType, not text, in column 'text'"):
        run(tmp_path / "none", tokenizer, f"hf:{tmp_path / 'set'}")
    with pytest.raises(ValueError, match="nosplit"):
        run(tmp_path / "split", tokenizer, f"hf:{tmp_path / 'set'}::nosplit")


@pytest.mark.parametrize("package", ["pyarrow", "datasets"])
def test_a_missing_package_is_a_sentence(
    package: str, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=rf'needs .*{package}; pip install "upcycle\[data\]"'):
        run(tmp_path / "out", tokenizer, tmp_path / "a.parquet" if package == "pyarrow" else f"hf:{tmp_path}")


def test_start_is_bos_where_the_tokenizer_puts_one(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path, bos=True)
    shards = run(tmp_path / "out", folder, jsonl(tmp_path / "a.jsonl", texts(5)))
    assert (shards.start, shards.eos) == (0, 1)
    assert 0 not in shards.document(0)  # it is not stored
    tokens, labels, documents, positions = Windows(shards, 200).row(0)
    assert (tokens[positions == 0] == 0).all() and 0 not in labels and 1 not in tokens
    assert (tokens == 0).sum() == documents.max() + 1 > 1


BAD: list[tuple[dict[str, object], str]] = [
    ({"tokenizer": ""}, "tokenizer is not set; write tokenizer=FOLDER"),
    ({"tokenizer": "nowhere"}, "nowhere has no tokenizer.json"),
    ({"sources": ()}, r"there are no sources; write sources=\[FILE"),
    ({"sources": ("nowhere.jsonl",)}, "'nowhere.jsonl' is not a file, a folder or a pattern"),
    ({"sources": ("[a.jsonl]",)}, r"write sources=\[a.jsonl\], without more quotes or other brackets"),
    ({"sources": ("(a.jsonl,b.txt)",)}, r"write several in brackets: sources=\[a.jsonl,b.txt\]"),
    ({"sources": (__file__,)}, r"test_data\.py cannot be read; convert it to one of"),
    ({"sources": ("hf:a:b:c:d",)}, r"'hf:a:b:c:d' is not like hf:org/name"),
    ({"eos": "<end>"}, "has no token '<end>'; write eos=TOKEN"),
    ({"shard_tokens": 0}, "shard_tokens is 0; it must be at least 1"),
    ({"output": ""}, "output is ''; write the name of a folder"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_requests_are_a_sentence(change: dict[str, object], message: str, tokenizer: Path, tmp_path: Path) -> None:
    good = PrepareConfig(str(tmp_path / "out"), str(tokenizer), (str(jsonl(tmp_path / "a.jsonl", texts(3))),))
    with pytest.raises(ValueError, match=message):
        prepare(replace(good, **change), quiet=True)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
    prepare(good, quiet=True)


def test_no_eos_and_no_text(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    path = jsonl(tmp_path / "a.jsonl", ["", ""])
    with pytest.raises(ValueError, match="names no eos_token; write eos=TOKEN"):
        run(tmp_path / "out", tmp_path, path)
    with pytest.raises(ValueError, match=r"there is no text in a\.jsonl"):
        run(tmp_path / "out", tmp_path, path, eos=EOS)
    good = jsonl(tmp_path / "b.jsonl", ["x"])
    assert run(tmp_path / "out", tmp_path, good, eos=EOS).documents == 1
    assert run(tmp_path / "both", tmp_path, path, good, eos=EOS).documents == 1


# ---- restarts and many processes


def bad_line(path: Path, documents: Sequence[str], at: int) -> Path:
    """Write a .jsonl with one line that has no text."""
    lines = jsonl(path, list(documents)).read_text().splitlines()
    path.write_text("\n".join([*lines[:at], json.dumps({"body": "x"}), *lines[at:]]) + "\n")
    return path


@pytest.mark.parametrize("shard_tokens", [100, 1 << 20])
def test_a_failed_job_does_not_block_the_corrected_one(tokenizer: Path, tmp_path: Path, shard_tokens: int) -> None:
    good, body = jsonl(tmp_path / "good.jsonl", texts(30, 1)), jsonl(tmp_path / "body.jsonl", texts(30, 2), key="body")
    bad = bad_line(tmp_path / "bad.jsonl", texts(30, 3), at=25)
    third = jsonl(tmp_path / "third.jsonl", texts(10, 4))
    for name, wrong, right in (
        ("column", [good, body], [good, f"{body}#body"]),
        ("first column", [body, good], [f"{body}#body", good]),
        ("line", [good, bad], [good, third]),
        ("left out", [bad, good], [good]),
        ("more", [good, bad], [good, f"{body}#body", third]),
    ):
        out = tmp_path / name
        with pytest.raises(ValueError, match="has no string under the key 'text'"):
            run(out, tokenizer, *wrong, shard_tokens=shard_tokens)
        kept = {
            path.name: path.stat().st_mtime_ns for path in (tmp_path / f"{name}.partial").glob("tokens-00000-*.bin")
        }
        assert digests(run(out, tokenizer, *right, shard_tokens=shard_tokens).folder) == digests(
            run(tmp_path / f"{name} wanted", tokenizer, *right, shard_tokens=shard_tokens).folder
        )
        stay = {path.name: path.stat().st_mtime_ns for path in out.glob("tokens-00000-*.bin")}
        assert stay == kept or wrong[0] != right[0], "what was made of the source that is good was made again"


def test_finished_work_of_a_source_that_did_not_fail_is_not_thrown_away(tokenizer: Path, tmp_path: Path) -> None:
    good, bad = jsonl(tmp_path / "good.jsonl", texts(30, 1)), bad_line(tmp_path / "bad.jsonl", texts(30, 2), at=25)
    with pytest.raises(ValueError, match="has no string under the key 'text'"):
        run(tmp_path / "out", tokenizer, good, bad)

    def held() -> dict[Path, bytes]:
        files = (path for path in (tmp_path / "out.partial").rglob("*") if path.is_file())
        return {path: path.read_bytes() for path in files if path.suffix != ".lock"}

    before = held()
    with pytest.raises(ValueError, match=r"out\.partial holds unfinished work with another .* or remove it"):
        run(tmp_path / "out", tokenizer, jsonl(tmp_path / "third.jsonl", texts(10, 4)))
    assert held() == before


SOURCES = 3


def sources_for_killing(folder: Path) -> list[Path]:
    return [jsonl(folder / f"{i}.jsonl.zst", ["", *texts(100, i), "", ""]) for i in range(SOURCES)]


def start(output: Path, tokenizer: Path, paths: Sequence[Path], worker: Worker) -> BaseProcess:
    config = PrepareConfig(str(output), str(tokenizer), tuple(map(str, paths)), shard_tokens=300)
    process = forked().Process(target=prepare, args=(config, worker), kwargs={"quiet": True})
    process.start()
    return process


def test_killed_at_random_moments_it_finishes_with_the_same_bytes(tokenizer: Path, tmp_path: Path) -> None:
    paths = sources_for_killing(tmp_path)
    wanted = digests(run(tmp_path / "wanted", tokenizer, *paths, shard_tokens=300).folder)
    output, chance, midway = tmp_path / "out", random.Random(0), 0
    job = tmp_path / "out.partial" / ".upcycle"
    for _ in range(12):
        parts = len(list(job.glob("part-*.json")))
        process = start(output, tokenizer, paths, Worker())
        while process.is_alive() and len(list(job.glob("part-*.json"))) <= parts:
            time.sleep(0.001)  # it has come to work again
        time.sleep(chance.random() * 0.02)
        process.kill()
        process.join()
        midway += process.exitcode == -signal.SIGKILL and not output.exists()
        if output.exists():  # killed after the last step; what is there must be whole
            break
    assert midway >= 2, "the job was too quick to be killed"
    last = start(output, tokenizer, paths, Worker())
    last.join()
    assert last.exitcode == 0 and digests(output) == wanted


def test_a_broken_part_is_made_again(tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = sources_for_killing(tmp_path)
    wanted = digests(run(tmp_path / "wanted", tokenizer, *paths, shard_tokens=300).folder)

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("training.data.prepare.finish", stop)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "out", tokenizer, *paths, shard_tokens=300)
    victim = tmp_path / "out.partial" / "tokens-00001-00001.bin"
    victim.write_bytes(victim.read_bytes()[:-2])
    with pytest.raises(
        ValueError, match=r"out\.partial holds unfinished work with another tokenizer, source or setting"
    ):
        run(tmp_path / "out", tokenizer, *paths, shard_tokens=301)
    with pytest.raises(ValueError, match=r"out\.partial is unfinished, run the same command again"):
        TokenShards.open(tmp_path / "out")
    assert digests(run(tmp_path / "out", tokenizer, *paths, shard_tokens=300).folder) == wanted


def stopped_before_the_end(output: Path, tokenizer: Path, paths: Sequence[Path]) -> Path:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("training.data.prepare.finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        run(output, tokenizer, *paths, shard_tokens=300)
    return output.with_name(output.name + ".partial")


@pytest.mark.parametrize("name", ["tokens-00001-00000.bin", "documents-00001-00001.npy"])
def test_a_part_with_a_zeroed_tail_is_made_again_and_foreign_files_stay(
    name: str, tokenizer: Path, tmp_path: Path
) -> None:
    paths = sources_for_killing(tmp_path)
    wanted = digests(run(tmp_path / "wanted", tokenizer, *paths, shard_tokens=300).folder)
    partial = stopped_before_the_end(tmp_path / "out", tokenizer, paths)
    whole = (partial / name).read_bytes()
    (partial / name).write_bytes(whole[:-100] + bytes(100))
    (partial / "tokens-00002-00001.bin").write_bytes(b"cut")
    foreign = {"notes.tmp": "mine", "mine.part": "mine too"}
    for file, said in foreign.items():
        (partial / file).write_text(said)
    found = digests(run(tmp_path / "out", tokenizer, *paths, shard_tokens=300).folder)
    assert {file: found.pop(file) for file in foreign} and found == wanted


def test_rank_0_waits_for_a_part_that_another_process_makes_again(tokenizer: Path, tmp_path: Path) -> None:
    paths = sources_for_killing(tmp_path)
    wanted = digests(run(tmp_path / "wanted", tokenizer, *paths, shard_tokens=300).folder)
    partial = stopped_before_the_end(tmp_path / "out", tokenizer, paths)
    victim = partial / "tokens-00001-00000.bin"  # a source of rank 1
    victim.write_bytes(victim.read_bytes()[:-10] + bytes(10))
    first = start(tmp_path / "out", tokenizer, paths, Worker(0, 2))
    time.sleep(0.5)
    assert not (tmp_path / "out").exists()
    second = start(tmp_path / "out", tokenizer, paths, Worker(1, 2))
    for process in (first, second):
        process.join()
        assert process.exitcode == 0
    assert digests(tmp_path / "out") == wanted


def test_what_is_there_is_looked_at(tokenizer: Path, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", texts(5))
    shard = run(tmp_path / "out", tokenizer, path).folder / "tokens-00000-00000.bin"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + b"?")
    with pytest.raises(ValueError, match=r"tokens-00000-00000\.bin has changed since it was written"):
        run(tmp_path / "out", tokenizer, path)
    shard.unlink()
    with pytest.raises(ValueError, match=r"tokens-00000-00000\.bin is missing, so .*out has changed; remove"):
        run(tmp_path / "out", tokenizer, path)


def test_two_processes_make_the_same_bytes(tokenizer: Path, tmp_path: Path) -> None:
    paths = sources_for_killing(tmp_path)
    wanted = digests(run(tmp_path / "wanted", tokenizer, *paths, shard_tokens=300).folder)
    processes = [start(tmp_path / "out", tokenizer, paths, Worker(rank, 2)) for rank in (1, 0)]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert digests(tmp_path / "out") == wanted


def test_a_process_that_comes_when_rank_0_is_done_waits_for_nobody(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jsonl(tmp_path / "a.jsonl", texts(5))  # one source, which is rank 0's
    folder = run(tmp_path / "out", tokenizer, path).folder
    monkeypatch.setattr(prepare_module, "complete", lambda *_: False)  # it looked before rank 0 was done
    monkeypatch.setattr(job.time, "sleep", lambda _: pytest.fail("it waits"))
    config = PrepareConfig(str(tmp_path / "out"), str(tokenizer), (str(path),))
    assert prepare(config, Worker(1, 2), quiet=True) == folder


def test_what_is_there_is_kept(tokenizer: Path, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", texts(5))
    first = run(tmp_path / "out", tokenizer, path)
    stamp = (first.folder / "meta.json").stat().st_mtime_ns
    run(tmp_path / "out", tokenizer, path)
    assert (first.folder / "meta.json").stat().st_mtime_ns == stamp
    jsonl(path, texts(6))
    with pytest.raises(ValueError, match="exists and was made from something else; remove it or choose another output"):
        run(tmp_path / "out", tokenizer, path)
    with pytest.raises(ValueError, match=f"contains the input {path}; write another folder"):
        run(tmp_path, tokenizer, path)


def test_the_command(tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = jsonl(tmp_path / "a.jsonl", ["ab", "c"])
    (tmp_path / "prepare.yaml").write_text(f"tokenizer: {tokenizer}\nsources: [{path}]\n")
    assert main([str(tmp_path / "out"), str(tmp_path / "prepare.yaml")]) == 0
    assert "2 documents, 5 tokens, 3 bytes of text (0.60 per token)" in capsys.readouterr().out
    assert main([str(tmp_path / "out"), "check=true"]) == 0
    capsys.readouterr()
    assert main([str(tmp_path / "other"), "tokeniser=x"]) == 2
    assert "did you mean 'tokenizer'?" in capsys.readouterr().err


# ---- shards that are not as they should be


@pytest.fixture
def folder(tokenizer: Path, tmp_path: Path) -> Path:
    return run(tmp_path / "shards", tokenizer, jsonl(tmp_path / "a.jsonl", texts(20)), shard_tokens=200).folder


def damage_meta(folder: Path, **changes: object) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_bytes(publish.signed({**meta, **changes}))


def test_damaged_folders_are_a_sentence(folder: Path, tmp_path: Path) -> None:
    tokens, table, meta = (
        folder / name for name in ("tokens-00000-00000.bin", "documents-00000-00000.npy", "meta.json")
    )
    kept = {path: path.read_bytes() for path in (tokens, table, meta)}

    def refused(message: str) -> None:
        with pytest.raises(ValueError, match=message):
            TokenShards.open(folder)
        for path, content in kept.items():
            path.write_bytes(content)
        TokenShards.open(folder)

    tokens.write_bytes(kept[tokens][:-2])
    refused(r"tokens-00000-00000\.bin has \d+ bytes and should have \d+")
    tokens.unlink()
    refused(r"tokens-00000-00000\.bin is missing")
    table.write_bytes(b"x" * len(kept[table]))
    refused(r"documents-00000-00000\.npy cannot be read")
    table.write_bytes(kept[table][:128] + bytes(len(kept[table]) - 128))
    refused("they do not belong together")
    table.write_bytes(kept[table].replace(b"<u8", b"<i8"))
    refused(r"is int64 \[2, \d+\], not uint64")
    meta.write_bytes(kept[meta][:-9])
    refused(r"meta\.json cannot be read")
    meta.unlink()
    refused(r"has no meta\.json, so it is not a folder of token shards")
    meta.write_text('{"model_type": "llama"}')
    refused("does not describe token shards")
    for changes, message in (
        ({"version": 2}, "is of version 2 and this program reads 1"),
        ({"dtype": "float32"}, "says dtype 'float32'"),
        ({"vocab": "400"}, "lacks a description of its token shards"),
        ({"documents": 7}, r"has 20 documents but its meta\.json says 7"),
        ({"shards": [{}]}, "lacks a description of its token shards"),
        ({"dtype": "uint32"}, "they do not belong together"),
    ):
        damage_meta(folder, **changes)
        refused(message)
    with pytest.raises(ValueError, match=r"there is no folder .*nowhere with token shards; make it with"):
        TokenShards.open(tmp_path / "nowhere")


def test_a_flipped_bit_in_the_last_count_of_a_table_names_the_table(folder: Path) -> None:
    path = folder / "documents-00000-00000.npy"
    content = bytearray(path.read_bytes())
    content[-8] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"documents-00000-00000\.npy has changed: its sha256 is"):
        TokenShards.open(folder)


def test_a_flipped_bit_is_found(folder: Path) -> None:
    path = folder / "tokens-00000-00000.bin"
    content = bytearray(path.read_bytes())
    content[11] ^= 0x80  # the high byte of an id: beyond the vocabulary
    path.write_bytes(content)
    shards = TokenShards.open(folder)
    with pytest.raises(ValueError, match="has changed: its sha256 is"):
        shards.verify()
    with pytest.raises(ValueError, match=r"holds id .* its files are damaged"):
        Windows(shards, 64).row(0)


def test_other_models_and_other_tokenizers(folder: Path, tmp_path: Path) -> None:
    vocab = TokenShards.open(folder).vocab
    TokenShards.open(folder, vocab)
    with pytest.raises(ValueError, match=f"tokenizer of {vocab} ids but the model has {vocab - 1} embeddings"):
        TokenShards.open(folder, vocab - 1)
    (tmp_path / "other").mkdir()
    other = run(tmp_path / "o", make_tokenizer(tmp_path / "other", bos=True), jsonl(tmp_path / "b.jsonl", texts(3)))
    with pytest.raises(ValueError, match="made with different tokenizers"):
        Mixture([("a", TokenShards.open(folder), 1), ("b", other, 1)], 8, 0)


# ---- windows


def made_up(*parts: Sequence[int], start: int = 0) -> TokenShards:
    """Shards whose documents have these lengths, and where every token is another number from 1 on."""
    shards, number = [], 1
    for lengths in parts:
        starts = np.cumsum([0, *lengths]).astype(np.uint64)
        shards.append(Shard(np.arange(number, number + int(starts[-1]), dtype=np.uint32), starts, starts))
        number += int(starts[-1])
    return TokenShards(Path("made-up"), tuple(shards), number, -1, start, "none")


def owners(shards: TokenShards) -> dict[int, tuple[int, int]]:
    """token -> (document, place in it)."""
    found = {}
    for index in range(shards.documents):
        for place, token in enumerate(shards.document(index).tolist()):
            found[token] = (index, place)
    return found


def check_borders(batch: Batch, shards: TokenShards) -> None:
    """Each input is what comes before its label in the label's own document; ids and positions say where that is."""
    owner = owners(shards)
    for tokens, labels, documents, positions in zip(*map(torch.Tensor.tolist, vars(batch).values()), strict=True):
        before = None
        for t, (token, label, document, position) in enumerate(zip(tokens, labels, documents, positions, strict=True)):
            if label == IGNORE:
                before = None  # context of the window before, or beyond the end
                continue
            index, place = owner[label]
            assert token == (shards.start if place == 0 else label - 1)
            if before is not None and before == index:
                assert (document, position) == (documents[t - 1], positions[t - 1] + 1)
            elif before is not None:
                assert place == 0 and (document, position) == (documents[t - 1] + 1, 0)
            elif t == 0:
                assert (document, position) == (0, 0)
            before = index


LENGTHS = st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=9), min_size=1, max_size=3)


@settings(deadline=None, max_examples=60)
@given(LENGTHS, st.integers(1, 15), st.integers(0, 3), st.booleans())
def test_an_epoch_has_every_token_once(lengths: list[list[int]], sequence: int, epoch: int, shuffled: bool) -> None:
    shards = made_up(*lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "CHUNK", 4)
        windows = Windows(shards, sequence, True, "a", 7 if shuffled else None)
        batch = stack([windows.row(epoch * windows.count + n) for n in range(windows.count)])
    assert batch.labels[batch.scored].sort().values.tolist() == list(range(1, shards.tokens + 1))
    check_borders(batch, shards)
    assert batch.tokens.shape == batch.labels.shape == (windows.count, sequence)
    assert (batch.tokens.dtype, batch.documents.dtype, batch.positions.dtype) == (torch.int64, torch.int32, torch.int64)
    if not shuffled:
        assert batch.labels[batch.scored].tolist() == list(range(1, shards.tokens + 1))
    if shards.tokens >= sequence:  # full: what is not scored is context
        assert batch.tokens.flatten()[sequence * (windows.count - 1) :].max() < shards.vocab
        assert int((~batch.scored).sum()) == windows.count * sequence - shards.tokens


def test_broken_borders_are_noticed() -> None:
    shards = made_up([5, 3, 9, 4, 6])
    windows = Windows(shards, 9, True, "a", 0)
    batch = stack([windows.row(n) for n in range(windows.count)])
    check_borders(batch, shards)
    late = torch.cat([batch.documents[:, :1], batch.documents[:, :-1]], 1)  # the input's document, not the label's
    for twin in (
        replace(batch, documents=late),
        replace(batch, documents=torch.zeros_like(batch.documents)),
        replace(batch, positions=torch.arange(9).repeat(windows.count, 1)),
        replace(batch, tokens=torch.cat([batch.tokens[:, :1], batch.labels[:, :-1]], 1)),
    ):
        with pytest.raises(AssertionError):
            check_borders(twin, shards)


def test_unmasked_windows_are_plain_packing() -> None:
    shards = made_up([5, 3, 9, 4, 6])
    windows = Windows(shards, 9, mask_documents=False)
    batch = stack([windows.row(n) for n in range(windows.count)])
    assert not batch.documents.any() and (batch.positions == torch.arange(9)).all()
    assert torch.equal(batch.labels, torch.arange(1, 28).view(3, 9))


def test_a_set_shorter_than_a_sequence_is_padded() -> None:
    batch = stack([Windows(made_up([2, 1]), 6, True, "a", None).row(0)])
    assert batch.tokens.tolist() == [[0, 1, 0, 0, 0, 0]]
    assert batch.labels.tolist() == [[1, 2, 3, IGNORE, IGNORE, IGNORE]]
    assert batch.documents.tolist() == [[0, 0, 1, 2, 2, 2]]  # padding is seen by padding alone
    assert batch.positions.tolist() == [[0, 1, 0, 0, 1, 2]]


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 300), st.integers())
def test_permuted_is_a_permutation(count: int, seed: int) -> None:
    assert sorted(permuted(i, count, seed) for i in range(count)) == list(range(count))


def test_permuted_has_no_pattern() -> None:
    """Neighbours go anywhere: the mean jump of a random permutation is a third of its length."""
    count = 10**12
    places = [permuted(i, count, "x") for i in range(2000)]
    jumps = np.abs(np.diff(np.array(places, float))) / count
    assert abs(jumps.mean() - 1 / 3) < 0.03 and abs(np.mean(places) / count - 0.5) < 0.03
    small = [tuple(permuted(i, 4, key) for i in range(4)) for key in range(2400)]
    assert len(set(small)) == 24 and min(small.count(order) for order in set(small)) > 40


def test_epochs_and_names_and_seeds_shuffle_anew() -> None:
    shards = made_up([3] * 200)

    def order(name: str, seed: int, epoch: int) -> list[int]:
        windows = Windows(shards, 3, True, name, seed)
        return [int(windows.row(epoch * windows.count + n)[1][0]) for n in range(windows.count)]

    orders = [order("a", 0, 0), order("a", 0, 1), order("b", 0, 0), order("a", 1, 0)]
    for i, one in enumerate(orders):
        assert sorted(one) == sorted(orders[0]) and one != sorted(one)
        assert all(one != other for other in orders[:i])
    assert order("a", 0, 1) == orders[1]


def test_documents_get_other_neighbours() -> None:
    """Not only windows change places: what lies together in one is another choice in each epoch."""
    shards = made_up([2] * 40)
    windows = Windows(shards, 8, True, "a", 0)
    together = [
        {frozenset(windows.row(e * windows.count + n)[1].tolist()) for n in range(windows.count)} for e in range(2)
    ]
    assert len(together[0] & together[1]) <= 1


# ---- mixtures


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 9))
def test_counts_stay_within_one_sample_of_the_weights(weights: list[int], seed: int) -> None:
    schedule = Schedule([w / 4 for w in weights], seed)
    seen = [0] * len(weights)
    for n in range(min(3 * schedule.period, 700)):
        source, rank = schedule[n]
        assert rank == seen[source]  # each source's samples come in order, none left out
        seen[source] += 1
        for count, weight in zip(seen, weights, strict=True):
            assert abs(count - (n + 1) * weight / sum(weights)) < 1


def test_drawn_at_random_they_would_not() -> None:
    chance, seen, worst = random.Random(0), [0, 0], 0.0
    for n in range(700):
        seen[chance.random() < 0.3] += 1
        worst = max(worst, abs(seen[1] - 0.3 * (n + 1)))
    assert worst > 1


def test_awkward_weights_are_rounded_to_the_longest_schedule() -> None:
    weights = [0.1234567, 0.3, 0.0000001, 0.7654321]
    schedule = Schedule(weights, 0)
    assert schedule.period == data.CYCLE
    for share, weight in zip(schedule.shares, weights, strict=True):
        assert abs(share / schedule.period - weight / sum(weights)) <= 1 / data.CYCLE
    assert min(schedule.shares) > 0


def test_a_source_does_not_always_fall_to_the_same_rank() -> None:
    schedule = Schedule([1, 1], 0)
    assert {schedule[n][0] for n in range(0, 64, 2)} == {0, 1}


def mixture(seed: int = 3, **options: bool) -> Mixture:
    chance = random.Random(0)
    parts = [made_up(*([chance.randint(1, 30) for _ in range(50)] for _ in range(2))) for _ in range(3)]
    return Mixture([("a", parts[0], 3), ("b", parts[1], 1.5), ("c", parts[2], 0.5)], 16, seed, **options)


def same(a: Batch, b: Batch) -> bool:
    return all(torch.equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


def joined(batches: Sequence[Batch]) -> Batch:
    return Batch(*(torch.cat(parts) for parts in zip(*(vars(batch).values() for batch in batches), strict=True)))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_any_mesh_reads_the_same_samples(ranks: int) -> None:
    """A global batch of 8 on any number of ranks; and stopped after any step, it goes on with the next sample."""
    size = 8 // ranks
    for step in (0, 1, 57):
        parts = []
        for rank in range(ranks):
            with Loader(mixture(), step * 8, size, rank, ranks) as loader:
                first, cursor = next(loader)
                assert cursor == (step + 1) * 8
                parts.append(first)
        assert same(joined(parts), mixture().batch(step * 8, 8))
    assert not same(joined(parts[::-1]), mixture().batch(57 * 8, 8)) or ranks == 1  # order is noticed


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(0, 10**6))
def test_any_split_resumes_bitwise(sizes: list[int], cursor: int) -> None:
    whole, at, parts = mixture(), cursor, []
    for size in sizes:
        parts.append(mixture().batch(at, size))
        at += size
    assert same(joined(parts), whole.batch(cursor, sum(sizes)))
    assert not same(joined(parts), mixture(seed=4).batch(cursor, sum(sizes))) or sum(sizes) < 3


def test_a_mixture_reads_whole_epochs_of_each_source() -> None:
    mixed = mixture()
    of_b = (n for n in itertools.count() if mixed.schedule[n][0] == 1)
    two_epochs = itertools.islice(of_b, 2 * mixed.sources[1].count)
    labels = torch.cat([mixed.batch(n, 1).labels for n in two_epochs])
    counts = torch.bincount(labels[labels >= 0], minlength=mixed.sources[1].shards.vocab)[1:]
    assert (counts == 2).all()


def test_a_source_keeps_its_order_whatever_is_beside_it() -> None:
    shards = made_up([4] * 30)
    alone, beside = (Mixture([("a", shards, 1), *more], 4, 0) for more in ([], [("b", made_up([5] * 9), 2.0)]))
    found = [beside.batch(n, 1) for n in range(30) if beside.schedule[n][0] == 0]
    assert same(joined(found), alone.batch(0, len(found)))


def test_other_weights_neither_re_read_nor_skip() -> None:
    """Changed twice on the way, and saved and resumed in between: each source gives its samples in order, none twice."""
    lengths = [random.Random(n).randint(1, 30) for n in range(50)]
    shards = {name: made_up(lengths) for name in "abc"}

    def mixed(state: dict[str, Any], **weights: float) -> Mixture:
        state = json.loads(json.dumps(state))  # as a checkpoint holds it
        return Mixture([(name, shards[name], weight) for name, weight in weights.items()], 16, 3, state=state)

    class Told(Windows):
        def row(self, index: int) -> Any:
            read[self.name].append(index)
            return super().row(index)

    read: dict[str, list[int]] = {name: [] for name in "abc"}
    steps: list[tuple[int, dict[str, float]]] = [
        (137, {"a": 3, "b": 1}), (200, {"a": 3, "b": 1}), (613, {"a": 1, "b": 2.5}), (700, {"a": 1, "b": 2.5}),
        (901, {"b": 1, "a": 0.1, "c": 1}), (1000, {"b": 1, "a": 0.1, "c": 1}),
    ]  # fmt: skip
    state, at = {}, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "Windows", Told)
        for stop, weights in steps:
            mixture_ = mixed(state, **weights)
            counts = {name: len(indices) for name, indices in read.items()}
            for sample in range(at, stop):
                mixture_.batch(sample, 1)
            gave = {name: len(read[name]) - counts[name] for name in weights}
            for (
                name,
                weight,
            ) in weights.items():  # and the shares are those of the new weights, give or take one each way
                assert abs(gave[name] - (stop - at) * weight / sum(weights.values())) < 2
            state, at = mixture_.state(stop), stop
            assert state["given"] == {name: len(read[name]) for name in weights}
        assert all(indices == list(range(len(indices))) for indices in read.values()) and len(read["c"]) > 100
        whole, parts = mixed({}, a=3, b=1), mixed(mixed({}, a=3, b=1).state(137), a=3, b=1)
        assert same(whole.batch(137, 40), parts.batch(137, 40))
        # twin: without what was counted, as it was before: the same sample of a source is another number of the run
        read["a"], read["b"] = [], []
        mixed({}, a=3, b=1).batch(0, 500)
        mixed({}, a=1, b=3).batch(500, 500)
        assert len(read["a"]) - len(set(read["a"])) > 120 and max(read["b"]) - len(read["b"]) > 240
    with pytest.raises(ValueError, match="the checkpoint's place in the data has no before"):
        mixed({"since": 1}, a=1)


def test_mock_has_the_same_interface() -> None:
    mock = Mock(100, 16, seed=1)
    batch = mock.batch(5, 3)
    assert same(batch, joined([mock.batch(5, 1), mock.batch(6, 2)]))
    assert batch.tokens.shape == (3, 16) and int(batch.tokens.max()) < 100 and batch.scored.all()
    assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1]) and not same(batch, mock.batch(4, 3))
    assert {k: v.dtype for k, v in vars(batch).items()} == {k: v.dtype for k, v in vars(mixture().batch(0, 1)).items()}


# ---- a stream


@pytest.fixture
def streamed(tokenizer: Path, tmp_path: Path) -> DataConfig:
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    for part in range(2):
        jsonl(tmp_path / "set" / f"train-{part}.jsonl", ["", *texts(15, part)])
    return DataConfig(stream=f"hf:{tmp_path / 'set'}", tokenizer=str(tokenizer), sequence=16)


def test_a_stream_is_the_same_on_any_mesh_and_after_any_stop(streamed: DataConfig) -> None:
    whole = open_training(streamed, 400).batch(0, 160)
    documents = [row for part in range(2) for row in texts(15, part)]
    known = Tokenizer.from_file(f"{streamed.tokenizer}/tokenizer.json")
    wanted = [id for document in documents for id in [*known.encode(document).ids, known.token_to_id(EOS)]]
    assert len(wanted) * 1.2 < 160 * 16  # more than an epoch
    assert whole.labels.flatten().tolist() == (wanted * 3)[: 160 * 16]
    for rank in range(2):
        cursor, state = 0, {}
        for stop in (1, 3, 9):  # steps of 2 ranks of 4 samples, each time from the state of rank 0
            with Loader(open_training(streamed, 400, state), cursor, 4, rank, 2) as loader:
                for _ in range(stop):
                    first = cursor + 4 * rank
                    batch, cursor = next(loader)
                    assert same(batch, Batch(*(part[first : first + 4] for part in vars(whole).values())))
                state = json.loads(json.dumps(loader.samples.state(cursor)))
    stream = open_training(streamed, 400)
    stream.batch(8, 1)
    with pytest.raises(ValueError, match="is at sample 9 and cannot go back to 8"):
        stream.batch(8, 1)
    with pytest.raises(ValueError, match="differs from the checkpoint's"):
        open_training(replace(streamed, sequence=17), 400, state)


def test_a_stream_takes_the_tokenizer_of_a_hub_id(
    streamed: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached(Path(streamed.tokenizer), "org/tokenizer", monkeypatch, tmp_path)
    there = open_training(replace(streamed, tokenizer="org/tokenizer"), 400).batch(0, 4)
    assert same(there, open_training(streamed, 400).batch(0, 4))


def test_bad_streams_are_a_sentence(streamed: DataConfig, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ids but the model has 99 embeddings"):
        open_training(streamed, 99)
    for change, message in (
        ({"tokenizer": ""}, "data.tokenizer is not set"),
        ({"stream": "a.jsonl"}, "data.stream is 'a.jsonl'; write hf:org/name"),
        ({"train": ("x",)}, "data.stream and data.train are both set"),
        ({"stream": f"{streamed.stream}::nosplit"}, "nosplit"),
    ):
        with pytest.raises(ValueError, match=message):
            open_training(replace(streamed, **change), 400)  # type: ignore[arg-type]
    (tmp_path / "none").mkdir()
    jsonl(tmp_path / "none" / "train.jsonl", ["", ""])
    with pytest.raises(ValueError, match="there is no text in hf:"):
        open_training(replace(streamed, stream=f"hf:{tmp_path / 'none'}"), 400).batch(0, 1)


# ---- validation


@pytest.mark.parametrize(("size", "ranks"), [(1, 1), (3, 1), (2, 3), (8, 4)])
@pytest.mark.parametrize("mask", [True, False])
def test_validation_scores_every_token_once(size: int, ranks: int, mask: bool) -> None:
    shards = made_up([5, 3, 9], [4, 6, 30, 1])
    valid = Validation("a", shards, 7, mask_documents=mask)
    found = [list(valid.batches(size, rank, ranks)) for rank in range(ranks)]
    assert len({len(batches) for batches in found}) == 1  # or the ranks would wait for each other
    assert all(batch.tokens.shape == (size, 7) for batches in found for batch in batches)
    labels = torch.cat([batch.labels for batches in found for batch in batches])
    assert labels[labels >= 0].sort().values.tolist() == list(range(1, shards.tokens + 1))


def test_bits_per_byte_is_what_one_computes_by_hand(tokenizer: Path, tmp_path: Path) -> None:
    """A model that knows pairs of tokens, on documents as they are and as the windows cut them."""
    documents = texts(30, 5)
    shards = run(tmp_path / "out", tokenizer, jsonl(tmp_path / "a.jsonl", documents))
    known = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    nats = torch.rand(shards.vocab, shards.vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    by_hand = 0.0
    for document in documents:
        ids = [known.token_to_id(EOS), *known.encode(document).ids, known.token_to_id(EOS)]
        by_hand += sum(float(nats[a, b]) for a, b in pairwise(ids))
    by_hand /= math.log(2) * len("".join(documents).encode())
    for sequence in (13, 100, 10**5):
        valid, total = Validation("a", shards, sequence), 0.0
        for batch in valid.batches(4):
            total += float(nats[batch.tokens, batch.labels.clamp(min=0)][batch.scored].sum())
        assert valid.bits_per_byte(total) == pytest.approx(by_hand, rel=1e-12)
        assert bits_per_byte(total, valid.bytes + 1) != pytest.approx(by_hand, rel=1e-12)


def test_the_head_of_a_set_is_whole_documents_and_their_bytes() -> None:
    shards = made_up([5, 3, 9], [4, 6])
    for tokens, wanted in ((1, 5), (5, 5), (16, 8), (17, 17), (20, 17), (21, 21), (26, 21), (27, 27), (99, 27)):
        head = shards.head(tokens)
        assert head.tokens == head.bytes == wanted
    assert [shards.document(i).tolist() for i in range(4)] == [shards.head(21).document(i).tolist() for i in range(4)]


# ---- configs


def test_configs(folder: Path, tmp_path: Path) -> None:
    words = [f"train=[{{name: web, path: {folder}, weight: 3}},{folder}]", f"valid=[{{path: {folder}, tokens: 90}}]"]
    config = read(DataConfig, "", [*words, "sequence=32"])
    assert config.train == (TrainSource("web", str(folder), 3), TrainSource("shards", str(folder), 1))
    assert config.valid == (ValidSource("shards", str(folder), 90),)
    mixed = open_training(config, 400)
    assert isinstance(mixed, Mixture) and mixed.state(5)["given"] == {"web": 4, "shards": 1}
    again = open_training(
        replace(config, train=[replace(config.train[0], weight=1), config.train[1]]), 400, mixed.state(5)
    )
    assert isinstance(again, Mixture) and (again.since, again.before) == (5, [4, 1])
    assert mixed.schedule.shares == [3, 1] and mixed.batch(0, 4).tokens.shape == (4, 32)
    (valid,) = open_validation(config, 400)
    assert valid.tokens <= 90 and valid.bytes < TokenShards.open(folder).bytes
    for opened in (open_training, open_validation):
        with pytest.raises(ValueError, match="the model has 99 embeddings"):
            opened(config, 99)
    with pytest.raises(ValueError, match="there is nothing to train on"):
        open_training(DataConfig(), 400)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("train=[{pth: x}]", r"unknown key 'data.train.0.pth'; did you mean 'path'\?"),
        ("train=[{name: x}]", r"data.train.0 has no path"),
        ("train=[{path: x, weight: 0}]", "data.train.0.weight is 0.0; it must be above 0"),
        ("train=[{path: x, weight: heavy}]", "data.train.0.weight"),
        ("train=[a/x,b/x]", "data.train has two sources named 'x'"),
        ("train=[3]", "data.train.0 is 3; it must be keys and values"),
        ("valid={a: b}", r"^valid is \{'a': 'b'\}; it must be a list, as in valid=\[\.\.\.\]$"),
        ("sequence=0", "data.sequence is 0; it must be at least 1"),
    ],
)
def test_bad_configs_are_a_sentence(word: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(DataConfig, "", [word])


# ---- the loader


class Failing:
    def batch(self, sample: int, size: int) -> Batch:
        if sample >= 4:
            raise OSError("the disk is gone")
        return Mock(10, 4).batch(sample, size)

    def state(self, cursor: int) -> dict[str, Any]:
        return {}


def test_a_failure_in_the_thread_comes_to_the_caller_in_its_turn() -> None:
    with Loader(Failing(), 0, 2) as loader:
        assert [cursor for _, cursor in (next(loader), next(loader))] == [2, 4]
        for _ in range(2):  # and stays
            with pytest.raises(OSError, match="the disk is gone"):
                next(loader)
    assert not loader.thread.is_alive()


def test_a_loader_closes_while_it_is_full() -> None:
    before = threading.active_count()
    loader = Loader(Mock(10, 4), 0, 2, ahead=1)
    next(loader)
    loader.close()
    loader.close()
    assert threading.active_count() == before
    with pytest.raises(ValueError, match="the loader is closed"):
        next(loader)


def test_a_loader_starts_at_its_cursor() -> None:
    with Loader(mixture(), 40, 4, 1, 2) as loader:
        for (batch, cursor), at in zip(loader, range(40, 200, 8), strict=False):
            assert cursor == at + 8 and same(batch, mixture().batch(at + 4, 4))


def test_a_record_that_the_disk_cannot_read_loses_no_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One failed read of a part's record must not make a folder of the other parts' documents, with exit code 0."""
    words = [f"tokenizer={make_tokenizer(tmp_path, bos=False)}", "shard_tokens=300"]
    words += [f"sources=[{jsonl(tmp_path / 'a.jsonl', texts(40, 1))},{jsonl(tmp_path / 'b.jsonl', texts(40, 2))}]"]
    real, reads = job.strict.read_json, [0, 0]  # so far; the one that fails

    def failing(path: Path) -> Any:
        reads[0] += path.name == "part-00001-00000.json"
        if path.name == "part-00001-00000.json" and reads[0] == reads[1]:
            raise ValueError(f"{path} cannot be opened") from OSError(errno.EIO, "Input/output error")
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(job.strict, "read_json", failing)
        assert main([str(tmp_path / "whole"), *words]) == 0
        reads[:] = 0, reads[0]  # the last one, which collects the parts
        assert main([str(tmp_path / "out"), *words]) == 2
    assert not (tmp_path / "out").exists()
    assert main([str(tmp_path / "out"), *words]) == 0
    have, want = (json.loads((tmp_path / name / "meta.json").read_text()) for name in ("out", "whole"))
    assert have["documents"] == want["documents"] == 80
