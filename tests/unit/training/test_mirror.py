"""A run whose disk is lost resumes from its mirror, bit for bit as if it had never stopped; a mirror that is damaged, half
written or not reachable costs no run its steps.

KILLS=10 pytest -s tests/unit/training/test_mirror.py -k s3        with moto[server] and s3fs: a real S3 server
"""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import huggingface_hub
import pytest

from tests.parallel.ranks import as_torchrun
from tests.unit.training.test_kill import code, files, log, started, step
from tests.unit.training.test_state import small
from tests.unit.training.test_train import WORDS, Stopped, config, place, stops_before
from training.__main__ import main
from training.checkpoint import mirror
from training.checkpoint.mirror import Mirror, complete_steps, restore
from training.checkpoint.state import Checkpoints
from training.config.reading import read_config
from training.config.schema import CheckpointConfig
from training.run import step as step_module
from training.run.loop import train
from training.run.preflight import check_own
from upcycle.__main__ import main as upcycle
from upcycle.io import remote
from upcycle.io.remote import Store

__all__ = ["place"]  # a fixture
KILLS = int(os.environ.get("KILLS", 10))
URL = "memory://bucket/run"
TO = CheckpointConfig(mirror=URL)


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = fsspec.filesystem("memory")
    found.store.clear()
    yield found
    found.store.clear()
    found.pseudo_dirs[:] = [""]


