"""Ctrl-C before the first step is a sentence and 130, whatever is being read; words from elsewhere are answered; and
packages that take seconds to import are left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.training.test_standalone import slices
from tests.unit.training.test_train import place
from training.__main__ import main
from training.checkpoint import layout, standalone, storage
from training.run import measures, session

__all__ = ["place"]  # a fixture


def interrupted(real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*inputs: Any, **named: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return real(*inputs, **named)

    return call


def test_ctrl_c_while_weights_are_read(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    data = [f"data.train=[{place / 'data'}]", f"model.source={place / 'dense'}", f"output={tmp_path / 'run'}"]
    words = [*data, "data.sequence=24", "batch=2", "micro_batch=2", "schedule.warmup=0", "steps=2", "device=cpu"]
    said = "upcycle: stopped; the same command continues from here\n"
    for owner, name in ((layout, "described"), (layout, "load"), (layout, "copy")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted(getattr(owner, name)))
            capfd.readouterr()
            assert main(words) == 130, name
            assert said in capfd.readouterr().err and not (tmp_path / "run").exists()
    assert main(words) == 0
    more = [*words, "steps=3"]
    for owner, name in ((standalone, "kept"), (storage.Shards, "fill"), (storage, "read_manifest")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted(getattr(owner, name)))
            capfd.readouterr()
            assert main(more) == 130, name
            assert said in capfd.readouterr().err
    assert main(more) == 0


def test_ctrl_c_in_the_first_validation(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """There is no loss yet, and no picture of it: the sentence is that of any other stop."""
    run, data = tmp_path / "run", place / "data"
    words = [f"data.train=[{data}]", f"data.valid=[{data}]", f"model.source={place / 'dense'}", f"output={run}"]
    more = ["data.sequence=24", "batch=2", "micro_batch=2", "schedule.warmup=0", "steps=2", "device=cpu"]
    drawn: list[Path] = []
    monkeypatch.setattr(session, "draw", drawn.append)
    with monkeypatch.context() as patch:
        patch.setattr(measures, "measured", interrupted(measures.measured))
        assert main([*words, *more]) == 75
    assert "stopped after step 0" in capfd.readouterr().out and not drawn
    assert main([*words, *more]) == 0 and drawn == [run]


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("optim.lr=1e-3", "unknown key 'optim.lr'; write schedule.peak; known keys: name"),
        ("optim.learning_rate=1e-3", "write schedule.peak"),
        ("lr=1e-3", "unknown key 'lr'; write schedule.peak"),
        ("schedule.lr=1", "write schedule.peak"),
        ("optim.cip=1", "did you mean 'clip'"),
    ],
)
def test_a_word_of_other_programs_is_answered_with_ours(
    word: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word]) == 2
    assert says in capsys.readouterr().err


SECONDS = {  # to import these takes seconds, and a plain run needs none of them before its first step
    "transformers", "sklearn", "scipy", "pandas", "pyarrow", "datasets", "lm_eval", "matplotlib", "peft", "accelerate",
    "tensorboard", "wandb", "huggingface_hub.hf_api", "evaluation.ask.run",
}  # fmt: skip
FIRST = """
import json, sys
from training.__main__ import main
from training.run import step

def first(*_):
    print(json.dumps(sorted(sys.modules)))
    raise KeyboardInterrupt

step.train_step = first
assert [main(words) for words in json.loads(sys.argv[1])] == [130, 130]
"""


def test_a_run_imports_nothing_that_takes_seconds_before_its_first_step(place: Path, tmp_path: Path) -> None:
    """Neither a dense model nor slices, whose routers are measured on text and made with the weights."""
    data = [f"data.train=[{place / 'data'}]", f"data.valid=[{place / 'valid'}]", "data.sequence=24", "device=cpu"]
    more = [*data, "batch=2", "micro_batch=2", "schedule.warmup=0", "steps=2"]
    runs = [[f"model.source={place / 'dense'}", f"output={tmp_path / 'dense'}", *more]]
    runs += [[slices(place), f"output={tmp_path / 'slices'}", *more]]
    done = subprocess.run([sys.executable, "-c", FIRST, json.dumps(runs)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "slices" / "origin" / standalone.OBSERVED).is_file()
    dense, cut = ({name for name in SECONDS if name in json.loads(line)} for line in done.stdout.splitlines())
    assert (dense, cut) == (set(), set())
