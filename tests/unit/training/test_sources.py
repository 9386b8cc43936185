"""Arrow folders of `datasets`, and a stream of the Hub whose preparation is stopped: the bytes are those of one sitting."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.training.test_data import decoded, digests, jsonl, make_tokenizer, run, texts
from training.data import encoding
from training.data.mixture import DataConfig
from training.data.open import open_training
from training.data.prepare import JOB
from training.data.sources import texts as sources

datasets = pytest.importorskip("datasets")
pyarrow = pytest.importorskip("pyarrow")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"), bos=False)


# ---- Arrow


def saved(folder: Path, rows: list[str], key: str = "text", **more: Any) -> Path:
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({key: rows, "n": list(range(len(rows)))}).save_to_disk(folder, **more)
    return folder


def test_a_folder_of_save_to_disk(tokenizer: Path, tmp_path: Path) -> None:
    rows = texts(30)
    place = saved(tmp_path / "set", rows, num_shards=2)
    loaded = datasets.load_from_disk(place)
    shutil.copy(next(place.glob("data-*.arrow")), place / "cache-0123.arrow")  # as `map` leaves it
    assert decoded(run(tmp_path / "out", tokenizer, place), tokenizer) == rows
    named = run(tmp_path / "named", tokenizer, f"{saved(tmp_path / 'other', rows[:9], 'content')}#content")
    assert decoded(named, tokenizer) == rows[:9]
    with pytest.raises(ValueError, match="no column 'text', only content, n"):
        run(tmp_path / "none", tokenizer, tmp_path / "other")
    loaded.train_test_split(5, seed=0).save_to_disk(tmp_path / "split")
    with pytest.raises(ValueError, match=r"holds the splits of a dataset; name those to read: sources=\[\S+/split/tr"):
        run(tmp_path / "whole", tokenizer, tmp_path / "split")
    assert run(tmp_path / "test", tokenizer, tmp_path / "split" / "test").documents == 5


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_a_packed_arrow_file_is_refused_unread(codec: str, tokenizer: Path, tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["x" * (1 << 20)]})
    options = pyarrow.ipc.IpcWriteOptions(compression=codec)
    with pyarrow.ipc.new_stream(tmp_path / "a.arrow", table.schema, options=options) as file:
        file.write_table(table)
    before = pyarrow.total_allocated_bytes()
    with pytest.raises(ValueError, match=r"a\.arrow has a packed or encoded batch"):
        run(tmp_path / "out", tokenizer, tmp_path / "a.arrow")
    assert pyarrow.total_allocated_bytes() <= before


def test_damaged_arrow_is_read_or_a_sentence(tmp_path: Path) -> None:
    path, chance = tmp_path / "a.arrow", random.Random(3)
    (made,) = saved(tmp_path / "set", texts(50)).glob("*.arrow")
    whole, refused = made.read_bytes(), 0
    for _ in range(300):
        raw = bytearray(whole[: len(whole) - chance.choice([0, 0, chance.randrange(len(whole))])])
        for _ in range(chance.randint(1, 3)):
            raw[chance.randrange(len(raw))] = chance.randrange(256)
        path.write_bytes(raw)
        try:
            list(sources.table_texts(sources.find([str(path)])[0], lambda size: None))
        except ValueError as error:
            refused += 1
            assert "a.arrow" in str(error) and "\n" not in str(error)
    assert refused > 50


# ---- a stream that is stopped


class Counted:
    """A dataset of the Hub that counts the rows it gives, and stops after so many."""

    def __init__(self, rows: Any, stop: int) -> None:
        self.rows, self.stop, self.given = rows, stop, 0

    def __iter__(self) -> Iterator[Any]:
        for row in self.rows:
            if self.given == self.stop:
                raise KeyboardInterrupt
            self.given += 1
            yield row

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rows, name)


@pytest.mark.parametrize(
    ("kind", "stops", "known"), [("text", [40, 20], True), ("chat", [40, 20], True), ("text", [50], False)]
)
def test_a_stopped_stream_continues_at_its_place(
    kind: str, stops: list[int], known: bool, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "chat":
        tokenizer = make_tokenizer(tmp_path, bos=False)
        template = "{% for m in messages %}{{ m.role + ': ' + m.content + '<eos>' }}{% endfor %}"
        settings = {"eos_token": "<eos>", "chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"}
        (tokenizer / "tokenizer_config.json").write_text(json.dumps(settings))
    place = tmp_path / "set"
    place.mkdir()
    for part in range(4):
        rows = ["", *texts(15, part)]
        if kind == "chat":
            talks = [json.dumps({"prompt": "say", "completion": row}) for row in rows[1:]]
            (place / f"train-{part}.jsonl").write_text("\n".join(talks))
        else:
            jsonl(place / f"train-{part}.jsonl", rows)
    monkeypatch.setattr(encoding, "BATCH", 600)
    monkeypatch.setattr(encoding, "TALKS", 4)
    load, opened = sources.hub_rows, list[Counted]()

    def hub_rows(source: Any) -> Counted:
        opened.append(Counted(load(source), stop))
        return opened[-1]

    monkeypatch.setattr(sources, "hub_rows", hub_rows)
    stop, words = -1, {"shard_tokens": 400, "kind": kind}
    whole = digests(run(tmp_path / "whole", tokenizer, f"hf:{place}", **words).folder)  # type: ignore[arg-type]
    total = opened.pop().given
    for stop in stops:
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "out", tokenizer, f"hf:{place}", **words)  # type: ignore[arg-type]
        assert opened[-1].given == stop
        if not known:
            for record in (tmp_path / "out.partial" / JOB).glob("part-*.json"):
                record.write_text(record.read_text().replace(datasets.__version__, "0.1"))
    stop = -1
    out = run(tmp_path / "out", tokenizer, f"hf:{place}", **words)  # type: ignore[arg-type]
    assert digests(out.folder) == whole
    assert (opened[-1].given < total - 20) == known, "the rows before the place were read again"


def test_a_stream_resumed_inside_a_document_knows_its_place(tokenizer: Path, tmp_path: Path) -> None:
    """`datasets` forgets a state that it has loaded until it gives the next row."""
    (tmp_path / "set").mkdir()
    jsonl(tmp_path / "set" / "train.jsonl", [*texts(3), " ".join(texts(20, 1)), *texts(9, 2)])
    config = DataConfig(stream=f"hf:{tmp_path / 'set'}", tokenizer=str(tokenizer), sequence=16)
    whole = open_training(config, 400).batch(0, 200).labels.numpy()
    cursor, state = 40, None
    for _ in range(3):
        stream = open_training(config, 400, state)
        stream.batch(cursor, 1)
        state = json.loads(json.dumps(stream.state(cursor)))
    assert len(state["ids"]) > 100, "the state is not inside of a document"
    assert np.array_equal(open_training(config, 400, state).batch(cursor, 160).labels.numpy(), whole[cursor:])
