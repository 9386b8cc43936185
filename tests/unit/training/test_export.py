"""Checkpoints leave as Hugging Face folders; one that could not be written is noticed at once, and room is asked for
before."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from tests.unit.training.test_data import make_tokenizer
from tests.unit.training.test_state import names, saved, small
from tests.unit.training.test_train import place
from training import export
from training.__main__ import main
from training.checkpoint import export as export_module
from training.checkpoint import layout, storage
from training.checkpoint.state import Checkpoints
from training.cli.export import main as export_main
from training.config.reading import read_config
from training.config.schema import TrainConfig
from training.model.stock.model import model_of
from training.observe.metrics import read as read_metrics
from training.run import step as step_module
from training.run.loop import train
from upcycle.__main__ import main as upcycle
from upcycle.arch.targets.upcycled import MODELING
from upcycle.io import disk, hub, publish

__all__ = ["place"]  # a fixture


def words(place: Path, folder: Path, *more: str) -> list[str]:
    given = ["data.sequence=24", "batch=2", "micro_batch=2", "log_every=1", "schedule.warmup=0", "model.dtype=float32"]
    data = [f"model.source={place / 'dense'}", f"data.train=[{place / 'data'}]", f"output={folder}"]
    return [*given, *data, "checkpoint.every=2", "schedule.peak=1e-3", *more]


def test_any_checkpoint_is_exported_and_so_is_a_finished_run(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    train(read_config("", words(place, run, f"export={tmp_path / 'own'}", "steps=4")))
    assert export_main([str(run), f"output={tmp_path / 'last'}"]) == 0
    assert "after step 4" in capsys.readouterr().out
    assert export(run / "checkpoints" / "step-00000002", tmp_path / "second") == 2
    for file in (tmp_path / "own").iterdir():
        assert (tmp_path / "last" / file.name).read_bytes() == file.read_bytes(), file.name
    second, last = (load_file(tmp_path / name / "model.safetensors") for name in ("second", "last"))
    assert second.keys() == last.keys() and not any(torch.equal(second[n], last[n]) for n in last if "q_proj" in n)

    (tmp_path / "last" / ".upcycle").mkdir()  # left by a kill right after the rename
    for given, says in (
        ([str(run), str(tmp_path / "last")], "exists already; remove it"),
        ([str(run), str(run)], "is the same as"),
        ([str(run), str(run / "checkpoints")], "lies in"),
        ([str(place / "dense"), str(tmp_path / "new")], "is not a training run or a checkpoint"),
        ([str(run)], "write RUN OUTPUT [key=value ...]; got"),
        ([str(run), "outptu=ex1"], "unknown key 'outptu'; did you mean 'output'?"),
    ):
        assert export_main(given) == 2
        assert says in capsys.readouterr().err
    assert not (tmp_path / "last" / ".upcycle").exists()

    # started again with another folder, and with fewer steps than it has
    for name, steps in (("again", 4), ("fewer", 3)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(read_config("", words(place, run, f"export={tmp_path / name}", f"steps={steps}")))
        assert (tmp_path / name / "model.safetensors").read_bytes() == (
            tmp_path / "own" / "model.safetensors"
        ).read_bytes()


def test_a_weight_that_its_dtype_cannot_hold_is_not_exported(place: Path, tmp_path: Path) -> None:
    with layout.opened(place / "dense") as origin:
        model = layout.load(model_of(origin.spec), origin)
        with torch.no_grad():
            next(iter(model.layers["1"].parameters())).view(-1)[0] = 1e6
        with pytest.raises(ValueError, match=r"is not finite in float16, so the model is not exported"):
            export_module.export(model, origin, tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()


def test_an_export_is_the_same_however_many_tensors_travel_together(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(read_config("", words(place, tmp_path / "run", f"export={tmp_path / 'together'}", "steps=2")))
    sizes = [path.stat().st_size for path in (tmp_path / "together").glob("*.safetensors")]
    for stage in (1, 5000, 20_000):
        assert stage < sizes[0]
        monkeypatch.setattr(export_module, "STAGE", stage)
        export(run, tmp_path / str(stage))
        assert files(tmp_path / str(stage)) == files(tmp_path / "together")


def test_the_last_checkpoint_may_hold_weights_alone(place: Path, tmp_path: Path) -> None:
    """A finished run's export, its checkpoint's export and a second start are those of a run that keeps everything;
    more steps start without moments and say so. Checkpoints before the last step hold everything."""

    def given(name: str, *more: str) -> TrainConfig:
        kept = [f"checkpoint.last={name}", "checkpoint.keep=9", f"export={tmp_path / name}-model"]
        return read_config("", words(place, tmp_path / name, "steps=4", *kept, *more))

    for name in ("all", "weights"):
        train(given(name))
        export(tmp_path / name / "checkpoints" / "step-00000004", tmp_path / f"{name}-again")
    assert files(tmp_path / "all-model") == files(tmp_path / "weights-model") == files(tmp_path / "weights-again")
    every, light = (set(held(tmp_path / name, 4)) for name in ("all", "weights"))
    assert light < every and all("optimizer.state" in name for name in every - light)
    assert {name.rpartition(".")[2] for name in every - light} == {"exp_avg", "exp_avg_sq", "step"}
    assert held(tmp_path / "weights", 2) == held(tmp_path / "all", 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(given("weights"))  # it is done, and nothing is lost by that
    with pytest.warns(UserWarning, match="step 4 was the last of a run with checkpoint.last=weights, so moments start"):
        train(given("weights", "steps=6", f"export={tmp_path / 'more'}"))
    train(given("all", "steps=6", f"export={tmp_path / 'more-all'}"))
    assert held(tmp_path / "weights", 6).keys() == held(tmp_path / "weights", 4).keys()
    assert files(tmp_path / "more") != files(tmp_path / "more-all"), "the moments of step 4 matter"


def held(run: Path, step: int) -> dict[str, Any]:
    """Return the tensors that a checkpoint holds, by name."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    return {name: entry["shape"] for name, entry in storage.read_manifest(folder)["tensors"].items()}


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def test_a_save_that_failed_is_said_at_the_next_step_and_tried_again(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, failing, begun = disk.write_all, [1], [0]

    def write(fd: int, data: memoryview) -> None:
        if failing[0] and "/checkpoints/" in os.readlink(f"/proc/self/fd/{fd}"):
            failing[0] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd, data)

    def step(*inputs: Any) -> Any:
        begun[0] += 1
        time.sleep(0.2)  # in which a save of this small model comes to its end
        return real_step(*inputs)

    real_step = step_module.train_step
    monkeypatch.setattr(step_module, "train_step", step)
    monkeypatch.setattr(disk, "write_all", write)
    said = r"No space left on device: .*step-00000004.partial/shard-00000.safetensors.*; tries again with step 5"
    with pytest.warns(UserWarning, match=said):
        assert main(words(place, tmp_path / "once", "steps=6", "checkpoint.every=4", "checkpoint.keep=9")) == 0
    assert names(tmp_path / "once" / "checkpoints") == ["step-00000005", "step-00000006"]

    begun[0], failing[0] = 0, 10**9
    with pytest.warns(UserWarning, match="tries again with step 3"):
        assert main(words(place, tmp_path / "never", "steps=8")) == 2
    assert begun[0] == 4, "the second failure ends the run at the step after it"
    assert "step-00000003.partial/shard-00000.safetensors" in capsys.readouterr().err


