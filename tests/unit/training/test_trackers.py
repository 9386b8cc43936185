"""Each tracker holds the numbers of metrics.jsonl, once, also after a run was killed and resumed."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from training.observe import trackers
from training.observe.metrics import Metrics, read
from training.observe.trackers import STATE

Series = dict[str, list[tuple[int, float]]]
CONFIG = {"schedule.peak": 2e-4, "data.train.0.path": "my data", "stages": []}
HASH = subprocess.run(
    ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
).stdout.strip()


def run(folder: Path, first: int, last: int, *to: str, validate: bool = True) -> None:
    """Log a run of steps first + 1 ... last: a row for two steps, and a validation at each fourth."""
    with Metrics(folder, first, stream=io.StringIO(), to=to, project="tries", name="a run", config=CONFIG) as log:
        for step in range(first + 1, last + 1):
            log.step(step, tokens=100, loss=torch.tensor(4 / step), lr=step / 1000)
            if step % 2 == 0:
                log.log(step, **{"balance/0/max_over_mean": 1.5, "none": float("nan")})
            if step % 4 == 0 and validate:
                log.log(step, **{"valid/C++, web/loss": 3.0 - step / 100})
    if "wandb" in to and (folder / "wandb").is_dir():  # whose folders are named by the second
        (folder / "wandb").rename(folder / f"wandb-{len(list(folder.glob('wandb-*')))}")


def of_file(folder: Path) -> Series:
    found: Series = {}
    for row in read(folder):
        for name, value in row.items():
            if name != "step" and value is not None:
                found.setdefault(name, []).append((row["step"], value))
    return found


# ---- what each tracker holds, by its own reader


def of_tensorboard(folder: Path) -> tuple[Series, str]:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    held = {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}
    [text] = {each.tensor_proto.string_val[0].decode() for each in events.Tensors("a run/text_summary")}
    return held, text


def of_wandb(folder: Path) -> tuple[Series, str]:
    """Read the files of an offline run, one for each start, as `wandb sync` does."""
    pytest.importorskip("wandb").teardown()  # its process has written everything
    found: Series = {}
    said = ""
    for file in sorted(folder.glob("wandb*/offline-run-*/*.wandb")):
        for record in wandb_records(file):
            if record.HasField("run"):
                assert (record.run.project, record.run.display_name) == ("tries", "a run")
                said += str({each.key: json.loads(each.value_json) for each in record.run.config.update})
            if record.HasField("history"):
                row = {(e.key or "/".join(e.nested_key)): json.loads(e.value_json) for e in record.history.item}
                for name, value in row.items():
                    if not name.startswith("_"):
                        found.setdefault(name, []).append((row["_step"], value))
    return found, said


def wandb_records(file: Path) -> list[Any]:
    from wandb.proto import wandb_internal_pb2  # type: ignore[import-not-found]

    data, at, found, whole = file.read_bytes(), 7, [], b""
    while at + 7 <= len(data):  # LevelDB's log: blocks of 32 KiB, records with a checksum, a length and a kind
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            found.append(record)
            whole = b""
    return found


def of_mlflow(folder: Path) -> tuple[Series, str]:
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient(Path("mlruns").resolve().as_uri())
    [found] = client.search_runs([client.get_experiment_by_name("tries").experiment_id])
    assert found.info.run_name == "a run" and found.info.status == "FINISHED"
    held = {name: client.get_metric_history(found.info.run_id, name) for name in found.data.metrics}
    back = {trackers.tidy(name): name for name in of_file(folder)}
    return {back[name]: [(m.step, m.value) for m in each] for name, each in held.items()}, str(found.data.params)


def of_trackio(folder: Path) -> tuple[Series, str]:
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage  # type: ignore[import-not-found]

    assert SQLiteStorage.get_runs("tries") == ["a run"]
    found: Series = {}
    for row in SQLiteStorage.get_logs("tries", "a run"):
        for name, value in row.items():
            if name not in ("step", "timestamp"):
                found.setdefault(name, []).append((row["step"], value))
    return found, str(SQLiteStorage.get_run_config("tries", "a run"))


HELD: dict[str, Callable[[Path], tuple[Series, str]]] = {
    "tensorboard": of_tensorboard, "wandb": of_wandb, "mlflow": of_mlflow, "trackio": of_trackio,
}  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a working directory in which every tracker stays local."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setattr(trackers, "commit", lambda: HASH)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when trackio is imported
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path / "a folder"


def test_names() -> None:
    assert HELD.keys() == trackers.TRACKERS.keys()


@pytest.mark.parametrize("name", HELD)
def test_a_tracker_holds_the_numbers_of_the_file(name: str, place: Path) -> None:
    pytest.importorskip(name)
    run(place, 0, 12, name)
    run(place, 6, 6, name)  # killed before it logs anything
    run(place, 6, 20, name)
    held, said = HELD[name](place)
    want = of_file(place)
    timed = {"seconds_per_step", "tokens_per_s", "memory_gb"}  # of the first time; the file has those of the second
    assert held.keys() == want.keys() and len(want["loss"]) == 10 and len(want["valid/C++, web/loss"]) == 5
    for key, series in want.items():
        assert [step for step, _ in held[key]] == [step for step, _ in series], key
        exact = np.float32 if name == "tensorboard" else float
        if key not in timed:
            assert [exact(value) for _, value in held[key]] == [exact(value) for _, value in series], key
    for word in ("schedule.peak", "0.0002", "my data", HASH):
        assert word in said


@pytest.mark.parametrize("name", HELD)
def test_a_tracker_that_comes_later_gets_the_rows_so_far(name: str, place: Path) -> None:
    pytest.importorskip(name)
    run(place, 0, 8)
    run(place, 6, 10, name)
    held, want = HELD[name](place)[0], of_file(place)
    assert [step for step, _ in held["loss"]] == [2, 4, 6, 8, 10]
    assert held["lr"] == want["lr"] or name == "tensorboard"


# ---- without the packages


class Fake:
    """A tracker that keeps what it gets; `fails`: at this step."""

    made: list[Fake]

    def __init__(self, start: trackers.Start, fails: int = 0) -> None:
        self.start, self.fails, self.rows = start, fails, dict[int, dict[str, float]]()
        self.id = start.id or f"run {len(self.made)}"
        self.closed = False
        self.made.append(self)

    def log(self, step: int, numbers: dict[str, float]) -> None:
        if step == self.fails:
            raise RuntimeError("no answer\nfrom the server")
        assert step not in self.rows or not numbers.keys() & self.rows[step].keys()
        self.rows.setdefault(step, {}).update(numbers)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    Fake.made = []
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Fake)
    monkeypatch.setattr(trackers, "find_spec", lambda name: object())
    return Fake


def test_a_resumed_run_goes_on_in_the_same_run_and_sends_no_step_twice(tmp_path: Path, fake: type[Fake]) -> None:
    for first, last in ((0, 13), (6, 7), (6, 7), (6, 16)):
        run(tmp_path, first, last, "wandb")
    assert [(each.id, each.start.step) for each in fake.made] == [("run 0", first) for first in (0, 6, 6, 6)]
    assert [sorted(each.rows) for each in fake.made] == [[2, 4, 6, 8, 10, 12], [], [], [14, 16]]
    assert all(each.closed for each in fake.made)
    about = fake.made[0].start
    assert (about.project, about.name, about.config) == ("tries", "a run", {**CONFIG, "git": trackers.commit()})
    assert "none" not in fake.made[0].rows[2]
    run(tmp_path, 0, 2, "wandb")  # from the start again
    assert fake.made[-1].id == "run 4" and sorted(fake.made[-1].rows) == [2]


def test_a_measure_that_a_kill_prevented_is_sent_after_the_resume(tmp_path: Path, fake: type[Fake]) -> None:
    run(tmp_path, 0, 8, "wandb", validate=False)
    with Metrics(tmp_path, 8, stream=io.StringIO(), to=["wandb"]) as log:
        log.log(8, **{"valid/web/loss": 2.0})
    assert fake.made[1].rows == {8: {"valid/web/loss": 2.0}}
    assert fake.made[1].start.name == tmp_path.name


def test_a_tracker_that_fails_does_not_end_the_run(
    tmp_path: Path, fake: type[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(trackers.TRACKERS, "wandb", lambda start: fake(start, fails=4))
    with pytest.warns(UserWarning, match="wandb failed and gets no more rows; metrics.jsonl has them"):
        run(tmp_path, 0, 8, "wandb")
    assert [row["step"] for row in read(tmp_path)] == [2, 4, 6, 8] and list(fake.made[0].rows) == [2]
    monkeypatch.setitem(trackers.TRACKERS, "wandb", fake)
    run(tmp_path, 8, 10, "wandb")
    assert fake.made[1].id == "run 1" and list(fake.made[1].rows) == [2, 4, 6, 8, 10]


def test_a_tracker_that_does_not_start_is_one_sentence(
    tmp_path: Path, fake: type[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(start: trackers.Start) -> None:
        raise RuntimeError("no\nkey")

    monkeypatch.setitem(trackers.TRACKERS, "wandb", refuse)
    with pytest.raises(ValueError, match=r"log.to names wandb, which did not start: no key; leave it out, or mend it"):
        run(tmp_path, 0, 2, "wandb")


def test_a_missing_package_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in trackers.TRACKERS:
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(
            ValueError, match=rf'{name} is not installed; pip install "upcycle\[logs\]", or leave {name}'
        ):
            Metrics(tmp_path, to=["jsonl", name])
    run(tmp_path, 0, 2, "jsonl")
    assert not (tmp_path / STATE).exists()


def test_the_commit_is_the_working_directory_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert trackers.commit() == ""
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], [*who, "commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run(["git", *words], check=True)
    assert len(trackers.commit()) == 40
    monkeypatch.setenv("PATH", os.devnull)
    assert trackers.commit() == ""
