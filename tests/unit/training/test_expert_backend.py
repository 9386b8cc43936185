"""model.expert_backend=auto: the fastest that is installed and fits, the same after a resume, said in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.unit.training.test_folders import trains
from tests.unit.training.test_train import config, moe, place
from training.config.schema import ModelConfig
from training.experts import AUTO, DEFAULT, Need, capabilities, fastest, grouped, quack, unfit
from training.run.loop import train
from upcycle.__main__ import main

__all__ = ["place"]
SLICES = Need(576, 384, torch.bfloat16, "cuda", "silu")


@pytest.mark.parametrize(("need", "name", "why"), [
    (SLICES, "quack", ""),
    (replace(SLICES, activation="gelu_tanh"), "quack", ""),
    (replace(SLICES, dtype=torch.float32), "grouped", "computes in bfloat16 on CUDA, and got float32 on cuda"),
    (replace(SLICES, device="cpu"), "grouped", "got bfloat16 on cpu"),
    (replace(SLICES, adapters=True), "grouped", "cannot compute adapters"),
    (replace(SLICES, biases=True), "grouped", "cannot compute biases"),
    (replace(SLICES, gated=False), "grouped", "experts without a gate"),
    (replace(SLICES, activation="relu2"), "grouped", "computes gated silu and gelu_tanh, and got relu2"),
    (replace(SLICES, width=100), "reference", "multiples of 8 in bfloat16, and got 576 and 100"),
    (replace(SLICES, width=100, device="cpu"), "grouped", "on cpu"),
])  # fmt: skip
def test_the_fastest_that_computes_the_model(need: Need, name: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (quack, grouped):
        monkeypatch.setattr(module, "available", lambda: "")
    found, reason = fastest(need)
    assert found == name and why in reason and bool(why) == bool(reason)


def test_what_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quack, "available", lambda: "it needs a package; use grouped")
    monkeypatch.setattr(grouped, "available", lambda: "")
    assert fastest(SLICES) == ("grouped", "it needs a package; use grouped")
    monkeypatch.setattr(grouped, "available", lambda: "it needs torch")
    assert fastest(SLICES) == ("reference", "it needs torch")
    assert unfit("quack", SLICES).startswith("it needs") and not unfit("reference", SLICES)


def test_a_plan_counts_as_the_default_does(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ModelConfig().expert_backend == AUTO and capabilities(AUTO) is capabilities(DEFAULT)
    plans = []
    for word in ([], ["model.expert_backend=auto"], [f"model.expert_backend={DEFAULT}"]):
        model = ["model.source=", f"model.upcycle={json.dumps(moe(place))}"]
        assert main(["estimate", *trains(place)[1:], *model, *word, "gpus=1"]) == 0
        plans.append(capsys.readouterr().out)
    assert plans[0] == plans[1] == plans[2]


def test_a_run_says_it_and_keeps_it(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def trained(folder: str, *words: str, steps: int) -> tuple[str, str]:
        capsys.readouterr()
        run = train(config(place, tmp_path / folder, "schedule.warmup=0", *words, steps=steps))
        return capsys.readouterr().err, json.loads((run / "run.json").read_text())["model"]["expert_backend"]

    said, name = trained("plain", steps=2)
    assert said.count("computes experts by grouped\n") == 1 and name == "grouped"
    said, name = trained("told", "model.expert_backend=reference", steps=2)
    assert "computes experts" not in said and name == "reference"
    said, name = trained("told", steps=4)
    kept = "computes experts by reference, as this run did before; grouped is the fastest here\n"
    assert said.count(kept) == 1 and name == "reference"
    said, name = trained("told", "model.expert_backend=grouped", steps=6)
    assert "computes experts" not in said and name == "grouped"


def test_a_run_goes_on_where_its_backend_is_not_installed(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(config(place, tmp_path / "run", "schedule.warmup=0", "model.expert_backend=grouped", steps=2))
    older = json.loads((run / "run.json").read_text())
    for name in ("quack", "gone"):
        model = {**older["model"], "expert_backend": name}
        (run / "run.json").write_text(json.dumps({k: v for k, v in older.items() if k != "sum"} | {"model": model}))
        with pytest.warns(UserWarning, match="sum"):
            train(config(place, run, "schedule.warmup=0", steps=4))
        assert "computes experts by grouped\n" in capsys.readouterr().err
