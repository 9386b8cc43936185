"""A signal is heard within a batch, also in a validation and in a suite: the run saves first, leaves with a code of its
own, and what was not measured is measured when it goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from evaluation.ask.engine import Engine
from tests.parallel.ranks import run
from tests.parallel.runs import stopped_in_validation
from tests.unit.training.test_train import WORDS, losses, place
from training.__main__ import main
from training.config.reading import read_config
from training.observe.metrics import read as read_metrics
from training.run import step as step_module
from training.run.loop import train
from training.run.stop import Stopped

__all__ = ["place"]  # a fixture


def signalled(real: Callable[..., Any], at: int) -> tuple[Callable[..., Any], list[int]]:
    """`real`, whose call number `at` without gradients sends this process a SIGTERM; and how often it was called so."""
    calls = [0]

    def call(*inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            calls[0] += 1
            if calls[0] == at:
                os.kill(os.getpid(), signal.SIGTERM)
        return real(*inputs)

    return call, calls


def words(place: Path, folder: Path) -> list[str]:
    data = [f"data.train=[{place / 'data'}]", f"data.valid=[{place / 'valid'}]"]
    return [f"output={folder}", f"model.source={place / 'dense'}", "steps=4", *data, *WORDS, "valid_every=2"]


def test_a_validation_is_left_at_the_next_batch(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = step_module.nll
    call, calls = signalled(real, 10**9)
    monkeypatch.setattr(step_module, "nll", call)
    assert main(words(place, tmp_path / "whole")) == 0
    batches = calls[0] // 3  # of a validation: before, between and after
    call, calls = signalled(real, batches + 2)  # the second batch after step 2
    monkeypatch.setattr(step_module, "nll", call)
    capsys.readouterr()
    assert main(words(place, tmp_path / "parts")) == 75
    assert calls[0] == batches + 2, "it went on validating"
    assert "stopped after step 2 of 4; the same command continues" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "parts" / "checkpoints").iterdir()] == ["step-00000002"]
    assert losses(tmp_path / "parts")[-1][3] is None
    assert main(words(place, tmp_path / "parts")) == 0
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_a_signal_in_the_last_step_leaves_the_end_to_the_next_start(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the last validation nor the export is made before it is asked for again."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        given = read_config("", [*words(place, tmp_path / "run"), f"export={out}", "steps=3", "valid_every=0"])
        patch.setattr("training.run.step.train_step", signal_before(step_module.train_step, 3))
        with pytest.raises(Stopped, match="after step 3"):
            train(given)
        assert not out.exists() and losses(tmp_path / "run")[-1][3] is None
    train(given)
    assert out.is_dir() and losses(tmp_path / "run")[-1][3] is not None


def signal_before(real: Callable[..., Any], at: int) -> Callable[..., Any]:
    calls = [0]

    def step(*inputs: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*inputs)

    return step


def test_a_suite_is_left_at_the_next_forward(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "words").mkdir()
    shutil.copy(place / "tokenizer" / "tokenizer.json", tmp_path / "words")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (tmp_path / "words" / "tokenizer_config.json").write_text(json.dumps(settings))
    more = ["eval.every=3", f"eval.tokenizer={tmp_path / 'words'}", "eval.limit=4", "valid_every=0"]
    given = read_config("", [*words(place, tmp_path / "run"), *more, "steps=3"])
    call, calls = signalled(Engine.hidden, 2)
    with monkeypatch.context() as patch, pytest.raises(Stopped, match="after step 0"):
        patch.setattr(Engine, "hidden", lambda *inputs: call(*inputs))
        train(given)
    assert calls[0] == 2 and not (tmp_path / "run" / "checkpoints").exists()
    train(given)
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows if any(name.startswith("eval/") for name in row)] == [0, 3]


def test_one_rank_that_is_asked_in_a_validation_stops_both(place: Path, tmp_path: Path) -> None:
    given = [*words(place, tmp_path / "run"), "device=cpu"]
    assert run(2, stopped_in_validation, given, 2) == [(2, True), (2, True)]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]