@pytest.fixture(scope="module")
def halted(place: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """Return a run that died in step 8, with checkpoints of steps 3 and 6, and the content of its mirror."""
    run, found = tmp_path_factory.mktemp("halted") / "run", fsspec.filesystem("memory")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(step_module, "train_step", stops_before(8))
        train(config(place, run, f"checkpoint.mirror={URL}"))
    return run, {name: found.cat_file(name) for name in list(found.store)}


@pytest.fixture
def mirrored(halted: tuple[Path, dict[str, bytes]], memory: Any) -> Path:
    """Put the mirror of the run that died into memory, and return the run."""
    for name, data in halted[1].items():
        memory.pipe_file(name, data)
    return halted[0]


def steps() -> list[int]:
    return complete_steps(Store(URL).files())


def test_a_run_on_an_empty_disk_resumes_from_the_mirror(place: Path, tmp_path: Path, mirrored: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    train(config(place, whole))
    assert steps() == [6, 3]
    restore(TO, run)
    for name in ("run.json", "origin/origin.json", "checkpoints/step-00000006/manifest.json"):
        assert (run / name).read_bytes() == (mirrored / name).read_bytes()
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "metrics.jsonl", "origin", "run.json"]
    for _ in range(2):  # the second time after its end
        train(config(place, run, f"checkpoint.mirror={URL}"))
        assert log(run) == log(whole)
        have, want = (files(each / "checkpoints" / "step-00000008") for each in (run, whole))
        assert have == want
        assert steps() == [8, 6]  # checkpoint.keep=2
        shutil.rmtree(run)


def test_two_ranks_resume_from_the_mirror_on_an_empty_disk(place: Path, tmp_path: Path) -> None:
    """Both look for it before they know each other; one fetches it, and rank 0 sends the files of both."""
    words = [
        f"model.source={place / 'dense'}", f"data.train=[{place / 'data'}]", *WORDS, "balance.bias_rate=0", "steps=4",
        "checkpoint.every=2", f"checkpoint.mirror=file://{tmp_path}/store",
    ]  # fmt: skip
    for name, words_ in (("whole", [*words[:-1]]), ("run", [*words, "checkpoint.keep=3"]), ("run", words)):
        said = [tmp_path / f"{name}-{rank}" for rank in range(2)]
        codes = as_torchrun(2, "training.__main__", [f"output={tmp_path / name}", *words_], said)
        assert codes == [0, 0], "".join(each.read_text() for each in said)
        if "checkpoint.keep=3" in words_:
            shutil.rmtree(tmp_path / "run")
            shutil.rmtree(tmp_path / "store" / "step-00000004")
    assert "fetching step-00000002" in "".join(each.read_text() for each in said)
    last = "checkpoints/step-00000004"
    have, want = files(tmp_path / "run" / last), files(tmp_path / "whole" / last)
    assert have == want and len([name for name in have if name.startswith("shard-")]) == 2
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["step-00000002", "step-00000004"]


SHARD = "shard-00000.safetensors"
FAULTS: dict[str, Callable[[Any, str], Any]] = {
    "damaged": lambda fs, step: fs.pipe_file(f"{step}/{SHARD}", bytes(fs.size(f"{step}/{SHARD}"))),
    "cut": lambda fs, step: fs.pipe_file(f"{step}/{SHARD}", fs.cat_file(f"{step}/{SHARD}")[:-1]),
    "missing": lambda fs, step: fs.rm_file(f"{step}/{SHARD}"),
    "log": lambda fs, step: fs.pipe_file(f"{step}/metrics.jsonl", fs.cat_file(f"{step}/metrics.jsonl")[:-9]),
    "manifest": lambda fs, step: fs.rm_file(f"{step}/manifest.json"),
    "list": lambda fs, step: fs.pipe_file(f"{step}/mirror.json", fs.cat_file(f"{step}/mirror.json")[:-9]),
    "half": lambda fs, step: fs.rm_file(f"{step}/mirror.json"),
    "of step 3": lambda fs, step: [
        fs.pipe_file(name.replace("00000003", "00000006"), fs.cat_file(name))
        for name in list(fs.store)
        if "00000003" in name
    ],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_or_half_written_checkpoint_falls_back_to_the_one_before(
    fault: str, tmp_path: Path, memory: Any, mirrored: Path
) -> None:
    FAULTS[fault](memory, "/bucket/run/step-00000006")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        restore(TO, tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000003"]
    assert files(checkpoints / "step-00000003") == files(mirrored / "checkpoints" / "step-00000003")
    told = ["step 6 of the mirror is not used: memory://" in str(each.message) for each in said]
    assert any(told) == (fault != "half")


def test_a_mirror_without_a_whole_checkpoint_is_a_sentence(tmp_path: Path, memory: Any, mirrored: Path) -> None:
    for number in (3, 6):
        FAULTS["damaged"](memory, f"/bucket/run/step-{number:08d}")
    with pytest.raises(ValueError, match="none of the 2 checkpoints in memory://bucket/run is whole"):
        restore(TO, tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_newer_one_of_disk_and_mirror_is_used(tmp_path: Path, memory: Any, mirrored: Path) -> None:
    run = tmp_path / "run"
    for number, then in ((3, {"step-00000003", "step-00000006"}), (6, {"step-00000006"})):
        shutil.copytree(mirrored / f"checkpoints/step-{number:08d}", run / f"checkpoints/step-{number:08d}")
        restore(TO, run)
        assert {path.name for path in (run / "checkpoints").iterdir()} == then
        shutil.rmtree(run)


def test_a_killed_restore_continues_and_leaves_a_folder_that_a_run_accepts(tmp_path: Path, mirrored: Path) -> None:
    """Killed before each of its writes."""
    for count in range(1, 40):
        run, writes = tmp_path / f"run-{count}", [0]

        def dies(real: Any, *inputs: Any, writes: list[int] = writes, count: int = count) -> Any:
            writes[0] += 1
            if writes[0] == count:
                raise KeyboardInterrupt
            return real(*inputs)

        with pytest.MonkeyPatch.context() as patch:
            for module, name in ((mirror.publish, "rename"), (mirror.disk, "copy"), (remote.disk, "write_blocks")):
                real = getattr(module, name)
                patch.setattr(module, name, lambda *inputs, real=real: dies(real, *inputs))
            try:
                restore(TO, run)
                break
            except KeyboardInterrupt:
                assert not list(run.glob("checkpoints/*"))
        check_own(run)
        restore(TO, run)
        assert files(run / "checkpoints/step-00000006") == files(mirrored / "checkpoints/step-00000006")
        assert not (run / mirror.SCRATCH).exists() and not (run / mirror.LOCK).exists()
    assert count > 8


@pytest.mark.parametrize(
    "name", ["secret", "checkpoints/step-00000009", "origin/a/b", "step-00000009.partial/x", "../x"]
)
def test_a_list_that_names_a_file_of_no_run_is_refused(name: str, memory: Any) -> None:
    memory.pipe_file("/bucket/run/step-00000003/mirror.json", mirror.publish.signed({"files": {name: {"bytes": 1}}}))
    with pytest.raises(remote.Damaged):
        mirror.listed(Store(URL), "step-00000003")


# ---- to the store


def saved(run: Path, mirror: Mirror | None, *numbers: int, **keys: Any) -> Checkpoints:
    (run / "metrics.jsonl").write_text("{}")
    checkpoints = Checkpoints(run / "checkpoints", asynchronous=False, mirror=mirror, **keys)
    for number in numbers:
        checkpoints.save(number, small(number))
    return checkpoints


def test_a_failed_upload_is_said_and_the_next_checkpoint_and_the_end_try_again(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failing = remote.push, [True]

    def push(files: Any, url: str) -> None:
        if failing[0]:
            raise ValueError(f"{url} cannot be written: no route")
        real(files, url)

    monkeypatch.setattr(remote, "push", push)
    to = Mirror(TO, tmp_path)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        saved(tmp_path, to, 1)
        to.thread.submit(lambda: None).result()
        assert len(said) == 1 and str(said[0].message) == (
            "step-00000001 is not in the mirror: memory://bucket/run/step-00000001 cannot be written: no route; "
            "tries again with the next checkpoint"
        )
        failing[0] = False
        saved(tmp_path, to, 2)
        to.thread.submit(lambda: None).result()
        assert steps() == [2] and len(said) == 1
        failing[0] = True
        saved(tmp_path, to, 3)
        to.thread.submit(lambda: None).result()
        failing[0] = False
        to.close()
    assert steps() == [3, 2]


def test_one_upload_at_a_time_and_no_save_waits_for_it(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first one hangs, the run continues and keeps the folder that is being sent; then the newest one is next."""
    real, sent, started, go = remote.push, list[str](), threading.Event(), threading.Event()

    def push(files: Any, url: str) -> None:
        started.set()
        assert go.wait(300)
        sent.append(url.rpartition("/")[2])
        real(files, url)

    monkeypatch.setattr(remote, "push", push)
    to = Mirror(TO, tmp_path)
    saved(tmp_path, to, 1)
    assert started.wait(300)
    saved(tmp_path, to, 2, 3, 4, keep=1)
    there, before = {path.name for path in (tmp_path / "checkpoints").iterdir()}, list(sent)
    go.set()
    to.close()
    assert there == {"step-00000001", "step-00000004"} and not before
    assert sent == ["step-00000001", "step-00000004"] and steps() == [4, 1]


def test_a_killed_upload_is_made_up_for_by_the_next_start_and_made_once(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, None, 1, 2)
    sent, real = list[str](), remote.push
    monkeypatch.setattr(remote, "push", lambda files, url: (sent.append(url), real(files, url)))
    for _ in range(2):
        to = Mirror(TO, tmp_path)
        saved(tmp_path, to).mirror_again()
        to.close()
    assert sent == [f"{URL}/step-00000002"] and steps() == [2]


def test_older_checkpoints_leave_the_mirror_and_other_files_stay(tmp_path: Path, memory: Any) -> None:
    memory.pipe_file("/bucket/run/notes.txt", b"mine")
    memory.pipe_file("/bucket/run/step-00000001/shard-00000.safetensors", b"half")
    memory.pipe_file("/bucket/run/step-x/mine", b"mine")
    for number in range(2, 9):
        to = Mirror(CheckpointConfig(mirror=URL, keep=1, keep_every=3), tmp_path)
        saved(tmp_path, to, number)
        to.close()
    names = {name.partition("/")[0] for name in Store(URL).files()}
    assert names == {"step-00000003", "step-00000006", "step-00000008", "notes.txt", "step-x"}


def test_a_mirror_that_cannot_be_used_is_said_before_anything_is_read(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    words = [
        f"output={tmp_path / 'run'}",
        f"model.source={place / 'dense'}",
        f"data.train=[{place / 'data'}]",
        "steps=1",
        "schedule.warmup=0",
    ]
    cases = {
        f"checkpoint.mirror=file://{tmp_path}/file/run": "file/run cannot be",
        "checkpoint.mirror=folder": "it must be an address, such as s3://bucket/run",
        "output=memory://bucket/run": "write output=FOLDER and checkpoint.mirror=memory://bucket/run",
        "lora.rank=2 lora.export=memory://bucket/run": "lora.export=memory://bucket/run is an address",
        "push=org/name": "there is none; write export=FOLDER too",
        "push=name": "'name' is not a Hub name",
    }
    for word, said in cases.items():
        assert main([*words, *word.split()]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(ValueError, match="each island needs a mirror of its own"):
        read_config("", [*words, f"checkpoint.mirror={URL}", "islands.local=2"])
    assert not (tmp_path / "run").exists()


# ---- data, models and exports


def test_data_and_model_come_from_a_store_and_the_export_goes_there_and_to_the_hub(
    place: Path, tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pushed = list[dict[str, bytes]]()

    class Hub:
        def create_repo(self, *_: Any, **__: Any) -> None:
            assert not Store("memory://bucket/moe").files(), "an export that the Hub refuses stays here"

        def create_commit(self, name: str, operations: Any, **_: Any) -> Any:
            pushed.append(
                {
                    each.path_in_repo: Path(each.path_or_fileobj).read_bytes()
                    for each in operations
                    if not isinstance(each.path_or_fileobj, bytes)
                }
            )
            return SimpleNamespace(commit_url=f"https://example.org/{name}")

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    remote.push_folder(place / "data", "memory://bucket/data", "meta.json")
    remote.push_folder(place / "dense", "memory://bucket/dense", "config.json")
    run, here = tmp_path / "run", tmp_path / "here"
    words = ["data.sequence=24", "batch=2", "steps=1", "model.dtype=float32", "schedule.warmup=0", "micro_batch=2"]
    far = [f"output={run}", "data.train=[memory://bucket/data]", "model.source=memory://bucket/dense"]
    assert main([*words, *far, "export=memory://bucket/moe", "push=org/moe"]) == 0
    assert (
        main(
            [
                *words,
                f"output={here}",
                f"data.train=[{place / 'data'}]",
                f"model.source={place / 'dense'}",
                f"export={tmp_path / 'moe'}",
            ]
        )
        == 0
    )
    assert "uploaded to https://example.org/org/moe" in capsys.readouterr().err
    weights = (tmp_path / "moe" / "model.safetensors").read_bytes()
    assert memory.cat_file("/bucket/moe/model.safetensors") == weights == pushed[0]["model.safetensors"]
    assert not list(run.glob("export*"))
    assert main([*words, *far, "export=memory://bucket/moe"]) == 0  # finished: nothing to do
    assert upcycle(["export", str(run), "memory://bucket/again"]) == 0
    assert memory.cat_file("/bucket/again/model.safetensors") == weights and not list(run.glob("export*"))
    assert upcycle(["export", str(run), "memory://bucket/again"]) == 2
    assert "memory://bucket/again exists already" in capsys.readouterr().err
    assert upcycle(["plan", "source=memory://bucket/again", "experts=2"]) == 0  # sums checked: it has upcycle.json
    name = next(name for name in memory.store if name.startswith("/bucket/data/tokens"))
    memory.pipe_file(name, bytes(memory.size(name)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    remote.fetch.cache_clear()
    shutil.rmtree(run)
    assert main([*words, *far]) == 2
    assert "is damaged: its sha256 is not the stated one" in capsys.readouterr().err
    remote.fetch.cache_clear()


def test_killed_at_any_moment_it_resumes_from_s3_on_an_empty_disk(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("s3fs", reason='s3fs is absent: pip install "upcycle[storage]"')
    server = pytest.importorskip("moto.server", reason='moto is absent: pip install "moto[server,s3]"')
    store = server.ThreadedMotoServer(port=0)
    store.start()
    host, port = store.get_host_and_port()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1",
        "FSSPEC_S3_ENDPOINT_URL": f"http://{host}:{port}",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    s3 = fsspec.filesystem("s3", endpoint_url=f"http://{host}:{port}")
    s3.mkdir("bucket")
    whole, killed, words = tmp_path / "whole", tmp_path / "killed", ["checkpoint.mirror=s3://bucket/killed"]
    process = started(place, whole)
    began = time.perf_counter()
    assert code(process, 300) == 0, whole.with_suffix(".said").read_text()
    took = time.perf_counter() - began
    chance, restored, steps = random.Random(time.time_ns()), 0, int(step(whole))
    for kill in range(KILLS):
        process = started(place, killed, *words)
        if kill % 3 == 2:
            time.sleep(chance.uniform(0, took))  # often while it fetches
        else:
            while process.is_alive() and step(killed) < (kill + 1) * steps / (KILLS + 1):
                time.sleep(0.005)
            time.sleep(chance.uniform(0, took / 10))
        process.kill()
        assert code(process, 60) in (-9, 0), killed.with_suffix(".said").read_text()
        shutil.rmtree(killed, ignore_errors=True)
        restored += bool(s3.exists("bucket/killed"))
    process = started(place, killed, *words)
    assert code(process, 300) == 0, killed.with_suffix(".said").read_text()
    store.stop()
    print(f"\n{KILLS} kills, {steps} steps, {restored} starts with a mirror")
    assert log(killed) == log(whole)
    assert files(killed / "export") == files(whole / "export")
    last = f"checkpoints/step-{steps:08d}"
    have, want = files(killed / last), files(whole / last)
    assert [name for name in want if have.get(name) != want[name]] == []
