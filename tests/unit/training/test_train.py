"""A run as a whole: stopped and resumed it is bitwise the run that never stopped; what it exports is what it trained."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.parity import tiny
from tests.unit.training.test_data import jsonl, make_tokenizer, texts
from training.__main__ import main
from training.checkpoint.state import Checkpoints
from training.cli.prepare import main as prepare
from training.config.reading import read_config
from training.config.schema import TrainConfig
from training.data.open import open_training
from training.observe.metrics import Metrics
from training.observe.metrics import read as read_metrics
from training.parallel.watch import Watch
from training.run import session
from training.run import step as step_module
from training.run.build import begin, start
from training.run.loop import train
from training.run.session import draw
from training.run.step import train_step
from upcycle.__main__ import main as upcycle

WORDS = [
    "data.sequence=24", "batch=4", "micro_batch=2", "log_every=1", "schedule.warmup=2", "schedule.peak=1e-3", "model.dtype=float32",
    "checkpoint.every=3", "balance.bias_rate=0.01", "data.seed=3",
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    tiny.make("llama", folder / "dense", vocab_size=400)
    tokenizer = make_tokenizer(folder / "tokenizer", bos=False) if not (folder / "tokenizer").mkdir() else folder
    for name, seed, count in (("data", 0, 60), ("valid", 1, 20)):
        source = jsonl(folder / f"{name}.jsonl", texts(count, seed))
        assert prepare([str(folder / name), f"tokenizer={tokenizer}", f"sources=[{source}]"]) == 0
    return folder


def moe(place: Path) -> dict[str, Any]:
    return {
        "source": str(place / "dense"), "target": "glm4_moe", "experts": 4, "granularity": 2, "top_k": 2,
        "method": "virtual_group", "router": {"score": "sigmoid"},
    }  # fmt: skip


def config(place: Path, output: Path, *words: str, steps: int = 8) -> TrainConfig:
    upcycle = json.dumps(moe(place))
    data = [f"data.train=[{place / 'data'}]", f"data.valid=[{place / 'valid'}]"]
    return read_config("", [f"output={output}", f"model.upcycle={upcycle}", f"steps={steps}", *data, *WORDS, *words])


def losses(folder: Path) -> list[Any]:
    return [
        (row["step"], row.get("loss"), row.get("grad_norm"), row.get("valid/valid/bpb")) for row in read_metrics(folder)
    ]


class Stopped(BaseException):
    pass


def stops_before(number: int) -> Callable[..., Any]:
    real, count = step_module.train_step, [0]

    def step(*arguments: Any) -> Any:
        count[0] += 1
        if count[0] == number:
            raise Stopped
        return real(*arguments)

    return step


def test_a_resumed_run_is_the_run_that_never_stopped(place: Path, tmp_path: Path) -> None:
    whole = train(config(place, tmp_path / "whole", f"export={tmp_path / 'whole-out'}"))

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(step_module, "train_step", stops_before(6))  # after the checkpoint of step 3, in the middle
        train(config(place, tmp_path / "parts"))
    parts = train(config(place, tmp_path / "parts", f"export={tmp_path / 'parts-out'}"))
    assert losses(whole) == losses(parts)
    assert [row[0] for row in losses(parts)] == list(range(9))
    a, b = (load_file(tmp_path / f"{name}-out" / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert losses(whole)[-1][1] < losses(whole)[1][1] - 0.1, "nothing was learned"
    bias = a["model.layers.0.mlp.gate.e_score_correction_bias"]
    assert bool((bias != 0).any()), "the balance bias did not move"


def test_the_watch_is_told_what_a_run_does_in_order(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a rank that hangs is named with the part that it hangs in; between parts ("") others are waited for. The
    log is on the disk before a checkpoint, or it would have a hole after a crash; both are before a validation."""
    told: list[str] = []
    monkeypatch.setattr(Watch, "doing", lambda self, what: told.append(what))
    monkeypatch.setattr(Watch, "enter", lambda self, part: told.append(part))
    for kind, name in ((Metrics, "sync"), (Checkpoints, "save")):
        real = getattr(kind, name)
        monkeypatch.setattr(
            kind, name, lambda *inputs, name=name, real=real, **keys: (told.append(name), real(*inputs, **keys))[1]
        )
    train(config(place, tmp_path / "run", "schedule.warmup=0", steps=1))
    micro_batch = ["forward", "", "backward", ""]
    assert told == [
        "validation", "", "step 1", "data", "", *micro_batch, *micro_batch, "optimizer", "",
        "checkpoint", "sync", "save", "validation", "", "sync",
    ]  # fmt: skip


def balances(folder: Path) -> list[dict[str, Any]]:
    kept = ("step", "balance")
    return [{k: v for k, v in row.items() if k.startswith(kept)} for row in read_metrics(folder) if "loss" in row]


