"""What lies next to a checkpoint is held to its sum, and a model that is not finite or learned nothing never looks done."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.unit.training.test_data import make_tokenizer
from tests.unit.training.test_dead import skipping
from tests.unit.training.test_train import WORDS, config, moe, place
from training import api
from training.__main__ import main
from training.checkpoint import layout
from training.checkpoint.state import found
from training.data.shards import read_meta
from training.run import step as step_module
from training.run.loop import train
from upcycle.io.publish import NO_SUM

__all__ = ["place"]


@pytest.fixture(scope="module")
def run(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with adapters, a tokenizer and an export."""
    make_tokenizer(place / "dense", bos=False)
    folder = tmp_path_factory.mktemp("sums") / "run"
    words = ["schedule.warmup=1", "lora.rank=2", "lora.match=[attention]", f"export={folder}-out", "device=cpu"]
    return train(config(place, folder, *words, steps=2))


def changed(path: Path, old: str, new: str) -> Callable[[], object]:
    """Change a file, and return what puts it back."""
    whole = path.read_text()
    assert old in whole, whole
    path.write_text(whole.replace(old, new, 1))
    return lambda: path.write_text(whole)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("origin/config.json", '"num_experts_per_tok": 2', '"num_experts_per_tok": 3'),
        ("origin/tokenizer.json", '"id": 1', '"id": 2'),
        ("origin/origin.json", '"granularity": 2', '"granularity": 1'),
        ("run.json", '"alpha": 0.0', '"alpha": 1.0'),
    ],
)
def test_a_changed_digit_next_to_a_checkpoint_is_refused(
    run: Path, file: str, old: str, new: str, tmp_path: Path
) -> None:
    back = changed(run / file, old, new)
    try:
        with pytest.raises(ValueError, match=rf"{file} has changed since it was written: its (sum|sha256) differs"):
            api.export(run, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    finally:
        back()


def test_a_run_without_sums_loads_and_says_so(run: Path, tmp_path: Path) -> None:
    files = [run / "run.json", run / "origin" / "origin.json"]
    whole = {path: path.read_bytes() for path in files}
    for path, data in whole.items():
        kept = {key: value for key, value in json.loads(data).items() if key not in ("sum", "sums")}
        path.write_text(json.dumps(kept))
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert api.export(run, tmp_path / "out") == 2
        told = {str(each.message) for each in said}
        assert {NO_SUM.format(path) for path in files} <= told
    finally:
        for path, data in whole.items():
            path.write_bytes(data)


def test_run_json_still_trains_the_run_again(run: Path, tmp_path: Path) -> None:
    again = ["steps=2", f"output={tmp_path / 'again'}", "export="]
    assert main([str(run / "run.json"), *again]) == 0
    back = changed(run / "run.json", '"steps": 2', '"steps": 3')
    try:
        assert main([str(run / "run.json"), *again]) == 2
    finally:
        back()


@pytest.mark.parametrize("key", ["eos", "start", "bytes", "vocab"])
def test_a_changed_number_of_a_shard_folder_is_refused(place: Path, key: str) -> None:
    value = read_meta(place / "data")[key]
    back = changed(place / "data" / "meta.json", f'"{key}": {value}', f'"{key}": {value + 1}')
    try:
        with pytest.raises(ValueError, match=r"meta\.json has changed since it was written: its sum differs"):
            read_meta(place / "data")
    finally:
        back()


def test_a_changed_file_of_an_export_is_named_when_it_is_read(run: Path) -> None:
    out = Path(f"{run}-out")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with layout.opened(out):
            pass
    back = changed(out / "config.json", '"rope_theta": 10000.0', '"rope_theta": 20000.0')
    try:
        with pytest.warns(UserWarning, match=r"config\.json has changed since it was written"), layout.opened(out):
            pass
    finally:
        back()
    back = changed(out / "upcycle.json", '"granularity": 2', '"granularity": 1')
    try:
        with pytest.raises(ValueError, match=r"upcycle\.json has changed since"), layout.opened(out):
            pass
    finally:
        back()


# ---- what is not finite, and what learned nothing


def said(capsys: pytest.CaptureFixture[str], words: list[str]) -> str:
    capsys.readouterr()
    assert main(words) == 2
    out = capsys.readouterr()
    assert "is trained" not in out.out and "Traceback" not in out.err
    return out.err


def asked(place: Path, folder: Path, *words: str) -> list[str]:
    own = [f"output={folder}", f"export={folder}-out", "device=cpu", "steps=3", f"data.train=[{place / 'data'}]"]
    return [*own, f"model.upcycle={json.dumps(moe(place))}", *WORDS, *words]


def test_weights_that_are_not_finite_are_neither_saved_nor_exported(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    err = said(capsys, asked(place, folder, "optim.eps=0", "optim.weight_decay=0"))
    assert "is not finite after step" in err and "optim.eps" in err
    assert not found(folder / "checkpoints") and not Path(f"{folder}-out").exists()


def test_a_run_that_skipped_every_step_does_not_end_as_trained(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step_module, "train_step", skipping(1, 3))
    folder = tmp_path / "run"
    assert "all 3 steps were skipped" in said(capsys, asked(place, folder))
    assert not Path(f"{folder}-out").exists()


@pytest.mark.parametrize("word", ["balance.z_weight=1e30", "teacher.weight=1e30"])
def test_a_weight_of_the_loss_beyond_all_reason_is_refused_before_training(
    word: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert f"{word.partition('=')[0]} is 1e+30; it must be at most" in said(capsys, asked(place, folder, word))
    assert not folder.exists() and not Path(f"{folder}-out").exists()


def test_an_export_names_the_tensor_that_is_not_finite(run: Path, tmp_path: Path) -> None:
    from training.checkpoint.export import check_finite

    check_finite({"a": torch.ones(3), "b": torch.zeros(0), "c": torch.ones(2, dtype=torch.int64)})
    for value in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(ValueError, match=r"^b is not finite in bfloat16"):
            check_finite({"a": torch.ones(3), "b": torch.tensor([1.0, value]).bfloat16()})
    with pytest.raises(ValueError, match=r"^b is not finite in float16"):
        check_finite({"b": torch.tensor([1e9]).half()})