def test_room_is_asked_for_before_the_first_step(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("it trains, and could not save")

    monkeypatch.setattr(step_module, "train_step", never)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=storage.SPARE + 10**5))
    assert main(words(place, tmp_path / "run", "steps=8")) == 2
    said = capsys.readouterr().err
    assert "3 checkpoints of 0.00 GB each do not fit into" in said and "make room" in said


def test_room_is_for_as_many_as_lie_there_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    saved(tmp_path / "two", 1, 2, keep=2)
    monkeypatch.setattr(storage, "check_free", lambda folder, size, count: asked.append((size, count)))
    for folder, saves in (("none", 1), ("none", 2), ("none", 9), ("two", 1), ("two", 9)):
        with Checkpoints(tmp_path / folder, keep=2) as checkpoints:
            checkpoints.check_room(small(1), saves)
    assert [count for _, count in asked] == [1, 2, 3, 1, 1]
    on_disk = (tmp_path / "two" / "step-00000001" / "shard-00000.safetensors").stat().st_size
    assert on_disk - 2 * 4096 <= asked[0][0] < on_disk, "all but the file's header"


def stamps(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_second_training_of_one_output_is_refused_and_writes_nothing(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(words(place, run, "steps=2")) == 0
    before = stamps(run)
    with publish.alone(run / publish.LOCK, run):
        assert main(words(place, run, "steps=4")) == 2
        said = capsys.readouterr().err
        assert f"another process is writing {run} (process {os.getpid()} on {socket.gethostname()}" in said
    assert stamps(run) == before
    (run / publish.LOCK).write_text("99999999 elsewhere 2020-01-01T00:00:00Z\n")  # of a run that was killed
    assert main(words(place, run, "steps=4")) == 0
    assert not (run / publish.LOCK).exists()


def test_an_export_leaves_alone_what_it_did_not_make(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, partial = tmp_path / "run", tmp_path / "out.partial"
    partial.mkdir()
    (partial / "thesis.tex").write_text("mine")
    assert main(words(place, run, f"export={tmp_path / 'out'}", "steps=2")) == 2
    assert "out.partial exists and is not unfinished work of this program" in capsys.readouterr().err
    assert not run.exists() and (partial / "thesis.tex").read_text() == "mine"
    shutil.rmtree(partial)

    assert main(words(place, run, "steps=2")) == 0
    (partial / ".upcycle").mkdir(parents=True)  # of an export that was killed, of a model in two shards
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    (partial / ".upcycle" / "job.json").write_text(json.dumps({"export": shards}))
    for name in (*shards, "notes.tmp", "mine.part"):
        (partial / name).write_text("?")
    assert export(run, tmp_path / "out") == 2
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"notes.tmp", "mine.part"} < names and not {*shards, ".upcycle"} & names


def test_all_files_of_an_export_are_checked(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    given = words(place, tmp_path / "run", f"export={out}", "steps=2")
    assert main(given) == 0
    listed = json.loads((out / publish.MANIFEST).read_text())["files"].keys()
    assert listed == {path.name for path in out.iterdir()} - {publish.MANIFEST, "README.md"}
    assert upcycle(["inspect", str(out), "check=true"]) == 0 and main(given) == 0
    assert "sizes, sha256 and values are right" in capsys.readouterr().out
    for name in sorted(path.name for path in out.iterdir() if path.name not in ("config.json", "README.md")):
        whole = (out / name).read_bytes()
        (out / name).write_bytes(whole.replace(b"0", b"1", 1) if name == publish.MANIFEST else whole[:-1] + b"?")
        assert upcycle(["inspect", str(out), "check=true"]) == 1
        assert name in capsys.readouterr().err
        if name != publish.MANIFEST:
            assert main(given) == 2
            assert f"{name} has changed since it was written" in capsys.readouterr().err
        (out / name).write_bytes(whole)
    (out / "config.json").write_bytes((out / "config.json").read_bytes() + b"\n")
    assert upcycle(["inspect", str(out), "check=true"]) == 1
    assert "config.json has" in capsys.readouterr().err
    (out / publish.MANIFEST).unlink()  # as older versions exported
    assert upcycle(["inspect", str(out), "check=true"]) == 0 and main(given) == 0
    assert "without a manifest, sizes, sha256 and other files cannot be checked" in capsys.readouterr().out


def test_an_export_can_be_pushed_and_its_card_says_what_was_done(place: Path, tmp_path: Path) -> None:
    card = "---\nlicense: other\nlicense_name: tiny\n---\n# A dense model\n"
    shutil.copytree(place / "dense", tmp_path / "org" / "dense")
    (tmp_path / "org" / "dense" / "README.md").write_text(card)
    made = {
        "source": str(tmp_path / "org" / "dense"),
        "experts": 4,
        "granularity": 2,
        "method": "virtual_group",
        "top_k": 2,
    }
    out, run = tmp_path / "out", tmp_path / "run"
    more = ["model.source=", f"model.upcycle={json.dumps(made)}", f"data.valid=[{place / 'valid'}]", "steps=2"]
    train(read_config("", words(place, run, *more, f"export={out}")))
    export(run, tmp_path / "again")
    assert {"README.md", "config.json", "upcycle.json"} < {name for name, _ in hub.upload(out).files}
    text = (out / "README.md").read_text()
    assert text == (tmp_path / "again" / "README.md").read_text()
    head = ModelCard(text).data.to_dict()
    assert (head["license"], head["license_name"]) == ("other", "tiny") and {"moe", "upcycled"} < {*head["tags"]}
    rows = read_metrics(run)
    losses = [row["loss"] for row in rows if "loss" in row]
    valid = [row["valid/valid/loss"] for row in rows if "valid/valid/loss" in row]
    for line in (
        "# dense, upcycled and trained", "| method | virtual_group", "| experts | 4 |", "| granularity | 2 |",
        "| top_k | 2 |", f"| architecture | {json.loads((out / 'config.json').read_text())['model_type']} |",
        f"| tokens trained | {rows[-1]['tokens']:,} |", f"| training loss | {losses[0]:.4f} at first, {losses[-1]:.4f} at",
        f"| validation valid loss | {valid[0]:.4f} at first, {valid[-1]:.4f} at the end |",
    ):  # fmt: skip
        assert line in text, line
    assert str(tmp_path) not in text


def manifest_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / publish.MANIFEST).read_text())
    return found


def test_an_export_says_where_it_comes_from_over_two_trainings(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dense base with its fingerprint, the recipe, and each training: what it began with, its data and tokens."""
    moe, first, second = tmp_path / "moe", tmp_path / "first", tmp_path / "second"
    keys = ["experts=4", "granularity=2", "method=virtual_group", "top_k=2", "target=upcycled"]
    assert upcycle(["convert", f"source={place / 'dense'}", f"output={moe}", *keys]) == 0
    for start, out in ((moe, first), (first, second)):
        run = tmp_path / f"run-{out.name}"
        assert main(words(place, run, "steps=2", f"model.source={start}", f"export={out}", "device=cpu")) == 0
    converted, found = manifest_of(moe), manifest_of(second)
    assert (found["from"], found["source"]) == (str(place / "dense"), converted["source"])
    assert found["config"] == converted["config"] and found["versions"] == converted["versions"]
    one, two = found["trained"]
    assert [one] == manifest_of(first)["trained"]
    assert (one["start"], one["start_sum"]) == (str(moe), converted["sum"])
    assert (two["start"], two["start_sum"]) == (str(first), manifest_of(first)["sum"])
    row = read_metrics(tmp_path / "run-second")[-1]
    assert (two["tokens"], two["steps"], two["data"]) == (row["tokens"], 2, ["data"])
    assert two["losses"]["training loss"][1] == row["loss"]
    card = (second / "README.md").read_text()
    for line in (
        "# dense, upcycled and trained", f"| base model | dense, fingerprint {converted['source'][0][:16]} |",
        "| trained from | first |", f"| tokens trained | {two['tokens']:,} |", "| data | data |",
        f"| trained before | {one['tokens']:,} tokens in 1 run |",
    ):  # fmt: skip
        assert line in card, line
    capsys.readouterr()
    assert upcycle(["inspect", str(second)]) == 0
    said = capsys.readouterr().out
    assert f"{place / 'dense'}" in said and "trained from         " in said and "chooses in each of 2 slices" in said
    public = dict(hub.upload(second).files)[publish.MANIFEST]
    assert isinstance(public, bytes) and str(tmp_path).encode() not in public
    assert upcycle(["verify", str(place / "dense"), str(second)]) == 3


def test_an_old_runs_export_has_the_modelling_file_of_today(place: Path, tmp_path: Path) -> None:
    """One that an older version kept may not know today's transformers: 5.24 renamed the cache, and it read none."""
    keys = ["experts=4", "granularity=2", "method=virtual_group", "top_k=2", "target=upcycled"]
    assert upcycle(["convert", f"source={place / 'dense'}", f"output={tmp_path / 'moe'}", *keys]) == 0
    train(read_config("", words(place, tmp_path / "run", "steps=1", f"model.source={tmp_path / 'moe'}")))
    (tmp_path / "run" / "origin" / MODELING.name).write_text("# of an older version")
    export(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out" / MODELING.name).read_bytes() == MODELING.read_bytes()
    assert upcycle(["inspect", str(tmp_path / "out"), "check=true"]) == 0


@pytest.mark.parametrize("target", ["upcycled", "mixtral"])
def test_the_snippet_of_a_card_runs_as_it_stands(target: str, place: Path, tmp_path: Path) -> None:
    """In the folder, with nobody at the keyboard: it writes a text, asks nothing and warns of nothing."""
    dense, moe, out = (tmp_path / name for name in ("dense", "moe", "out"))
    shutil.copytree(place / "dense", dense)
    make_tokenizer(dense, bos=False)
    (dense / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}')
    assert upcycle(["convert", f"source={dense}", f"output={moe}", "experts=4", f"target={target}"]) == 0
    train(read_config("", words(place, tmp_path / "run", "steps=2", f"model.source={moe}", f"export={out}")))
    snippets = []
    for folder in (moe, out):
        text = (folder / "README.md").read_text()
        assert "upcycle chat" in text and ("trust_remote_code=True" in text) == (target == "upcycled")
        snippets.append((str(folder), text.partition("```python\n")[2].partition("```")[0]))
    # one process for both, because transformers' imports take longer than what is asked of them
    both = (
        f"import os\nfor folder, code in {snippets!r}:\n    os.chdir(folder)\n    print('----')\n    exec(code, {{}})"
    )
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        [sys.executable, "-c", both], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    nothing, *texts = done.stdout.split("----\n")
    assert nothing == "" and len(texts) == 2 and all(map(str.strip, texts)) and "[y/N]" not in done.stdout
