"""What is published is whole, on the disk, made by one process, and nobody else's file is touched."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.upcycle.plans import load, readable
from upcycle.__main__ import main
from upcycle.converting import convert as converting
from upcycle.converting.convert import convert
from upcycle.io import disk, publish

ROOT = Path(__file__).parents[3]
WORDS = ["experts=2", "max_shard=200KB"]


def words(llama: Path, output: Path) -> list[str]:
    return ["convert", f"source={llama}", f"output={output}", *WORDS]


def stopped_before_the_end(llama: Path, output: Path, *more: str) -> Path:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(converting, "finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        convert(*load(f"source={llama}", f"output={output}", *WORDS, *more), quiet=True)
    return output.with_name(output.name + ".partial")


def zero_the_tail(file: Path) -> None:
    size = file.stat().st_size
    with open(file, "r+b") as opened:
        opened.truncate(size - 2000)
        opened.truncate(size)


def no_locks(*_: object) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


# ---- one process at a time


def test_a_lock_names_who_has_it_and_goes_with_what_was_made_for_it(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "run"
    who = f"{folder} .process {os.getpid()} on {socket.gethostname()}, since 20"
    with publish.alone(folder / ".lock", folder):
        with (
            pytest.raises(ValueError, match=f"another process is writing {who}"),
            publish.alone(folder / ".lock", folder),
        ):
            pass
        assert (folder / ".lock").is_file()
    assert not (tmp_path / "a").exists()
    with publish.alone(folder / ".lock", folder):
        (folder / "made").touch()
    assert [path.name for path in folder.iterdir()] == ["made"]
    (folder / ".lock").write_text("99999999 elsewhere 2020-01-01T00:00:00Z\n")  # of a process that was killed
    with publish.alone(folder / ".lock", folder):
        assert (folder / ".lock").read_text().startswith(f"{os.getpid()} ")


def test_a_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / ".lock").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="symbolic link"), publish.alone(tmp_path / ".lock", tmp_path):
        pass
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("host", ["here", "elsewhere"])
def test_without_locks_who_lives_is_respected_and_who_died_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setattr(publish.fcntl, "flock", no_locks)
    monkeypatch.setattr(publish, "BEAT", 0.05)
    lock, name = tmp_path / ".lock", socket.gethostname() if host == "here" else host
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        lock.write_text(f"{other.pid} {name} 2020-01-01T00:00:00Z\n")
        with publish.opened(lock) as file:
            done = publish.threading.Event()
            thread = publish.threading.Thread(
                target=lambda: [os.utime(lock) for _ in iter(lambda: done.wait(0.01), True)]
            )
            thread.start()
            with pytest.raises(ValueError, match=f"process {other.pid} on {name}"):
                publish.acquire(file, "it")
            done.set()
            thread.join()
        other.communicate(b"\n")
    with publish.alone(lock, tmp_path):
        pass


# ---- what fails leaves nothing


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_what_cannot_be_written_is_named_and_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def stream(path: Path) -> None:
        scratch = path.with_name("scratch")
        with disk.renamed(scratch, path), disk.Stream(scratch) as file:
            file.write(b"x" * 5000)

    (tmp_path / "source").write_text("x")
    ways: list[Callable[[Path], None]] = [
        lambda p: disk.write_atomic(p, b"x"),
        lambda p: disk.copy(tmp_path / "source", p),
    ]
    for number, way in enumerate([*ways, stream]):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            with pytest.raises(OSError) as caught:
                way(tmp_path / f"file{number}")
        assert call == "rename" or caught.value.filename in (str(tmp_path / f"file{number}"), str(tmp_path / "scratch"))
        assert [path.name for path in tmp_path.iterdir()] == ["source"]


# ---- what is reused, and what is there


def test_a_finished_shard_with_a_zeroed_tail_is_made_again(llama: Path, tmp_path: Path) -> None:
    whole = convert(*load(f"source={llama}", f"output={tmp_path / 'whole'}", *WORDS), quiet=True)
    partial = stopped_before_the_end(llama, tmp_path / "moe")
    shards = sorted(partial.glob("*.safetensors"))
    before = [file.stat().st_ino for file in shards]
    zero_the_tail(shards[1])
    assert main(words(llama, tmp_path / "moe")) == 0
    after = [(tmp_path / "moe" / file.name).stat().st_ino for file in shards]
    assert [i for i, _ in enumerate(shards) if after[i] != before[i]] == [1], "the others are not made again"
    for file in whole.iterdir():
        assert file.name == "upcycle.json" or file.read_bytes() == (tmp_path / "moe" / file.name).read_bytes(), (
            file.name
        )


def test_a_measurement_that_is_damaged_is_made_again(llama: Path, tmp_path: Path) -> None:
    source, text = readable(llama, tmp_path)
    more = ["router.normalize=false", "scale=calibrated", "calibration.tokens=8", f"calibration.texts={text}"]
    convert(*load(f"source={source}", f"output={tmp_path / 'whole'}", *WORDS, *more), quiet=True)
    partial = stopped_before_the_end(source, tmp_path / "moe", *more)
    measured = partial / ".upcycle" / converting.OBSERVED
    measured.write_bytes(measured.read_bytes()[:-4] + bytes(4))
    convert(*load(f"source={source}", f"output={tmp_path / 'moe'}", *WORDS, *more), quiet=True)
    for name in ("upcycle.measured", "model-00001-of-00002.safetensors"):
        found = [tmp_path / folder / name for folder in ("whole", "moe")]
        assert not found[0].exists() or found[0].read_bytes() == found[1].read_bytes()


def test_every_file_is_checked(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each damaged or gone: inspect check=true says so, and convert does not call the folder complete."""
    source, _ = readable(llama, tmp_path)
    output = tmp_path / "moe"
    assert main([*words(source, output), "target=upcycled"]) == 0  # has a modeling file as well
    assert main(["inspect", str(output), "check=true"]) == 0
    said = capsys.readouterr().out
    assert "sizes, sha256 and values are right" in said and "not checked          README.md: not in" in said
    names = {path.name for path in output.iterdir()} - {"README.md", "upcycle.json"}
    assert {"config.json", "tokenizer.json", "generation_config.json"} < names and any(n.endswith(".py") for n in names)
    for name in sorted(names):
        whole = (output / name).read_bytes()
        times = (output / name).stat().st_atime_ns, (output / name).stat().st_mtime_ns
        (output / name).write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
        os.utime(output / name, ns=times)
        if name != "config.json" and not name.endswith("index.json"):  # which must be read to describe the folder
            assert main(["inspect", str(output), "check=true"]) == 1
            assert name in capsys.readouterr().err
        assert main([*words(source, output), "target=upcycled"]) == 2
        assert name in capsys.readouterr().err
        (output / name).unlink()
        assert main([*words(source, output), "target=upcycled"]) == 2
        assert f"{name} is missing" in capsys.readouterr().err
        (output / name).write_bytes(whole)
    (output / "README.md").write_text("its owner's")
    (output / "more.json").write_text("{}")
    assert main([*words(source, output), "target=upcycled"]) == 0
    assert main(["inspect", str(output), "check=true"]) == 0
    assert "README.md, more.json: not in the manifest" in capsys.readouterr().out


