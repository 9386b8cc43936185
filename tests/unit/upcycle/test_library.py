"""`from upcycle import Upcycling` does with values what the command line does with words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from upcycle import Upcycling
from upcycle.__main__ import main
from upcycle.config.reading import read
from upcycle.config.schema import UpcycleConfig


def test_it_plans_converts_and_verifies_as_the_commands_do(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my.yaml").write_text("experts: 4\nmethod: {name: drop, ratio: 0.25}\n")
    moe = Upcycling(tmp_path / "my.yaml", source=llama, method={"ratio": 0.5}, layers=[1])
    with pytest.raises(ValueError, match="no output to verify"):
        moe.verify()
    words = [str(tmp_path / "my.yaml"), f"source={llama}", "method.ratio=0.5", "layers=[1]"]
    assert main(["plan", *words]) == 0
    assert capsys.readouterr().out == f"{moe.plan}\n"
    folder = moe.convert(tmp_path / "ours", quiet=True)
    assert folder == moe.convert(quiet=True) == tmp_path / "ours"
    assert main(["convert", *words, f"output={tmp_path / 'theirs'}"]) == 0
    ours, theirs = (json.loads((tmp_path / name / "upcycle.json").read_text()) for name in ("ours", "theirs"))
    assert (ours["plan"], ours["files"]) == (theirs["plan"], theirs["files"])
    capsys.readouterr()
    report = moe.verify(tokens=64)
    assert report.tokens == 64
    assert report.relative > 1e-3
    assert main(["verify", str(llama), str(folder), "--tokens", "64"]) == 0
    assert capsys.readouterr().out == f"{report}\n"


def test_a_config_is_the_same_in_every_form(llama: Path, tmp_path: Path) -> None:
    want = read(UpcycleConfig, "tiny", [f"source={llama}", "method.name=copy", "granularity=1"])
    values = {"source": llama, "method": {"name": "copy"}, "granularity": 1}
    assert Upcycling("tiny", **values).config == want
    assert Upcycling(want).config == want
    assert Upcycling(want, seed=1, **{"router.init.std": 0.1}).config == read(
        UpcycleConfig,
        "tiny",
        [f"source={llama}", "method.name=copy", "granularity=1", "seed=1", "router.init.std=0.1"],
    )
    (tmp_path / "my.yaml").write_text("experts: 4\n")
    assert Upcycling({"experts": 4}, source=llama).config == Upcycling(tmp_path / "my.yaml", source=llama).config


def test_mistakes_are_one_sentence(llama: Path) -> None:
    with pytest.raises(ValueError, match="source is not set"):
        Upcycling(experts=4)
    with pytest.raises(ValueError, match="did you mean 'experts'"):
        Upcycling(source=llama, expert=4)
    with pytest.raises(ValueError, match="top_k must be at most 4"):
        _ = Upcycling(source=llama, experts=4, top_k=5).plan


def test_importing_the_package_waits_for_nothing() -> None:
    code = (
        "import sys, upcycle; assert not {'torch', 'omegaconf', 'upcycle.planning.plan'} & set(sys.modules); "
        "from upcycle import Upcycling; assert 'transformers' not in sys.modules; upcycle.nothing"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "AttributeError: module 'upcycle' has no attribute 'nothing'", done.stderr
