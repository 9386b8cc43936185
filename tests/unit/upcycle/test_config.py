"""Reading a config from a file and words: files that are refused, and names that look like numbers."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from upcycle.__main__ import main
from upcycle.config.reading import build, of_manifest, read
from upcycle.config.schema import Calibration, UpcycleConfig


@pytest.mark.parametrize("text", ["a: &a [*a]", "layers: &x [1, *x]"])
def test_a_yaml_that_holds_itself_is_refused(llama: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "loop.yaml").write_text(text)
    assert main(["plan", str(tmp_path / "loop.yaml"), f"source={llama}"]) == 2


def test_names_are_kept_as_typed() -> None:
    config = read(UpcycleConfig, "", ["output=0123", "source=1_000", "router.score=on", "top_k=03", "layers=[0]"])
    assert (config.output, config.source, config.router.score) == ("0123", "1_000", "on")
    assert (config.top_k, config.layers) == (3, [0])


def test_an_older_manifest_means_the_same_under_the_names_of_today() -> None:
    stored = asdict(UpcycleConfig(calibration=Calibration(("a.txt",), 64, 16)))
    stored["calibration"]["length"] = stored["calibration"].pop("sequence")
    config = build(UpcycleConfig, of_manifest({"config": stored, "method": {"name": "copy"}}))
    assert config.calibration == Calibration(("a.txt",), 64, sequence=16)
    with pytest.raises(ValueError, match=r"unknown key 'calibration.length'; write calibration.sequence"):
        read(UpcycleConfig, "", ["calibration.length=16"])


def test_the_record_of_a_training_is_not_a_plan(tmp_path: Path) -> None:
    (tmp_path / "upcycle.json").write_text('{"format": 1, "from": "x", "trained": []}')
    with pytest.raises(ValueError, match=r"is the record of a trained model, not a plan; .*upcycle inspect"):
        read(UpcycleConfig, str(tmp_path / "upcycle.json"))


@pytest.mark.parametrize(
    ("key", "ours"), [("copies", "experts"), ("num_experts", "experts"), ("num_experts_per_tok", "top_k")]
)
def test_words_for_sizes_from_elsewhere_name_our_keys(key: str, ours: str) -> None:
    with pytest.raises(ValueError, match=f"unknown key '{key}'; write {ours}"):
        read(UpcycleConfig, "", [f"{key}=4"])


def test_a_home_folder_is_found_where_the_shell_leaves_its_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my.yaml").write_text("donors: [~/b]\nmethod: {name: prune, by: ~/c.json}\n")
    config = read(UpcycleConfig, str(tmp_path / "my.yaml"), ["output=~/a", "calibration.texts=[~/d,e~/f]"])
    assert (config.output, config.donors) == (f"{tmp_path}/a", (f"{tmp_path}/b",))
    assert config.method["by"] == f"{tmp_path}/c.json" and config.calibration.texts == (f"{tmp_path}/d", "e~/f")