# ---- nobody else's


def test_foreign_files_in_unfinished_work_stay(llama: Path, tmp_path: Path) -> None:
    partial = stopped_before_the_end(llama, tmp_path / "moe")
    foreign = ["notes.tmp", "mine.part", "mine.rank-0.part", "config.json.7.tmp"]
    for name in foreign:
        (partial / name).write_text(name)
    ours = ["config.json.7-0123abcd.upcycle.tmp", "model-00001-of-00002.safetensors.rank-0.part"]
    for name in ours:
        (partial / name).write_text(name)
    assert main(words(llama, tmp_path / "moe")) == 0
    assert all((tmp_path / "moe" / name).read_text() == name for name in foreign)
    assert not any((tmp_path / "moe" / name).exists() for name in ours)
    assert not {*foreign} & {*json.loads((tmp_path / "moe" / "upcycle.json").read_text())["files"]}


def test_a_folder_of_somebody_else_is_not_worked_in(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "moe.partial").mkdir()
    (tmp_path / "moe.partial" / "notes").write_text("mine")
    assert main(words(llama, tmp_path / "moe")) == 2
    assert "moe.partial exists and is not unfinished work of this program" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "moe.partial").iterdir()] == ["notes"]


def test_what_another_process_made_meanwhile_is_left_alone(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one comes to its end after this one looked for the output, and before it has the lock."""
    assert main(words(llama, tmp_path / "moe")) == 0
    monkeypatch.setattr(converting, "complete", lambda *_: False)
    with pytest.raises(ValueError, match="another process has just written"):
        convert(*load(f"source={llama}", f"output={tmp_path / 'moe'}", *WORDS), quiet=True)
    assert not (tmp_path / "moe.partial").exists()


def test_a_command_of_one_file_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    """A name of ours for this file goes; another file's, which may be written now, and somebody's stay."""
    left, others = tmp_path / "routing.json.12-0a1b2c3d.upcycle.tmp", tmp_path / "b.json.12-0a1b2c3d.upcycle.tmp"
    for path in (left, others, tmp_path / "notes.tmp"):
        path.write_bytes(b"half")
    publish.write_own(tmp_path / "routing.json", b"{}")
    assert {path.name for path in tmp_path.iterdir()} == {"routing.json", others.name, "notes.tmp"}
    with (
        publish.alone(tmp_path / ".routing.json.lock", tmp_path / "routing.json"),
        pytest.raises(ValueError, match="another process is writing"),
    ):
        publish.write_own(tmp_path / "routing.json", b"{1}")


# ---- crashes


QUICK = ("convert", "prepare", "results", "islands", "compare", "plan")


def test_crashed_at_any_call_a_command_ends_with_the_same_bytes() -> None:
    """Some of the quick ones; `python -m tests.crashes` makes all, of all commands."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.crashes", *QUICK, "--each", "3"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr[-3000:]
    assert "crashes and reruns as they should be" in ran.stdout and ran.stdout.count(" crashes at ") == len(QUICK)
