"""verify, and the manifest that it reads: a wrong file is refused in one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from upcycle.__main__ import main


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"promise": 3}', '{"plan": 1, "files": {"a": 3}, "promise": {"exact": true}}']
)
def test_a_manifest_that_is_none_is_one_sentence(llama: Path, tmp_path: Path, text: str) -> None:
    folder = shutil.copytree(llama, tmp_path / "moe")
    (folder / "upcycle.json").write_text(text)
    for arguments in (
        ["verify", str(llama), str(folder)],
        ["inspect", str(folder)],
        ["inspect", str(folder), "--check"],
    ):
        assert main(arguments) == 2


@pytest.mark.parametrize(
    ("key", "value"),
    [("vocab_size", 100), ("vocab_size", None), ("vocab_size", "x"), ("hidden_size", 32), ("hidden_act", "zz"),
     ("rms_norm_eps", "x"), ("model_type", [1])],
)  # fmt: skip
def test_verify_refuses_a_config_that_is_not_of_the_weights(
    llama: Path, tmp_path: Path, key: str, value: object
) -> None:
    folder = shutil.copytree(llama, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    assert main(["verify", str(llama), str(folder)]) == 2
    assert main(["verify", str(folder), str(llama)]) == 2
