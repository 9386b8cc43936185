"""Token shards are read whole once before they are learned from, and again when they changed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.unit.training.test_train import WORDS, moe, place
from training.__main__ import main
from training.data import open as opening
from training.data.mixture import DataConfig
from training.data.open import check_tokens
from training.run import build

__all__ = ["place"]  # a fixture


@pytest.fixture
def data(place: Path, tmp_path: Path) -> Path:
    return shutil.copytree(place / "data", tmp_path / "data", ignore=shutil.ignore_patterns(".checked.json"))


def damage(data: Path) -> Path:
    """The low byte of every id is overwritten: all are ids of the vocabulary still."""
    file = next(data.glob("tokens*"))
    content = bytearray(file.read_bytes())
    content[::2] = b"\x07" * len(content[::2])
    file.write_bytes(content)
    return file


def test_damaged_tokens_are_said_before_weights_are_read(
    place: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = damage(data)
    monkeypatch.setattr(build, "learner", lambda *_, **__: pytest.fail("a model was made"))
    words = [f"output={tmp_path / 'run'}", f"model.upcycle={json.dumps(moe(place))}", "steps=8", *WORDS]
    for key in ("train", "valid"):
        other = "valid" if key == "train" else "train"
        given = [f"data.{key}=[{data}]", f"data.{other}=[{place / 'valid'}]"]
        assert main([*words, *given]) == 2
        assert f"{file} has changed" in capsys.readouterr().err
    assert not (tmp_path / "run").exists() and not (data / ".checked.json").exists()


def test_they_are_read_once_and_again_when_one_changed(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = opening.check_file
    monkeypatch.setattr(opening, "check_file", lambda path, sha: (read.append(path.name), real(path, sha)))
    config, files = DataConfig(train=(str(data),)), {path.name for path in data.iterdir()} - {"meta.json"}
    check_tokens(config)
    assert set(read) == files
    check_tokens(config)
    assert len(read) == len(files)  # not once more
    first = next(data.glob("tokens*"))
    os.utime(first, ns=(1, 1))
    read.clear()
    check_tokens(config)
    assert read == [first.name]
    for change in ("time", "copy", "sum"):  # what is not as it was when it was read is not believed
        stamp, content = first.stat(), first.read_bytes()
        damage(data)
        if change == "copy":  # with its times, as rsync -a and cp -p make one
            shutil.copy2(first, first.with_suffix(".new"))
            first.with_suffix(".new").rename(first)
            os.utime(first, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        elif change == "sum":
            (data / ".checked.json").write_text("[]")
        with pytest.raises(ValueError, match="has changed"):
            check_tokens(config)
        first.write_bytes(content)
        check_tokens(config)


def test_a_folder_that_cannot_be_written_to_is_read_each_time(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (data / ".checked.json").mkdir()
    check_tokens(DataConfig(train=(str(data),)))
    damage(data)
    with pytest.raises(ValueError, match="has changed"):
        check_tokens(DataConfig(train=(str(data),)))
