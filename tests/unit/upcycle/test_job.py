"""One job of many processes, any of which may die, start late, or belong to another run."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from pathlib import Path

import pytest

from tests.unit.upcycle.plans import load, readable
from upcycle.converting import convert as converting
from upcycle.converting.convert import convert
from upcycle.io import job, publish
from upcycle.io.checkpoint import Checkpoint
from upcycle.io.job import Worker
from upcycle.planning.plan import UpcyclePlan


def shared_job(llama: Path, output: Path) -> tuple[UpcyclePlan, list[Checkpoint]]:
    return load(f"source={llama}", f"output={output}", "max_shard=200KB", "experts=4")


def test_a_process_that_was_killed_or_never_came_is_not_waited_for(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "PATIENCE", 0.5)
    with pytest.raises(ValueError, match="rank-1 of 2 stopped: it is not running"):
        convert(*shared_job(llama, tmp_path / "moe"), Worker(0, 2), quiet=True)


def test_without_locks_a_killed_process_is_not_waited_for_and_a_live_one_is(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(job.fcntl, "flock", no_locks)
    monkeypatch.setattr(job, "PATIENCE", 0.6)
    monkeypatch.setattr(publish, "BEAT", 0.1)
    folder = tmp_path / "moe.partial" / ".upcycle"
    folder.mkdir(parents=True)
    watch = job.Watch(tmp_path / "moe.partial", Worker(0, 3))
    (folder / "rank-2.lock").write_text("")  # of a process that was killed
    with publish.opened(folder / "rank-1.lock") as lock, publish.hold(lock, "moe.partial"):
        for _ in range(6):
            watch.check([1])
            time.sleep(0.2)
        with pytest.raises(ValueError, match="rank-2 of 3 stopped: it is not running"):
            for _ in range(6):
                watch.check([2])
                time.sleep(0.2)


def test_a_process_that_failed_before_rank_0_began_is_noticed(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "PATIENCE", 0.5)
    (tmp_path / "moe.partial" / ".upcycle").mkdir(parents=True)
    (tmp_path / "moe.partial" / ".upcycle" / "rank-1.failed").write_text("its disk is full")
    with pytest.raises(ValueError, match="rank-1 of 2 stopped: its disk is full"):
        convert(*shared_job(llama, tmp_path / "moe"), Worker(0, 2), quiet=True)


def test_what_failed_in_the_last_run_is_past(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "moe.partial" / ".upcycle"
    folder.mkdir(parents=True)
    for rank in (0, 1, 5):  # that run had more processes
        (folder / f"rank-{rank}.failed").write_text("of the last run")
        os.utime(folder / f"rank-{rank}.failed", (0, 0))
    (tmp_path / "moe.partial" / "model.safetensors.rank-5.part").write_text("of the last run")
    other: list[Path] = []

    def late() -> None:
        time.sleep(0.5)
        other.append(convert(*shared_job(llama, tmp_path / "moe"), Worker(1, 2), quiet=True))

    thread = threading.Thread(target=late)
    thread.start()
    folder = convert(*shared_job(llama, tmp_path / "moe"), Worker(0, 2), quiet=True)
    thread.join()
    assert other == [folder]
    assert not list(folder.glob("*.part"))


def test_a_process_that_comes_when_all_is_done_is_content(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late rank looks for the output just before rank 0, which found every shard there, renames the folder."""
    folder = convert(*shared_job(llama, tmp_path / "moe"), quiet=True)
    monkeypatch.setattr(converting, "complete", lambda *_: False)
    monkeypatch.setattr(job.time, "sleep", lambda _: pytest.fail("it waits"))
    assert convert(*shared_job(llama, tmp_path / "moe"), Worker(1, 2), quiet=True) == folder


def test_a_process_whose_folder_is_renamed_while_it_joins_waits_for_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "moe.partial" / job.JOB).mkdir(parents=True)  # of another job, whose rank 0 has not replaced job.json
    monkeypatch.setattr(job.time, "sleep", lambda _: pytest.fail("it waits"))
    with (
        pytest.raises(ValueError, match="has just finished"),
        job.job(tmp_path / "moe.partial", {"plan": 1}, Worker(1, 2), lambda: None, over=lambda: True),
    ):
        pytest.fail("it works in a folder that is finished")


def test_two_runs_of_different_size_never_write_one_file(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The surviving rank 1 of a run of two runs beside a new run of one process."""
    plan, checkpoints = shared_job(llama, tmp_path / "moe")
    identity = {"plan": plan.hash, "source": [c.fingerprint() for c in checkpoints]}
    (tmp_path / "moe.partial" / ".upcycle").mkdir(parents=True)
    (tmp_path / "moe.partial" / ".upcycle" / "job.json").write_text(json.dumps(identity))
    real, paths = converting.disk.Stream, {0: set[str](), 1: set[str]()}

    def stream(path: Path) -> converting.disk.Stream:
        paths[worker.rank].add(path.name)
        if worker.rank == 1:
            raise OSError(errno.EIO, "enough is known")
        return real(path)

    monkeypatch.setattr(converting.disk, "Stream", stream)
    worker = Worker(1, 2)
    with pytest.raises(ValueError, match="enough is known"):
        convert(plan, checkpoints, worker, quiet=True)
    worker = Worker(0, 1)
    convert(plan, checkpoints, worker, quiet=True)
    assert paths[1]
    assert not paths[0] & paths[1]


def test_a_job_that_made_nothing_gives_way_to_another_plan(llama: Path, tmp_path: Path) -> None:
    source, text = readable(llama, tmp_path)
    words = (f"source={source}", f"output={tmp_path / 'moe'}")
    with pytest.raises(ValueError, match="16 tokens and 8192 are needed"):
        convert(*load(*words, "router.normalize=false", "scale=calibrated", f"calibration.texts={text}"), quiet=True)
    assert convert(*load(*words), quiet=True).is_dir()


def test_text_that_changes_is_another_job_and_is_looked_for_before_any_work(llama: Path, tmp_path: Path) -> None:
    words = ["experts=2", "router.normalize=false", "scale=calibrated", "top_k=1", "calibration.tokens=8"]
    source, text = readable(llama, tmp_path)

    def run(source: Path = source) -> Path:
        place = [f"source={source}", f"output={tmp_path / 'moe'}", f"calibration.texts={text}"]
        return convert(*load(*place, *words), quiet=True)

    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        run(llama)
    run()
    run()  # the same text: the output is left as it is
    text.write_text("p o n m l k j i h g f e d c b a")
    with pytest.raises(ValueError, match="result of another plan"):
        run()
    text.unlink()
    with pytest.raises(ValueError, match=r"letters\.txt does not exist"):
        run()


@pytest.mark.parametrize(("rank", "count"), [("1", "1"), ("x", "2"), ("-1", "2"), ("0", "0"), ("1", "2"), ("0", "2")])
def test_a_rank_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, rank: str, count: str) -> None:
    """RANK=1 without WORLD_SIZE once made nothing and called it complete; left over with it, it waited for a minute."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", count)
    with pytest.raises(ValueError, match="use torchrun"):
        Worker.here()


def test_ranks_are_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(key, value)
    assert Worker.here() == Worker(1, 2)
