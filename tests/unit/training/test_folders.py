"""No command destroys a folder that is not its own, and runs that older versions left go on and are read."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from unittest.mock import Mock

import pytest

from evaluation.__main__ import main as evaluation
from tests.unit.training.test_train import WORDS, place
from training.checkpoint import standalone
from training.checkpoint.state import found
from training.config.schema import ModelConfig
from training.run.session import Session
from upcycle.__main__ import main

__all__ = ["place"]  # a fixture


def held(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file below a folder, and the names of the folders."""
    paths = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in paths}


def trains(place: Path, *more: str) -> list[str]:
    own = [f"model.source={place / 'dense'}", f"data.train=[{place / 'data'}]", "balance.bias_rate=0", "steps=2"]
    return ["train", *WORDS, *own, "schedule.warmup=0", *more]


@pytest.fixture(scope="module")
def run(place: Path) -> Path:
    """A run at its end, with adapters."""
    assert main(trains(place, f"output={place / 'run'}", "lora.rank=2")) == 0
    return place / "run"


class Killed(BaseException):
    pass


@pytest.mark.parametrize("before", [False, True], ids=["at first", "when started again"])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_run_that_was_killed_while_it_kept_its_model_starts_again(
    at: int, before: bool, place: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed start leaves nothing that the next start does not know, nor does a second start that is killed."""
    real, calls = standalone.write_atomic, [0]

    def killed(path: Path, data: bytes) -> None:
        calls[0] += 1
        if calls[0] == at:
            raise Killed
        real(path, data)

    words = trains(place, f"output={tmp_path / 'run'}", "lora.rank=2")
    if before:
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(Session, "learn", Mock(side_effect=Killed))
            main(words)
        assert standalone.begun(tmp_path / "run") and not found(tmp_path / "run" / "checkpoints")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(standalone, "write_atomic", killed)
        main(words)
    assert main(words) == 0
    kept = {path.name for path in (tmp_path / "run").iterdir()} - {"metrics.before.jsonl"}
    assert kept == {path.name for path in run.iterdir()}


def test_the_record_of_another_model_is_gone_before_its_files_are(
    place: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that is killed while it writes another model's files leaves no record that they would contradict."""
    shutil.copytree(run, tmp_path / "run")
    origin = standalone.kept(tmp_path / "run")
    monkeypatch.setattr(standalone, "write_atomic", Mock(side_effect=Killed))
    assert standalone.recorded(tmp_path / "run") is not None
    with pytest.raises(Killed):
        standalone.keep(tmp_path / "run", origin, ModelConfig(source="another"))
    assert standalone.recorded(tmp_path / "run") is None and found(tmp_path / "run" / "checkpoints")


def test_an_empty_folder_for_the_model_of_a_killed_run_is_taken(place: Path, tmp_path: Path) -> None:
    left = tmp_path / "run" / "origin"
    left.mkdir(parents=True)
    (left / "observed.safetensors.12-0a1b2c3d.upcycle.tmp").write_bytes(b"half")
    assert main(trains(place, f"output={tmp_path / 'run'}")) == 0
    assert not list(left.glob("*.tmp")) and (left / "origin.json").is_file()


COMMANDS = {
    "train": ["output={there}"],
    "train where files lie": ["output={there}/.."],
    "a server of islands": ["output={there}", "islands.serve=true", "islands.count=1", "islands.secret={place}/key"],
    "islands here": ["output={there}", "islands.local=2"],
    "train's export": ["output={new}", "export={there}"],
    "an export at the end": ["output={run}", "lora.rank=2", "export={there}"],
    "adapters": ["output={new}", "lora.rank=2", "lora.export={there}"],
    "adapters at the end": ["output={run}", "lora.rank=2", "lora.export={there}"],
}
OTHERS = {
    "export": ["export", "{run}", "{there}"],
    "prepare": ["prepare", "{there}", "tokenizer={place}/tokenizer", "sources=[{place}/valid.jsonl]"],
    "convert": ["convert", "source={place}/dense", "output={there}", "experts=2"],
}


@pytest.mark.parametrize("what", ["a model", "a file of mine", "token shards"])
@pytest.mark.parametrize("name", [*COMMANDS, *OTHERS])
def test_a_folder_of_another_kind_is_refused_and_stays_as_it_was(
    name: str, what: str, place: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "holds" / "there"
    if what == "a file of mine":
        there.mkdir(parents=True)
        (there / "thesis.txt").write_text("mine")
        (there / ".upcycle").mkdir()
    else:
        shutil.copytree(place / {"a model": "dense", "token shards": "data"}[what], there)
    (place / "key").write_text("k" * 64)
    before, its_run = held(tmp_path), held(run)
    words = trains(place, *COMMANDS[name]) if name in COMMANDS else OTHERS[name]
    with warnings.catch_warnings(record=True) as warned:
        done = main([word.format(there=there, new=tmp_path / "new", run=run, place=place) for word in words])
    said = capsys.readouterr().err
    assert held(tmp_path) == before
    if (name, what) == ("an export at the end", "a model"):  # older versions exported without a list of files
        assert done == 0 and "nobody knows whether it is this run's model" in str(warned[-1].message)
        return
    assert done == 2 and held(run) == its_run and said.count("upcycle: ") == 1 and "Traceback" not in said
    assert "exists" in said or "is not a run" in said
    assert "choose another" in said or "write output=" in said


@pytest.mark.parametrize("name", ["train's export", "adapters", "an export at the end", *OTHERS])
def test_a_folder_of_another_kind_is_refused_where_unfinished_work_would_lie(
    name: str, place: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(place / "dense", tmp_path / "there.partial")
    before = held(tmp_path)
    words = trains(place, *COMMANDS[name]) if name in COMMANDS else OTHERS[name]
    there = tmp_path / "there"
    assert main([word.format(there=there, new=tmp_path / "new", run=run, place=place) for word in words]) == 2
    assert "is not unfinished work of this program; move it" in capsys.readouterr().err
    assert held(tmp_path) == before


def test_the_output_is_not_the_export(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    for key in ("export", "lora.export"):
        assert main(trains(place, f"output={folder}", "lora.rank=2", f"{key}={tmp_path}/./run")) == 2
        assert f"{key}={folder} is also the output" in capsys.readouterr().err
    assert not folder.exists()


def test_an_empty_folder_and_what_a_killed_start_left_are_an_output(place: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / ".lock").write_text("")
    for name in ("empty", "killed"):
        assert main(trains(place, f"output={tmp_path / name}")) == 0
        assert {"run.json", "checkpoints"} <= held(tmp_path / name).keys()
        assert "config.json" not in held(tmp_path / name)


def test_a_run_of_an_older_version_goes_on_and_is_read(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lora = ["lora.rank=2", "steps=4", "checkpoint.every=2", f"data.valid=[{place / 'valid'}]"]
    whole, old = tmp_path / "whole", tmp_path / "old"
    assert main(trains(place, *lora, f"output={whole}", f"export={tmp_path / 'whole-out'}")) == 0
    shutil.copytree(whole, old)
    shutil.rmtree(found(old / "checkpoints")[0])
    (old / "run.json").rename(old / "config.json")
    assert main(["export", str(old), str(tmp_path / "half")]) == 0, "adapters are in config.json there"
    capsys.readouterr()
    assert main(["report", str(old), str(whole), f"output={tmp_path / 'page.html'}"]) == 0
    page = (tmp_path / "page.html").read_text()
    assert f"{old}/config.json output=AGAIN" in page and f"{whole}/run.json output=AGAIN" in page
    assert evaluation(["compare", str(old), "--", str(whole)]) in (0, 1)

    assert main(trains(place, *lora, f"output={old}", f"export={tmp_path / 'old-out'}")) == 0
    weights = [(tmp_path / f"{name}-out" / "model.safetensors").read_bytes() for name in ("old", "whole")]
    assert weights[0] == weights[1] != (tmp_path / "half" / "model.safetensors").read_bytes()
    assert main(["export", str(old), str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == weights[0]