def test_what_a_resumed_run_says_of_its_routers_is_what_the_whole_one_says(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint of step 3 lies between two lines, and holds what was counted since the first."""
    words = ["log_every=4", "balance.capacity_factor=1", "balance.z_weight=1e-3"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(config(place, whole, *words))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(step_module, "train_step", stops_before(6))
        train(config(place, parts, *words))
    train(config(place, parts, *words))
    assert balances(whole) == balances(parts)
    first = balances(whole)[0]
    assert first["step"] == 4 and 0 < first["balance/whole"] < 1 and first["balance/dropped"] > 0
    assert f"  dropped {100 * first['balance/dropped']:.3g}%  " in capsys.readouterr().err


def test_choices_are_whole_until_rows_of_a_group_differ(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the first step of an exact upcycle every choice is a whole FFN, whether it is made as it is read or before."""
    still = ["balance.bias_rate=0", "optim.router_lr=0"]
    stays = balances(train(config(place, tmp_path / "stays", *still, steps=3)))
    assert [row["balance/whole"] for row in stays] == [1, 1, 1]
    said = capsys.readouterr().err
    assert "whole 100%" in said and "dropped" not in said, "no capacity drops any"
    for row in stays:
        assert row["balance/missing"] == row["balance/doubled"] == row["balance/1/missing"] == 0
        assert 0.9 < row["balance/aux"] < 8 and row["balance/z"] > 0 and 0 < row["balance/router_entropy"] < 1.0001
    first, *later = balances(train(config(place, tmp_path / "moves", still[0], "optim.router_lr=1000", steps=3)))
    assert first == stays[0]
    for row in later:
        assert row["balance/whole"] < 0.9 and row["balance/missing"] > 0.1 and row["balance/doubled"] > 0.1
        assert row["balance/whole"] == sum(row[f"balance/{n}/whole"] for n in range(2)) / 2

    folder = tmp_path / "moe"
    given = moe(place) | {"output": str(folder)}
    (tmp_path / "moe.yaml").write_text(json.dumps(given))
    assert upcycle(["convert", str(tmp_path / "moe.yaml")]) == 0
    words = ["model.upcycle=", f"model.source={folder}", *still]
    assert balances(train(config(place, tmp_path / "offline", *words, steps=3))) == stays
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.gate.weight"
    twice = tensors[name][[0, 2, 1, 3, 4, 6, 5, 7]]  # equal rows are those of one slice, of two copies
    save_file(tensors | {name: twice}, file, metadata={"format": "pt"})
    apart = balances(train(config(place, tmp_path / "apart", *words, steps=3)))[0]
    assert apart["balance/0/whole"] == 0 and apart["balance/0/missing"] == apart["balance/0/doubled"] == 1
    assert apart["balance/1/whole"] == 1 and apart["balance/whole"] == 0.5
    (folder / "upcycle.json").unlink()  # nobody knows what the experts are
    silent = balances(train(config(place, tmp_path / "silent", *words, steps=3)))[0]
    assert not any("whole" in key or "missing" in key for key in silent) and "balance/z" in silent


def test_a_step_whose_gradient_alone_is_not_finite_changes_nothing(place: Path, tmp_path: Path) -> None:
    with start(config(place, tmp_path / "run"), torch.device("cpu")) as run:
        begin(run)
        samples = open_training(run.config.data, run.origin.dense.vocab)
        batches = [samples.batch(0, 2), samples.batch(2, 2)]
        assert run.model.final_norm is not None
        hook = run.model.final_norm.weight.register_hook(lambda gradient: gradient * math.inf)
        before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
        learned = train_step(run, batches, 1e-3)
        assert learned["loss"].isfinite() and not learned["grad_norm"].isfinite() and learned["skipped"] == 1
        assert all(torch.equal(tensor, before[name]) for name, tensor in run.model.state_dict().items())
        hook.remove()
        learned = train_step(run, batches, 1e-3)
        assert learned["grad_norm"].isfinite() and learned["skipped"] == 1
        assert not torch.equal(run.model.state_dict()["final_norm.weight"], before["final_norm.weight"])


def test_the_export_is_what_was_trained(place: Path, tmp_path: Path) -> None:
    from training.checkpoint import layout
    from training.model.decoder import Decoder

    out = tmp_path / "out"
    train(config(place, tmp_path / "run", f"export={out}", steps=3))
    with layout.opened(out) as origin:
        model = layout.load(Decoder(origin.spec, experts="reference"), origin)
    want = tiny.logits(out, tiny.tokens())
    assert float((model(tiny.tokens()) - want).detach().abs().max()) < 2e-6 * float(want.abs().max())


def test_what_a_person_asked_to_see_is_there(
    place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "draw", draw)  # the real one; tests/conftest.py takes it from all other runs
    folder = train(config(place, tmp_path / "run", "profile=2-3", "log_every=2", steps=4))
    assert (folder / "plots.png").read_bytes()[:4] == b"\x89PNG"
    assert {"trace-2-3.json.gz", "run.json", "metrics.jsonl", "checkpoints"} <= {p.name for p in folder.iterdir()}
    rows = [row for row in read_metrics(folder) if "loss" in row]
    for row in rows:
        phases = [row[f"time/{name}"] for name in ("data", "forward", "backward", "optimizer")]
        assert min(phases) > 0
        assert sum(phases) <= row["seconds_per_step"]
    line = next(line for line in capfd.readouterr().err.splitlines() if line.startswith("step 4/4"))
    for word in ("loss ", " tok/s", " TFLOP/s", " GB", "load ", "ETA 0:00:00"):
        assert word in line
    assert ("MFU" in line) == torch.cuda.is_available()


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_changes_no_number(place: Path, tmp_path: Path, mode: str) -> None:
    plain, again = (
        train(config(place, tmp_path / name, f"model.recompute={name}", "balance.aux_weight=0.1", steps=4))
        for name in ("none", mode)
    )
    assert losses(plain) == losses(again)
    loads = [[row.get("balance/max_over_mean") for row in read_metrics(folder)] for folder in (plain, again)]
    assert loads[0] == loads[1]


def test_a_suite_is_asked_while_it_trains(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The numbers stand beside the loss, and asking changes nothing of the training."""
    (tmp_path / "words").mkdir()
    shutil.copy(place / "tokenizer" / "tokenizer.json", tmp_path / "words")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (tmp_path / "words" / "tokenizer_config.json").write_text(json.dumps(settings))
    words = ["eval.every=2", f"eval.tokenizer={tmp_path / 'words'}", "eval.limit=4"]
    asked = train(config(place, tmp_path / "asked", *words, steps=3))
    plain = train(config(place, tmp_path / "plain", steps=3))
    rows = [row for row in read_metrics(asked) if any(key.startswith("eval/") for key in row)]
    assert [row["step"] for row in rows] == [0, 2, 3]
    assert len({json.dumps({k: v for k, v in row.items() if k.startswith("eval/")}) for row in rows}) > 1
    assert losses(asked) == losses(plain)
    data = [f"data.train=[{place / 'data'}]", f"model.source={place / 'dense'}", f"output={tmp_path / 'none'}"]
    assert main([*data, *WORDS, "steps=8", "eval.every=1"]) == 2
    assert "has no tokenizer" in capsys.readouterr().err


def test_an_export_that_is_there_is_said_before_the_training(place: Path, tmp_path: Path) -> None:
    words = [f"export={tmp_path / 'out'}"]
    train(config(place, tmp_path / "run", *words, steps=3))
    train(config(place, tmp_path / "run", *words, steps=3))  # a finished run has nothing left to do
    with pytest.raises(ValueError, match="exists already; remove it or choose another folder"):
        train(config(place, tmp_path / "other", *words, steps=3))
    assert not (tmp_path / "other" / "metrics.jsonl").exists()


def test_micro_batches_do_not_change_the_step(place: Path, tmp_path: Path) -> None:
    one = train(config(place, tmp_path / "one", "micro_batch=4", "balance.aux_weight=0", steps=3))
    four = train(config(place, tmp_path / "four", "micro_batch=1", "balance.aux_weight=0", steps=3))
    for (_, a, *_), (_, b, *_) in zip(losses(one)[1:], losses(four)[1:], strict=True):
        assert a == pytest.approx(b, rel=1e-5)


def test_sigterm_saves_and_the_next_run_goes_on(place: Path, tmp_path: Path) -> None:
    words = [
        "steps=400",
        f"output={tmp_path / 'run'}",
        f"data.train=[{place / 'data'}]",
        *WORDS[:-3],
        "checkpoint.every=0",
        "log_every=50",
    ]
    command = [sys.executable, "-m", "training", *words, f"model.source={place / 'dense'}"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    while process.poll() is None and not (tmp_path / "run" / "metrics.jsonl").exists():
        time.sleep(0.1)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 75
    steps = [int(path.name.removeprefix("step-")) for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert len(steps) == 1
    assert 1 <= steps[0] < 400
    assert f"stopped after step {steps[0]} of 400; the same command continues" in said
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [*range(50, steps[0], 50), steps[0]]


def test_text_that_an_upcycled_model_reads_again_is_told(place: Path, tmp_path: Path) -> None:
    """In time to stop it: what the run would have read by its end, as its log counts it there; also of a resume."""

    def told(output: str, *words: str, steps: int) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(config(place, tmp_path / output, "valid_every=0", *words, steps=steps))
        return [str(one.message) for one in caught if "learn by heart" in str(one.message)]

    length = "data.sequence=128"
    (said,) = told("long", length, steps=8)
    (read,) = (
        row["epochs/data"] for row in read_metrics(tmp_path / "long") if row["step"] == 8 and "epochs/data" in row
    )
    assert read > 1.5 and f"by step 8 this run reads data {read:.1f} times" in said
    assert not told("long", length, steps=8)  # there is nothing left to do
    assert not told("short", length, steps=4)
    (again,) = told("short", length, "schedule.final=1e-4", steps=8)
    assert again == said
    assert not told(
        "dense", length, "model.upcycle=", f"model.source={place / 'dense'}", "balance.bias_rate=0", steps=8
    )
